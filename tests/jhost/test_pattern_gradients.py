"""Gradients of patterns, and of one of them on every mesh of the property tests.

They are the plain function's exactly, for small integers.  `test_backward.py` has the
patterns with matmuls alone, in either kind of pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from tests.jhost.blocks import assert_same, gradients, relu_block, rows
from tests.lowering.on_mesh import on, tp
from tests.lowering.traced import array, plain

Function = Callable[..., jax.Array]


class Pattern(NamedTuple):
    """A function, its arguments' shapes, and how they and its result are sharded."""

    fun: Function
    shapes: tuple[tuple[int, ...], ...]
    ins: tuple[P, ...]
    out: P
    pipeline: str = "collective"


def with_bias(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    return rows(x @ w.T + bias[None])


ROWS, COLUMNS = P("tp"), P(None, "tp")
PATTERNS: dict[str, Pattern] = {
    "all-gather": Pattern(lambda x: rows(jnp.copy(x)), ((4, 8),), (COLUMNS,), P()),
    "all-gather p2p": Pattern(
        lambda x: rows(jnp.copy(x)), ((8, 3),), (ROWS,), P(), "p2p"
    ),
    "all-reduce": Pattern(
        lambda x: rows(jnp.sum(x, axis=1)), ((4, 4, 2),), (COLUMNS,), P()
    ),
    "reduce-scatter": Pattern(
        lambda x: rows(jnp.sum(x, axis=1)), ((4, 4, 4),), (COLUMNS,), COLUMNS
    ),
    "linear with bias": Pattern(
        with_bias, ((8, 4), (16, 4), (16,)), (P(), ROWS, ROWS), COLUMNS
    ),
}


def assert_same_gradients(pattern: Pattern, settings: dict[str, Any]) -> None:
    args = [array(*shape, seed=n) for n, shape in enumerate(pattern.shapes)]
    chunks = 2 if pattern.pipeline == "collective" else "auto"
    how: Any = {"chunks": chunks, "pipeline": pattern.pipeline, **settings}
    numbers = range(len(args))
    given = gradients(jhost.jit(pattern.fun, **how), *numbers)(*args)
    assert_same(given, plain(gradients(pattern.fun, *numbers), *args))


@pytest.mark.parametrize("name", PATTERNS)
def test_gradients_of_each_pattern(name: str) -> None:
    pattern = PATTERNS[name]
    assert_same_gradients(pattern, tp(4, pattern.ins, pattern.out))


MESHES: dict[str, dict[str, int]] = {
    "one device": {},
    "8": {"tp": 8},
    "4 x 2": {"dp": 4, "tp": 2},
    "2 x 2 x 2": {"dp": 2, "fsdp": 2, "tp": 2},
    "1 x 4": {"dp": 1, "tp": 4},
}
"""Four devices in a row are what the patterns are on."""
SMALLER = ("1 x 4",)


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(axes, id=name, marks=[pytest.mark.slow] * (name in SMALLER))
        for name, axes in MESHES.items()
    ],
)
def test_gradients_on_each_mesh(axes: dict[str, int]) -> None:
    """Rows are over dp and tp, weights over fsdp and tp: replicated over the others."""
    data = tuple(a for a in ("dp", "tp") if a in axes)
    other = "fsdp" if "fsdp" in axes else None
    tensor = "tp" if axes else None
    ins = P(data), P(other, tensor), P(tensor, other)
    shapes = (16, 4), (4, 16), (16, 4)
    for pipeline in ("collective", "p2p"):
        if pipeline == "p2p" and len(data) != 1:
            continue  # its rows go along one axis
        pattern = Pattern(relu_block, shapes, ins, P(data), pipeline)
        settings = on(axes, ins, P(data)) if axes else {}
        assert_same_gradients(pattern, settings)
