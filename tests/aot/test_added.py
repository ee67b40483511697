"""Which sums of products cuBLAS makes: those that the cost model says it makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from jhost.lowering.cost.kernels import kernels
from jhost.lowering.ir.statements import Compute
from jhost.lowering.units.make import unit_of
from tests.aot.on_h200 import QUICKLY, MakeH200s
from tests.lowering.hand_built import buffer

Tree: TypeAlias = "tuple[Tree, Tree] | None"
"""Where sums stand: None is a product."""

SIZE = 512


def trees(leaves: int) -> Iterator[Tree]:
    if leaves == 1:
        yield None
    for count in range(1, leaves):
        for left in trees(count):
            yield from ((left, right) for right in trees(leaves - count))


def of_tree(tree: Tree) -> Callable[..., Any]:
    def summed(tree: Tree, products: Iterator[Any]) -> Any:
        if tree is None:
            return next(products)
        return summed(tree[0], products) + summed(tree[1], products)

    def f(*arrays: Any) -> Any:
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return summed(tree, (x @ y for x, y in pairs))

    return f


def transposed(x: Any, y: Any, z: Any, w: Any) -> Any:
    return (x @ y).T + z @ w


def sequences(x: Any, y: Any, z: Any, w: Any) -> Any:
    return x @ y + z @ w


def read_twice(x: Any, y: Any, z: Any, w: Any) -> Any:
    product = x @ y
    return product * (product + z @ w)


def subtracted(x: Any, y: Any, z: Any, w: Any) -> Any:
    return x @ y - z @ w


def behind_a_barrier(x: Any, y: Any, z: Any, w: Any) -> Any:
    first, second = lax.optimization_barrier((x @ y, z @ w))
    return first + second


def converted(x: Any, y: Any, z: Any, w: Any) -> Any:
    first, second = ((a @ b).astype(jnp.float32) for a, b in ((x, y), (z, w)))
    return jnp.sin(first + second)


def integers(x: Any, y: Any, z: Any, w: Any) -> Any:
    first, second = (
        lax.dot(*(each.astype(jnp.int8) for each in pair), preferred_element_type=int)
        for pair in ((x, y), (z, w))
    )
    return first + second


def of_a_fusion(x: Any, y: Any, z: Any, w: Any) -> Any:
    return jnp.tanh(x @ y) @ z + w @ x


ALONE = (
    transposed,
    sequences,
    read_twice,
    subtracted,
    behind_a_barrier,
    converted,
    integers,
    of_a_fusion,
)
FORMS: dict[str, Callable[..., Any]] = {
    **{str(tree): of_tree(tree) for count in (2, 3, 4) for tree in trees(count)},
    **{f.__name__: f for f in ALONE},
}


@pytest.mark.parametrize("form", FORMS)
def test_xla_has_the_kernels_of_the_cost_model(form: str, h200s: MakeH200s) -> None:
    f, leaves = FORMS[form], max(2, form.count("None"))
    sharding = NamedSharding(h200s({"a": 4}), P())
    rows = (2, SIZE // 2) if form == "sequences" else (SIZE,)
    types = [
        jax.ShapeDtypeStruct((*sizes, SIZE), jnp.bfloat16, sharding=sharding)
        for sizes in (rows, (SIZE,)) * leaves
    ]
    options = {**QUICKLY, "xla_gpu_enable_triton_gemm": False}
    text = jax.jit(f).lower(*types).compile(options).as_text() or ""
    made = re.findall(r" (?:fusion|copy)\(|__cublas", text[text.index("ENTRY") :])
    unit = unit_of("f", f, *types)
    ins = tuple(buffer(f"in{n}: bf16{[*t.shape]}") for n, t in enumerate(types))
    compute = Compute(unit=unit, ins=ins, outs=(buffer(f"out: bf16{[*rows, SIZE]}"),))
    assert len(made) == len(kernels(compute, {}, {}))
