"""`jax.disable_jit`, `debug_nans` and `debug_infs`: as `jax.jit` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.testing import assert_close
from tests.lowering.hand_built import mesh_of

Jit: TypeAlias = Callable[..., Any]

ROW = np.arange(8, dtype=np.float32)
VALUES = {"float": 3.0, "int": 2, "bool": True, "numpy": ROW, "array": jnp.asarray(ROW)}

each_jit = pytest.mark.parametrize(
    "jit",
    [jhost.jit, lambda f: jhost.jit(f, mesh=mesh_of(tp=4))],
    ids=["no mesh", "mesh"],
)


@each_jit
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_without_jit_python_runs_the_function(value: Any, jit: Jit) -> None:
    def f(x: Any) -> Any:
        return x * 2 if jnp.sum(x) > 1 else x  # fails where it is traced

    with jax.disable_jit(), jax.numpy_dtype_promotion("standard"):
        assert_close(jit(f)(value), jax.jit(f)(value))
        if not isinstance(value, bool | int):
            total = [jax.grad(lambda x, g=g: jnp.sum(g(f)(x))) for g in (jit, jax.jit)]
            assert_close(total[0](value), total[1](value))


def test_without_jit_what_was_traced_before_runs() -> None:
    f = jhost.jit(lambda x: x * jnp.sin(x), mesh=mesh_of(tp=4), in_shardings=P("tp"))
    _, tangent = jax.linearize(f, ROW)
    wanted = tangent(ROW)
    with jax.disable_jit():
        assert_close(tangent(ROW), wanted, tolerance=1e-6)


BAD = {"scalar": -1.0, "numpy": -ROW, "array": jnp.full(8, jnp.nan)}


@each_jit
@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_the_operation_that_makes_a_nan_is_named(value: Any, jit: Jit) -> None:
    f = jit(lambda x: jnp.log(x) + 1)
    with jax.debug_nans(True):
        for call in (f, jax.jit(f)):
            with pytest.raises(FloatingPointError, match=r"\(nan\) encountered in log"):
                call(value)
        with pytest.raises(FloatingPointError, match="nan"):
            jax.grad(lambda x: jnp.sum(f(x)))(value)


@each_jit
def test_the_operation_that_makes_an_infinity_is_named(jit: Jit) -> None:
    f = jit(lambda x: lax.div(jnp.ones_like(x), x))
    with jax.debug_infs(True):
        with pytest.raises(FloatingPointError, match="encountered in div"):
            f(ROW)
        assert_close(f(ROW + 1), 1 / (ROW + 1), tolerance=1e-6)
