"""Functions around jhost functions: the calls in what JAX makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from jhost import errors
from jhost._call.arguments import name_of
from jhost._call.program import Config, derived_program, plain
from jhost._call.stages import explained
from jhost._primitives import jhost_p
from jhost.lowering.explain import Explanation, joined


class InnerCall(NamedTuple):
    """What one call of a jhost function runs, whatever JAX has derived it from."""

    call_jaxpr: Any
    config: Config


def calls_in(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[InnerCall]:
    """Each call of a jhost function in what JAX makes of `fun`, in order."""
    return list(_calls(_traced(fun, args, kwargs)))


def explain_around(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Explanation:
    """What jhost makes of each different call in `fun`."""
    calls = calls_in(fun, args, kwargs)
    if not calls:
        raise errors.ArgumentError(
            f"jhost.explain got {name_of(fun)}, which calls no jhost function on these "
            "arguments. Decorate it, or a function that it calls, with jhost.jit."
        )
    # A function that is called again on the same types has the same jaxpr.
    different = {(id(call.call_jaxpr), plain(call.config)): call for call in calls}
    return joined(
        name_of(fun),
        [explained(derived_program(*call), call.config) for call in different.values()],
    )


def _traced(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The jaxpr of a function; arguments that are no arrays are what they are.

    So those that are static to a `jax.jit` may be given to it as they are.
    """
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


def _calls(jaxpr: Any) -> Iterator[InnerCall]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive is not jhost_p:
            for inner in jaxprs_in_params(eqn.params):
                yield from _calls(inner)
        elif eqn.outvars:
            yield InnerCall(eqn.params["call_jaxpr"], eqn.params["config"])
