"""Why values change their layout, in the user's words: one remark for each change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jhost._jax import NO_LINE, source_line
from jhost._text import bytes_text
from jhost.lowering.ir.layout import Layout, axes_size, layout_of, spec_text, used_axes
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.operation import Claim, Operation
from jhost.lowering.ir.remarks import LayoutReport, ReplicationReport
from jhost.lowering.ir.statements import Buffer, Compute, Reshard, Set
from jhost.lowering.ir.unit_printer import type_text
from jhost.lowering.layouts.flat_bodies import local_name
from jhost.lowering.layouts.reshard import plan_reshard
from jhost.lowering.layouts.solve import Alternatives, Solution
from jhost.lowering.layouts.solver import AssignmentRank
from jhost.lowering.layouts.transfer_bytes import NOTHING, TransferBytes, moved_by
from jhost.lowering.rules.flops import flops_of
from jhost.lowering.streams.participation import whole_reason


class _Reason(NamedTuple):
    text: str
    though_nothing_moves: bool = False


_READ = "reduced once for all its readers"
_UNREAD = (
    "reduced onto all devices, as nothing asks for less (out_shardings=, jhost.shard)"
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
        self.marks = marks
        self.mesh = mesh

    # --- The three places where layouts change -------------------------------- #

    def operand(self, number: int, position: int, have: Layout) -> LayoutReport | None:
        """An operand that an operation needs in another layout than it rests in."""
        op, alternatives = (
            self.solution.operations[number],
            self.solution.alternatives[number],
        )
        name = op.ins[position]
        want = op.required(position, self.solution.assignments[number])
        moved = self.solution.costs.reshard(name, have, want)
        reasons = [*self.losses(op, position, alternatives, have, want)]
        # Every device may have its part already.
        if moved == NOTHING and not any(
            reason.though_nothing_moves for reason in reasons
        ):
            return None
        after = f"{self.spec(name, have, want)} for {_title(op)}"
        reason, where = _joined(reasons), line_of(op)
        return layout_remark(name, spec_text(have), after, moved, reason, where)

    def replication(self, number: int) -> ReplicationReport | None:
        """The remark that an operation needs operands whole, on all devices."""
        op, assignment = (
            self.solution.operations[number],
            self.solution.assignments[number],
        )
        spread = {axis for axes in assignment for axis in axes}
        moved, names, reasons = NOTHING, dict[str, None](), dict[str, None]()
        for position, name in enumerate(op.ins):
            have, want = self.solution.layouts[name], op.required(position, assignment)
            for dim, axes in enumerate(have):
                # An axis on another dim still leaves each device a part of the work.
                lost = set(axes) - spread
                if lost and op.operands[position][dim] is None:
                    reasons[_whole_reason(op, dim)] = None
                    names[local_name(name)] = None
            if local_name(name) in names:
                moved += self.solution.costs.reshard(name, have, want)
        if moved == NOTHING or not isinstance(op.stmt, Compute):
            return None
        (unit_eqn,) = op.stmt.unit.eqns
        devices = axes_size([*spread], self.mesh)
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
        """A result that does not rest as it is made."""
        op, alternatives = (
            self.solution.operations[number],
            self.solution.alternatives[number],
        )
        name = op.outs[position]
        have, rest = layout_of(made), self.solution.layouts[name]
        moved = self.solution.costs.reshard(name, have, rest, made.partial)
        reasons = [*self.given(name), *self.undivided(op, alternatives)]
        if moved == NOTHING and not any(
            reason.though_nothing_moves for reason in reasons
        ):
            return None
        if made.partial and not reasons:
            read = any(name in reader.ins for reader in self.solution.operations)
            reasons = [_Reason(_READ if read or not made.shape else _UNREAD)]
        before = made_text(made, op)
        where = self.given_at(name) or line_of(op)
        after = self.spec(name, have, rest)
        return layout_remark(name, before, after, moved, _joined(reasons), where)

    def copy(self, number: int, have: Layout) -> LayoutReport | None:
        """A copy of a value in another layout, which is what the user asked for."""
        op = self.solution.operations[number]
        (source,), (name,) = op.ins, op.outs
        rest = self.solution.layouts[name]
        moved = self.solution.costs.reshard(name, have, rest)
        if moved == NOTHING:
            return None
        where = self.given_at(name)
        before, after = spec_text(have), self.spec(name, have, rest)
        reasons = [*self.given(name)]
        return layout_remark(source, before, after, moved, _joined(reasons), where)

    def spec(self, name: str, have: Layout, want: Layout) -> str:
        """A layout in words; of an exchange with the type, which has the experts' room.

        That is `[groups, experts, capacity, features]` of tokens that go to experts.
        """
        pairs = zip(have, want, strict=True)
        gone = {axis for old, new in pairs for axis in set(old) - set(new)}
        if gone.isdisjoint(used_axes(want)):
            return spec_text(want)
        return f"{spec_text(want)} of {type_text(self.solution.costs.buffers[name])}"

    def left_whole(self, number: int) -> LayoutReport | None:
        """The remark that a dim is whole because its axes do not divide it."""
        op = self.solution.operations[number]
        reasons = [*self.undivided(op, self.solution.alternatives[number])]
        if not reasons or not op.outs:
            return None
        layout = spec_text(self.solution.layouts[op.outs[0]])
        made = f"{layout} by {_title(op)}"
        return layout_remark(
            op.outs[0], made, layout, NOTHING, _joined(reasons), line_of(op)
        )

    # --- Reasons -------------------------------------------------------------- #

    def losses(
        self,
        op: Operation,
        position: int,
        alternatives: Alternatives,
        have: Layout,
        want: Layout,
    ) -> Iterator[_Reason]:
        """Why the operand's dims lose the axes that they are over."""
        for dim, axes in enumerate(have):
            lost = [axis for axis in axes if axis not in want[dim]]
            mapped = op.operands[position][dim]
            if lost and op.pinned is not None:
                yield _Reason("as its specs say")
            elif lost and mapped is None:
                yield _Reason(_whole_reason(op, dim))
            elif mapped is not None:
                for axis in lost:
                    yield self.losing_reason(
                        op, alternatives, (axis, mapped.factor), dim
                    )

    def losing_reason(
        self, op: Operation, alternatives: Alternatives, claim: Claim, dim: int
    ) -> _Reason:
        """What it would take to leave a dim over the axis that it is over."""
        rank, (axis, factor) = alternatives.losing.get(claim), claim
        if rank is None:
            return self.undivisible(op.sizes[factor], axis)
        stayed = f"if dim {dim} stayed sharded over {axis}"
        return _Reason(f"{stayed}, {_losing_text(rank, alternatives.rank)}")

    def undivided(self, op: Operation, alternatives: Alternatives) -> Iterator[_Reason]:
        for (axis, factor), rank in alternatives.losing.items():
            if rank is None:
                yield self.undivisible(op.sizes[factor], axis)

    def undivisible(self, size: int, axis: str) -> _Reason:
        devices = axes_size((axis,), self.mesh)
        return _Reason(
            f"{size} does not divide over {axis} ({devices})", though_nothing_moves=True
        )

    def given(self, name: str) -> Iterator[_Reason]:
        if name in self.marks:
            yield _Reason("as constrained")

    def given_at(self, name: str) -> str:
        """The user's line, which the shardings of arguments and results do not have."""
        where = self.marks[name].where if name in self.marks else NO_LINE
        return "" if where == NO_LINE else where


def _joined(reasons: Sequence[_Reason]) -> str:
    """Each reason once."""
    return "; ".join(dict.fromkeys(reason.text for reason in reasons if reason.text))


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
    text = f"{name}: {before} -> {after}: {_moved_text(moved)}"
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


def _moved_text(moved: TransferBytes) -> str:
    """Bytes a device, and whether a pipeline hides them."""
    if not moved.hidden:
        return f"{bytes_text(moved.exposed)} a device"
    if not moved.exposed:
        return f"{bytes_text(moved.hidden)} a device in a pipeline"
    hidden = _moved_text(TransferBytes(hidden=moved.hidden))
    return f"{hidden} and {bytes_text(moved.exposed)} outside it"


def _losing_text(losing: AssignmentRank, chosen: AssignmentRank) -> str:
    """What would be worse: more bytes, or as many and something else, or work."""
    moved, instead = chosen.moved, losing.moved
    if losing.cost < chosen.cost:
        return "the whole program would move more bytes"
    if (instead.exposed, instead.hidden) == (moved.exposed, moved.hidden):
        return f"as many bytes would move{_tie_text(losing, chosen)}"
    received = _moved_text(instead).replace(" a device", "", 1)
    text = f"each device would receive {received} for this operation"
    if moved.hidden and not instead.hidden:
        text += ", and no pipeline would hide them"
    return f"{text}, and devices would repeat work" if instead < moved else text


def _tie_text(losing: AssignmentRank, chosen: AssignmentRank) -> str:
    """What decides between assignments that move as many bytes."""
    if losing.cost.exposed > chosen.cost.exposed or losing.shared > chosen.shared:
        return ", and devices would repeat more work"
    if losing.moved.communications > chosen.moved.communications:
        return " in more transfers"
    return ", but of a larger operand" if losing.largest > chosen.largest else ""


def made_text(made: Buffer, op: Operation) -> str:
    """A result as `op` makes it: `partial sum over tp by dot_general`."""
    layout = layout_of(made)
    if not made.partial:
        return f"{spec_text(layout)} by {_title(op)}"
    reducers = {reducer for _, reducer in made.partial}
    axes = ", ".join(axis for axis, _ in made.partial)
    text = f"partial {' and '.join(sorted(reducers))} over {axes}"
    text = f"{text} of {spec_text(layout)}" if any(layout) else text
    return f"{text} by {_title(op)}"


def _title(op: Operation) -> str:
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


def _whole_reason(op: Operation, dim: int) -> str:
    if not isinstance(op.stmt, Compute):
        return f"each iteration of the {_title(op)} takes a part of dim {dim}"
    (unit_eqn,) = op.stmt.unit.eqns
    if unit_eqn.rule.opaque:  # a remark of its own has the reason
        return f"{unit_eqn.eqn.primitive.name} works on whole arrays"
    return whole_reason(op.stmt, dim)
