"""What a mixture of experts becomes on GPUs: exchanges of rows, and no kernel moves."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jhost
from tests.aot.on_h200 import MakeH200s

nnx: Any = pytest.importorskip("flax.nnx")
layers: Any = pytest.importorskip("jhost.nnx")

EXCHANGE = "ragged-all-to-all"


def moved(text: str) -> Counter[str]:
    """The communications of floats, which are not offsets and counts."""
    found = re.findall(r"= \(*(\w+)\[.*? ([a-z-]+?)(?:-start)?\(", text)
    kinds = "all-gather", "all-reduce", "all-to-all", "collective-permute", EXCHANGE
    return Counter(
        kind for dtype, kind in found if kind in kinds and dtype in ("bf16", "f32")
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rows_go_to_their_experts_and_back(h200s: MakeH200s) -> None:
    mesh = h200s({"ep": 4})
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

    assert moved(text(lambda layer, x: layer(x))) == {EXCHANGE: 2}
    # The router is on every device, and so is its gradient.
    gradients = moved(text(jax.grad(loss, (0, 1))))
    assert gradients.pop(EXCHANGE) == 4
    assert set(gradients) <= {"all-reduce"}
