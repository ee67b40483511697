"""What is compiled moves and keeps at most twice what `jax.jit` makes of a function."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jhost
from tests.lowering.hand_built import mesh_of

Array: TypeAlias = jax.Array

_COLLECTIVE = re.compile(
    r"= (.*?) (?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)
_KEPT_ANYWAY = 8192
"""Bytes: buffers for indices and the like."""
_MOVED_ANYWAY = 8
"""Elements: a flag of each device."""


def moved(text: str) -> int:
    """The elements in the results of all collectives of a compiled program."""
    shapes = (
        shape
        for results in _COLLECTIVE.findall(text)
        for shape in re.findall(r"\w+\[([\d,]*)\]", results)
    )
    return sum(math.prod(map(int, filter(None, s.split(",")))) for s in shapes)


def convolved(x: Array) -> Array:
    kernel = jnp.ones((4, x.shape[1], 3))
    numbers = "NTC", "TIO", "NTC"
    return lax.conv_general_dilated(
        x[None], kernel, (1,), [(3, 0)], dimension_numbers=numbers
    )[0]


def difference(x: Array) -> Array:
    return jnp.pad(x[1:] - x[:-1], ((0, 1), (0, 0)))


def spread(x: Array) -> Array:
    """A transposed convolution: twice as many rows."""
    kernel, numbers = jnp.ones((3, x.shape[1], 8)), ("NTC", "TIO", "NTC")
    return lax.conv_general_dilated(
        x[None], kernel, (1,), [(1, 2)], lhs_dilation=(2,), dimension_numbers=numbers
    )[0]


def by_kernel(x: Array) -> Array:
    """The gradient of a kernel that gives a few places less than there are."""
    numbers = "NTC", "TIO", "NTC"

    def convolved(kernel: Array) -> Array:
        return lax.conv_general_dilated(
            x[None], kernel, (1,), "VALID", dimension_numbers=numbers
        )

    return jax.grad(lambda k: (convolved(k) ** 2).sum())(jnp.ones((4, 64, 8)))


def pooled(x: Array) -> Array:
    return lax.reduce_window(x, 0.0, lax.add, (16, 1), (1, 1), "SAME")


def most(x: Array) -> Array:
    """Overlapping windows, one less than their stride could have."""
    return lax.reduce_window(x, -np.inf, lax.max, (3, 1), (2, 1), "VALID")


def most_of_three(x: Array) -> Array:
    """Windows whose stride divides neither the rows nor a device's part of them."""
    return lax.reduce_window(x, -np.inf, lax.max, (3, 1), (3, 1), "SAME")


def by_function(x: Array) -> Array:
    """A function for which no value stands for padding."""
    return lax.reduce_window(x, 0.0, lambda a, b: a * b + 1, (3, 1), (1, 1), "SAME")


def labelled(x: Array) -> Array:
    """Each row meets the next one, in each of three iterations."""

    def step(sums: Array, k: Array) -> tuple[Array, None]:
        return sums + (x[:-1] * jnp.sin(k * x[1:])).sum(0), None

    return lax.scan(step, jnp.zeros(64), jnp.arange(3.0))[0]


def chosen(x: Array) -> Array:
    """The gradient of one branch needs more values than that of the other."""
    return lax.cond(x[0, 0] > 1, lambda x: x - jnp.max(x, 0), lambda x: x * 2, x)


def solved(x: Array) -> Array:
    """A system of equations in eight numbers of each row."""
    return jnp.linalg.solve(x.reshape(-1, 8, 8) + 20 * jnp.eye(8), x[:, :8, None])


def by_gradients(x: Array) -> Array:
    """Iterations until each row is near enough."""

    def row(x: Array) -> Array:
        return jax.scipy.sparse.linalg.cg(lambda v: v * (x**2 + 1), x, maxiter=5)[0]

    return jax.vmap(row)(x)


def pulled(fun: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return jax.grad(lambda x: (fun(x) ** 2).sum())


def in_four(x: Array) -> Array:
    """The outer dim takes an axis and half of the next one."""
    return jax.nn.softmax(x.reshape(4, -1, 64), axis=1).reshape(x.shape)


def a_row_each(fun: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: fun(x.reshape(8, -1))


@pytest.mark.parametrize(
    ("fun", "out"),
    [
        (lambda x: jnp.roll(x, 1, 0), P(("a", "b"))),
        (lambda x: jnp.roll(x, 1, 0), P()),
        (lambda x: x[::-1], P()),
        (pulled(difference), P(("a", "b"))),
        (pulled(convolved), P(("a", "b"))),
        (spread, P(("a", "b"))),
        (pulled(spread), P(("a", "b"))),
        (lambda x: x[-1] * 2, P()),
        (lambda x: lax.dynamic_slice_in_dim(x, jnp.int32(x[0, 0]), 5), P()),
        (lambda x: jnp.sort(x, axis=0), P(("a", "b"))),
        (lambda x: (jnp.sort(x, axis=0), jnp.argsort(x, axis=0)), P(("a", "b"))),
        (lambda x: jnp.argmax(x, axis=0), P()),
        (by_kernel, P()),
        (lambda x: jnp.concatenate([x, x]), P(("a", "b"))),
        (lambda x: jnp.tile(x, (2, 1)), P(("a", "b"))),
        (lambda x: jnp.tile(x, (3, 2)), P(("a", "b"))),
        (lambda x: jnp.concatenate([x, x * 2, x]), P(("a", "b"))),
        (pulled(lambda x: jnp.concatenate([x, x * 2, x])), P(("a", "b"))),
        (lambda x: jnp.concatenate([x + n for n in range(5)]), P(("a", "b"))),
        (pulled(lambda x: jnp.tile(x, (1, 2))), P(("a", "b"))),
        (pulled(pooled), P(("a", "b"))),
        (by_function, P(("a", "b"))),
        (pulled(most), P(("a", "b"))),
        (pulled(most_of_three), P(("a", "b"))),
        (pulled(lambda x: jnp.pad(x, ((8, 8), (0, 0)))), P(("a", "b"))),
        (pulled(lambda x: jnp.concatenate([x[:1] * 2, x])[:-1]), P(("a", "b"))),
        (pulled(labelled), P(("a", "b"))),
        (pulled(chosen), P(("a", "b"))),
        (pulled(lambda x: jnp.pad(x, ((3, 3), (0, 0)), "reflect")), P(("a", "b"))),
        (lambda x: jnp.sin(x.reshape(4, -1, 64)), P(None, ("a", "b"))),
        (in_four, P(("a", "b"))),
        (pulled(in_four), P(("a", "b"))),
        (solved, P(("a", "b"))),
        (pulled(solved), P(("a", "b"))),
        (by_gradients, P(("a", "b"))),
        (a_row_each(lambda x: x[3::8]), P()),
        (a_row_each(lambda x: x.at[jnp.int32(x[0, 0])].set(x[7])), P(("a", "b"))),
    ],
    ids=[
        "roll", "rolled whole", "reversed whole",
        "difference", "conv", "spread", "spread, pulled",
        "last", "slice", "sort", "sorts", "argmax", "by kernel",
        "joined", "tiled", "tiled in two dims", "three joined", "three joined, pulled",
        "five joined", "tiled beside, pulled", "pooled", "pooled by a function",
        "pooled by maxima", "pooled by threes", "padded", "behind a row",
        "labelled in a scan, pulled", "branches, pulled", "reflected, pulled",
        "in four", "softmax in four", "softmax in four, pulled",
        "solved", "solved, pulled", "solved by gradients",
        "far apart, a row a device", "one row written, a row a device",
    ],
)  # fmt: skip
def test_no_more_than_twice_is_moved_and_kept(
    fun: Callable[[Array], Any], out: P
) -> None:
    x, devices = jax.ShapeDtypeStruct((512, 64), np.float32), mesh_of(a=2, b=4)
    ins = P(("a", "b"))
    on = [NamedSharding(devices, spec) for spec in (ins, out)]
    plain = jax.jit(fun, in_shardings=on[0], out_shardings=on[1])
    hosted = jhost.jit(fun, mesh=devices, in_shardings=(ins,), out_shardings=out)
    one, other = (each.lower(x).compile() for each in (plain, hosted))
    least, most = (moved(each.as_text() or "") for each in (one, other))
    assert most <= 2 * least + _MOVED_ANYWAY
    kept: list[Any] = [each.memory_analysis() for each in (one, other)]
    least, most = (each.temp_size_in_bytes for each in kept)
    assert most <= 2 * least + _KEPT_ANYWAY
