"""Random mixes of derivatives, up to the third, and of what may stand between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

Function: TypeAlias = Callable[..., Any]
Transform: TypeAlias = Callable[[Function], Function]


def _numbers(tree: Any) -> Any:
    """Small whole numbers for each float of a tree, and nothing for the rest."""

    def one(leaf: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            return np.zeros(jnp.shape(leaf), jax.dtypes.float0)
        count = np.arange(np.prod(jnp.shape(leaf), dtype=int))
        numbers = (count % 3 - 1).reshape(jnp.shape(leaf))
        return jnp.array(numbers, jnp.result_type(leaf))

    return jax.tree.map(one, tree)


def _reverse(f: Function) -> Function:
    def pulled(*args: Any) -> Any:
        result, pullback = jax.vjp(f, *args)
        return _floats(pullback(_numbers(result)))

    return pulled


def _forward(f: Function) -> Function:
    return lambda *args: _floats(jax.jvp(f, args, _numbers(args))[1])


def _linearized(f: Function) -> Function:
    return lambda *args: _floats(jax.linearize(f, *args)[1](*_numbers(args)))


def _floats(tree: Any) -> Any:
    """A tree of tangents without those that have no type."""
    return [a for a in jax.tree.leaves(tree) if a.dtype != jax.dtypes.float0]


def _batched(f: Function) -> Function:
    """Of the arguments and of their negatives, added up."""

    def both(*args: Any) -> Any:
        pairs = jax.tree.map(lambda a: jnp.stack([jnp.array(a), -a]), args)
        return jax.tree.map(lambda a: jnp.sum(a, 0), jax.vmap(f)(*pairs))

    return both


ORDERS: Mapping[str, Transform] = {
    "reverse": _reverse,
    "forward": _forward,
    "linearize": _linearized,
}

BETWEEN: Mapping[str, Transform] = {
    "nothing": lambda f: f,
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "vmap": _batched,
}


@dataclasses.dataclass(frozen=True)
class Derivatives:
    """Transforms, the innermost first, of which the first `inside` are compiled."""

    names: tuple[str, ...]
    inside: int

    def of(self, function: Function, jit: Callable[[Function], Function]) -> Function:
        """The derivatives of a function; those inside are compiled by `jit`."""
        for number, name in enumerate(self.names):
            if number == self.inside:
                function = jit(function)
            function = {**ORDERS, **BETWEEN}[name](function)
        return jax.jit(jit(function) if self.inside == len(self.names) else function)


@st.composite
def derivatives(draw: st.DrawFn) -> Derivatives:
    names: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        names.append(draw(st.sampled_from(sorted(ORDERS))))
        names.append(draw(st.sampled_from(sorted(BETWEEN))))
    return Derivatives(tuple(names), draw(st.integers(0, len(names))))
