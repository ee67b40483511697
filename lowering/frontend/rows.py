"""Concatenations of concatenations as one, and slices of them as slices of a piece.

`jnp.pad(x, 3, mode="reflect")` joins a mirrored slice of `x` and `x`, and then the
result and a mirrored slice of the result.  As written, the array between the two is
put together and cut again, though nothing else reads it.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import Atom, new_eqn
from jhost.lowering.frontend.inline_calls import FlatJaxpr, needed
from jhost.lowering.rules.dim_rule import shape_of
from jhost.lowering.rules.rearrange import MOST_PIECES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _JoinedRow:
    """Arrays that are joined along a dim."""

    dim: int
    pieces: tuple[Atom, ...]

    def piece_with(self, start: int, stop: int) -> tuple[Atom, int] | None:
        """The piece that has all of `[start:stop]`, and where it begins."""
        ends = itertools.accumulate(shape_of(each)[self.dim] for each in self.pieces)
        for piece, end in zip(self.pieces, ends, strict=True):
            first = end - shape_of(piece)[self.dim]
            if first <= start < stop <= end:
                return piece, first
        return None


def with_rows(flat: FlatJaxpr) -> FlatJaxpr:
    """`flat`, with no concatenation of another one along the same dim."""
    writer = _RowWriter()
    eqns = [writer.equation(eqn) for eqn in flat.eqns]
    if all(map(operator.is_, eqns, flat.eqns)):
        return flat
    return dataclasses.replace(flat, eqns=needed(eqns, flat.outvars))


class _RowWriter:
    def __init__(self) -> None:
        self.rows: dict[Var, _JoinedRow] = {}

    def equation(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation, or one that does the same to the pieces of a row."""
        if eqn.primitive.name == "concatenate":
            return self.concatenation(eqn)
        if eqn.primitive.name == "slice" and self.row(eqn.invars[0]):
            return self.slice(eqn)
        return eqn

    def row(self, value: Atom) -> _JoinedRow | None:
        return None if isinstance(value, Literal) else self.rows.get(value)

    def concatenation(self, eqn: JaxprEqn) -> JaxprEqn:
        dim = eqn.params["dimension"]
        pieces = [*self.pieces(eqn.invars, dim)]
        if len(pieces) > MOST_PIECES:
            pieces = [*eqn.invars]
        self.rows[eqn.outvars[0]] = _JoinedRow(dim=dim, pieces=tuple(pieces))
        if len(pieces) == len(eqn.invars):
            return eqn
        return new_eqn(eqn.primitive, pieces, eqn.outvars, eqn.params, like=eqn)

    def pieces(self, values: Sequence[Atom], dim: int) -> list[Atom]:
        found: list[Atom] = []
        for value in values:
            row = self.row(value)
            found += row.pieces if row and row.dim == dim else [value]
        return found

    def slice(self, eqn: JaxprEqn) -> JaxprEqn:
        row = self.row(eqn.invars[0])
        assert row is not None
        starts, limits = ([*eqn.params[n]] for n in ("start_indices", "limit_indices"))
        found = row.piece_with(starts[row.dim], limits[row.dim])
        if found is None:
            return eqn
        piece, first = found
        starts[row.dim] -= first
        limits[row.dim] -= first
        ends = {"start_indices": tuple(starts), "limit_indices": tuple(limits)}
        return new_eqn(eqn.primitive, [piece], eqn.outvars, eqn.params | ends, like=eqn)
