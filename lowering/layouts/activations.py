"""Which operands are activations, and which are weights.

Where a weight and an activation claim a mesh axis for different factors, one of them
moves.  Each operation moves the smaller of the two.  The whole program may move less if
one of them stays everywhere.  No change of single decisions leads from one to the
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.operation import Assignment, Operation

OperandNumbers: TypeAlias = Mapping[Operation, int]
"""Operations, each with the number of the operand that is its activation, or weight."""

ACTIVATIONS, WEIGHTS = "activations", "weights"

Staying: TypeAlias = tuple[str, str] | tuple[()]
"""Activations or weights, and the mesh axis over which they stay, whatever that moves.

Nothing stays in all of the program if it is empty.
"""


def operands_of(operations: Sequence[Operation]) -> Mapping[str, OperandNumbers]:
    """The activations of operations, and their weights.

    An activation is the operand with the most reductions behind it.  An operation whose
    operands have none is left out.  What an iteration takes over from the one before
    counts as one reduction more.  A weight is contracted with an activation, and has no
    reduction behind it.
    """
    behind: dict[str, int] = {}
    activations: dict[Operation, int] = {}
    weights: dict[Operation, int] = {}
    for op in operations:
        counts = [behind.get(name, 0) for name in op.ins]
        most = max(counts, default=0)
        if most and not op.forwards:
            activations[op] = counts.index(most)
            if op.reduces and 0 in counts:
                weights[op] = counts.index(0)
        behind |= dict.fromkeys(op.outs, most + (op.reduces or op.carries))
    return {ACTIVATIONS: activations, WEIGHTS: weights}


def stays(
    op: Operation,
    operand: int,
    assignment: Assignment,
    layouts: Mapping[str, Layout],
    axis: str,
) -> bool:
    """Whether an assignment wants `axis` where it shards the operand already."""
    have, want = layouts[op.ins[operand]], op.required(operand, assignment)
    pairs = zip(have, want, strict=True)
    return all(axis in wanted for axes, wanted in pairs if axis in axes)
