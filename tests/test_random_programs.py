"""Random programs: jhost's results are the plain function's, exactly."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import chex
import hypothesis
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import jhost
from jhost._jax import without_dead_code
from jhost.lowering.ir.bodies import all_remarks
from jhost.lowering.ir.pipelines import SumsPosition
from jhost.lowering.schedule.scheduled_transfer import TransferForm
from tests import apart, sums
from tests.jhost.derived import vjp
from tests.lowering.traced import interpreted
from tests.random_derivatives import Derivatives, derivatives
from tests.random_programs import OF_MORE_AXES, REFUSALS, Case, cases
from tests.random_rows import LOOKUPS, UPDATES
from tests.random_steps import BOOLEANS, INT4, INT8, SMOOTH, UINT8, WHOLE, ZEROS

pytestmark = pytest.mark.filterwarnings("ignore::jhost.errors.StreamWarning")
"""Of some marks nothing reads the result."""

WAYS = st.sampled_from([None, *get_args(TransferForm)])
"""How what moves outside of loops does."""

EXACT = 2.0**20
"""Up to here float32 holds whole numbers, their sums, and halves of them."""

_OTHERS = {name: WHOLE.alone[name] for name in ("broadcast_in_dim", "transpose")}
ROWS = dataclasses.replace(WHOLE, alone={**LOOKUPS, **UPDATES, **_OTHERS})


def assert_same(given: Any, wanted: Any) -> None:
    """Values, dtypes and weak types are equal."""
    assert_equal(given, wanted)
    assert list(map(type_of, given)) == list(map(type_of, wanted))


def assert_equal(given: Any, wanted: Any) -> None:
    chex.assert_trees_all_equal(*(jax.tree.map(readable, x) for x in (given, wanted)))


def readable(array: jax.Array) -> jax.Array | np.ndarray:
    """JAX 0.10 cannot read what `jit(out_shardings=...)` shards of an empty array."""
    return array if array.size else np.empty(array.shape, array.dtype)


def type_of(array: jax.Array) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.weak_type


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(cases(WHOLE), st.sampled_from(sums.EVERY), WAYS)
def test_random_programs_equal_the_plain_function(
    case: Case, where: SumsPosition, way: TransferForm | None
) -> None:
    with sums.standing(where), sums.moving(way):
        assert_case(case)


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(st.sampled_from([INT8, UINT8, INT4, BOOLEANS]).flatmap(cases))
def test_random_programs_of_narrow_integers_and_booleans_equal_the_plain_function(
    case: Case,
) -> None:
    assert_case(case)


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(cases(ROWS, most_steps=4))
def test_random_lookups_and_updates_equal_the_plain_function(case: Case) -> None:
    assert_case(case)


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(cases(WHOLE))
def test_random_programs_that_xla_partitions_equal_the_plain_function(
    case: Case,
) -> None:
    case.count()
    expected = by_jax(lambda: case.compiled(jax.jit)(*case.arguments()))
    with apart.in_processes():
        try:
            f = case.compiled(functools.partial(jhost.jit, **case.settings()))
            result = f(*case.placed())
        except REFUSALS:
            return
    assert_same(result, expected)


def assert_case(case: Case) -> None:
    """Emission and interpretation give what the plain function gives."""
    case.count()
    expected = by_jax(lambda: case.compiled(jax.jit)(*case.arguments()))
    settings = case.settings()
    try:
        f = case.compiled(functools.partial(jhost.jit, **settings))
        result = f(*case.placed())
    except REFUSALS:
        return
    assert_same(result, expected)
    again = interpreted(case.function, **settings)(*case.placed())
    assert_same(again, expected)


@given(cases(WHOLE, most_steps=5))
def test_the_mesh_of_the_arguments_is_as_one_that_is_given(case: Case) -> None:
    hypothesis.assume(case.mesh and any(kind != "number" for kind in case.kinds))
    case.count()
    settings = case.settings(results=False)
    del settings["in_shardings"]
    f, args = jhost.jit(case.function, **settings), case.placed()
    try:
        wanted = str(f.lower(*args).host_ir)
    except REFUSALS as refusal:
        with pytest.raises(type(refusal)):
            f.with_options(mesh=None).lower(*args)
        return
    assert str(f.with_options(mesh=None).lower(*args).host_ir) == wanted


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(cases(WHOLE, most_steps=5), st.integers(1, 8))
def test_no_wish_of_a_function_is_a_refusal(case: Case, chunks: int) -> None:
    case.count()
    f, args = jhost.jit(case.function, **case.settings()), case.placed()
    try:
        f.with_options(chunks="auto", pipeline="auto").lower(*args)
    except REFUSALS:
        return
    f.with_options(chunks=chunks, pipeline="p2p").lower(*args)


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(cases(SMOOTH))
def test_infinities_and_no_numbers_stay_where_they_are(case: Case) -> None:
    args = case.arguments(special=[np.nan, np.inf, -np.inf])
    # What is multiplied before it is added up is taken to be finite.
    result = added_up_first(case, args)
    if result is not None:
        assert_same(result, by_jax(lambda: jax.jit(case.function)(*args)))


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(cases(ZEROS, most_steps=5))
def test_zeros_have_the_signs_that_the_plain_function_gives_them(case: Case) -> None:
    args = case.arguments(most=1, special=[-0.0])
    # A sum that cancels, and is then turned round, has another sign in another order.
    result = added_up_first(case, args)
    if result is not None:
        wanted = by_jax(lambda: jax.jit(case.function)(*args))
        assert_same(result, wanted)
        signs = (list(map(np.signbit, leaves_of(x))) for x in (result, wanted))
        assert_equal(*signs)


def added_up_first(case: Case, args: Any) -> Any:
    """The results of a program that puts off no sum; None where it is refused."""
    case.count()
    f = jhost.jit(case.function, **case.settings())
    try:
        remarks = all_remarks(f.lower(*case.placed(args)).host_ir)
        result = f(*case.placed(args))
    except REFUSALS:
        return None
    hypothesis.assume(not any("stayed partial" in str(each) for each in remarks))
    return result


def leaves_of(results: Any) -> list[Any]:
    """Those of floats; of what is no number the sign says nothing."""
    leaves = (x for x in jax.tree.leaves(results) if hasattr(x, "dtype"))
    floats = (x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))
    wide = (np.asarray(readable(x)).astype(np.float64) for x in floats)
    return [np.where(np.isnan(x), 1, x) for x in wide]


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(cases(SMOOTH), st.booleans(), st.sampled_from(sums.EVERY), WAYS)
def test_their_gradients_equal_the_plain_functions(
    case: Case, inside: bool, where: SumsPosition, way: TransferForm | None
) -> None:
    """Around a jhost function, and `inside` of one."""
    case.count()
    shapes = by_jax(lambda: jax.eval_shape(case.function, *case.arguments()))
    random = np.random.default_rng(1)
    cotangents = jax.tree.map(
        lambda result: (
            jnp.array(random.integers(-1, 2, result.shape), result.dtype)
            if jnp.issubdtype(result.dtype, jnp.floating)
            else np.zeros(result.shape, jax.dtypes.float0)
        ),
        shapes,
    )

    def both(function: Any) -> Any:
        return lambda *args: vjp(function)(cotangents, *args)

    expected = by_jax(lambda: jax.jit(both(case.function))(*case.arguments()))
    hypothesis.assume(largest(expected) < EXACT)
    try:
        if inside:
            f = jhost.jit(both(case.function), **case.settings(results=False))
        else:
            f = both(case.compiled(functools.partial(jhost.jit, **case.settings())))
        with sums.standing(where), sums.moving(way):
            result = f(*case.placed())
    except REFUSALS:
        return
    assert_equal(result, expected)


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(
    cases(SMOOTH, most_steps=5) | cases(SMOOTH, most_steps=4, meshes=OF_MORE_AXES),
    derivatives(),
)
def test_their_derivatives_of_any_order_equal_the_plain_functions(
    case: Case, taken: Derivatives
) -> None:
    """In every mix of modes, some of them taken inside of the jhost function.

    JAX refuses what has no derivative also where no result depends on it.
    """
    case.count()
    for name in taken.names:
        hypothesis.event(f"taken {name}")
    args = case.arguments(most=1)
    expected = by_jax(lambda: outcome(lambda: taken.of(case.function, jax.jit)(*args)))
    hypothesis.assume(largest(expected) < EXACT)
    jit = functools.partial(jhost.jit, **case.settings(results=False))
    try:
        result = outcome(lambda: taken.of(case.function, jit)(*case.placed(args)))
    except REFUSALS:
        return
    if isinstance(expected, dict) and not isinstance(result, dict):
        live = without_dead_code(jax.make_jaxpr(case.function)(*args))
        expected = taken.of(jax.extend.core.jaxpr_as_fun(live), jax.jit)(*args)
    assert_equal(result, expected)


def by_jax(f: Callable[[], Any]) -> Any:
    """What a call of the plain function gives, if XLA can compile it.

    It cannot where branches hold a `shard_map` each, with other layouts. And a jhost
    function inside that takes the mesh of a `shard_map` may refuse its own marks.
    """
    try:
        return f()
    except (jax.errors.JaxRuntimeError, *REFUSALS):
        hypothesis.reject()


def outcome(f: Callable[[], Any]) -> Any:
    """What a call gives, or the name of JAX's error where it has no derivative."""
    try:
        return f()
    except (TypeError, NotImplementedError) as refusal:
        return {type(refusal).__name__: jnp.zeros(())}


def largest(tree: Any) -> float:
    """The largest number in a tree of arrays; infinite if one is none."""
    arrays = [a for a in jax.tree.leaves(tree) if a.dtype != jax.dtypes.float0]
    wide = (np.asarray(a).astype(np.float64) for a in arrays)
    sizes = [float(np.max(np.abs(a), initial=0)) for a in wide]
    return max((n if n == n else np.inf for n in sizes), default=0.0)
