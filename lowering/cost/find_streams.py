"""Find the streams that nobody marked, and pipeline those that gain.

The transfers of a program without marks say where streams could be.  A stream that
could hide as much as a pipeline has to gain gets marks.  Then layouts are solved again,
because other layouts may be best where a loop hides transfers.  Then each stream is
weighed against no stream.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from jhost.lowering.cost.choose_forms import ChooseForms
from jhost.lowering.cost.choose_found import FoundStreamsChoice, numbers_of
from jhost.lowering.cost.choose_schedule import WholePrograms
from jhost.lowering.cost.outcomes import NOT_PIPELINED
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.remembering import FollowingPass, through
from jhost.lowering.cost.sections import Sections
from jhost.lowering.cost.stream_bounds import StreamBounds
from jhost.lowering.ir.bodies import all_marks, programs, with_each_body
from jhost.lowering.ir.derived import derived
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LeftStream, Search
from jhost.lowering.ir.requests import stream_choices
from jhost.lowering.ir.statements import Compute
from jhost.lowering.streams.found_stream import FoundStream


@dataclasses.dataclass(frozen=True, slots=True)
class _MarkedProgram:
    """Streams to weigh, and the programs to weigh them in.

    Attributes:
        streams: the streams.
        marks: their marks before layouts, for the program and each body in it.
        looped: the program, laid out with these marks.
        plain: the program, laid out without them; it has them too.
    """

    streams: Sequence[FoundStream]
    marks: Sequence[Sequence[StreamChoice]]
    looped: Program
    plain: Program

    def is_like(self, other: _MarkedProgram) -> bool:
        """Whether both ask for the same, and no value lies otherwise."""
        asked, others = (
            [dataclasses.replace(m, spares=False) for own in each.marks for m in own]
            for each in (self, other)
        )
        return asked == others and self.looped.body is other.looped.body


@dataclasses.dataclass(frozen=True, slots=True)
class FindStreams:
    """A program without stream marks -> one with marks for the loops that gain.

    Attributes:
        layouts: the passes that lay out values, up to communications.
        loops: those behind them.  Cycles are not among them: they take longest, and
            move what stands in no loop over chunks.
        whole: what says how long whole programs take, with loops and without.
        rates: the rates of the devices; None where no stream is to be found.
    """

    name: ClassVar[str] = "find_streams"

    layouts: Sequence[FollowingPass]
    loops: Sequence[FollowingPass]
    whole: WholePrograms
    rates: Rates | None

    @property
    def transfers(self) -> ChooseForms:
        """The pass that chooses which transfers stand beside work outside of loops."""
        return self.whole.schedule.transfers

    def apply(self, program: Program) -> Program:
        if self.rates is None or program.mesh.size <= 1 or _is_marked(program):
            return program
        if any(isinstance(remark, Search) for remark in program.remarks):
            return program  # found already, to choose its layouts
        every = self.marked(program, StreamBounds(self.rates, self.transfers.can_hide))
        found = [self.by_time(program, each, self.rates) for each in every]
        if not found:
            return _remarked(program, Search())
        first, *others = found
        return min(found, key=self.seconds) if others else first

    def marked(self, program: Program, bounds: StreamBounds) -> list[_MarkedProgram]:
        """The streams that are worth weighing, and those where weights stay besides."""
        plain = self.laid_out(program)
        first = bounds.streams(plain)
        every = (
            [self.marked_with(program, plain, _numbered(first))] if any(first) else []
        )
        more = bounds.streams(plain, spares=True)
        if any(m.spares for streams in more for s in streams for m in s.every_mark):
            marked = self.marked_with(program, plain, _numbered(more))
            if not any(map(marked.is_like, every)):
                every.append(marked)
        return every

    def marked_with(
        self, program: Program, plain: Program, found: Sequence[Sequence[FoundStream]]
    ) -> _MarkedProgram:
        """`program` with marks for `found` streams; `plain` is laid out without."""
        marks = [[m for each in streams for m in each.every_mark] for streams in found]
        of_program = _of_global_values(marks, plain, program)
        return _MarkedProgram(
            # Bodies come first.  The program around them is weighed with their loops.
            streams=[each for streams in reversed(found) for each in streams],
            marks=of_program,
            looped=self.laid_out(_with_more_marks(program, of_program)),
            plain=_with_more_marks(plain, marks),
        )

    def seconds(self, program: Program) -> float:
        return self.whole.predicted(program).total

    def by_time(
        self, program: Program, marked: _MarkedProgram, rates: Rates
    ) -> Program:
        """`program` with the loops that gain among those of found streams."""
        weighing = self.weighed(marked, rates)
        asked = weighing.asked(marked.marks)
        if not any(asked):
            return _remarked(program, Search(left=tuple(weighing.left)))
        chosen = _with_more_marks(program, asked)
        chosen = _remarked(chosen, Search(left=tuple(weighing.left)))
        return self.if_faster(program, chosen, marked.streams)

    def if_faster(
        self, program: Program, chosen: Program, streams: Sequence[FoundStream]
    ) -> Program:
        """`chosen` if it takes no longer than `program`, which has no found stream.

        Streams were weighed in their body or layer, with the layouts of all streams and
        without cycles.  Only the whole program says what they gain in the end.
        """
        after = self.seconds(chosen)
        # Whatever its order, a program takes most of its time in bodies.
        if after <= self.whole.at_least(program):
            return chosen
        before = self.seconds(program)
        if after <= before:
            return chosen
        predicted = ((NOT_PIPELINED, before), ("pipelined", after))
        left = (LeftStream(lines=s.lines, predicted=predicted) for s in streams)
        return _remarked(program, Search(left=tuple(left)))

    def laid_out(self, program: Program) -> Program:
        """`program` with its layouts and communications."""
        return through(self.layouts, program)

    def weighed(self, marked: _MarkedProgram, rates: Rates) -> FoundStreamsChoice:
        """The best choice for each stream."""
        with_loops, without = (
            Sections(
                each, [numbers_of(all_marks(each), s.marks[0]) for s in marked.streams]
            )
            for each in (marked.looped, marked.plain)
        )
        weighing = FoundStreamsChoice(with_loops, without, self.loops, rates)
        for each in marked.streams:
            weighing.choose(each)
        return weighing


def _remarked(program: Program, search: Search) -> Program:
    return dataclasses.replace(program, remarks=(*program.remarks, search))


def _is_marked(program: Program) -> bool:
    """Whether a program or a body in it has a mark of a stream."""
    return any(map(stream_choices, programs(program)))


# --- The marks, in the program before layouts and behind them --------------------- #


def _numbered(found: Sequence[Sequence[FoundStream]]) -> list[list[FoundStream]]:
    """The same streams, with a number for each of their marks."""
    count = itertools.count()

    def numbered(stream: FoundStream) -> FoundStream:
        marks = tuple(
            tuple(dataclasses.replace(m, numbers=(next(count),)) for m in group)
            for group in stream.marks
        )
        return dataclasses.replace(stream, marks=marks)

    return [[numbered(each) for each in streams] for streams in found]


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
    """Marks of values in a laid-out program -> the same marks before layouts."""
    triples = zip(marks, programs(local), programs(program), strict=True)
    return [
        [dataclasses.replace(m, buffer=_named(m.buffer, inner, outer)) for m in own]
        for own, inner, outer in triples
    ]


def _named(name: str, local: Program, program: Program) -> str:
    """The value of a program that is called `name` in the `local`, laid-out program.

    A partial sum has a name of its own there; the equation that makes it is the same.
    """
    makers = _computed(program)
    if name in makers.values():
        return name
    # What no equation makes has one name: it comes from outside, or from a body.
    same = (v for v, made in _computed(local).items() if made == name)
    return next((makers[variable] for variable in same), name)


@derived
def _computed(program: Program) -> Mapping[int, str]:
    """The values that a program computes, by the variables of their equations."""
    return {
        id(var): buffer.name
        for stmt in program.body
        if isinstance(stmt, Compute)
        for var, buffer in zip(stmt.unit.outvars, stmt.outs, strict=True)
    }
