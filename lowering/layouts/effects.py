"""What an operation's assignment asks of its operands and makes of its results."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from jhost.lowering.ir.layout import (
    Layout,
    axes_size,
    local_shape,
    size_in_bytes,
)
from jhost.lowering.ir.operation import Assignment, Operation
from jhost.lowering.layouts.halo import plan_halo
from jhost.lowering.layouts.joined import planned_join
from jhost.lowering.layouts.kinds import Kinds
from jhost.lowering.layouts.preferences import Preferences
from jhost.lowering.layouts.transfer_bytes import (
    AS_IT_LIES,
    FLOPS_PER_TOUCHED_BYTE,
    NOTHING,
    ReshardCosts,
    TransferBytes,
)

_MUCH = 1 << 16
"""Fewer bytes are rearranged in no time, but a transfer more takes time to begin."""


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentEffect:
    """What an assignment asks of the operands, and makes of the results.

    Attributes:
        wants: the layout in which it reads each operand.
        rests: the layout in which each result rests.
        cost: the bytes that bring results to where they rest.
        more: the bytes from there to the layouts that their consumers prefer.
        at_rest: whether results are made where they rest, and nothing moves.
        flops: the work of each device.
    """

    wants: tuple[tuple[str, Layout], ...]
    rests: tuple[tuple[str, Layout], ...]
    cost: TransferBytes
    more: TransferBytes
    at_rest: bool
    flops: int


class AssignmentEffects:
    """The effects of assignments, each computed once for the same preferences."""

    def __init__(
        self,
        preferences: Preferences,
        costs: ReshardCosts,
        kinds: Kinds,
        of_kinds: dict[Hashable, AssignmentEffect],
    ) -> None:
        self.preferences = preferences
        self.costs = costs
        self.kinds = kinds
        self.of_kinds = of_kinds
        # By the operation itself, because its id may be reused once it is gone.
        self.known: dict[tuple[Operation, Assignment, Hashable], AssignmentEffect] = {}

    def of(self, op: Operation, assignment: Assignment) -> AssignmentEffect:
        # Preferences are part of the key, as they change from round to round.
        about = self.preferences.about(op.outs)
        key = op, assignment, about
        effect = self.known.get(key)
        if effect is None:
            effect = self.known[key] = self.of_kind(op, assignment, about)
        return effect

    def of_kind(
        self, op: Operation, assignment: Assignment, about: Hashable
    ) -> AssignmentEffect:
        """The effect, as found for another operation of its kind or for itself."""
        key = self.kinds.of(op), assignment, about
        effect = self.of_kinds.get(key)
        if effect is None:
            effect = self.of_kinds[key] = self.found(op, assignment)
            return effect
        # One that forwards has its only want from its first operand.
        wants = [(n, want) for n, (_, want) in zip(op.ins, effect.wants, strict=False)]
        rests = [(n, rest) for n, (_, rest) in zip(op.outs, effect.rests, strict=True)]
        return AssignmentEffect(
            tuple(wants),
            tuple(rests),
            effect.cost,
            effect.more,
            effect.at_rest,
            effect.flops,
        )

    def found(self, op: Operation, assignment: Assignment) -> AssignmentEffect:
        rests: list[tuple[str, Layout]] = []
        cost, more, at_rest = NOTHING, NOTHING, True
        for position, name in enumerate(op.outs):
            have, partial = op.produced(position, assignment)
            rest = self.preferences.rest(name, have, partial)
            target = self.preferences.target(name, rest)
            cost += self.costs.reshard(name, have, rest, partial)
            more += self.costs.reshard(name, rest, target)
            at_rest = at_rest and have == rest and not partial
            rests.append((name, rest))
        wants = [(n, self.wanted(op, i, assignment)) for i, n in enumerate(op.ins)]
        if op.forwards:
            # A forwarded value is not moved itself.  Its source is, and once for all
            # that want it in that layout.
            wants, cost = [(op.ins[0], op.forwarded(rests[0][1]))], NOTHING
        halo = self.halo(op, assignment)
        cost, at_rest = cost + halo, at_rest and halo == NOTHING
        flops = self.flops(op, assignment)
        return AssignmentEffect(tuple(wants), tuple(rests), cost, more, at_rest, flops)

    def halo(self, op: Operation, assignment: Assignment) -> TransferBytes:
        """The bytes from neighbours, where dims are read in windows."""
        if op.exchanges(assignment, self.costs.mesh):
            return self.joining(op, assignment)
        total = NOTHING
        shapes: dict[int, list[int]] = {}
        seen: set[Hashable] = set()
        for window in op.windows:
            axes, name = assignment[window.factor], op.ins[window.operand]
            devices = axes_size(axes, self.costs.mesh)
            if devices == 1:
                continue
            buffer = self.costs.buffers[name]
            layout = op.required(window.operand, assignment)
            # A second dim is exchanged after the first, so its pieces are as long as
            # the first dim's window.
            held = local_shape(buffer.shape, layout, self.costs.mesh)
            shape = shapes.setdefault(window.operand, list(held))
            count, part = op.sizes[window.factor] // devices, shape[window.dim]
            plan = plan_halo(window.reads, count, part, devices)
            # A piece that two windows of one value need is sent once.
            moved = [piece for piece in plan.pieces if not piece.stays]
            by_key = {(name, window.dim, piece.sent): piece.size for piece in moved}
            sizes = [size for key, size in by_key.items() if key not in seen]
            seen |= by_key.keys()
            shape[window.dim] = sum(sizes)
            received = size_in_bytes(shape, buffer.dtype)
            shape[window.dim] = plan.window
            total += TransferBytes(received, 0, len(sizes)) * self.costs.times(name)
        return total

    def joining(self, op: Operation, assignment: Assignment) -> TransferBytes:
        """The bytes of pieces of all operands that are joined along a dim."""
        assert op.joined is not None
        dim = op.joined.dim
        shapes = [
            local_shape(
                self.costs.buffers[name].shape,
                op.required(position, assignment),
                self.costs.mesh,
            )
            for position, name in enumerate(op.ins)
        ]
        plan = planned_join(
            op, assignment, [shape[dim] for shape in shapes], self.costs.mesh
        )
        sizes = [piece.size for piece in plan.pieces if not piece.stays]
        buffer = self.costs.buffers[op.outs[0]]
        shape = [*shapes[0][:dim], sum(sizes), *shapes[0][dim + 1 :]]
        received = size_in_bytes(shape, buffer.dtype)
        return TransferBytes(received, 0, len(sizes)) * self.costs.times(op.outs[0])

    def flops(self, op: Operation, assignment: Assignment) -> int:
        """The work of a device, in all iterations."""
        work = op.flops or self.rearranging(op)
        if not work:
            return 0
        axes = [axis for axes in assignment for axis in axes]
        times = self.costs.times(op.outs[0])
        return times * work // axes_size(axes, self.costs.mesh)

    def rearranging(self, op: Operation) -> int:
        """The work of elements that come to other places: each is read and written.

        Holding them counts as much again, because the program holds both the gathered
        value and the rearranged one.
        """
        if not op.windows and op.joined is None:
            return 0
        buffer = self.costs.buffers[op.outs[0]]
        size = size_in_bytes(buffer.shape, buffer.dtype)
        return 0 if size < _MUCH else 4 * size * FLOPS_PER_TOUCHED_BYTE

    def wanted(self, op: Operation, position: int, assignment: Assignment) -> Layout:
        """The layout wanted of an operand.

        A loop reads the dim that it cuts in any layout: the value need never be whole,
        and a reshard would save nothing.
        """
        want = op.required(position, assignment)
        streamed = self.costs.streamed.get(op.ins[position])
        if streamed is None or not op.cut or streamed.dim not in op.cut[position]:
            return want
        return (*want[: streamed.dim], AS_IT_LIES, *want[streamed.dim + 1 :])
