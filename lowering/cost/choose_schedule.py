"""Choose when a program's transfers run: in jhost's order, or as XLA orders them.

Scans become cycles, and transfers outside of loops get their form and their place.
Each of these is weighed by itself.  In the end the whole program is weighed against the
program as it was written.  That runs as in `jax.jit`: with XLA's own options, or with
those that begin collectives early.  If it does not clearly gain there, it may still be
jhost's without an order.  A link between processes may be slower than is known, unless
it was measured.  So there it has to gain with a slow one as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, TypeAlias

from jhost.lowering.cost.choose_cycles import ChooseCycles
from jhost.lowering.cost.choose_forms import ChooseForms
from jhost.lowering.cost.choose_permutes import kinds_of, ranked_kinds
from jhost.lowering.cost.leave_to_xla import (
    has_own_kernels,
    is_over_same_devices,
    left_to_xla,
)
from jhost.lowering.cost.remembering import FollowingPass, through
from jhost.lowering.cost.soonest import soonest
from jhost.lowering.ir.bodies import (
    held_bodies,
    is_pipelined,
    statements,
    with_each_body,
)
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LeftToXla, Prediction
from jhost.lowering.ir.statements import Communicate

_GAIN = 0.995
"""The time as in `jax.jit` must be below this share of the time in jhost's order."""

_LEAST = 0.998
"""The share of a program's work that is sure: an order may fuse a little more of it."""


ByRates: TypeAlias = Sequence[float]
"""Seconds by the known rates, and by others that devices may have."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChooseSchedule:
    """A program with its loops over chunks -> the same in order, or left to XLA.

    Attributes:
        order: the passes that make cycles, and that move transfers beside work.
        leave: the pass that leaves programs between processes to XLA.
        cycles: what makes cycles.
        transfers: what says how long a program takes, if that can be predicted.
    """

    name: ClassVar[str] = "choose_schedule"

    order: Sequence[FollowingPass]
    leave: FollowingPass
    cycles: ChooseCycles
    transfers: ChooseForms

    def apply(self, program: Program) -> Program:
        ordered = through((*self.order, self.leave), program)
        moves = any(isinstance(stmt, Communicate) for stmt in statements(program))
        # Loops over chunks have gained over no loop already, or were asked for.
        if is_pipelined(program) or not moves or left_to_xla(ordered):
            return ordered
        return self.best(program, ordered) if self.transfers.weighs else ordered

    def at_least(self, program: Program) -> float:
        """Seconds that the program takes in whatever order this pass gives it.

        Most of them pass in bodies, which are in order soon.  Cycles take long to
        weigh, but they save no more than the transfers take that they move.
        """
        rates = self.transfers.rates
        assert rates is not None
        ordered = with_each_body(program, self.transfers.apply)
        every = map(self.transfers.in_units, self.transfers.orders_of_work(ordered))
        kinds = [each for _, each in kinds_of(rates)]
        least = min(soonest(each, kind) for each in every for kind in kinds)
        least = _LEAST * least - self.cycles.most_saved(program)
        if not any(held_bodies(program)):
            return least  # the times of XLA's own order are not below it either
        return min(least, *(written for _, (written, *_) in self.written(program)))

    def best(self, program: Program, ordered: Program) -> Program:
        """`ordered`, or `program` if it takes less time as it was written."""
        if ordered.body is program.body and not self.transfers.may_begin_early:
            return ordered  # where nothing overlaps, this is all that there is
        in_order = self.seconds(ordered)
        written = [*self.written(program)]
        if not has_own_kernels(program):
            if (left := self.left(program, in_order, written)) is not None:
                return left
        (_, as_written), *_ = written
        return program if _gains(as_written, in_order) else ordered

    def left(
        self,
        program: Program,
        in_order: ByRates,
        written: Sequence[tuple[bool, ByRates]],
    ) -> Program | None:
        """`program` with a remark that leaves it to XLA, if that clearly gains."""
        left, seconds = None, in_order
        for early, each in written:
            if _gains(each, seconds, _GAIN):
                predicted = each[0], in_order[0]
                left = LeftToXla(axes=(), early=early, predicted=predicted)
                seconds = each
        if left is None:
            return None
        return dataclasses.replace(program, remarks=(*program.remarks, left))

    def written(self, program: Program) -> Iterator[tuple[bool, ByRates]]:
        """The seconds as it was written, and with options that begin early.

        Only programs that are left to XLA get these.
        """
        begins = self.may_begin_early(program)
        for early in (False, True) if begins else (False,):
            yield early, self.seconds(program, early=early)

    def may_begin_early(self, program: Program) -> bool:
        """Whether XLA may get options to begin a program's collectives early."""
        safe = not self.transfers.between or is_over_same_devices(program)
        return safe and self.transfers.may_begin_early and not has_own_kernels(program)

    def seconds(self, program: Program, *, early: bool = False) -> ByRates:
        """How long a program takes, by each of the rates that devices may have."""
        assert self.transfers.rates is not None
        by = (self.transfers.by(rates) for rates in self.transfers.rates.possible)
        return [each.seconds(program, early=early) for each in by]


def _gains(times: ByRates, others: ByRates, most: float = 1.0) -> bool:
    """Whether all times are below that share of the others."""
    pairs = zip(times, others, strict=True)
    return all(time < most * other for time, other in pairs)


@dataclasses.dataclass(frozen=True, slots=True)
class WholePrograms:
    """What says how long whole programs take, by all passes up to their schedule.

    Attributes:
        loops: the passes up to loops over chunks.
        schedule: the pass behind them.
    """

    loops: Sequence[FollowingPass]
    schedule: ChooseSchedule

    def predicted(self, program: Program) -> Prediction:
        """What a program takes in jhost's order, by the better kind of permutes."""
        transfers = self.schedule.transfers
        assert transfers.rates is not None
        scheduled = self.schedule.apply(self.with_loops(program))
        (_, predicted), *_ = ranked_kinds(
            transfers.in_units(scheduled), transfers.rates
        )
        return predicted

    def at_least(self, program: Program) -> float:
        """Seconds that a program takes in whatever order it gets."""
        return self.schedule.at_least(self.with_loops(program))

    def early(self, program: Program) -> float:
        """The seconds as in `jax.jit`, with options that begin collectives early."""
        return self.schedule.transfers.seconds(self.with_loops(program), early=True)

    def with_loops(self, program: Program) -> Program:
        return through(self.loops, program)
