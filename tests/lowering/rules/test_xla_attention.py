"""JAX's attention without a kernel, with each of its arguments: nothing is moved."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from tests.jhost.derived import programs, vjp
from tests.lowering.on_mesh import communications, on

B, T, S, N, K, H = 4, 6, 8, 4, 2, 8


def array(*shape: int, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(values.astype(np.float32))


BATCH, HEADS = P("dp"), P("dp", "tp")
LENGTHS = jnp.array([1, 5, 6, 3], jnp.int32)

# Static arguments, arrays, and how those lie.
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, P]]] = {
    "none": ({}, {}, {}),
    "is_causal": ({"is_causal": True}, {}, {}),
    "local_window_size": ({"local_window_size": (2, 1)}, {}, {}),
    "scale": ({"scale": 0.5}, {}, {}),
    "bias": ({}, {"bias": array(1, N, T, S, seed=5)}, {"bias": P(None, "tp")}),
    "bias of all": ({}, {"bias": array(B, N, T, S, seed=5)}, {"bias": HEADS}),
    "mask": ({}, {"mask": array(B, 1, T, S, seed=6) > -1}, {"mask": BATCH}),
    "query_seq_lengths": (
        {},
        {"query_seq_lengths": LENGTHS},
        {"query_seq_lengths": BATCH},
    ),
    "key_value_seq_lengths": (
        {"is_causal": True},
        {"key_value_seq_lengths": LENGTHS + 1},
        {"key_value_seq_lengths": BATCH},
    ),
}


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        *(pytest.param(name, K, id=f"{name}-groups of heads") for name in ARGUMENTS),
        # What else is given, has its heads as queries have them, or none.
        *(
            pytest.param(name, N, id=f"{name}-a head each", marks=pytest.mark.slow)
            for name in ("none", "bias", "key_value_seq_lengths")
        ),
    ],
)
def test_attention_by_batch_and_heads(name: str, heads: int) -> None:
    static, arrays, specs = ARGUMENTS[name]

    def attend(q: Any, k: Any, v: Any, more: dict[str, Any]) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, implementation="xla", **static, **more
        )

    key, value = (array(B, S, heads, H, seed=seed) for seed in (1, 2))
    args = array(B, T, N, H), key, value, arrays
    sequences = P("dp", None, "tp")
    ins = sequences, sequences, sequences, specs
    settings = on({"dp": 2, "tp": 2}, ins, sequences)
    hosted = jhost.jit(attend, **settings)
    assert not communications(hosted.lower(*args).host_ir)
    cotangent = array(B, T, N, H, seed=3)
    wanted = _floats(jax.jit(vjp(attend))(cotangent, *args))
    for one, other in zip(_floats(vjp(hosted)(cotangent, *args)), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    *_, backward = programs(vjp(hosted), cotangent, *args)
    summed = ["AllReduce dp sum"] if name == "bias" else []
    assert communications(backward) == summed


def _floats(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
