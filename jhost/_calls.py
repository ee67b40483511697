"""The calls of jhost's primitive that a function makes, with their operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jhost._api import JitFunction
from jhost._primitives import jhost_p
from jhost._program import Call
from jhost.lowering.rules import bind


def calls_of(
    f: JitFunction[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    gradients: bool,
) -> dict[str, Call]:
    """The call that `f` makes, and those of its value and gradients, by name.

    They are made without a tuning.
    """
    calls = {f.__name__: f.as_call(args, kwargs)}
    if gradients:
        names = (f"{f.__name__}, keeping residuals", f"{f.__name__}, backward")
        call, floats = by_floats(f, args, kwargs)
        derived = _recorded(gradients_of(call), floats)
        calls |= dict(zip(names, derived, strict=True))
    return {
        name: call._replace(config=dataclasses.replace(call.config, tunings=()))
        for name, call in calls.items()
    }


def by_floats(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """`f` as a function of the float arrays among its arguments alone, and those."""
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    floats = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]

    def call(*values: Any) -> Any:
        new = dict(zip(floats, values, strict=True))
        filled = [new.get(i, leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(tree, filled)
        return f(*args, **kwargs)

    return call, [leaves[i] for i in floats]


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
    return np.zeros(result.shape, jax.dtypes.float0)


def _recorded(fun: Callable[..., Any], args: Sequence[Any]) -> list[Call]:
    """The calls in the program of `fun`, which is run once for their operands."""
    closed = jax.make_jaxpr(fun)(*args)
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)
    calls: list[Call] = []
    for eqn in jaxpr.eqns:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if eqn.primitive is jhost_p and eqn.outvars:
            config = dataclasses.replace(eqn.params["config"], embedded=False)
            calls.append(Call(eqn.params["call_jaxpr"], config, tuple(operands)))
        values |= zip(eqn.outvars, bind(eqn, operands), strict=True)
    return calls
