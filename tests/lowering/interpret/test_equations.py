"""What NumPy makes of an equation is what JAX makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from jhost.lowering.interpret.equations import by_numpy
from jhost.lowering.rules.dim_rule import shape_of
from tests.lowering.hand_built import integers

X, Y = integers(2, 3, 4), integers(2, 4, 3, seed=1)


@pytest.mark.parametrize(
    "fun",
    [
        pytest.param(
            lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
            id="batched",
        ),
        pytest.param(
            lambda x, y: lax.dot_general(x, y, (((1, 2), (2, 1)), ((), ()))),
            id="all_contracted",
        ),
        pytest.param(
            lambda x, y: lax.broadcast_in_dim(x, (2, 5, 3, 4), (0, 2, 3)),
            id="broadcast",
        ),
        pytest.param(
            lambda x, y: lax.slice(x, (0, 1, 0), (2, 3, 4), (1, 1, 2)), id="slice"
        ),
        pytest.param(lambda x, y: lax.rev(x, (0, 2)), id="rev"),
        pytest.param(lambda x, y: lax.transpose(x, (2, 0, 1)), id="transpose"),
        pytest.param(lambda x, y: lax.reduce_sum(x, (0, 2)), id="sum"),
        pytest.param(lambda x, y: lax.sub(x, lax.transpose(y, (0, 2, 1))), id="sub"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_numpy_gives_what_jax_gives(fun: Callable[..., Any], dtype: Any) -> None:
    x, y = X.astype(dtype), Y.astype(dtype)
    *before, eqn = jax.make_jaxpr(fun)(x, y).eqns
    args = [x if shape_of(v) == x.shape else y for v in eqn.invars]
    if before:
        args = [x, y.transpose(0, 2, 1)]
    given = by_numpy(eqn, args, eqn.params)
    assert given is not None
    wanted = eqn.primitive.bind(*args, **eqn.params)
    assert (given[0].dtype, given[0].shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(given[0], wanted)


def test_windows_are_moved_inside() -> None:
    start = np.int32(3), np.int32(-1), np.int32(2)
    fun = jax.make_jaxpr(lambda x, *at: lax.dynamic_slice(x, at, (1, 2, 3)))
    eqn = fun(X, *start).eqns[-1]
    given = by_numpy(eqn, [X, *(np.maximum(at, 0) for at in start)], eqn.params)
    assert given is not None
    np.testing.assert_array_equal(given[0], X[1:2, 0:2, 1:4])


def test_narrow_floats_are_left_to_jax() -> None:
    x = X.astype(jax.numpy.bfloat16)
    (eqn,) = jax.make_jaxpr(lambda x: lax.reduce_sum(x, (0,)))(x).eqns
    assert by_numpy(eqn, [x], eqn.params) is None
