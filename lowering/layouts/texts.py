"""The words of layout remarks for operations, values and bytes."""

from __future__ import annotations

from jhost._jax import NO_LINE, source_line
from jhost._text import bytes_text
from jhost.lowering.ir.layout import layout_of, spec_text
from jhost.lowering.ir.operation import Operation
from jhost.lowering.ir.statements import Buffer, Compute, Set
from jhost.lowering.layouts.transfer_bytes import TransferBytes


def made_text(made: Buffer, op: Operation) -> str:
    """A result as `op` makes it: `partial sum over tp by dot_general`."""
    layout = layout_of(made)
    if not made.partial:
        return f"{spec_text(layout)} by {title_of(op)}"
    reducers = {reducer for _, reducer in made.partial}
    axes = ", ".join(axis for axis, _ in made.partial)
    text = f"partial {' and '.join(sorted(reducers))} over {axes}"
    text = f"{text} of {spec_text(layout)}" if any(layout) else text
    return f"{text} by {title_of(op)}"


def title_of(op: Operation) -> str:
    if isinstance(op.stmt, Set):
        return "copy"
    if not isinstance(op.stmt, Compute):
        return type(op.stmt).__name__.lower()
    (unit_eqn,) = op.stmt.unit.eqns
    return unit_eqn.eqn.primitive.name


def line_of(op: Operation) -> str:
    """The user's line of `op`, or nothing."""
    if isinstance(op.stmt, Set):
        return ""
    if not isinstance(op.stmt, Compute):
        return op.stmt.where
    (unit_eqn,) = op.stmt.unit.eqns
    line = source_line(unit_eqn.eqn)
    return "" if line == NO_LINE else line


def moved_text(moved: TransferBytes) -> str:
    """Bytes a device, and whether a pipeline hides them."""
    if not moved.hidden:
        return f"{bytes_text(moved.exposed)} a device"
    if not moved.exposed:
        return f"{bytes_text(moved.hidden)} a device in a pipeline"
    hidden = moved_text(TransferBytes(hidden=moved.hidden))
    return f"{hidden} and {bytes_text(moved.exposed)} outside it"
