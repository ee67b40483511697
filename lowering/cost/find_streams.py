"""Find the streams that nobody marked, and pipeline those that gain.

Layouts are settled by then, and stay as they are.  A stream that could hide less than a
pipeline has to gain is not looked at any further.  The others are weighed as if they
were marked: see `candidates.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

from jhost.lowering.cost.candidates import Evaluation, Outcome, Predictions, gain_of
from jhost.lowering.cost.kernels import kernels
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.remembering import FollowingPass, Remembering
from jhost.lowering.cost.sections import Sections
from jhost.lowering.ir.bodies import (
    ITERATIONS,
    EachProgram,
    all_marks,
    programs,
    rebuilt,
    with_marks,
)
from jhost.lowering.ir.index import Index, Rank
from jhost.lowering.ir.layout import axes_size, bytes_of
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import between_processes
from jhost.lowering.ir.requests import marks_alike, set_choice, stream_choices
from jhost.lowering.ir.statements import (
    Communicate,
    Compute,
    Cond,
    Scan,
    Stmt,
    While,
)
from jhost.lowering.ir.transfers import received_bytes
from jhost.lowering.layouts.hidden_dims import streamed_dims
from jhost.lowering.streams.found import FoundStream, found_streams


_CLOSE = 0.98
"""From this share of a time on, what could be gained is not looked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class CutAsChosen(EachProgram):
    """Marks with a choice -> the same, with the dims that their loops will cut."""

    name: ClassVar[str] = "cut_as_chosen"

    def change(self, program: Program) -> Program:
        if not stream_choices(program):
            return program
        return dataclasses.replace(program, streamed=streamed_dims(program))


@dataclasses.dataclass(frozen=True, slots=True)
class FindStreams:
    """A program without marks of streams -> one with those that a loop gains by.

    Attributes:
        following: the passes up to the loops.
        rates: the rates of the devices, if they are known and something can be hidden.
    """

    name: ClassVar[str] = "find_streams"

    following: tuple[FollowingPass, ...]
    rates: Rates | None = None

    def apply(self, program: Program) -> Program:
        rates = self.rates
        if rates is None or any(isinstance(m, StreamChoice) for m in all_marks(program)):
            return program
        marked = _Finding(rates).marked(program)
        if marked is program:
            return program
        return self.chosen(program, marked, rates)

    def chosen(self, program: Program, marked: Program, rates: Rates) -> Program:
        """`program` with those of the marks of another that gain."""
        marks, sections = all_marks(marked), Sections(marked, laid_out=True)
        following = [Remembering(step) for step in (CutAsChosen(), *self.following)]
        predictions: Predictions = []
        for group in marks_alike(marked):
            section = sections.holding(group, marks)
            weighing = _Weighing(section, following, rates, predictions=predictions)
            mark = marks[group[0]]
            assert isinstance(mark, StreamChoice)
            set_choice(marks, group, weighing.best(mark))
        return CutAsChosen().apply(rebuilt(with_marks(marked, marks), _without_idle))


class _Weighing(Evaluation):
    """The candidates for a stream that was found: those that win most often first.

    Nobody waits for the last percent here, so it stops where no more can be gained.
    """

    def best(self, mark: StreamChoice) -> StreamChoice:
        for candidate in self.candidates(mark):
            outcome = self.evaluate(candidate)
            if outcome is not None:
                self.outcomes.append(outcome)
            if self.outcomes and not self.leaves_more(self.outcomes[0]):
                break
        if not self.outcomes:
            return dataclasses.replace(mark, unpipelined=True)
        ranked = sorted(self.outcomes, key=lambda outcome: outcome.seconds)
        plain = self.outcomes[0]
        if ranked[0].seconds >= self.gain * plain.seconds:
            ranked.sort(key=lambda outcome: outcome is not plain)
        return dataclasses.replace(
            ranked[0].mark,
            reason=self.reason(ranked),
            predicted=tuple((each.text, each.seconds) for each in ranked),
        )

    def candidates(self, mark: StreamChoice) -> Iterator[StreamChoice]:
        """What could be done with a mark; first of all, nothing."""
        yield dataclasses.replace(mark, unpipelined=True)
        if (p2p := self.p2p(mark)) is not None:
            yield p2p
            if mark.sums != "in chunks":
                yield dataclasses.replace(p2p, sums="in chunks")
                yield dataclasses.replace(p2p, sums="whole")
            yield dataclasses.replace(p2p, zigzag=False)
            if self.outcomes[1:] and (more := self.in_more_chunks(p2p, self.outcomes[1])):
                yield more
        for candidate in self.without_permutes(mark):
            if candidate.pipeline is not None:
                yield candidate

    def leaves_more(self, plain: Outcome) -> bool:
        """Whether another candidate could gain on the best one so far."""
        best = min(self.outcomes, key=lambda outcome: outcome.seconds)
        most = self.gain if best is plain else _CLOSE
        return best.compute < most * best.seconds


def _without_idle(program: Program) -> Program:
    """`program` without its marks of streams, if none of them asks for a loop."""
    if any(not mark.unpipelined for mark in stream_choices(program)):
        return program
    marks = tuple(m for m in program.marks if not isinstance(m, StreamChoice))
    if len(marks) == len(program.marks):
        return program
    return dataclasses.replace(program, marks=marks)


class _Finding:
    """The streams that could hide enough, by what statements take at least."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def marked(self, program: Program) -> Program:
        return rebuilt(program, self.with_marks)

    def with_marks(self, program: Program) -> Program:
        """One program with a mark for each stream that is worth a closer look."""
        most = (1 - gain_of(self.rates)) * self.work(program)
        worth = [each for each in self.streams(program) if each.hidden > most]
        if not worth:
            return program
        marks = (mark for each in worth for mark in each.marks)
        return dataclasses.replace(program, marks=(*program.marks, *marks))

    def streams(self, program: Program) -> Sequence[FoundStream]:
        if not any(map(self.may_hide, program.body)):
            return ()
        mesh = dict(program.mesh.shape)
        return found_streams(program, lambda stmt: self.seconds(stmt, mesh))

    def may_hide(self, stmt: Stmt) -> bool:
        return isinstance(stmt, Communicate) and not between_processes(
            stmt.axes, self.rates.reach
        )

    def work(self, program: Program) -> float:
        """What the contractions of a program take at least, those of bodies too."""
        mesh = dict(program.mesh.shape)
        return sum(self.work_of(stmt, mesh) for stmt in program.body)

    def work_of(self, stmt: Stmt, mesh: dict[str, int]) -> float:
        match stmt:
            case Compute():
                return self.seconds(stmt, mesh)
            case Scan(body=body, length=length):
                return length * self.work(body)
            case While(body=body):
                return ITERATIONS * self.work(body)
            case Cond(branches=branches):
                return max(map(self.work, branches), default=0.0)
            case _:
                return 0.0

    def seconds(self, stmt: Stmt, mesh: dict[str, int]) -> float:
        """What a contraction or a communication takes by itself; others take nothing."""
        match stmt:
            case Compute():
                if not any(each.rule.contracts for each in stmt.unit.eqns):
                    return 0.0
                at: dict[Index, int] = {Rank(axis): n - 1 for axis, n in mesh.items()}
                return sum(k.seconds(self.rates) for k in kernels(stmt, mesh, at))
            case Communicate(kind=kind, axes=axes, source=source):
                if not self.may_hide(stmt):
                    return 0.0
                devices = axes_size(axes, mesh)
                received = received_bytes(kind, bytes_of(source), devices)
                return self.rates.link(kind, axes).seconds(kind, received, devices)
            case _:
                return 0.0


def all_programs(program: Program) -> list[Program]:
    return list(programs(program))
