"""A call split into a program that runs first, and one that needs values of the first.

Linearization, partial evaluation and rematerialization make two programs of one.  The
values that pass between them are the residuals.  JAX's rules for this are in
`linearization.py` and `partial_evaluation.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.interpreters.ad import Zero


@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """Where an operand of the second program comes from, by number.

    It is a `result` of the first program, or an operand that the first was `given`, or
    a `constant` of the program that both come from.
    """

    result: int | None = None
    given: int | None = None
    constant: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A program in two: `first`, then `second`, and the values between them.

    Attributes:
        first: a closed jaxpr.
        second: a closed jaxpr; its first operands are the residuals.
        residuals: where each residual comes from.
        kept: the number of results of `first` that are the program's own; its other
            results are for `second` only.
        by_policy: whether a policy of the user's may have chosen the residuals.
        names: the names of the operands of `first`, "" where unknown.
        how: what JAX made `first` for.
        whole: the program that both come from, where no other trace has it.
    """

    first: Any
    second: Any
    residuals: tuple[Residual, ...]
    kept: int
    by_policy: bool = False
    names: tuple[str, ...] = ()
    how: Derivation = "forward"
    whole: Any = None


Refine: TypeAlias = Callable[..., Split]
"""A split, and the call's other parameters by name -> one that computes the same.

The new split may have other residuals.  Results of `first` that are neither `kept` nor
residuals stay its last results.  Operands of `second` that are no residuals stay, in
their order.
"""


Derivation: TypeAlias = typing.Literal[
    "forward", "tangents", "recomputed", "known", "unknown", "backward", "batched"
]
"""The kind of program that JAX derived from a call's program.

`known` and `unknown` come from partial evaluation, which splits programs of any kind.
It moves work that a loop need not repeat before the loop, and separates what a
checkpoint computes again from its tangents.
"""

Rename: TypeAlias = Callable[..., dict[str, Any]]
"""The call's other parameters by name, and how -> those of a program derived from it.

The third argument has the names of its operands, if its program does not have them.
"""


def new_split(
    first: Any,
    second: Any,
    kept: int,
    forwarded: Sequence[int | None],
    call_jaxpr: Any,
) -> Split:
    """The split that JAX made.

    `forwarded` has, for each residual that is an operand, its number.  The constants of
    `call_jaxpr` are counted first.  It has None for a residual that `first` makes.
    """
    constants = len(call_jaxpr.consts)
    residuals: list[Residual] = []
    made = itertools.count(kept)
    for source in forwarded:
        if source is None:
            residuals.append(Residual(result=next(made)))
        elif source < constants:
            residuals.append(Residual(constant=source))
        else:
            residuals.append(Residual(given=source - constants))
    return Split(first, second, tuple(residuals), kept)


def residual_values(
    split: Split, constants: Sequence[Any], results: Sequence[Any], given: Sequence[Any]
) -> list[Any]:
    """The residuals, in the order in which the second program takes them."""
    return [
        results[residual.result]
        if residual.result is not None
        else given[residual.given]
        if residual.given is not None
        else constants[residual.constant or 0]
        for residual in split.residuals
    ]


# --- Operands ---------------------------------------------------------------------- #


def operand_names(jaxpr: Any) -> tuple[str, ...]:
    """The name of each operand of a program; "" without one."""
    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.in_avals))
    return tuple(name or "" for name in names) or ("",) * len(jaxpr.in_avals)


def keep(values: Sequence[Any], kept: Sequence[bool]) -> list[Any]:
    """The values that are kept."""
    return [value for value, wanted in zip(values, kept, strict=True) if wanted]


def with_zeros(
    jaxpr: Any, nonzeros: Sequence[bool], tangents: Sequence[Any]
) -> list[Any]:
    """Fills in the symbolic zero tangents that a call neither takes nor returns."""
    given = iter(tangents)
    return [
        next(given) if nonzero else Zero(aval.to_tangent_aval())
        for nonzero, aval in zip(nonzeros, jaxpr.out_avals, strict=True)
    ]
