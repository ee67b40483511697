"""Concatenations of concatenations, as the frontend writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

from jhost.lowering.frontend.inline_calls import inline_calls
from jhost.lowering.frontend.rows import with_rows
from tests.lowering.hand_built import integers

Fun: TypeAlias = Callable[[Any], Any]


def _pieces(fun: Fun) -> list[int]:
    """How many arrays each concatenation joins; the equations give what `fun` does."""
    x = integers(8, 3)
    closed = jax.make_jaxpr(fun)(x)
    flat = with_rows(inline_calls(closed))
    values: dict[Any, Any] = dict(zip(flat.invars, [x], strict=True))
    for eqn in flat.eqns:
        args = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
        many = eqn.primitive.multiple_results
        values |= zip(eqn.outvars, outs if many else [outs], strict=True)
    chex.assert_trees_all_equal(
        [np.asarray(values[v]) for v in flat.outvars], jax.tree.leaves(fun(x))
    )
    joined = [eqn for eqn in flat.eqns if eqn.primitive.name == "concatenate"]
    return [len(eqn.invars) for eqn in joined]


def _joined(*arrays: Any) -> jax.Array:
    return lax.concatenate(arrays, 0)


@pytest.mark.parametrize(
    ("fun", "pieces"),
    [
        (lambda x: _joined(_joined(x, x * 2), x * 3), [3]),
        (lambda x: _joined(x, _joined(x * 2, x), x), [4]),
        (lambda x: lax.concatenate([_joined(x, x), _joined(x, x)], 1), [2, 2, 2]),
        (lambda x: lax.slice_in_dim(_joined(x * 2, x), 9, 12), []),
        (lambda x: lax.slice_in_dim(_joined(x * 2, x), 7, 12), [2]),
        (lambda x: lax.slice(_joined(x * 2, x), (1, 1), (8, 3), (2, 1)), []),
        (lambda x: (y := _joined(x, x), _joined(y, x)), [2, 3]),
        (lambda x: jnp.pad(x, ((3, 2), (0, 0)), "reflect"), [3]),
        (lambda x: jnp.pad(x, ((3, 2), (0, 0)), "wrap"), [3]),
        (lambda x: _joined(*[_joined(x, x)] * 20), [2, 20]),
    ],
    ids=[
        "first", "middle", "another dim", "of a piece", "of two pieces", "stride",
        "read twice", "mirrored", "periodic", "too many",
    ],
)  # fmt: skip
def test_arrays_are_joined_once(fun: Fun, pieces: list[int]) -> None:
    assert _pieces(fun) == pieces


def test_what_a_piece_has_is_sliced_from_it() -> None:
    closed = jax.make_jaxpr(lambda x: _joined(x * 2, x)[9:12])(integers(8, 3))
    flat = with_rows(inline_calls(closed))
    (eqn,) = flat.eqns
    assert eqn.invars == [*flat.invars]
    assert eqn.params["start_indices"] == (1, 0)
