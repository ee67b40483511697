"""Caches that `jax.clear_caches` empties."""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from jax._src import util

_P = ParamSpec("_P")
_R = TypeVar("_R")


def cached_by_jaxpr(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Remembers what a function makes of its first argument, while that lives.

    That is a jaxpr, or what else is equal to itself alone; what is made of it must not
    refer to it.  `jax.clear_caches` forgets it too.
    """
    return util.weakref_lru_cache(function, trace_context_in_key=False)


def cached(size: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """`functools.lru_cache` of that size that `jax.clear_caches` empties."""
    return util.cache(size, trace_context_in_key=False)
