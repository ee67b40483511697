"""Reductions in windows that skip places without an element.

A part of a padded dim has the padding among its elements.  Where no value changes
nothing, each element says whether it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive, jaxpr_as_fun

from jhost._jax import close


def skipping(
    eqn: JaxprEqn, operands: Sequence[Any], initial: Sequence[Any], changed: Any
) -> list[Any]:
    """The reduction of only the elements whose last value is true."""
    params = {**eqn.params, **changed}
    if eqn.primitive.name == "select_and_gather_add":
        prim = params.pop("select_prim")
        function, initial = _picking(prim), _worst(prim, operands[1].dtype)
    else:
        function = jaxpr_as_fun(close(params.pop("jaxpr"), params.pop("consts")))

    def combine(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        (*ones, here), (*others, there) = left, right
        made = [
            lax.select(here, lax.select(there, both, one), other)
            for both, one, other in zip(
                function(*ones, *others), ones, others, strict=True
            )
        ]
        return [*made, lax.bitwise_or(here, there)]

    begun = [*initial, np.True_]
    results = lax.reduce_window([*operands], begun, combine, **params)
    return [*results[: len(eqn.outvars)]]


def _picking(prim: Primitive) -> Callable[..., list[Any]]:
    """Of two values and the elements that they belong to, those that `prim` picks."""

    def pick(one: Any, mine: Any, other: Any, others: Any) -> list[Any]:
        is_mine = prim.bind(mine, others)
        pairs = (one, other), (mine, others)
        return [lax.select(is_mine, *pair) for pair in pairs]

    return pick


def _worst(prim: Primitive, dtype: np.dtype) -> list[Any]:
    """The value and the element with which JAX begins to pick."""
    worst = -np.inf if prim.name == "ge" else np.inf
    return [np.asarray(begin).astype(dtype)[()] for begin in (0, worst)]
