"""Choose the form of transfers outside of loops: permutes, or collectives as written.

This decides no order.  `schedule/order.py` says where a transfer of either form is
issued and waited for, and `schedule/moved_work.py` which work moves beside it.  What
these make is only compared here, by its time.

Three kinds of transfers qualify: gathers of weights, whose shards are there long before
they are read; sums of gradients, which nothing reads for long; and values that devices
send each other, such as the stages of a pipeline.  The third kind consists of permutes
or all-to-alls, and stays what it is.

- Within a process permutes run beside other work, but the pieces that they bring have
  to be put together or added.  So all gathers of a program become permutes if that is
  predicted to gain, and so do all its sums.
- Between processes a permute is a kernel of NCCL's, like a collective.  Such a kernel
  also runs beside work if it is issued early and waited for late.  So collectives stay
  collectives there.  They are put in order whatever is predicted, because all processes
  have to write the same program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

from jhost._text import bytes_text
from jhost.lowering.cost.products_in_parts import products_in_parts
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.remembering import FollowingPass, through
from jhost.lowering.cost.simulate import predict, seconds_in_bodies
from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.display_names import display_name
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import between_processes
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.statements import Buffer, Communicate, PipelineKind
from jhost.lowering.ir.transfers import SHORT_TRANSFER, larger_side
from jhost.lowering.schedule.intervals import GATHERING, IsOpen
from jhost.lowering.schedule.moved_work import MovedWork, with_work_moved
from jhost.lowering.schedule.order import beside_work, in_order
from jhost.lowering.schedule.permutes import is_made_of_permutes
from jhost.lowering.schedule.schedule_loops import ScheduleLoops
from jhost.lowering.schedule.scheduled_transfer import TransferForm
from jhost.lowering.schedule.where_most_is_held import with_less_held
from jhost.lowering.units.segment import Segment

_GAIN = 0.995
"""The time with permutes must be below this share of the time with collectives."""

_GAIN_OF_WORK = 0.999
"""The same where work moves, which costs nothing but memory for a while."""

_TURNS: Sequence[tuple[TransferForm, bool]] = [
    ("collective", True),
    ("collective", False),
    ("permutes", True),
    ("permutes", False),
]
"""The kinds of transfers in the order of the choice: the form, and whether gathers.

Collectives come first.  Their order is never weighed, so they stand already where
permutes are weighed beside them.
"""

_HOW: Mapping[TransferForm, str] = {"permutes": " by permutes", "collective": ""}


Decided: TypeAlias = dict[
    tuple[tuple[Buffer, ...], tuple[Communicate, ...]],
    bool,
]
"""Whether permutes gain, by the params of a program or body, and by its transfers."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChooseForms(EachProgram):
    """Transfers with work before or behind them -> in their form, beside that work.

    Within a process, `rates` decide if the function's `pipeline` is "auto"; "p2p" asks
    for all of them.
    """

    name: ClassVar[str] = "choose_forms"

    rates: Rates | None = None
    pipeline: PipelineKind | Literal["auto"] = "auto"
    between: frozenset[str] = frozenset()
    """The axes along which GPUs of several processes lie."""
    units: Sequence[FollowingPass] = dataclasses.field(
        default_factory=lambda: (Segment(), ScheduleLoops())
    )
    """The passes that end a program's loops, and that it is timed behind."""
    moves_work: bool = True
    """Whether work may move beside transfers as well."""
    decided: Decided | None = None
    """The decisions for other programs with the same transfers; None decides anew.

    Candidates of pipelines share most transfers that stand in no loop.  With marks over
    two axes, three quarters of the programs that were timed weighed them again.
    """

    @property
    def weighs(self) -> bool:
        """Whether the order of a whole program is weighed against that of XLA."""
        return self.rates is not None and self.pipeline == "auto"

    @property
    def time_decides(self) -> bool:
        """Whether the predicted time decides between programs of other transfers."""
        return self.weighs and not self.between

    @property
    def may_begin_early(self) -> bool:
        """Whether XLA has options that hide collectives on such devices."""
        return self.rates is not None and self.rates.overlaps

    def by(self, rates: Rates) -> ChooseForms:
        """The pass for devices of other rates."""
        return dataclasses.replace(self, rates=rates)

    def of_candidates(self) -> ChooseForms:
        """The pass for candidates of pipelines, which decides once for a transfer.

        Pipelines have been measured against programs whose work keeps its order.
        """
        return dataclasses.replace(self, moves_work=False, decided={})

    def change(self, program: Program) -> Program:
        can_hide = self.can_hide_on(program.mesh.shape)
        program = self.with_less_held(program)
        other, moved = self.with_work_moved(program)
        if not moved:
            return self.with_forms(program, can_hide)
        said = (_said_moved(program, each) for each in moved)
        other = dataclasses.replace(other, remarks=(*other.remarks, *said))
        ordered = self.with_forms(other, can_hide)
        if self.may_weigh(moved):
            made = self.with_forms(program, can_hide)
            if not self.gains(made, ordered, _GAIN_OF_WORK):
                return made
        return ordered

    def with_work_moved(self, program: Program) -> tuple[Program, list[MovedWork]]:
        """The program with work moved beside its transfers, if work may move."""
        if not self.moves_work:
            return program, []
        return with_work_moved(program, self.can_hide_on(program.mesh.shape))

    def with_less_held(self, program: Program) -> Program:
        """The program with products that wait where it holds most, if work may move."""
        # Nothing says in a body what is held around it.
        if not self.moves_work or program.is_body:
            return program
        mesh = dict(program.mesh.shape)

        def stays_whole(stmt: Communicate) -> bool:
            return self.way(stmt, mesh) == "collective" and self.is_open(stmt)

        return with_less_held(program, stays_whole)

    def can_hide_on(self, mesh: Mapping[str, int]) -> IsOpen:
        """Whether a transfer may stand beside work, on that mesh."""
        return functools.partial(self.can_hide, mesh=dict(mesh))

    def orders_of_work(self, program: Program) -> Iterator[Program]:
        """The program, and the same with its own work moved, if any moves."""
        yield program
        other, moved = self.with_work_moved(program)
        if moved:
            yield other

    def may_weigh(self, moved: Sequence[MovedWork]) -> bool:
        """Whether work moves only if that is predicted to gain."""
        axes = {axis for each in moved for axis in each.beside.axes}
        return self.pipeline == "auto" and not axes <= self.between

    def with_forms(self, program: Program, can_hide: IsOpen) -> Program:
        """`program` with a form for its transfers, beside its work as that stands."""
        way_of = functools.partial(self.way, mesh=dict(program.mesh.shape))
        every = beside_work(program, can_hide)
        ways: dict[str, TransferForm] = {}
        notes: list[Note] = []
        forms = _Forms(program, self.rates)
        for way, gathers in _TURNS:
            stmts = [
                stmt
                for stmt in every
                if way_of(stmt) == way and (stmt.kind in GATHERING) == gathers
            ]
            if not stmts:
                continue
            more: dict[str, TransferForm] = {
                **ways,
                **{stmt.name: way for stmt in stmts},
            }
            if self.is_better(forms, way, ways, more, stmts):
                ways = more
                notes += _said(way, gathers, stmts)
        if not ways:
            return program
        made = forms.program(ways)
        return dataclasses.replace(made, remarks=(*program.remarks, *notes))

    def can_hide(self, stmt: Communicate, mesh: Mapping[str, int]) -> bool:
        """Whether a transfer may stand beside work outside of loops."""
        return self.way(stmt, mesh) is not None and self.is_open(stmt)

    def way(self, stmt: Communicate, mesh: Mapping[str, int]) -> TransferForm | None:
        """The form of a transfer that stands beside work; None if there is none."""
        if not self.between.isdisjoint(stmt.axes):
            return "collective"
        # `between` has the axes between processes of GPUs only: on CPUs no transfer
        # runs beside anything.
        if self.rates is not None and between_processes(stmt.axes, self.rates.reach):
            return None
        if stmt.kind == "CollectivePermute":
            return "collective"  # it is a permute already
        return "permutes" if is_made_of_permutes(stmt, mesh) else None

    def is_open(self, stmt: Communicate) -> bool:
        """Whether a transfer by itself qualifies: large enough, and hidden if moved."""
        if bytes_of(stmt.source) < SHORT_TRANSFER:
            return False
        if self.pipeline != "auto":
            return self.pipeline == "p2p"
        if not self.between.isdisjoint(stmt.axes):
            return True
        if self.rates is None:
            return False
        if stmt.kind == "CollectivePermute":
            return self.rates.permute.beside_compute
        # Collectives that run beside matmuls need no permutes to replace them.
        alone = not self.rates.link(stmt.kind, stmt.axes).beside_compute
        return alone and self.rates.permute.beside_compute

    def is_better(
        self,
        forms: _Forms,
        way: TransferForm,
        ways: Mapping[str, TransferForm],
        more: Mapping[str, TransferForm],
        stmts: Sequence[Communicate],
    ) -> bool:
        """Whether some transfers are made by `way`, so that there are `more` ways."""
        if way == "collective" or self.pipeline != "auto":
            return True
        decided = {} if self.decided is None else self.decided
        which = forms.written.params, tuple(map(_without_name, stmts))
        if which not in decided:
            # Weighed together with the kinds decided before: two transfers that share
            # one piece of work hide less than each would by itself.
            made, other = map(forms.program, (ways, more))
            decided[which] = self.gains(made, other, _GAIN)
        return decided[which]

    def gains(self, made: Program, other: Program, most: float) -> bool:
        """Whether the `other` program takes less than `most` of the time.

        Time in bodies does not count: it is the same, and may be most of all.
        """
        assert self.rates is not None
        made, other = map(self.in_units, (made, other))
        bodies = seconds_in_bodies(made, self.rates)
        before, after = (predict(p, self.rates).total - bodies for p in (made, other))
        return after < most * before

    def seconds(self, program: Program, *, early: bool = False) -> float:
        """How long a program or a body takes; `early` is as in `predict`."""
        assert self.rates is not None
        return predict(self.in_units(program), self.rates, early=early).total

    def in_units(self, program: Program) -> Program:
        """The program as it is timed."""
        return through(self.units, program)


class _Forms:
    """A program with its transfers in order, each choice of forms made once."""

    def __init__(self, written: Program, rates: Rates | None) -> None:
        self.written = written
        self.rates = rates
        self.made: list[tuple[Mapping[str, TransferForm], Program]] = []

    def program(self, ways: Mapping[str, TransferForm]) -> Program:
        """The program with a form for some of its transfers."""
        for known, program in self.made:
            if known == ways:
                return program
        program = products_in_parts(in_order(self.written, ways), self.rates)
        self.made.append((ways, program))
        return program


def _without_name(stmt: Communicate) -> Communicate:
    """A transfer without what differs from one program to another."""
    return dataclasses.replace(stmt, name="")


def _said(
    way: TransferForm, gathers: bool, stmts: Sequence[Communicate]
) -> Iterator[Note]:
    sent = ("CollectivePermute", "AllToAll")
    moved = [stmt for stmt in stmts if stmt.kind in sent]
    others = [stmt for stmt in stmts if stmt.kind not in sent]
    when = "before" if gathers else "after"
    for done, some in (("gathered" if gathers else "summed", others), ("sent", moved)):
        if not some:
            continue
        axes = " and ".join(dict.fromkeys(axis for stmt in some for axis in stmt.axes))
        text = f"{bytes_text(sum(map(larger_side, some)))} {done} over {axes}"
        yield Note(
            form=f"{{}}: {text}{_HOW[way]}, beside the work that comes {when}",
            values=tuple(stmt.out.name for stmt in some),
        )


def _said_moved(program: Program, moved: MovedWork) -> Note:
    name = display_name(program, moved.beside.out.name)
    form = f"{{}}: computed beside what moves {name}, which nothing else hides"
    return Note(form=form, values=(moved.product.outs[0].name,))
