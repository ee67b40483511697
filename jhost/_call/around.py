"""Functions around jhost functions: the calls in what JAX makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from jhost import errors
from jhost._call.arguments import name_of
from jhost._call.config import Config, program_config
from jhost._call.explained import explained
from jhost._call.program import derived_program
from jhost._call.whole import left_whole, noted
from jhost._primitives import jhost_p
from jhost.lowering.explain import joined
from jhost.lowering.explanation import Explanation
from jhost.lowering.ir.program import Program


class InnerCall(NamedTuple):
    """What a call of a jhost function runs, whatever JAX has derived it from.

    `times` is how often it is run, in scans around it.
    """

    call_jaxpr: Any
    config: Config
    times: int = 1

    def program(self) -> Program:
        """The Host IR that jhost makes of it."""
        return derived_program(self.call_jaxpr, self.config)


def calls_in(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[InnerCall]:
    """Each call of a jhost function in what JAX makes of `fun`, in order."""
    return list(_calls(_traced(fun, args, kwargs), 1))


def explain_around(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Explanation:
    """What jhost makes of each different call in `fun`."""
    with noted() as whole:
        calls = calls_in(fun, args, kwargs)
        if not calls and not whole and isinstance(fun, jax.stages.Wrapped):
            # JAX may have traced it before, and then calls nothing in it again.
            plain: Any = fun
            calls = calls_in(plain.__wrapped__, args, kwargs)
    if not calls and not whole:
        raise errors.ArgumentError(
            f"jhost.explain got {name_of(fun)}, which calls no jhost function on these "
            "arguments. Decorate it, or a function that it calls, with jhost.jit."
        )
    found = [*map(_explained, _different(calls))]
    found += [explained(each, config, None) for each, config in whole]
    return joined(name_of(fun), found)


def _different(calls: Sequence[InnerCall]) -> Iterable[InnerCall]:
    """Each call once, with how often it is run in all."""
    found: dict[Any, InnerCall] = {}
    for call in calls:
        # A function that is called again on the same types has the same jaxpr.
        key = id(call.call_jaxpr), program_config(call.config)
        times = call.times + (found[key].times if key in found else 0)
        found[key] = call._replace(times=times)
    return found.values()


def _explained(call: InnerCall) -> Explanation:
    program = left_whole(call.call_jaxpr, call.config) or call.program()
    explanation = explained(program, call.config, call.call_jaxpr)
    return dataclasses.replace(explanation, calls=call.times)


def _traced(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The jaxpr of a function; arguments that are no arrays are what they are.

    So those that are static to a `jax.jit` may be given to it as they are.  A function
    of `jax.jit` traces itself: with options for the compiler, JAX lets no other do so.
    """
    if isinstance(fun, jax.stages.Wrapped):
        traced: Any = fun.trace(*args, **kwargs)
        return getattr(traced, "traced", traced).jaxpr  # flax's stages hold JAX's
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def call(*arrays: Any) -> Any:
        values = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            values[place] = array
        given, named = jax.tree.unflatten(tree, values)
        return fun(*given, **named)

    return jax.make_jaxpr(call)(*(leaves[place] for place in places))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _calls(jaxpr: Any, times: int) -> Iterator[InnerCall]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        params = eqn.params
        if eqn.primitive is not jhost_p:
            length = params["length"] if eqn.primitive.name == "scan" else 1
            for inner in jaxprs_in_params(params):
                yield from _calls(inner, times * length)
        elif eqn.outvars:
            yield InnerCall(params["call_jaxpr"], params["config"], times)
