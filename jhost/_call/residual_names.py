"""The user's names for the operands of the two programs of a split."""

from __future__ import annotations

import dataclasses

from jax.extend.core import Var

from jhost._jax import Residual, Split, with_operand_names
from jhost.lowering.frontend.value_names import ValueNames, value_names


def with_names(split: Split) -> Split:
    """The split with names for the operands of the first program and for residuals.

    The names are in the programs' debug info, as JAX's own are.  So batched programs
    have them too, and dead code elimination drops the names of operands that it drops.
    """
    if not split.names:
        return split
    invars, jaxpr = split.first.jaxpr.invars, split.first.jaxpr
    given = dict(zip(invars, split.names, strict=True))
    # On a line with several equations no name is certain, because the forward has more
    # equations than the user wrote.
    names = value_names(jaxpr.eqns, given, "alone")
    kept = [_name(residual, split, names) for residual in split.residuals]
    rest = [""] * (len(split.second.in_avals) - len(kept))
    return dataclasses.replace(
        split,
        first=with_operand_names(split.first, split.names),
        second=with_operand_names(split.second, [*kept, *rest]),
    )


def _name(residual: Residual, split: Split, names: ValueNames) -> str:
    if residual.given is not None:
        return split.names[residual.given]
    # The first program neither takes it nor makes it.
    if residual.result is None:
        return "closed-over array"
    value = split.first.jaxpr.outvars[residual.result]
    return f"{names[value]} (kept from the forward)" if isinstance(value, Var) else ""
