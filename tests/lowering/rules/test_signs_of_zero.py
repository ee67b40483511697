"""Zeros have the sign that `jax.jit` gives them, wherever sums are made of parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jhost
from tests import budget
from tests.lowering.hand_built import mesh_of
from tests.lowering.on_mesh import tp

ROWS = np.array([0, 3, 7, 5])
SEGMENTS = np.array([0, 1, 1, 2, 3, 3, 3, 0])


def negative(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.full(shape, -0.0, dtype)


def carried(begin: Any) -> Callable[[Any], Any]:
    """A sum of sums over devices, all -0.0, that begins so."""

    def function(xs: Any) -> Any:
        def step(total: Any, x: Any) -> tuple[Any, None]:
            return total + x.sum(0) * -jnp.zeros_like(x[0]), None

        return lax.scan(step, begin, xs)[0]

    return function


def products(turned: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Two products, of which the sum over devices is made behind what is done."""
    return lambda x: turned(x @ jnp.ones((4, 4))) + turned(x * 2 @ jnp.ones((4, 4)))


CASES: dict[str, tuple[Callable[[Any], Any], Any, P]] = {
    "rows": (lambda x: x[ROWS], negative(8, 4), P("tp")),
    "bfloat16": (lambda x: x[ROWS], negative(8, 4, dtype=jnp.bfloat16), P("tp")),
    "complex": (
        lambda x: x[ROWS],
        jnp.full((8, 4), complex(-0.0, -0.0), np.complex64),
        P("tp"),
    ),
    "filled": (
        lambda x: x.at[ROWS + 1].get(mode="fill", fill_value=-0.0),
        jnp.zeros((8, 4)),
        P("tp"),
    ),
    "updates": (
        lambda x: negative(5, 4).at[SEGMENTS].add(x),
        negative(8, 4),
        P("tp"),
    ),
    "taken away": (
        lambda x: negative(5, 4).at[SEGMENTS].subtract(x),
        jnp.zeros((8, 4)),
        P("tp"),
    ),
    "one element each": (lambda x: x.sum(0), negative(4, 8), P("tp")),
    "one product each": (lambda x: x.T @ jnp.ones((4, 8)), negative(4, 8), P("tp")),
    "negated": (products(lax.neg), jnp.zeros((4, 4)), P(None, "tp")),
    "times 0": (products(lambda y: y * 0 * -1), jnp.ones((4, 4)), P(None, "tp")),
    "carried from -0.0": (carried(negative(8)), jnp.ones((3, 8, 8)), P(None, "tp")),
    "carried from 0.0": (carried(jnp.zeros(8)), jnp.ones((3, 8, 8)), P(None, "tp")),
    "of any sign": (
        lambda xs: carried(xs[0, 0] * -0.0)(xs),
        jnp.ones((3, 8, 8)),
        P(None, "tp"),
    ),
    "scalar": (
        lambda xs: lax.scan(lambda c, x: (c - x.sum(), None), np.float32(-0.0), xs)[0],
        jnp.zeros((3, 8)),
        P(None, "tp"),
    ),
    "of no iteration": (carried(negative(8)), jnp.ones((0, 8, 8)), P(None, "tp")),
}


@pytest.mark.parametrize("name", CASES)
def test_zeros_have_their_signs(name: str) -> None:
    function, x, spec = CASES[name]
    wanted = jax.jit(function)(x)
    spread = P("tp") if wanted.ndim and wanted.shape[0] % 4 == 0 else P()
    for out in {P(), spread}:
        given = jhost.jit(function, **tp(4, spec, out))(x)
        for part in (jnp.real, jnp.imag):
            one, other = (np.asarray(part(each)) for each in (given, wanted))
            np.testing.assert_array_equal(np.signbit(one), np.signbit(other))


POOLS = {"max": (lax.max, -np.inf), "min": (lax.min, np.inf), "sum": (lax.add, 0.0)}


@settings(max_examples=budget.examples(12), deadline=None)  # each is compiled
@given(
    kind=st.sampled_from([*POOLS]),
    window=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    strides=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.sampled_from(["VALID", "SAME"]),
    pulled=st.booleans(),
)
@example(kind="min", window=(3, 2), strides=(3, 2), padding="VALID", pulled=True)
def test_pools_have_them(
    kind: str,
    window: tuple[int, int],
    strides: tuple[int, int],
    padding: str,
    pulled: bool,
) -> None:
    combine, begin = POOLS[kind]
    rng = np.random.default_rng(0)
    x, cotangents = (
        jnp.asarray(rng.choice(np.array([-0.0, 1, -1], np.float32), (4, 8)))
        for _ in range(2)
    )

    def pool(x: Any) -> Any:
        return lax.reduce_window(x, begin, combine, window, strides, padding)

    def back(x: Any, cotangents: Any) -> Any:
        made, pull = jax.vjp(pool, x)
        return pull(lax.slice(cotangents, (0, 0), made.shape))[0]

    function = back if pulled else lambda x, _: pool(x)
    # Of a single window XLA takes the cotangent as it is.
    hypothesis.assume(jax.eval_shape(pool, x).size > 1)
    mesh = mesh_of(a=2, b=4)
    found = jhost.jit(function, mesh=mesh, in_shardings=P("a", "b"))(x, cotangents)
    wanted = jax.jit(function)(x, cotangents)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.parametrize("pipeline", ["collective", "p2p"])
def test_chunks_of_one_row_have_them_too(pipeline: str) -> None:
    def function(x: Any) -> Any:
        return jhost.stream(x.T @ jnp.ones((4, 8)), axis=0)

    x = negative(4, 8)
    given = jhost.jit(function, **tp(4, P("tp"), P("tp"), pipeline=pipeline))(x)
    wanted = jax.jit(function)(x)
    np.testing.assert_array_equal(np.signbit(given), np.signbit(wanted))


def collectives(function: Callable[..., Any], x: Any, spec: P, out: P) -> list[str]:
    """The collectives of a function over two mesh axes, and its questions of rank."""
    mesh = jax.make_mesh((2, 2), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    shardings = NamedSharding(mesh, spec), NamedSharding(mesh, out)
    call = jhost.jit(function, in_shardings=shardings[:1], out_shardings=shardings[1])
    names = r"stablehlo\.(all_reduce|reduce_scatter|partition_id)"
    return sorted(re.findall(names, call.lower(x).as_text()))


def test_a_gradient_over_two_axes_takes_no_collective_for_its_signs() -> None:
    made = collectives(
        lambda x: x.T @ x, jnp.ones((8, 4)), P(("dp", "fsdp")), P("fsdp")
    )
    assert made == ["all_reduce", "reduce_scatter"]


def test_signs_of_a_sum_of_rows_take_a_collective_over_each_axis() -> None:
    """What is summed first may be -0.0, and so may the sum over the other axis."""
    made = collectives(
        lambda x: x[np.array([0, 3])] * -1, jnp.ones((8, 4)), P(("dp", "fsdp")), P()
    )
    assert made.count("all_reduce") % 2 == 0


def test_a_device_asks_for_its_rank_once() -> None:
    made = collectives(lambda x: (x * 2, x * 3), jnp.ones((8, 4)), P(), P("fsdp"))
    assert made == ["partition_id"]
