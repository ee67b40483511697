"""The calls of jhost's primitive that a function makes, with their operands."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhost import errors
from jhost._annotate import as_int
from jhost._call.bind import call_of
from jhost._call.config import Call
from jhost._call.function import JitFunction
from jhost._jax import evaluate, rewritten
from jhost._primitives import jhost_p
from jhost.runtime.mesh import automatic


def calls_of(
    f: JitFunction[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    gradients: bool | int | Sequence[int],
) -> dict[str, Call]:
    """The calls of `f`, and of its value and gradients, by name.

    The gradients are by all floats, or by the positional arguments of these numbers, as
    inside `jax.jit`.  The calls are made without a tuning.
    """
    calls = {f.__name__: call_of(f.__jhost_source__, args, kwargs)}
    if gradients is not False:
        argnums = _argnums(gradients, len(args))
        derived = _gradient_calls(f, args, kwargs, argnums)
        names = ["keeping residuals", "backward"]
        if len(derived) != len(names):
            names = [f"gradient {number}" for number in range(len(derived))]
        calls |= {f"{f.__name__}, {n}": c for n, c in zip(names, derived, strict=True)}
    # Under `jax.set_mesh`, a traced function knows of an abstract mesh only.
    mesh = calls[f.__name__].config.mesh
    return {
        name: Call(
            call.call_jaxpr,
            # With a tuning, marks would have no open choice left.
            dataclasses.replace(call.config, mesh=mesh, tunings=()),
            tuple(map(automatic, call.operands)),
        )
        for name, call in calls.items()
    }


def _argnums(gradients: Any, count: int) -> Sequence[int] | None:
    """The numbers of positional arguments, from 0, or None for all that are floats."""
    if isinstance(gradients, bool):
        return None
    several = gradients if isinstance(gradients, Sequence) else (gradients,)
    numbers = list(map(as_int, several))
    if isinstance(gradients, str) or None in numbers:
        raise errors.ArgumentError(
            "jhost.tune takes a bool, or numbers of positional arguments, as "
            f"gradients, but got {gradients!r}."
        )
    known = [n for n in numbers if n is not None]
    if beyond := [n for n in known if not -count <= n < count]:
        raise errors.OptionError(
            f"jhost.tune got gradients={gradients!r}, but there are {count} positional "
            f"arguments: {', '.join(map(str, beyond))} is none of them."
        )
    return [n % count for n in known]


def _gradient_calls(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: Sequence[int] | None,
) -> list[Call]:
    """What the gradients of `f` call where all arrays are traced."""
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    # Other leaves stay what they are: a static argument has to be known.
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

    def gradients(*values: Any) -> Any:
        traced = dict(zip(arrays, values, strict=True))
        filled = [traced.get(i, leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(tree, filled)
        call, floats = by_floats(f, args, kwargs, argnums)
        if not floats:
            which = "" if argnums is None else f" {', '.join(map(str, argnums))}"
            raise errors.ArgumentError(
                f"There are no gradients of {f.__name__} to tune: none of its "
                f"arguments{which} holds an array of floats."
            )
        return gradients_of(call)(*floats)

    return _recorded(gradients, [leaves[i] for i in arrays])


def by_floats(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: Sequence[int] | None = None,
) -> tuple[Callable[..., Any], list[Any]]:
    """`f` as a function of the float arrays among its arguments alone, and those.

    With `argnums`, of those in these positional arguments alone.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))
    leaves = [leaf for _, leaf in paths]
    floats = [
        number
        for number, (path, leaf) in enumerate(paths)
        if _is_inexact(leaf) and (argnums is None or _position(path) in argnums)
    ]

    def call(*values: Any) -> Any:
        new = dict(zip(floats, values, strict=True))
        filled = [new.get(i, leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(tree, filled)
        return f(*args, **kwargs)

    return call, [leaves[i] for i in floats]


def _position(path: Any) -> int | None:
    """The number of the positional argument that a leaf stands in, if it does."""
    return path[1].idx if path[0].idx == 0 else None


def gradients_of(f: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of `f` by all arguments.

    They start from small integers, so that sums of them are exact.
    """

    def gradients(*args: Any) -> Any:
        result, pullback = jax.vjp(f, *args)
        return pullback(jax.tree.map(_cotangent, result))

    return gradients


def _is_inexact(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _cotangent(result: Any) -> Any:
    if _is_inexact(result):
        integers = jnp.arange(result.size, dtype=jnp.int32) % 5 - 2
        return integers.reshape(result.shape).astype(result.dtype)
    # JAX has this dtype for cotangents of what has no derivative.
    return np.zeros(result.shape, jax.dtypes.float0)


def _recorded(fun: Callable[..., Any], args: Sequence[Any]) -> list[Call]:
    """The calls in the program of `fun`, which is run once for their operands."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive is jhost_p and eqn.outvars]
    atoms = [atom for eqn in eqns for atom in eqn.invars]
    values = iter(evaluate(rewritten(jaxpr, outvars=atoms), args))
    return [
        Call(
            eqn.params["call_jaxpr"],
            # Compiled alone it can have XLA options, as inside an outer program it
            # cannot.
            dataclasses.replace(eqn.params["config"], embedded=False),
            tuple(itertools.islice(values, len(eqn.invars))),
        )
        for eqn in eqns
    ]
