"""Why a value changes its layout: constraints, sizes that do not divide, and costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jhost._jax import NO_LINE
from jhost.lowering.ir.layout import Layout, axes_size
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.operation import Claim, Operation
from jhost.lowering.ir.statements import Compute, Cond
from jhost.lowering.layouts.assigner import AssignmentRank
from jhost.lowering.layouts.solve import Alternatives
from jhost.lowering.layouts.texts import moved_text, title_of
from jhost.lowering.rules.dim_rule import factors_of
from jhost.lowering.streams.participation import whole_reason


class Reason(NamedTuple):
    """A reason; some are worth saying even where every device has its part already."""

    text: str
    though_nothing_moves: bool = False


class Reasons:
    """The reasons of one solution, for operations on a mesh and the user's marks."""

    def __init__(self, marks: Mapping[str, ShardMark], mesh: Mapping[str, int]) -> None:
        self.marks = marks
        self.mesh = mesh

    def losses(
        self,
        op: Operation,
        position: int,
        alternatives: Alternatives,
        have: Layout,
        want: Layout,
    ) -> Iterator[Reason]:
        """Why the operand's dims lose axes that shard them."""
        for dim, axes in enumerate(have):
            lost = [axis for axis in axes if axis not in want[dim]]
            mapped = op.operands[position][dim]
            claims = dict(op.claims(mapped, axes, self.mesh)) if mapped else {}
            # A `shard_map`: its specs decided, and no cost was weighed.
            if lost and op.pinned is not None:
                yield Reason("as its specs say")
            elif lost and op.like is not None:
                yield Reason(_like_reason(op))
            elif lost and mapped is None:
                yield Reason(whole_reason_of(op, dim))
            elif mapped is not None:
                for axis in lost:
                    claim = axis, claims[axis]
                    yield self.losing_reason(op, alternatives, claim, dim)

    def losing_reason(
        self, op: Operation, alternatives: Alternatives, claim: Claim, dim: int
    ) -> Reason:
        """What it would cost to leave a dim sharded over an axis."""
        rank, (axis, factor) = alternatives.losing.get(claim), claim
        if rank is None:
            split = self.is_split(op, claim)
            whole = Reason(whole_reason_of(op, dim))
            return whole if split else self.undivisible(op, factor, axis)
        stayed = f"if dim {dim} stayed sharded over {axis}"
        return Reason(f"{stayed}, {_losing_text(rank, alternatives.rank)}")

    def undivided(self, op: Operation, alternatives: Alternatives) -> Iterator[Reason]:
        for claim, rank in alternatives.losing.items():
            if rank is None and not self.is_split(op, claim):
                axis, factor = claim
                yield self.undivisible(op, factor, axis)

    def is_split(self, op: Operation, claim: Claim) -> bool:
        """Whether devices would have several parts of a dim of several factors."""
        axis, factor = claim
        divides = op.sizes[factor] % axes_size((axis,), self.mesh) == 0
        return divides and factor in factors_of(op.nested)

    def undivisible(self, op: Operation, factor: int, axis: str) -> Reason:
        devices = axes_size((axis,), self.mesh)
        read = [window.size for window in op.windows if window.factor == factor]
        sizes = [op.sizes[factor], *read]
        size = next((size for size in sizes if size % devices), sizes[0])
        # If only a window's dim does not divide, the equation cuts or pads it, and that
        # repeats no work worth a remark.
        repeats = op.sizes[factor] % devices != 0
        return Reason(
            f"{size} does not divide over {axis} ({devices})",
            though_nothing_moves=repeats,
        )

    def given(self, name: str) -> Iterator[Reason]:
        if name in self.marks:
            yield Reason("as constrained")

    def given_at(self, name: str) -> str:
        """The user's line, which the shardings of arguments and results do not have."""
        where = self.marks[name].where if name in self.marks else NO_LINE
        return "" if where == NO_LINE else where


def _like_reason(op: Operation) -> str:
    """Why a value takes another value's layout at the border of a body."""
    if isinstance(op.stmt, Cond):
        return "all branches return it in one layout"
    return "a carried value has one layout in all iterations"


def joined(reasons: Sequence[Reason]) -> str:
    """Each reason once."""
    return "; ".join(dict.fromkeys(reason.text for reason in reasons if reason.text))


def _losing_text(losing: AssignmentRank, chosen: AssignmentRank) -> str:
    """What would be worse: more bytes, or equal bytes and more of something else."""
    moved, instead = chosen.moved, losing.moved
    if losing.cost < chosen.cost:
        return "the whole program would move more bytes"
    if (instead.exposed, instead.hidden) == (moved.exposed, moved.hidden):
        return f"as many bytes would move{_tie_text(losing, chosen)}"
    received = moved_text(instead).replace(" a device", "", 1)
    text = f"each device would receive {received} for this operation"
    if moved.hidden and not instead.hidden:
        text += ", and no pipeline would hide them"
    return f"{text}, and devices would repeat work" if instead < moved else text


def _tie_text(losing: AssignmentRank, chosen: AssignmentRank) -> str:
    """What decides between assignments that move equally many bytes."""
    if losing.cost.exposed > chosen.cost.exposed or losing.shared > chosen.shared:
        return ", and devices would repeat more work"
    if losing.moved.communications > chosen.moved.communications:
        return " in more transfers"
    return ", but of a larger operand" if losing.largest > chosen.largest else ""


def whole_reason_of(op: Operation, dim: int) -> str:
    if not isinstance(op.stmt, Compute):
        return f"each iteration of the {title_of(op)} takes a part of dim {dim}"
    (unit_eqn,) = op.stmt.unit.eqns
    if unit_eqn.rule.opaque:  # a remark of its own has the reason
        return f"{unit_eqn.eqn.primitive.name} works on whole arrays"
    return whole_reason(op.stmt, dim)
