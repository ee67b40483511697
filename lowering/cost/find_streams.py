"""Find the streams that nobody marked, and pipeline those that gain.

What moves where nothing is marked says where streams could be.  Those that could hide
as much as a pipeline has to gain are put where marks would be, and layouts are solved
again: what a loop hides may lie otherwise.  Then each stream is weighed against none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, TypeAlias

from jhost._text import counted
from jhost.lowering.cost.candidates import (
    Evaluation,
    Outcome,
    Predictions,
    gain_of,
    ranking_text,
)
from jhost.lowering.cost.kernels import kernels
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.remembering import FollowingPass, Remembering
from jhost.lowering.cost.sections import Sections
from jhost.lowering.ir.bodies import (
    ITERATIONS,
    all_marks,
    programs,
    rebuilt,
    with_each_body,
    with_marks,
)
from jhost.lowering.ir.derived import derived
from jhost.lowering.ir.index import Index, Rank
from jhost.lowering.ir.layout import axes_size, bytes_of
from jhost.lowering.ir.marks import Mark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import between_processes
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.requests import stream_choices
from jhost.lowering.ir.statements import Communicate, Compute, Cond, Scan, Stmt, While
from jhost.lowering.ir.transfers import received_bytes
from jhost.lowering.streams.found import FoundStream, found_streams

_CLOSE = 0.98
"""From this share of a time on, what could still be gained is not looked for."""

_HOPELESS = 1.05
"""From so many times the time without a loop on, a candidate is not varied."""

Number: TypeAlias = tuple[int, ...]
"""What tells a mark that was found from the others: its `numbers`."""


@dataclasses.dataclass(frozen=True, slots=True)
class FindStreams:
    """A program without marks of streams -> one with those that a loop gains by.

    Attributes:
        layouts: the passes that lay out values, up to the communications.
        following: those behind them, up to the loops.
        rates: the rates of the devices; None where no stream is to be found.
    """

    name: ClassVar[str] = "find_streams"

    layouts: tuple[FollowingPass, ...]
    following: tuple[FollowingPass, ...]
    rates: Rates | None = None

    def apply(self, program: Program) -> Program:
        if self.rates is None or program.mesh.size <= 1 or _is_marked(program):
            return program
        plain = self.laid_out(program)
        found = _numbered(_Bounds(self.rates).streams(plain))
        if not any(found):
            return program
        marks = [[m for each in streams for m in _marks(each)] for streams in found]
        marked = _with_more_marks(program, _of_global_values(marks, plain, program))
        plain = _with_more_marks(plain, marks)
        streams = [each for streams in found for each in streams]
        return self.chosen(marked, plain, streams, self.rates)

    def laid_out(self, program: Program) -> Program:
        for step in self.layouts:
            program = step.apply(program)
        return program

    def chosen(
        self,
        program: Program,
        plain: Program,
        streams: Sequence[FoundStream],
        rates: Rates,
    ) -> Program:
        """`program` with what is best for each stream; `plain` has layouts for none."""
        looped, without = (
            Sections(each, [_numbers_of(all_marks(each), s.marks[0]) for s in streams])
            for each in (self.laid_out(program), plain)
        )
        following = [Remembering(step) for step in self.following]
        weighing = _Weighing(looped, without, following, rates)
        for each in streams:
            weighing.choose(each)
        marks = weighing.marks(program)
        chosen = rebuilt(with_marks(program, marks), _without_idle)
        return _noted(chosen, len(streams), weighing.gained)


def _noted(program: Program, looked_at: int, gained: int) -> Program:
    """`program` with a remark on the streams that were looked at and left."""
    if gained == looked_at:
        return program
    left = looked_at - gained
    form = (
        f"{counted(left, 'stream')} more could hide what moves, and "
        f"{'is' if left == 1 else 'are'} predicted not to gain enough"
    )
    return dataclasses.replace(program, remarks=(*program.remarks, Note(form=form)))


def _is_marked(program: Program) -> bool:
    """Whether a program or a body in it has a mark of a stream."""
    return any(isinstance(mark, StreamChoice) for mark in all_marks(program))


def _without_idle(program: Program) -> Program:
    """`program` without its marks of streams, if none of them asks for a loop."""
    if any(not mark.unpipelined for mark in stream_choices(program)):
        return program
    marks = tuple(m for m in program.marks if not isinstance(m, StreamChoice))
    if len(marks) == len(program.marks):
        return program
    return dataclasses.replace(program, marks=marks)


# --- The marks, in the program before layouts and behind them --------------------- #


def _numbered(found: Sequence[Sequence[FoundStream]]) -> list[list[FoundStream]]:
    """The same streams, with a number for each of their marks."""
    count = 0
    numbered: list[list[FoundStream]] = []
    for streams in found:
        numbered.append([])
        for each in streams:
            groups: list[tuple[StreamChoice, ...]] = []
            for group in each.marks:
                numbers = range(count, count := count + len(group))
                pairs = zip(group, numbers, strict=True)
                groups.append(
                    tuple(dataclasses.replace(m, numbers=(n,)) for m, n in pairs)
                )
            numbered[-1].append(dataclasses.replace(each, marks=tuple(groups)))
    return numbered


def _marks(stream: FoundStream) -> list[StreamChoice]:
    return [mark for group in stream.marks for mark in group]


def _with_more_marks(
    program: Program, marks: Sequence[Sequence[StreamChoice]]
) -> Program:
    """`program` with more marks, some for each of `programs`."""

    def with_more(program: Program, marks: Iterator[Sequence[StreamChoice]]) -> Program:
        more = next(marks)
        program = with_each_body(program, lambda body: with_more(body, marks))
        if not more:
            return program
        return dataclasses.replace(program, marks=(*program.marks, *more))

    return with_more(program, iter(marks))


def _of_global_values(
    marks: Sequence[Sequence[StreamChoice]], local: Program, program: Program
) -> list[list[StreamChoice]]:
    """The marks of values of a program laid out, for what these were before."""
    triples = zip(marks, programs(local), programs(program), strict=True)
    return [
        [dataclasses.replace(m, buffer=_named(m.buffer, inner, outer)) for m in own]
        for own, inner, outer in triples
    ]


def _named(name: str, local: Program, program: Program) -> str:
    """The value of a program that has a `local` name where it is laid out.

    A partial sum has a name of its own there, and is made by the same equation.
    """
    makers = _computed(program)
    if name in makers.values():
        return name
    variable = next(var for var, made in _computed(local).items() if made == name)
    return makers[variable]


@derived
def _computed(program: Program) -> Mapping[int, str]:
    """The values that a program computes, by the variables of their equations."""
    return {
        id(var): buffer.name
        for stmt in program.body
        if isinstance(stmt, Compute)
        for var, buffer in zip(stmt.unit.outvars, stmt.outs, strict=True)
    }


# --- The choice ------------------------------------------------------------------- #


class _Weighing:
    """What is best for streams that were found, one after another.

    Each is evaluated with what was chosen for those before it, and without those behind
    it.  Without a loop a section is laid out as it is best then.
    """

    def __init__(
        self,
        looped: Sections,
        plain: Sections,
        following: Sequence[FollowingPass],
        rates: Rates,
    ) -> None:
        self.looped, self.plain = looped, plain
        self.following = following
        self.rates = rates
        self.predictions: Predictions = []
        self.chosen: dict[Number, StreamChoice] = {}
        self.gained = 0

    def choose(self, stream: FoundStream) -> None:
        """Choose for the marks of one stream."""
        before = dict(self.chosen)
        plain = self.outcome(self.plain, stream, [None] * len(stream.marks))
        if plain is None:
            self.chosen = before
            return
        outcomes = [plain]
        kept = before
        for candidates in self.candidates(stream):
            if not self.leaves_more(outcomes):
                break
            outcome = self.outcome(self.looped, stream, candidates)
            if outcome is None or outcome.seconds > _HOPELESS * plain.seconds:
                break  # and so will the others be: they differ in little
            if all(outcome.seconds < each.seconds for each in outcomes[1:]):
                kept = dict(self.chosen)
            outcomes.append(outcome)
        best = min((each.seconds for each in outcomes[1:]), default=math.inf)
        gains = best < gain_of(self.rates) * plain.seconds
        self.chosen = self.said(stream, kept, outcomes) if gains else before
        self.gained += gains

    def candidates(
        self, stream: FoundStream
    ) -> Iterator[Sequence[StreamChoice | None]]:
        """What the marks of each group may ask for, what wins most often first."""
        first = stream.marks[0][0]
        ways = [first]
        if first.spec.sums != "in chunks":
            ways += [first.with_spec(sums=sums) for sums in ("whole", "in chunks")]
        ways.append(first.with_spec(zigzag=False))
        for way in ways:
            yield [way] * len(stream.marks)

    def leaves_more(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether another candidate could gain on the best one so far."""
        best = min(outcomes, key=lambda outcome: outcome.seconds)
        most = gain_of(self.rates) if len(outcomes) == 1 else _CLOSE
        return best.compute < most * best.seconds

    def outcome(
        self,
        sections: Sections,
        stream: FoundStream,
        ways: Sequence[StreamChoice | None],
    ) -> Outcome | None:
        """What the groups of a stream come to in these ways, each maybe in none."""
        for group, way in zip(stream.marks, ways, strict=True):
            for mark in group:
                self.chosen[mark.numbers] = _as(mark, way)
        marks = self.marks(sections.program)
        numbers = _numbers_of(marks, stream.marks[0])
        section = sections.holding(numbers, marks)
        evaluation = Evaluation(
            section, self.following, self.rates, predictions=self.predictions
        )
        return evaluation.evaluate(_as(stream.marks[0][0], ways[0]))

    def marks(self, program: Program) -> list[Mark]:
        """The marks of a program with what was chosen; the others ask for nothing."""
        return [
            _as(mark, self.chosen.get(mark.numbers))
            if isinstance(mark, StreamChoice)
            else mark
            for mark in all_marks(program)
        ]

    def said(
        self,
        stream: FoundStream,
        chosen: Mapping[Number, StreamChoice],
        outcomes: Sequence[Outcome],
    ) -> dict[Number, StreamChoice]:
        """The choices, with the predictions behind those of a stream."""
        ranked = sorted(outcomes, key=lambda outcome: outcome.seconds)
        predicted = tuple((each.text, each.seconds) for each in ranked)
        how = "estimated from data sheets" if self.rates.estimated else "predicted"
        reason = ranking_text(how, predicted, ())
        said = {
            mark.numbers: dataclasses.replace(
                chosen[mark.numbers], predicted=predicted, reason=reason
            )
            for mark in _marks(stream)
        }
        return {**chosen, **said}


def _as(mark: StreamChoice, way: StreamChoice | None) -> StreamChoice:
    """A mark that asks for what another does, or for no loop."""
    if way is None or way.unpipelined:
        return dataclasses.replace(mark.with_spec(pipeline=None), unpipelined=True)
    return dataclasses.replace(
        way, buffer=mark.buffer, dim=mark.dim, lines=mark.lines, numbers=mark.numbers
    )


def _numbers_of(marks: Sequence[Mark], group: Sequence[StreamChoice]) -> list[int]:
    """The places among a program's marks of those of a group."""
    own = {mark.numbers for mark in group}
    places = enumerate(marks)
    return [n for n, m in places if isinstance(m, StreamChoice) and m.numbers in own]


# --- What could be hidden, by bounds ---------------------------------------------- #


class _Bounds:
    """The streams that could hide enough, by what statements take at least."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def streams(self, program: Program) -> list[list[FoundStream]]:
        """For each of `programs`, the streams that are worth a closer look."""
        return [self.streams_of(each) for each in programs(program)]

    def streams_of(self, program: Program) -> list[FoundStream]:
        if not any(map(self.may_hide, program.body)):
            return []
        mesh = dict(program.mesh.shape)
        least = (1 - gain_of(self.rates)) * self.work(program)
        every = found_streams(program, lambda stmt: self.seconds(stmt, mesh))
        return [each for each in every if each.hidden > least]

    def may_hide(self, stmt: Stmt) -> bool:
        """Whether it moves something that copy engines could move beside work."""
        return isinstance(stmt, Communicate) and not between_processes(
            stmt.axes, self.rates.reach
        )

    def work(self, program: Program) -> float:
        """What the contractions of a program take, those of bodies too."""
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
        """What a contraction or a communication takes by itself; others nothing."""
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
