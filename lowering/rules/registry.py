"""The registry of dim rules: which rule each primitive has, or why it has none.

Modules of rules write into it; `table.py` imports them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from jax.extend.core import JaxprEqn

from jhost.lowering.rules.dim_rule import DimRule, shape_of

Rule: TypeAlias = Callable[[JaxprEqn], DimRule]

_rules: dict[str, Rule] = {}
_opaque: dict[str, str] = {}


def rule(*primitives: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of the named primitives."""

    def register(function: Rule) -> Rule:
        for primitive in primitives:
            assert primitive not in known_primitives(), primitive
            _rules[primitive] = function
        return function

    return register


def opaque(reason: str, *primitives: str) -> None:
    """State that the named primitives work on whole arrays only, and why."""
    for primitive in primitives:
        assert primitive not in known_primitives(), primitive
        _opaque[primitive] = reason


def rule_of(eqn: JaxprEqn) -> DimRule:
    """The factors of `eqn`; every dim whole where its primitive has no rule."""
    # By name, so that there can be rules for primitives that only some JAX releases
    # have.
    registered = _rules.get(eqn.primitive.name)
    return registered(eqn) if registered else without_factors(eqn)


def opaque_reason(primitive: str) -> str:
    """Why a primitive without a rule has none."""
    return _opaque.get(primitive, "jhost has no dim rule for it")


def reason_of(eqn: JaxprEqn, rule: DimRule) -> str:
    """Why `eqn`, whose rule is opaque, works on whole arrays."""
    return rule.reason or opaque_reason(eqn.primitive.name)


def ruled_primitives() -> frozenset[str]:
    """The primitives with a rule."""
    return frozenset(_rules)


def known_primitives() -> frozenset[str]:
    """The primitives with a rule and those stated to be opaque."""
    return ruled_primitives() | frozenset(_opaque)


def without_factors(eqn: JaxprEqn, reason: str = "") -> DimRule:
    """No factors: operands and results whole, for the `reason`."""
    return DimRule(
        sizes=(),
        reducers=(),
        operands=tuple((None,) * len(shape_of(v)) for v in eqn.invars),
        results=tuple((None,) * len(shape_of(v)) for v in eqn.outvars),
        opaque=True,
        reason=reason,
    )
