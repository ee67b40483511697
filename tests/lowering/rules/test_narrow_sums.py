"""Sums over devices of what is narrow: integers of 4 bits, and booleans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.rules.linear import distributes
from tests.lowering.on_mesh import tp

PIPELINES = ("off", "collective", "p2p")


# --- Integers ----------------------------------------------------------------------- #


def wrapped(numbers: np.ndarray, low: int) -> np.ndarray:
    """Modulo 16, from `low` on."""
    return (numbers - low) % 16 + low


@pytest.mark.parametrize(("dtype", "low"), [(jnp.int4, -8), (jnp.uint4, 0)])
@pytest.mark.parametrize("out", [P(), P("tp")], ids=["all", "part"])
def test_sums_of_4_bits_wrap_round_before_they_are_widened(
    dtype: Any, low: int, out: P
) -> None:
    """With numpy's numbers: of JAX's own XLA:CPU wraps some round, and others not."""
    wide = np.int8 if low else np.uint8
    random = np.random.default_rng(0)
    numbers = [random.integers(low, low + 16, (8, 8)) for _ in range(4)]
    a, b, c, d = (jnp.array(n.astype(wide)).astype(dtype) for n in numbers)

    def function(a: Any, b: Any, c: Any, d: Any) -> Any:
        return lax.dot(a, b).astype(wide) + lax.dot(c, d).astype(wide)

    ins = (P(None, "tp"), P("tp")) * 2
    given = jhost.jit(function, **tp(4, ins, out))(a, b, c, d)
    one, other = numbers[0] @ numbers[1], numbers[2] @ numbers[3]
    wanted = wrapped(one, low) + wrapped(other, low)
    np.testing.assert_array_equal(np.asarray(given, np.int64), wanted)


@pytest.mark.parametrize("pipeline", ["collective", "p2p"])
def test_so_do_those_that_a_loop_makes(pipeline: str) -> None:
    random = np.random.default_rng(0)
    numbers = [random.integers(-8, 8, (8, 8)) for _ in range(2)]
    a, b = (jnp.array(n.astype(np.int8)).astype(jnp.int4) for n in numbers)

    def function(a: Any, b: Any) -> Any:
        return jhost.stream(lax.dot(a, b), axis=0).astype(np.int8)

    settings = tp(4, (P(None, "tp"), P("tp")), P("tp"), pipeline=pipeline)
    given = jhost.jit(function, **settings)(a, b)
    wanted = wrapped(numbers[0] @ numbers[1], -8)
    np.testing.assert_array_equal(np.asarray(given, np.int64), wanted)


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [
        (jnp.int4, np.int8, False),
        (jnp.int2, jnp.int4, False),
        (jnp.uint4, np.int8, False),
        (np.int8, jnp.int4, True),
        (jnp.int4, jnp.uint4, True),
        (jnp.float8_e4m3b11fnuz, jnp.float8_e4m3fn, False),
        (jnp.float8_e5m2, jnp.bfloat16, True),
    ],
)
def test_sums_are_made_after_a_conversion_that_keeps_them(
    source: Any, target: Any, kept: bool
) -> None:
    x = jax.ShapeDtypeStruct((4,), source)
    (eqn,) = jax.make_jaxpr(lambda x: x.astype(target))(x).jaxpr.eqns
    assert bool(distributes(eqn, "sum")) is kept


# --- Booleans ----------------------------------------------------------------------- #

_IMAGES = ("NCHW", "OIHW", "NCHW")

OF_BOOLEANS: dict[str, Callable[[Any, Any], Any]] = {
    "dot": lambda a, b: lax.dot(a, b),
    "einsum": lambda a, b: jnp.einsum("ij,jk->ki", a, b),
    "batch": lambda a, b: jnp.einsum("gij,jk->ikg", a[None], b),
    "counted": lambda a, b: lax.dot(a, b, preferred_element_type=np.int32),
    "any": lambda a, b: a.any(1),
    "all": lambda a, b: a.all(1),
    "ragged": lambda a, b: lax.ragged_dot(a, b[None], jnp.array([8])),
    "conv": lambda a, b: lax.conv_general_dilated(
        a[:, :, None, None],
        b[:, :, None, None],
        (1, 1),
        "VALID",
        dimension_numbers=_IMAGES,
    ),
}


@pytest.mark.parametrize("name", OF_BOOLEANS)
def test_booleans_are_contracted_as_by_jax(name: str) -> None:
    random = np.random.default_rng(0)
    a, b = (random.random((8, 8)) < 0.3 for _ in range(2))
    function = OF_BOOLEANS[name]
    wanted = jax.jit(function)(a, b)
    ins = (P(None, "tp"), P(None, "tp") if name == "conv" else P("tp"))
    for out in (P(), P("tp")):
        chex.assert_trees_all_equal(
            jhost.jit(function, **tp(4, ins, out))(a, b), wanted
        )


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_so_they_are_in_pipelines(pipeline: str) -> None:
    random = np.random.default_rng(0)
    a, b = (random.random((8, 8)) < 0.3 for _ in range(2))

    def function(a: Any, b: Any) -> Any:
        return jhost.stream(lax.dot(a, b), axis=0)

    for out in (P(), P("tp")):
        settings = tp(4, (P(None, "tp"), P("tp")), out, pipeline=pipeline)
        given = jhost.jit(function, **settings)(a, b)
        chex.assert_trees_all_equal(given, jax.jit(function)(a, b))
