"""Why values change their layout, in the user's words: one remark for each change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jhost.lowering.ir.layout import Layout, axes_size, layout_of, spec_text, used_axes
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.names import local_name
from jhost.lowering.ir.remarks import LayoutReport, ReplicationReport
from jhost.lowering.ir.statements import Buffer, Compute, Reshard
from jhost.lowering.ir.unit_printer import type_text
from jhost.lowering.layouts.gathered import Gathers, moved_in_all
from jhost.lowering.layouts.reasons import Reason, Reasons, joined, whole_reason_of
from jhost.lowering.layouts.reshard import plan_reshard
from jhost.lowering.layouts.solve import Solution
from jhost.lowering.layouts.texts import line_of, made_text, moved_text, title_of
from jhost.lowering.layouts.transfer_bytes import NOTHING, TransferBytes, moved_by
from jhost.lowering.rules.flops import flops_of

_READ = "reduced once for all its readers"
_UNREAD = (
    "reduced onto all devices, because neither out_shardings= nor jhost.shard asks for "
    "less"
)


class LayoutRemarks:
    """Remarks on the `Reshard`s of one solution, each for one value."""

    def __init__(
        self,
        solution: Solution,
        marks: Mapping[str, ShardMark],
        mesh: Mapping[str, int],
    ) -> None:
        self.solution = solution
        self.reasons = Reasons(marks, mesh)
        self.gathers = Gathers(solution)
        self.read = {name for op in solution.operations for name in op.ins}
        self.mesh = mesh

    # --- The three places where layouts change -------------------------------- #

    def operand(self, number: int, position: int, have: Layout) -> LayoutReport | None:
        """The remark on an operand that an operation needs in another layout."""
        op, alternatives = (
            self.solution.operations[number],
            self.solution.alternatives[number],
        )
        name = op.ins[position]
        want = op.required(position, self.solution.assignments[number])
        moved = self.solution.costs.reshard(name, have, want)
        reasons = [*self.reasons.losses(op, position, alternatives, have, want)]
        if _says_nothing(moved, reasons):
            return None
        after = f"{self.spec(name, have, want)} for {title_of(op)}"
        reason, where = joined(reasons), line_of(op)
        return layout_remark(name, spec_text(have), after, moved, reason, where)

    def replication(self, number: int) -> ReplicationReport | None:
        """The remark that an operation needs operands whole, on all devices."""
        op, assignment = (
            self.solution.operations[number],
            self.solution.assignments[number],
        )
        found = [*self.gathers.of(number)]
        moved = moved_in_all({gathered for *_, gathered in found})
        if moved == NOTHING or not isinstance(op.stmt, Compute):
            return None
        names = dict.fromkeys(local_name(op.ins[operand]) for operand, *_ in found)
        reasons = dict.fromkeys(whole_reason_of(op, dim) for _, dim, _ in found)
        spread = {axis for axes in assignment for axis in axes}
        (unit_eqn,) = op.stmt.unit.eqns
        devices = axes_size([*spread], self.mesh)
        # An operation in a body is repeated in each iteration.
        times = self.solution.costs.times(op.ins[0])
        return ReplicationReport(
            primitive=unit_eqn.eqn.primitive.name,
            values=tuple(names),
            reason="; ".join(reasons),
            bytes=moved.all,
            flops=times * flops_of(unit_eqn.eqn) // devices,
            where=line_of(op),
        )

    def result(self, number: int, position: int, made: Buffer) -> LayoutReport | None:
        """The remark on a result that rests in another layout than it is made in."""
        op, alternatives = (
            self.solution.operations[number],
            self.solution.alternatives[number],
        )
        name = op.outs[position]
        have, rest = layout_of(made), self.solution.layouts[name]
        moved = self.solution.costs.reshard(name, have, rest, made.partial)
        reasons = [*self.reasons.given(name), *self.reasons.undivided(op, alternatives)]
        if _says_nothing(moved, reasons):
            return None
        if made.partial and not reasons:
            is_read = name in self.read or not made.shape
            reasons = [Reason(_READ if is_read else _UNREAD)]
        before = made_text(made, op)
        where = self.reasons.given_at(name) or line_of(op)
        after = self.spec(name, have, rest)
        return layout_remark(name, before, after, moved, joined(reasons), where)

    def copy(self, number: int, have: Layout) -> LayoutReport | None:
        """The remark on a copy in another layout, which the user asked for."""
        op = self.solution.operations[number]
        (source,), (name,) = op.ins, op.outs
        rest = self.solution.layouts[name]
        moved = self.solution.costs.reshard(name, have, rest)
        if moved == NOTHING:
            return None
        where = self.reasons.given_at(name)
        before, after = spec_text(have), self.spec(name, have, rest)
        reasons = [*self.reasons.given(name)]
        return layout_remark(source, before, after, moved, joined(reasons), where)

    def spec(self, name: str, have: Layout, want: Layout) -> str:
        """A layout in words; for an exchange with the type of the value.

        The type of tokens that go to experts, `[groups, experts, capacity, features]`,
        shows how much room the experts have.
        """
        pairs = zip(have, want, strict=True)
        gone = {axis for old, new in pairs for axis in set(old) - set(new)}
        if gone.isdisjoint(used_axes(want)):
            return spec_text(want)
        return f"{spec_text(want)} of {type_text(self.solution.costs.buffers[name])}"

    def left_whole(self, number: int) -> LayoutReport | None:
        """The remark that a dim is whole because its axes do not divide it."""
        op = self.solution.operations[number]
        reasons = [*self.reasons.undivided(op, self.solution.alternatives[number])]
        if _says_nothing(NOTHING, reasons) or not op.outs:
            return None
        layout = spec_text(self.solution.layouts[op.outs[0]])
        made = f"{layout} by {title_of(op)}"
        return layout_remark(
            op.outs[0], made, layout, NOTHING, joined(reasons), line_of(op)
        )


def _says_nothing(moved: TransferBytes, reasons: Sequence[Reason]) -> bool:
    """Whether every device has its part already, and no reason is worth a remark."""
    return moved == NOTHING and not any(r.though_nothing_moves for r in reasons)


def layout_remark(
    name: str,
    before: str,
    after: str,
    moved: TransferBytes,
    reason: str,
    where: str,
) -> LayoutReport:
    """The remark on one value."""
    name = local_name(name)
    text = f"{name}: {before} -> {after}: {moved_text(moved)}"
    return LayoutReport(
        value=name,
        before=before,
        after=after,
        bytes=moved.exposed + moved.hidden,
        reason=reason,
        text=f"{text}; {reason}" if reason else text,
        where=where,
    )


def reduced_behind_remark(
    stmt: Reshard, where: str, mesh: Mapping[str, int]
) -> LayoutReport:
    """The remark on a sum that a scan carries without reducing it."""
    layout = layout_of(stmt.out)
    # By now each shape is a device's, and bytes are counted for whole values.
    shards = [axes_size(axes, mesh) for axes in layout]
    shape = [size * n for size, n in zip(stmt.out.shape, shards, strict=True)]
    whole = dataclasses.replace(stmt.out, shape=tuple(shape))
    steps = plan_reshard(layout, layout, stmt.source.partial, mesh)
    axes = ", ".join(axis for axis, _ in stmt.source.partial)
    return layout_remark(
        stmt.out.name,
        f"partial sum over {axes} by scan",
        spec_text(layout),
        moved_by(steps, layout, whole, mesh, None),
        "reduced once, behind all iterations",
        where,
    )
