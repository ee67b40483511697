"""Random programs: jhost's results are the plain function's, exactly."""

from __future__ import annotations

from typing import Any

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st

import jhost
from tests.jhost.derived import vjp
from tests.lowering.traced import interpreted
from tests.random_programs import REFUSALS, Case, cases
from tests.random_steps import SMOOTH, WHOLE

EXACT = 2.0**20
"""Up to here float32 holds whole numbers, their sums, and halves of them."""


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(cases(WHOLE))
def test_random_programs_equal_the_plain_function(case: Case) -> None:
    """Emission and interpretation do."""
    expected = jax.jit(case.function)(*case.arguments())
    settings = case.settings()
    try:
        result = jhost.jit(case.function, **settings)(*case.placed())
    except REFUSALS:
        return
    chex.assert_trees_all_equal(result, expected)
    again = interpreted(case.function, **settings)(*case.placed())
    chex.assert_trees_all_equal(again, expected)


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(cases(SMOOTH), st.booleans())
def test_their_gradients_equal_the_plain_functions(case: Case, inside: bool) -> None:
    """Around a jhost function, and `inside` of one."""
    shapes = jax.eval_shape(case.function, *case.arguments())
    random = np.random.default_rng(1)
    cotangents = tuple(
        jnp.asarray(random.integers(-1, 2, result.shape), result.dtype)
        for result in shapes
    )

    def both(function: Any) -> Any:
        return lambda *args: vjp(function)(cotangents, *args)

    expected = jax.jit(both(case.function))(*case.arguments())
    largest = max(float(jnp.abs(a).max()) for a in jax.tree.leaves(expected))
    hypothesis.assume(largest < EXACT)
    try:
        if inside:
            f = jhost.jit(both(case.function), **case.settings(results=False))
        else:
            f = both(jhost.jit(case.function, **case.settings()))
        result = f(*case.placed())
    except REFUSALS:
        return
    chex.assert_trees_all_equal(result, expected)
