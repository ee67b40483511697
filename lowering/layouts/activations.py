"""Which operands are activations: values with reductions behind them.

Where a weight and an activation claim a mesh axis for different factors, one of them
moves.  If activations stay in the whole program, all of it may move less than if each
operation moves what is smaller there.  No change of single decisions leads from one to
the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.operation import Assignment, Operation

Activations: TypeAlias = Mapping[Operation, int]
"""Operations, each with the operand that is its activation."""

Staying: TypeAlias = tuple[str, ...]
"""The mesh axes over which activations stay, whatever that moves."""


def activations_of(operations: Sequence[Operation]) -> Activations:
    """The operand of each operation that has the most reductions behind it.

    An operation whose operands have none is left out.  What an iteration takes over
    from the one before counts as one reduction more.
    """
    behind: dict[str, int] = {}
    found: dict[Operation, int] = {}
    for op in operations:
        counts = [behind.get(name, 0) for name in op.ins]
        most = max(counts, default=0)
        if most and not op.forwards:
            found[op] = counts.index(most)
        behind |= dict.fromkeys(op.outs, most + (op.reduces or op.carries))
    return found


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
