"""A function and the arguments of a call: what they are called, and their types."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jhost._jax import StaticArguments, TracedCall, arg_names, is_reference, type_of
from jhost.lowering.ir.fingerprint import value_text


def name_of(fun: Callable[..., Any]) -> str:
    """The name of a function; a `partial` has its function's, an object its class's."""
    if isinstance(fun, functools.partial):
        return name_of(fun.func)
    return getattr(fun, "__name__", type(fun).__name__)


def by_name(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Every leaf of the arguments by its name, such as `params['w']`."""
    try:
        named = dict(inspect.signature(fun).bind(*args, **kwargs).arguments)
    # Arguments that do not fit, of which JAX says more, or a callable without a
    # signature.
    except (TypeError, ValueError):
        named = {**{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}
    return {
        f"{path[0].key}{jax.tree_util.keystr(path[1:])}": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(named)
    }


def identity_of(
    traced: TracedCall,
    static: StaticArguments,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[str, ...]:
    """What makes the executable of a call beside its program, as lines of text."""
    names = arg_names(traced.jaxpr)[len(traced.consts) :]
    donated = itertools.compress(names, traced.donated)
    # In the order of numbers: processes compare these lines.
    held = {f"argument {n}": args[n] for n in sorted(static.positions(len(args)))}
    held |= {name: kwargs[name] for name in static.names if name in kwargs}
    return (
        *(f"{name} is donated" for name in donated),
        *(f"{name} is static: {value_text(value)}" for name, value in held.items()),
        *(f"{value_text(const)} is closed over" for const in traced.consts),
    )


def types_of(tree: Any) -> Any:
    """`tree` with a type in place of each array: a shape, a dtype, no sharding.

    Where a class of the user's takes no types, it is the tree of arrays.
    """
    try:
        return jax.tree.map(_type_of, tree)
    except Exception:
        return tree


def _type_of(leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    return jax.typeof(leaf) if is_reference(leaf) else type_of(leaf)
