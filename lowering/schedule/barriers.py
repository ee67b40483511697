"""Barriers in pieces, one for each operand, so that no operand waits for the others.

The backward of a `jax.checkpoint` has all its operands in one barrier: the weights and
the incoming gradient.  With a piece of its own, a weight can be gathered before that
gradient is there.  The weight still goes through a barrier.  Without one XLA would see
that the forward has made the same gather, and keep the gathered weight until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.rules.properties import is_barrier
from jhost.lowering.units.make import barrier_of, type_of


class Barriers:
    """Takes barriers apart, and merges the pieces that end up side by side."""

    def __init__(self) -> None:
        self.whole: dict[int, ir.Compute] = {}
        """The barrier that a piece comes from, by the identity of the piece."""
        self.pieces: list[ir.Compute] = []

    def apart(self, body: Iterable[ir.Stmt]) -> Iterator[ir.Stmt]:
        """The statements, with a piece for each operand of a barrier."""
        for stmt in body:
            if isinstance(stmt, ir.Compute) and len(passed_on(stmt) or ()) > 1:
                yield from self._pieces(stmt)
            else:
                yield stmt

    def _pieces(self, stmt: ir.Compute) -> Iterator[ir.Compute]:
        for source, out in zip(stmt.ins, stmt.outs, strict=True):
            piece = _barrier(stmt.unit.name, [source], [out])
            self.whole[id(piece)] = stmt
            self.pieces.append(piece)  # kept alive, so that its identity stays its own
            yield piece

    def together(self, body: Sequence[ir.Stmt]) -> Iterator[ir.Stmt]:
        """The statements, with pieces of one barrier merged where they are in a row."""
        if not self.whole:
            yield from body
            return
        pieces: list[ir.Compute] = []
        for stmt in body:
            whole = self.whole.get(id(stmt))
            if pieces and whole is not self.whole[id(pieces[0])]:
                yield self._merged(pieces)
                pieces = []
            if whole is None:
                yield stmt
            else:
                assert isinstance(stmt, ir.Compute)
                pieces.append(stmt)
        if pieces:
            yield self._merged(pieces)

    def _merged(self, pieces: Sequence[ir.Compute]) -> ir.Compute:
        whole = self.whole[id(pieces[0])]
        # All pieces are still together, so the program keeps its own statement.
        if len(pieces) == len(whole.ins):
            return whole
        ins, outs = zip(*((p.ins[0], p.outs[0]) for p in pieces), strict=True)
        return _barrier(whole.unit.name, ins, outs)


def passed_on(stmt: ir.Stmt) -> dict[str, ir.Buffer] | None:
    """The operand of each result of a barrier, by the result's name.

    None if the statement is not a barrier.
    """
    if not isinstance(stmt, ir.Compute) or len(stmt.unit.eqns) != 1:
        return None
    # A barrier with a literal operand has fewer operands than results.
    whole = len(stmt.ins) == len(stmt.outs)
    if not whole or not is_barrier(stmt.unit.eqns[0].eqn):
        return None
    return {out.name: source for source, out in zip(stmt.ins, stmt.outs, strict=True)}


def _barrier(
    name: str, ins: Sequence[ir.Buffer], outs: Sequence[ir.Buffer]
) -> ir.Compute:
    unit = barrier_of(name, *map(type_of, ins))
    return ir.Compute(unit=unit, ins=tuple(ins), outs=tuple(outs))
