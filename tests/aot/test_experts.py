"""What a mixture of experts becomes on GPUs: exchanges of rows, and products of these.

No kernel of an expert moves, and each row is multiplied once.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost
from tests.aot.on_h200 import MakeH200s

nnx: Any = pytest.importorskip("flax.nnx")
layers: Any = pytest.importorskip("jhost.nnx")

EXCHANGE = "ragged-all-to-all"
TENSOR_CORES = "jhost._jax.computations._has_tensor_cores"


def moved(text: str) -> Counter[str]:
    """The communications of floats, which are not offsets and counts."""
    found = re.findall(r"= \(*(\w+)\[.*? ([a-z-]+?)(?:-start)?\(", text)
    kinds = "all-gather", "all-reduce", "all-to-all", "collective-permute", EXCHANGE
    return Counter(
        kind for dtype, kind in found if kind in kinds and dtype in ("bf16", "f32")
    )


@pytest.fixture(scope="module")
def texts(h200s: MakeH200s) -> tuple[str, str]:
    """The layer on four GPUs, and its gradients by kernels and tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TENSOR_CORES, lambda: True)
        return made(h200s({"ep": 4}))


def made(mesh: Mesh) -> tuple[str, str]:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        layer = nnx.eval_shape(
            lambda: layers.MoE(64, 128, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        )

    def placed(x: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        )

    layer = jax.tree.map(lambda w: placed(w, P("ep") if w.ndim == 3 else P()), layer)
    x = placed(jax.ShapeDtypeStruct((2, 64, 64), jnp.bfloat16), P(None, "ep"))

    def loss(layer: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(layer(x)).astype(jnp.float32))

    def text(f: Any) -> str:
        jitted: Any = jhost.jit(f, mesh=mesh)
        return jitted.lower(layer, x).compile().as_text()

    return text(lambda layer, x: layer(x)), text(jax.grad(loss, (0, 1)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rows_go_to_their_experts_and_back(texts: tuple[str, str]) -> None:
    forward, both = map(moved, texts)
    assert forward == {EXCHANGE: 2}
    # The router is on every device, and so is its gradient.
    assert both.pop(EXCHANGE) == 4
    assert set(both) <= {"all-reduce"}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were here, where kernels are for them."""
    monkeypatch.setattr(TENSOR_CORES, lambda: True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_product_of_rows_is_a_kernel(texts: tuple[str, str]) -> None:
    """Of up, gate and down; each has two gradients."""
    assert [text.count("__gpu$xla.gpu.triton") for text in texts] == [3, 9]


def test_products_of_jax_are_kernels_on_each_device(
    gpus: None, h200s: MakeH200s
) -> None:
    """Where XLA would have to split them, they are its own."""
    mesh = h200s({"ep": 4})
    rows = jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
    matrices = jax.ShapeDtypeStruct((8, 64, 128), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    specs = P("ep"), P(), P()
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)

    def kernels(jitted: Any) -> int:
        text = jitted.lower(rows, matrices, sizes).compile().as_text()
        return text.count("__gpu$xla.gpu.triton")

    assert kernels(jhost.jit(lax.ragged_dot, mesh=mesh, in_shardings=specs)) == 1
    assert kernels(jax.jit(jhost.ragged_dot, in_shardings=shardings)) == 0


def test_rows_come_beside_kernels(gpus: None, h200s: MakeH200s) -> None:
    """A chunk is multiplied while another device's rows are on their way."""

    def f(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jhost.stream(lax.ragged_dot(x, w, sizes), 0)

    specs = P("ep"), P(None, None, "ep"), P()
    mesh = h200s({"ep": 4})
    jitted: Any = jhost.jit(
        f, mesh=mesh, in_shardings=specs, out_shardings=P(None, "ep"), pipeline="p2p"
    )
    types = (
        jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 256, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    schedule = jitted.lower(*types).compile().schedule()
    assert len(schedule.matmuls) == 4
    beside = [len(moved.matmuls) for moved in schedule.communications]
    assert sorted(beside) == [1, 2, 3], schedule


def test_what_is_exported_has_no_kernels(gpus: None) -> None:
    """JAX refuses to export calls that a later version may not know."""
    rows, matrices = jnp.ones((8, 4)), jnp.ones((2, 4, 3))
    export = jax.export.export(jax.jit(jhost.ragged_dot), platforms=["cuda"])
    text = export(rows, matrices, jnp.array([3, 5])).mlir_module()
    assert "chlo.ragged_dot" in text
