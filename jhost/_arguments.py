"""The arguments of a call: which are static, what they are called, their types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jhost import errors
from jhost._jax import Names, Nums, is_reference


def static_arguments(
    fun: Callable[..., Any], static_argnums: Nums, static_argnames: Names
) -> tuple[frozenset[int], frozenset[str]]:
    """The static arguments by position and by name, each inferred from the other."""
    nums, names = _as_tuple(static_argnums), _as_tuple(static_argnames)
    parameters = _parameters(fun)
    nums = tuple(num % len(parameters) if parameters else num for num in nums)
    if not names:
        names = tuple(parameters[num] for num in nums if num < len(parameters))
    if not nums:
        nums = tuple(parameters.index(name) for name in names if name in parameters)
    return frozenset(nums), frozenset(names)


def by_name(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Every leaf of the arguments by its name, such as `params['w']`."""
    try:
        named = dict(inspect.signature(fun).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        named = {**{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}
    return {
        f"{path[0].key}{jax.tree_util.keystr(path[1:])}": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(named)
    }


def types_of(tree: Any) -> Any:
    """`tree` with a type in place of each array: a shape, a dtype, no sharding."""
    return jax.tree.map(_type_of, tree)


def _type_of(leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    if is_reference(leaf):
        raise errors.UnsupportedError(
            "A jhost function takes arrays, but got a reference (jax.new_ref) to one "
            f"of shape {leaf.shape}. Give it what the reference holds, ref[...], and "
            "write to it what the function returns."
        )
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak_type)


def _parameters(fun: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):  # a builtin; JAX infers nothing there either
        return []


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)
