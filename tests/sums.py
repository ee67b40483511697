"""Where sums stand, and how transfers move, as a choice may have it."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, get_args
from unittest import mock

from jhost.lowering.cost import choose_cycles
from jhost.lowering.cost.choose_cycles import ChooseCycles
from jhost.lowering.cost.choose_forms import ChooseForms
from jhost.lowering.cost.choose_schedule import ChooseSchedule
from jhost.lowering.ir.pipelines import SumsPosition
from jhost.lowering.ir.program import Program
from jhost.lowering.loops import combine_small, planned
from jhost.lowering.schedule import moved_work
from jhost.lowering.schedule.movable_transfers import cycle_of
from jhost.lowering.schedule.scheduled_transfer import TransferForm

EVERY: tuple[SumsPosition, ...] = get_args(SumsPosition)


@contextmanager
def standing(sums: SumsPosition) -> Generator[None]:
    """Streams have those of their loops there, whatever was chosen."""
    choose = planned.choose_pipeline

    def chosen(mark: Any, *rest: Any) -> Any:
        return choose(mark.with_spec(sums=sums), *rest)

    with mock.patch.object(planned, "choose_pipeline", chosen):
        yield


@contextmanager
def by_permutes() -> Generator[None]:
    """What moves outside of loops goes by permutes wherever there is work beside it."""
    with moving("permutes"):
        yield


@contextmanager
def moving(
    way: TransferForm | None,
    work: bool = False,
    within: bool = True,
    little: bool = True,
) -> Generator[None]:
    """What moves outside of loops goes that way wherever there is work beside it.

    Of any size, so that none is small and goes with others; with None as was chosen.
    With `work` products go an iteration late wherever that puts one beside a transfer,
    and `within` their own iteration or program, too.  With `little` sums are late that
    have a little work behind them.
    """
    yes = mock.Mock(return_value=True)
    asked = {"is_open": yes, "gains": yes}
    if way == "collective":
        asked["way"] = mock.Mock(return_value=way)
    if way is None:
        yield
        return
    with (
        mock.patch.multiple(ChooseForms, **asked),
        mock.patch.object(ChooseSchedule, "best", _in_order),
        mock.patch.object(ChooseCycles, "may_move_work", mock.Mock(return_value=work)),
        mock.patch.object(combine_small, "SMALL", 0),
        mock.patch.object(
            choose_cycles, "cycle_of", functools.partial(cycle_of, little=little)
        ),
        nullcontext() if within else nothing_moving(),
    ):
        yield


def _in_order(self: ChooseSchedule, program: Program, ordered: Program) -> Program:
    """The program in order, whatever it is predicted to take."""
    del self, program
    return ordered


def nothing_moving() -> Any:
    """Work keeps its order in a program, as if no transfer were exposed."""
    none = mock.Mock(return_value=False)
    return mock.patch.object(moved_work.WorkOrder, "has_exposed", none)
