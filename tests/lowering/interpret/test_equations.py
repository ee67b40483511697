"""What NumPy makes of an equation is what JAX makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import evaluate_by
from jhost.lowering.interpret.equations import by_numpy, evaluated, traced
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
        pytest.param(
            lambda x, y: lax.pad(
                x, lax.full((), 7, x.dtype), ((-1, 2, 0), (2, -3, 2), (0, 1, 1))
            ),
            id="pad",
        ),
        pytest.param(
            lambda x, y: lax.select(x > 0, x, lax.transpose(y, (0, 2, 1))), id="select"
        ),
        pytest.param(lambda x, y: lax.split(x, (1, 0, 3), 2)[2], id="split"),
        pytest.param(
            lambda x, y: x + lax.broadcasted_iota(x.dtype, x.shape, 2), id="iota"
        ),
        pytest.param(lambda x, y: lax.sub(x, lax.transpose(y, (0, 2, 1))), id="sub"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_numpy_gives_what_jax_gives(fun: Callable[..., Any], dtype: Any) -> None:
    check(fun, X.astype(dtype), Y.astype(dtype))


def check(fun: Callable[..., Any], *args: Any) -> None:
    """NumPy alone gives what JAX does, in value and type."""
    body = jax.make_jaxpr(fun)(*args)
    ran: list[str] = []

    def equation(eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        given = by_numpy(eqn, args)
        assert given is not None, eqn
        ran.append(eqn.primitive.name)
        return given

    (given,) = evaluate_by(body, body.consts, args, equation, lambda each: each.val)
    wanted = fun(*args)
    assert ran
    assert (given.dtype, given.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(given, wanted)


def test_windows_are_moved_inside() -> None:
    starts = np.array([3, -1, 2], np.int32)
    check(lambda x, *at: lax.dynamic_slice(x, at, (1, 2, 3)), X, *np.maximum(starts, 0))


@pytest.mark.parametrize("given", ["bool", "int8", "uint32", "float32", "bfloat16"])
@pytest.mark.parametrize("wanted", ["bool", "int8", "uint32", "float32"])
def test_types_become_others_as_in_jax(given: str, wanted: str) -> None:
    x = jnp.asarray([0, 1, 3, 100, 200, 2.0**31], "float32").astype(given)
    fun = jax.make_jaxpr(lambda x: lax.convert_element_type(x, wanted))
    x = np.asarray(x)
    narrowed = given in ("float32", "bfloat16") and wanted != "float32"
    for eqn in fun(x).eqns:
        if narrowed:
            assert by_numpy(eqn, [x]) is None
        else:
            check(lambda x: lax.convert_element_type(x, wanted), x)


def test_numbers_are_brought_into_bounds() -> None:
    x = np.array([-5, 0, 3, 9], np.int32)
    check(lambda x: lax.clamp(np.int32(0), x, np.int32(4)), x)
    # The lower bound is asked first.
    check(lambda x: lax.clamp(np.int32(4), x, np.int32(0)), x)


@pytest.mark.parametrize("which", [np.bool_(True), np.int32(2)])
def test_one_of_several_is_selected_for_all_elements(which: Any) -> None:
    cases = [X, X + 1, X + 2][: 3 if which.dtype == np.int32 else 2]
    check(lambda which, *cases: lax.select_n(which, *cases), which, *cases)


def test_a_traced_step_runs_for_all_that_is_like_it() -> None:
    """Functions that it calls are run too, and what NumPy has not is JAX's."""
    calls: list[Any] = []

    @jax.jit
    def called(x: Any) -> Any:
        calls.append(x)
        return jnp.tanh(x) + jnp.sum(x)

    for number in range(3):
        (given,) = evaluated(traced(called, jax.typeof(X[0])), [X[0] * number])
        np.testing.assert_allclose(given, called(X[0] * number), rtol=1e-6)
    assert len(calls) == 1


def test_narrow_floats_are_left_to_jax() -> None:
    x = X.astype(jnp.bfloat16)
    (eqn,) = jax.make_jaxpr(lambda x: lax.reduce_sum(x, (0,)))(x).eqns
    assert by_numpy(eqn, [x]) is None
