"""The passes from a jaxpr to a finished Host IR program, in the order they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol, TypeAlias

from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh

from jhost import errors
from jhost.lowering.cost.choose_cycles import ChooseCycles, moving_all
from jhost.lowering.cost.choose_forms import ChooseForms
from jhost.lowering.cost.choose_layouts import ChooseLayouts
from jhost.lowering.cost.choose_permutes import ChoosePermutes
from jhost.lowering.cost.choose_pipelines import ChoosePipelines
from jhost.lowering.cost.choose_schedule import ChooseSchedule, WholePrograms
from jhost.lowering.cost.find_streams import FindStreams
from jhost.lowering.cost.leave_to_xla import LeaveToXla
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.remembering import Remembering
from jhost.lowering.frontend.build import build
from jhost.lowering.frontend.inline_calls import FlatJaxpr, inline_calls
from jhost.lowering.frontend.values import DisplayNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import StreamDefaults, Tunings
from jhost.lowering.layouts.carry_partial_sums import CarryPartialSums
from jhost.lowering.layouts.convert_to_communications import ConvertToCommunications
from jhost.lowering.layouts.delay_reductions import DelayReductions
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts
from jhost.lowering.layouts.split_axes import SplitAxes
from jhost.lowering.loops.combine_small import CombineSmall
from jhost.lowering.loops.leave_idle_marks import LeaveIdleMarks
from jhost.lowering.loops.lower_streams import LowerStreams
from jhost.lowering.loops.order_by_steps import OrderBySteps
from jhost.lowering.loops.split_all_reduces import SplitAllReduces
from jhost.lowering.padding.in_blocks import InBlocks
from jhost.lowering.padding.pad_uneven import PadUneven
from jhost.lowering.schedule.compute_late import ComputeLate
from jhost.lowering.schedule.recompute.programs import stack_least
from jhost.lowering.schedule.schedule_loops import ScheduleLoops
from jhost.lowering.units.insert_deallocations import InsertDeallocations
from jhost.lowering.units.segment import Segment
from jhost.lowering.verify.program import verify
from jhost.lowering.verify.state import TypesOfUnits


class Pass(Protocol):
    """A valid program in, a valid program out; options are the pass's fields."""

    name: ClassVar[str]

    def apply(self, program: Program) -> Program: ...


AnyPass: TypeAlias = Pass | Remembering
"""A pass, or one that does not make again what it made."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """All passes by purpose, in the order in which they run."""

    before_choice: tuple[AnyPass, ...]
    choice: ChoosePipelines
    by_time: ChooseLayouts
    finding: FindStreams
    layouts: tuple[AnyPass, ...]
    loops: tuple[AnyPass, ...]
    finish: tuple[AnyPass, ...]

    @property
    def up_to_layouts(self) -> tuple[AnyPass, ...]:
        """The passes after which every value's layout is settled."""
        return (*self.before_choice, *self.choices, *self.layouts)

    @property
    def choices(self) -> tuple[AnyPass, ...]:
        """The passes that decide what is pipelined, and which layouts are taken."""
        return self.choice, self.by_time, self.finding

    @property
    def behind_layouts(self) -> tuple[AnyPass, ...]:
        return (*self.loops, *self.finish)

    @property
    def all(self) -> tuple[AnyPass, ...]:
        return (*self.up_to_layouts, *self.behind_layouts)


def passes(
    *,
    settings: StreamDefaults,
    streams: int,
    strict: bool = True,
    rates: Rates | None = None,
    device_kind: str = "unknown",
    between: Collection[str] = (),
    tuned: Tunings | None = None,
) -> Passes:
    """All passes; `rates` are the devices' rates, if they are known.

    `between` has the axes along which GPUs of several processes lie.  `tuned` has the
    choices that were measured fastest for the marks of some programs.

    With `strict`, marks that cannot be followed are refused.  JAX derives programs from
    others that were lowered before, and a mark that fits one need not fit the other, so
    derived programs are not strict.
    """
    # Candidates share much with each other, and with the program that is chosen.
    shares = rates is not None
    # What each device holds, and what must move.
    propagate = PropagateLayouts()
    layouts = _shared(shares, propagate, CarryPartialSums(), DelayReductions())
    # Communications, and loops over chunks around them.
    to_loops = _shared(
        shares,
        ConvertToCommunications(),
        SplitAllReduces(),
        LeaveIdleMarks(strict=strict),
        CombineSmall(device_kind),
        ComputeLate(),
        LowerStreams(streams=streams, strict=strict),
        OrderBySteps(),
    )
    # Units that run as one kernel, and the order of work and transfers outside of
    # loops.
    units = _shared(shares, Segment(), ScheduleLoops())
    transfers = ChooseForms(rates, settings.pipeline, frozenset(between), units)
    (leave,) = _shared(shares, LeaveToXla(transfers.between))
    # Scans are compared with several cycles.
    weighed = transfers.of_candidates()
    (every,) = _shared(shares, moving_all(weighed))
    cycles = ChooseCycles(transfers, every)
    order = _shared(shares, cycles, transfers)
    schedule = ChooseSchedule(order, leave, cycles, transfers)
    whole = WholePrograms((*layouts, *to_loops), schedule)
    of_candidates = *_shared(shares, weighed), leave, *units
    loops = *to_loops, schedule, *units
    finding = FindStreams(
        layouts=(*layouts, *to_loops[:1]),
        loops=(*to_loops[1:], *of_candidates),
        whole=whole,
        rates=_rates_to_find(settings, rates),
    )
    split = SplitAxes(propagate, frozenset(between))
    by_time = ChooseLayouts(
        propagate,
        finding,
        # Where nothing overlaps, time says no more than bytes.
        rates=rates if rates and rates.overlaps and transfers.time_decides else None,
    )
    return Passes(
        before_choice=(InBlocks(), PadUneven(), split),
        choice=ChoosePipelines(
            (
                *layouts,
                *to_loops,
                *_shared(shares, cycles.of_candidates()),
                *of_candidates,
            ),
            settings=settings,
            whole=whole if transfers.time_decides else None,
            rates=rates,
            device_kind=device_kind,
            tuned=tuned or {},
        ),
        by_time=by_time,
        finding=finding,
        layouts=layouts,
        loops=loops,
        # Where buffers end, and which kind of permutes there is.
        finish=(InsertDeallocations(), ChoosePermutes(rates)),
    )


def _rates_to_find(settings: StreamDefaults, rates: Rates | None) -> Rates | None:
    """The rates by which streams are found; None where none is to be found."""
    if rates is None or not settings.finds or settings.pipeline != "auto":
        return None
    # What is found is moved by permutes.
    return rates if rates.permute.beside_compute else None


def _shared(shares: bool, *steps: Pass) -> tuple[AnyPass, ...]:
    """The passes, each making the same of one program or body once if it `shares`."""
    return tuple(Remembering(step, step.name) for step in steps) if shares else steps


VERIFIES_EACH: ContextVar[bool] = ContextVar("verifies_each", default=False)
"""Whether every pass is verified, as in tests.  Otherwise only the last one is."""


def run_passes(
    program: Program,
    sequence: Sequence[AnyPass],
    after_pass: Callable[[str, Program], None] | None = None,
) -> Program:
    """Apply each pass, and verify the last result.

    `after_pass` sees every program.  With it, every result is verified.
    """
    if VERIFIES_EACH.get() or after_pass is not None:
        return _verifying_each(program, sequence, after_pass)
    last = program
    for step in sequence:
        last = step.apply(last)
    if not _same_statements(program, last):
        try:
            verify(last, sequence[-1].name)
        except (errors.VerifyError, errors.IndexRangeError):
            # One of them broke an invariant, and the error is to name it.
            verify(program, after="build")
            _verifying_each(program, sequence)
            raise
    return last


def _verifying_each(
    program: Program,
    sequence: Sequence[AnyPass],
    after_pass: Callable[[str, Program], None] | None = None,
) -> Program:
    types: TypesOfUnits = {}  # most units stay as they are
    for step in sequence:
        before, program = program, step.apply(program)
        if not _same_statements(before, program):
            verify(program, step.name, types)
        if after_pass is not None:
            after_pass(step.name, program)
    return program


def _same_statements(before: Program, after: Program) -> bool:
    """Whether only marks and remarks differ; no invariant concerns these."""
    pairs = ((before.params, after.params), (before.results, after.results))
    return before.body is after.body and all(a == b for a, b in pairs)


def build_program(
    closed_jaxpr: Any,
    *,
    name: str,
    mesh: AbstractMesh,
    param_names: Sequence[str],
    result_names: Sequence[str],
    display_names: DisplayNames | None = None,
) -> Program:
    """The Host IR program of `closed_jaxpr` before any pass, with global shapes."""
    program = build(
        _equations(closed_jaxpr),
        name=name,
        mesh=mesh,
        param_names=param_names,
        result_names=result_names,
        display_names=display_names,
        flatten=_equations,
    )
    if VERIFIES_EACH.get():
        verify(program, after="build")
    return program


def _equations(closed_jaxpr: Any, around: JaxprEqn | None = None) -> FlatJaxpr:
    """A program or a body without calls, whose scans stack little for others."""
    return stack_least(inline_calls(closed_jaxpr, around))
