"""Convolutions of arrays with zeros around them, and slices of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from jhost.lowering.ir.statements import Compute
from tests import budget
from tests.lowering.on_mesh import exact, tp
from tests.lowering.traced import array, built

Array: TypeAlias = jax.Array
Fun: TypeAlias = Callable[[Array, Array], Array]


def convolution(x: Array, kernel: Array, **more: Any) -> Array:
    params: dict[str, Any] = {"window_strides": (1, 1), "padding": "VALID", **more}
    return lax.conv_general_dilated(
        x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **params
    )


def padded(x: Array, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
    return jnp.pad(x, ((0, 0), rows, columns, (0, 0)))


def joined(x: Array, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
    """The same by concatenations with zeros."""
    for dim, ends in (1, rows), (2, columns):
        before, after = (
            jnp.zeros((*x.shape[:dim], n, *x.shape[dim + 1 :]), x.dtype) for n in ends
        )
        x = jnp.concatenate([before, x, after], dim)
    return x


def causal(x: Array, kernel: Array) -> Array:
    """As Flax pads: before the rows only."""
    return convolution(padded(x, (2, 0), (0, 0)), kernel)


def gradient(f: Fun, by: int) -> Fun:
    """The gradient by the array or by the kernel, of a sum with weights."""

    def loss(x: Array, kernel: Array) -> Array:
        y = f(x, kernel)
        weights = lax.broadcasted_iota(y.dtype, y.shape, 1) % 3
        return jnp.sum(y * weights)

    return jax.grad(loss, by)


ARGS = array(2, 8, 4, 3), array(3, 2, 3, 5)


def windows(f: Fun) -> list[str]:
    """The pads and the slices of a function, and the padding of its convolutions."""
    found: list[str] = []
    for stmt in built(f, *ARGS).body:
        for each in stmt.unit.eqns if isinstance(stmt, Compute) else ():
            name, params = each.eqn.primitive.name, each.eqn.params
            if name in ("pad", "slice"):
                found.append(name)
            elif name == "conv_general_dilated":
                ends = [f"{low} {high}" for low, high in params["padding"]]
                found.append("convolution " + ", ".join(ends))
    return found


def kept(x: Array, kernel: Array) -> Array:
    y = convolution(x, kernel)
    return y[:, 1:] + jnp.sum(y)


@pytest.mark.parametrize(
    ("fun", "found"),
    [
        (causal, ["convolution 2 0, 0 0"]),
        (gradient(causal, 0), ["convolution 0 2, 1 1"]),
        (gradient(causal, 1), ["convolution 2 0, 0 0"]),
        (lambda x, k: convolution(padded(x, (1, 1), (1, 0)), k),
         ["convolution 1 1, 1 0"]),
        (lambda x, k: convolution(joined(x, (2, 0), (0, 1)), k),
         ["convolution 2 0, 0 1"]),
        (gradient(lambda x, k: convolution(joined(x, (2, 0), (0, 0)), k), 0),
         ["convolution 0 2, 1 1"]),
        (lambda x, k: convolution(padded(padded(x, (1, 0), (0, 0)), (0, 1), (0, 0)), k),
         ["convolution 1 1, 0 0"]),
        (lambda x, k: convolution(x, k, padding=[(3, 3), (0, 0)])[:, 2:-1],
         ["convolution 1 2, 0 0"]),
        (lambda x, k: convolution(x, k)[:, ::2], ["convolution 0 0, 0 0", "slice"]),
        (lambda x, k: convolution(x, k)[:1], ["convolution 0 0, 0 0", "slice"]),
        (kept, ["convolution 0 0, 0 0", "slice"]),
        (lambda x, k: convolution(jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0)),
                                          constant_values=1), k),
         ["pad", "convolution 0 0, 0 0"]),
        (lambda x, k: convolution(jnp.pad(x, ((1, 0), (0, 0), (0, 0), (0, 0))), k),
         ["pad", "convolution 0 0, 0 0"]),
    ],
)  # fmt: skip
def test_a_convolution_pads_and_cuts_by_itself(fun: Fun, found: list[str]) -> None:
    assert windows(fun) == found
    exact(fun, *ARGS, **tp(2, (P(None, "tp"), P()), None))


def around_gaps(x: Array, kernel: Array) -> Array:
    """The rows have gaps between them, the columns have none."""
    x = padded(x, (1, 2), (1, 0))
    return convolution(x, kernel[:1], padding=[(0, 0)] * 2, lhs_dilation=(2, 1))


def of_nothing(x: Array, kernel: Array) -> Array:
    return around_gaps(x[:, :0], kernel)


def nothing_left(x: Array, kernel: Array) -> Array:
    return convolution(x, kernel[:2], window_strides=(3, 1))[:, 2:2]


@pytest.mark.parametrize("fun", [around_gaps, of_nothing, nothing_left])
def test_gaps_and_nothing_are_left_as_they_are(fun: Fun) -> None:
    x, kernel = ARGS
    # A row of zeros becomes NaN by it.
    kernel = np.where(np.arange(5) == 1, np.float32("nan"), kernel)
    exact(fun, x, kernel, **tp(2, (P(None, None, "tp"), P()), None))


@st.composite
def chains(draw: st.DrawFn) -> Fun:
    """Padding, a convolution of any kind, and a slice."""
    pads = st.tuples(st.integers(0, 3), st.integers(0, 3))
    outer, inner = ([draw(pads), draw(pads)] for _ in range(2))
    own = st.tuples(st.integers(-1, 3), st.integers(-1, 3))
    steps = st.tuples(st.integers(1, 3), st.integers(1, 2))
    params = {
        "padding": [draw(own), draw(own)],
        "window_strides": draw(steps),
        "lhs_dilation": draw(steps),
        "rhs_dilation": draw(steps),
    }
    start, end = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    wider = draw(st.sampled_from([padded, joined]))

    def f(x: Array, kernel: Array) -> Array:
        y = convolution(wider(wider(x, *inner), *outer), kernel, **params)
        return y[:, start : max(y.shape[1] - end, start + 1), end:]

    return f


@given(fun=chains(), by=st.sampled_from([None, 0, 1]), sharded=st.integers(0, 2))
@settings(max_examples=budget.examples(12))
def test_all_of_it_is_exact(fun: Fun, by: int | None, sharded: int) -> None:
    f = fun if by is None else gradient(fun, by)
    spec = P(*("tp" if dim == sharded else None for dim in range(3)))
    exact(f, *ARGS, **tp(2, (spec, P()), None))
