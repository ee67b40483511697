"""Gradients of every pattern of parity group E, on every mesh of the property tests.

They are the plain function's exactly, for small integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from tests.jhost.blocks import SPECS, assert_same, gradients, relu_block, rows
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


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return rows(x @ w)


def with_bias(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    return rows(x @ w.T + bias[None])


def contracted(x: jax.Array, dy: jax.Array) -> jax.Array:
    return rows(x).T @ dy


def on_the_right(w: jax.Array, x: jax.Array) -> jax.Array:
    return w @ jhost.stream(x, 1)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return rows((jnp.maximum(x @ gate, 0) * (x @ up)) @ down)


ROWS, COLUMNS = P("tp"), P(None, "tp")
WIDE, SQUARE, NARROW = ((8, 4), (4, 16)), ((8, 8), (8, 8)), ((8, 8), (8, 2))
MLP = (8, 4), (4, 16), (16, 4)

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
    "all-gather before": Pattern(matmul, WIDE, (ROWS, COLUMNS), COLUMNS),
    "all-gather before p2p": Pattern(matmul, WIDE, (ROWS, COLUMNS), COLUMNS, "p2p"),
    "all-gather after": Pattern(matmul, NARROW, (ROWS, P()), P()),
    "matmul and all-reduce": Pattern(matmul, NARROW, (COLUMNS, ROWS), P()),
    "matmul and all-reduce p2p": Pattern(matmul, NARROW, (COLUMNS, ROWS), P(), "p2p"),
    "matmul and reduce-scatter": Pattern(matmul, NARROW, (COLUMNS, ROWS), ROWS),
    "matmul and reduce-scatter p2p": Pattern(
        matmul, NARROW, (COLUMNS, ROWS), ROWS, "p2p"
    ),
    "linear with bias": Pattern(
        with_bias, ((8, 4), (16, 4), (16,)), (P(), ROWS, ROWS), COLUMNS
    ),
    "gathered dim contracted": Pattern(contracted, SQUARE, (ROWS, COLUMNS), COLUMNS),
    "gathered dim contracted p2p": Pattern(
        contracted, SQUARE, (ROWS, COLUMNS), COLUMNS, "p2p"
    ),
    "gathered dim on the right": Pattern(on_the_right, SQUARE, (ROWS, COLUMNS), ROWS),
    "gathered dim on the right p2p": Pattern(
        on_the_right, SQUARE, (ROWS, COLUMNS), ROWS, "p2p"
    ),
    "MLP block": Pattern(relu_block, MLP, SPECS, ROWS),
    "MLP block p2p": Pattern(relu_block, MLP, SPECS, ROWS, "p2p"),
    "SwiGLU": Pattern(
        swiglu, (MLP[0], MLP[1], *MLP[1:]), (ROWS, COLUMNS, COLUMNS, ROWS), ROWS
    ),
}


def assert_same_gradients(pattern: Pattern, settings: dict[str, Any]) -> None:
    args = [array(*shape, seed=n) for n, shape in enumerate(pattern.shapes)]
    chunks = 2 if pattern.pipeline == "collective" else "auto"
    how: Any = {"chunks": chunks, "pipeline": pattern.pipeline, **settings}
    numbers = range(len(args))
    given = gradients(jhost.jit(pattern.fun, **how), *numbers)(*args)
    assert_same(given, plain(gradients(pattern.fun, *numbers), *args))


# test_backward.py has several of them on four devices, in either kind of pipeline.
@pytest.mark.parametrize(
    "name",
    [
        name if "p2p" in name else pytest.param(name, marks=pytest.mark.slow)
        for name in PATTERNS
    ],
)
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
