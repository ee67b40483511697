"""The two programs of a split, and the values between them, as variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import Residual, Split, rewritten
from jhost.lowering.frontend.inline_calls import FlatJaxpr, inline_plain_calls

SavedValues = tuple[tuple[Var, Var], ...]
"""Values of the first program, each with the operand of the second that it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Two programs, and the values `saved` from the first to the second.

    These are not among the results of `first` or the operands of `second`.  A policy of
    the user's may have chosen them.
    """

    first: FlatJaxpr
    second: FlatJaxpr
    saved: SavedValues
    by_policy: bool

    def with_eqns(
        self, first: Sequence[JaxprEqn], second: Sequence[JaxprEqn], saved: SavedValues
    ) -> Pair:
        """The pair with other equations, and other values between them."""
        return dataclasses.replace(
            self,
            first=dataclasses.replace(self.first, eqns=tuple(first)),
            second=dataclasses.replace(self.second, eqns=tuple(second)),
            saved=saved,
        )


def pair_of(split: Split) -> Pair:
    """The programs of a split, with no plain calls in them."""
    first, second = map(inline_plain_calls, (split.first, split.second))
    saved: list[tuple[Var, Var]] = []
    own: list[Var] = []
    count = len(split.residuals)
    for residual, operand in zip(split.residuals, second.invars, strict=False):
        # A constant is in neither program: the second has it as an operand of its own.
        if residual.constant is not None:
            own.append(operand)
        elif residual.result is not None:
            saved.append((first.outvars[residual.result], operand))
        else:
            saved.append((first.invars[residual.given or 0], operand))
    results = _not_saved(first.outvars, split)
    return Pair(
        dataclasses.replace(first, outvars=results),
        dataclasses.replace(second, invars=(*own, *second.invars[count:])),
        tuple(saved),
        split.by_policy,
    )


def _not_saved(outvars: Sequence[Var], split: Split) -> tuple[Var, ...]:
    """The results that are the program's own, and those that are no residuals."""
    residuals = {residual.result for residual in split.residuals}
    numbers = range(len(outvars))
    return tuple(outvars[n] for n in numbers if n < split.kept or n not in residuals)


def split_of(pair: Pair, like: Split) -> Split:
    """The split that a pair made of another one is."""
    first, second = pair.first, pair.second
    kept, others = first.outvars[: like.kept], first.outvars[like.kept :]
    values = [value for value, _ in pair.saved]
    # A value that is passed twice needs one more result.  An operand, or a result that
    # is there anyway, needs none.
    made = [v for v in dict.fromkeys(values) if v not in (*first.invars, *kept)]
    results = [*kept, *made, *others]

    def source(value: Var) -> Residual:
        if value in first.invars:
            return Residual(given=first.invars.index(value))
        return Residual(result=results.index(value))

    constants = [r for r in like.residuals if r.constant is not None]
    operands = [operand for _, operand in pair.saved]
    return dataclasses.replace(
        like,
        first=rewritten(
            like.first, invars=first.invars, outvars=results, eqns=first.eqns
        ),
        second=rewritten(
            like.second,
            invars=[*operands, *second.invars],
            outvars=second.outvars,
            eqns=second.eqns,
        ),
        residuals=(*map(source, values), *constants),
    )


def on_others(
    eqns: Iterable[JaxprEqn], instead: Mapping[Var, Var]
) -> tuple[JaxprEqn, ...]:
    """The equations, on other values `instead` of some of their operands."""
    return tuple(eqn.replace(invars=renamed(eqn.invars, instead)) for eqn in eqns)


def renamed(atoms: Iterable[Any], instead: Mapping[Var, Var]) -> list[Any]:
    """The values that stand `instead` of others, and the rest as they are."""
    return [a if isinstance(a, Literal) else instead.get(a, a) for a in atoms]
