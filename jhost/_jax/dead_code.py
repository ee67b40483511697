"""Programs without dead code, in which custom rules stay the user's."""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

from jax._src import linear_util
from jax.custom_derivatives import custom_jvp_call_p
from jax.extend.core import JaxprEqn, Var, jaxprs_in_params
from jax.extend.linear_util import WrappedFun
from jax.interpreters import partial_eval

from jhost._jax.eqns import ClosedJaxpr, like_closed, with_each_eqn


def without_dead_code(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The program without equations that no result or effect depends on.

    JAX drops them when it lowers a call.  If a program has none, JAX keeps it, and so
    its caches still know the program.
    """
    live, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, True, instantiate=True)
    rules = dict(_rules_of_results(jaxpr))
    if rules:
        live = with_each_eqn(live, partial(_with_rule, rules))
    return like_closed(live, jaxpr)


_ResultRule: TypeAlias = tuple[WrappedFun, int, int]
"""The function that gives a `custom_jvp`'s rule, a result's number, and their count."""


def _rules_of_results(jaxpr: Any) -> Iterator[tuple[Var, _ResultRule]]:
    """The rule of each result of a `custom_jvp`, here and in bodies."""
    for eqn in jaxpr.eqns:
        if _has_rule(eqn):
            rule, count = eqn.params["jvp_jaxpr_fun"], len(eqn.outvars)
            yield from ((v, (rule, n, count)) for n, v in enumerate(eqn.outvars))
            continue
        for inner in jaxprs_in_params(eqn.params):
            yield from _rules_of_results(inner)


def _has_rule(eqn: JaxprEqn) -> bool:
    return eqn.primitive is custom_jvp_call_p


def _with_rule(rules: Mapping[Var, _ResultRule], eqn: JaxprEqn) -> JaxprEqn | None:
    """The equation of a `custom_jvp` with the user's rule, for the results left."""
    # JAX (0.10 to 0.12) makes another rule for fewer results.  JAX's rule fails if the
    # user's rule returns a symbolic zero, but did not ask for those of operands.
    if not _has_rule(eqn) or not eqn.outvars:
        return None
    places = [rules[var] for var in eqn.outvars]
    (rule, _, count), left = places[0], [number for _, number, _ in places]
    if len(left) < count:
        thunk = cache(partial(_rule_of_some, rule, left))
        rule = linear_util.wrap_init(thunk, debug_info=rule.debug_info)
    return eqn.replace(params={**eqn.params, "jvp_jaxpr_fun": rule})


def _rule_of_some(
    rule: WrappedFun, left: Sequence[int], *zeros: bool
) -> tuple[Any, Any, list[bool]]:
    jaxpr, consts, zeros_out = rule.call_wrapped(*zeros)
    used = [number in left for number in range(len(zeros_out))]
    moving = [u for u, zero in zip(used, zeros_out, strict=True) if not zero]
    live, _ = partial_eval.dce_jaxpr(jaxpr, [*used, *moving], True)
    return live, consts, [zeros_out[number] for number in left]
