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
    """Remembers a function's results for its first argument, while that is alive.

    The argument is a jaxpr, or another object that is equal only to itself.  The result
    must not refer to it.  `jax.clear_caches` empties this cache too.
    """
    # JAX puts the trace context into the key by default: the ambient mesh, x64 mode and
    # so on.  A traced program does not depend on these any more.
    return util.weakref_lru_cache(function, trace_context_in_key=False)


def cached(
    size: int, *, by_context: bool = False
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """`functools.lru_cache` of that size that `jax.clear_caches` empties.

    With `by_context` the results also depend on the ambient mesh, x64 mode and so on,
    as tracing does.
    """
    return util.cache(size, trace_context_in_key=by_context)
