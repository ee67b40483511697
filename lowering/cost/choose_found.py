"""Choose for each stream that was found whether a loop gains, and which."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.cost.evaluator import Evaluator, Predictions
from jhost.lowering.cost.outcomes import Outcome, chunks_of, gain_of, ranking_text
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.remembering import FollowingPass
from jhost.lowering.cost.rows_of_layers import blocks_apart
from jhost.lowering.cost.sections import Section, Sections
from jhost.lowering.cost.stream_bounds import least_gain, seconds_of_transfer
from jhost.lowering.ir.bodies import adds_up, all_marks, has_loops
from jhost.lowering.ir.marks import Mark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LeftStream
from jhost.lowering.ir.statements import Communicate
from jhost.lowering.streams.found_stream import FoundStream
from jhost.lowering.streams.plan import plan_program

_CLOSE = 0.98
"""From this share of a time on, what could still be gained is not looked for.

Sums elsewhere make other computations as well, so it is an estimate and no bound.
"""

_WON_BACK = 0.1
"""The share of a time that a loop may win back if it puts its sums elsewhere."""

_NOTABLE = 0.99
"""A loop takes less than this share of the time of what it is weighed in.

Logits in chunks gained 0.7 % of a step of Llama 8B, and took 2.6 GB more.
"""

Number: TypeAlias = tuple[int, ...]
"""The `numbers` of a found mark, which no other mark has."""

WeighedIn: TypeAlias = tuple[int, range | None]
"""Where streams are weighed: a program or body, and one of its layers or all of it."""


class FoundStreamsChoice:
    """The best choice for each found stream, one stream after another.

    A stream is evaluated with the choices for earlier streams, and without the later
    ones.  `looped` has layouts for loops, and `plain` has layouts for none, because a
    section without a loop may lie better in another way.
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
        self.left: list[LeftStream] = []
        self.lost: set[WeighedIn] = set()
        """Where a loop took longer than none."""

    def choose(self, stream: FoundStream) -> None:
        """Choose for the marks of one stream."""
        before, layers = dict(self.chosen), self.layers(stream)
        plain = self.outcome(self.plain, stream, None)
        if plain is None or not self.may_gain(stream, plain, layers):
            self.leave(stream, before, [plain] if plain else [])
            return
        plain = self.without(stream, plain)
        outcomes, kept = [plain], before
        enough = plain.seconds - self.least(stream, plain, layers)
        if not self.may_gain_as_others_lie(stream, enough, layers):
            self.leave(stream, before, [plain])
            return
        for candidate in self.candidates(stream, outcomes, enough):
            if not self.leaves_more(outcomes, enough, stream.evened / layers):
                break
            outcome = self.outcome(self.looped, stream, candidate)
            if outcome is None:
                break  # and so will the others be: they differ in little
            if all(outcome.seconds < each.seconds for each in outcomes[1:]):
                kept = dict(self.chosen)
            outcomes.append(outcome)
            if outcome.seconds - plain.seconds > self.most_won_back(
                stream, plain, layers
            ):
                break
        best = min((each.seconds for each in outcomes[1:]), default=math.inf)
        if best < enough:
            self.chosen = self.said(stream, kept, outcomes)
        else:
            self.lost.add(self.weighed_in(stream))
            self.leave(stream, before, outcomes)
            if best - plain.seconds <= self.most_won_back(stream, plain, layers):
                self.choose_parts(stream)

    def choose_parts(self, stream: FoundStream) -> None:
        """Choose for each block of a stream that lost as a whole, but by little."""
        *others, whole = self.left
        for part in blocks_apart(stream):
            self.choose(part)
        gains = any(mark.numbers in self.chosen for mark in stream.every_mark)
        self.left = others if gains else [*others, whole]

    def without(self, stream: FoundStream, plain: Outcome) -> Outcome:
        """The outcome without a loop; what has other loops may lie better with them."""
        if not has_loops(plain.program):
            return plain
        looped = self.outcome(self.looped, stream, None)
        return min(filter(None, (plain, looped)), key=_seconds)

    def may_gain(self, stream: FoundStream, plain: Outcome, layers: int) -> bool:
        """Whether all that a loop could hide would be enough."""
        return stream.hidden / layers > self.least(stream, plain, layers)

    def may_gain_as_others_lie(
        self, stream: FoundStream, enough: float, layers: int
    ) -> bool:
        """Whether hiding all that a stream moves would be enough as values lie.

        Values lie as is best for the loops of all streams.  A program of many different
        layers is one section, and has many streams: each pays for what all others move.
        So where one has lost, the others are not lowered one by one to find that out.
        """
        if self.weighed_in(stream) not in self.lost:
            return True
        without = self.outcome(self.looped, stream, None)
        if without is None:
            return True
        saved = self.moved(stream) + stream.evened / layers
        return without.seconds - saved < enough

    def moved(self, stream: FoundStream) -> float:
        """The seconds of the transfers in a stream, and in those that are chosen."""
        program = self.section(self.looped, stream, stream.marks[0][0]).program
        graph, plan = plan_program(program)
        stmts = (
            graph[number].stmt
            for number, part in plan.participations.items()
            if not plan.marks[part.stream].unpipelined
        )
        mesh = dict(program.mesh.shape)
        return sum(
            seconds_of_transfer(stmt, mesh, self.rates)
            for stmt in stmts
            if isinstance(stmt, Communicate)
        )

    def weighed_in(self, stream: FoundStream) -> WeighedIn:
        """Where a stream is weighed."""
        numbers = numbers_of(all_marks(self.looped.program), stream.marks[0])
        return self.looped.holder(numbers), self.looped.layer(numbers)

    def least(self, stream: FoundStream, plain: Outcome, layers: int) -> float:
        """The seconds that a loop has to gain in the section where it is weighed."""
        of_its_work = least_gain(stream, self.rates) / layers
        return max(of_its_work, (1 - _NOTABLE) * plain.seconds)

    def most_won_back(self, stream: FoundStream, plain: Outcome, layers: int) -> float:
        """The seconds that other forms of a loop could save.

        Sums elsewhere change the stream's own work, however large a section is around
        it.  More chunks hide no more than what the stream moves.
        """
        of_its_own = (_WON_BACK * stream.work + stream.hidden) / layers
        return min(_WON_BACK * plain.seconds, of_its_own)

    def leave(
        self,
        stream: FoundStream,
        before: dict[Number, StreamChoice],
        outcomes: Sequence[Outcome] = (),
    ) -> None:
        """Choose no loop for a stream, and note the times that were compared."""
        self.chosen = before
        predicted = tuple((each.text, each.seconds) for each in outcomes)
        self.left.append(LeftStream(lines=stream.lines, predicted=predicted))

    def candidates(
        self, stream: FoundStream, outcomes: Sequence[Outcome], enough: float
    ) -> Iterator[StreamChoice]:
        """What the marks may ask for; what wins most often comes first.

        `outcomes` has those of the candidates before.  A loop is good in less than
        `enough` seconds.
        """
        first = stream.marks[0][0]
        yield first
        if first.spec.sums != "in chunks":
            yield first.with_spec(sums="in chunks")
            # Loops without sums are the same wherever sums are to stand.
            if adds_up(outcomes[-1].program):
                yield first.with_spec(sums="whole")
        best = min(outcomes[1:], key=_seconds)
        # More chunks hide more, but each chunk costs launches.
        if best.compute < min(enough, gain_of(self.rates) * best.seconds):
            if chunks := chunks_of(best):
                yield best.mark.with_spec(chunks=2 * chunks)

    def leaves_more(
        self, outcomes: Sequence[Outcome], enough: float, evened: float
    ) -> bool:
        """Whether another candidate could gain enough over the best one so far."""
        plain, best = outcomes[0], min(outcomes, key=_seconds)
        # Loops and their sums compute no less than the program without loops, but for
        # what is `evened` out.  What computes nearly all the time has little to hide.
        least = plain.compute - evened
        return least < (_CLOSE * best.seconds if len(outcomes) > 1 else enough)

    def layers(self, stream: FoundStream) -> int:
        """How many layers have a stream that is weighed in one of them."""
        first = stream.marks[0]
        numbers = numbers_of(all_marks(self.plain.program), first)
        # A layer has one mark of the smallest group.
        return 1 if self.plain.layer(numbers) is None else len(first)

    def outcome(
        self,
        sections: Sections,
        stream: FoundStream,
        way: StreamChoice | None,
    ) -> Outcome | None:
        """The outcome of a stream if all its marks ask for `way`; None is no loop."""
        section = self.section(sections, stream, way)
        evaluator = Evaluator(section, self.following, self.rates, self.predictions)
        return evaluator.evaluate(_as(stream.marks[0][0], way))

    def section(
        self, sections: Sections, stream: FoundStream, way: StreamChoice | None
    ) -> Section:
        """Where a stream is weighed, if all its marks ask for `way`."""
        self.chosen |= {mark.numbers: _as(mark, way) for mark in stream.every_mark}
        marks = self.marks(sections.program)
        return sections.holding(numbers_of(marks, stream.marks[0]), marks)

    def marks(self, program: Program) -> list[Mark]:
        """The marks of a program with their choices; the others ask for nothing."""
        return [
            _as(mark, self.chosen.get(mark.numbers))
            if isinstance(mark, StreamChoice)
            else mark
            for mark in all_marks(program)
        ]

    def asked(
        self, marks: Sequence[Sequence[StreamChoice]]
    ) -> list[Sequence[StreamChoice]]:
        """Marks of some programs with their choices; none where no loop gains."""
        asked = [[_as(m, self.chosen.get(m.numbers)) for m in own] for own in marks]
        return [[] if all(m.unpipelined for m in own) else own for own in asked]

    def said(
        self,
        stream: FoundStream,
        chosen: Mapping[Number, StreamChoice],
        outcomes: Sequence[Outcome],
    ) -> dict[Number, StreamChoice]:
        """The choices, with the predictions and the reason at the marks of `stream`."""
        ranked = sorted(outcomes, key=_seconds)
        predicted = tuple((each.text, each.seconds) for each in ranked)
        how = "estimated from data sheets" if self.rates.estimated else "predicted"
        reason = ranking_text(how, predicted, ())
        said = {
            mark.numbers: dataclasses.replace(
                chosen[mark.numbers], predicted=predicted, reason=reason
            )
            for mark in stream.every_mark
        }
        return {**chosen, **said}


def _seconds(outcome: Outcome) -> float:
    return outcome.seconds


def _as(mark: StreamChoice, way: StreamChoice | None) -> StreamChoice:
    """`mark` asking for what `way` asks for; None is no loop."""
    if way is None or way.unpipelined:
        return mark.without_loop()
    return dataclasses.replace(
        way, buffer=mark.buffer, dim=mark.dim, lines=mark.lines, numbers=mark.numbers
    )


def numbers_of(marks: Sequence[Mark], group: Sequence[StreamChoice]) -> list[int]:
    """The positions, among a program's marks, of the marks of a group."""
    own = {mark.numbers for mark in group}
    places = enumerate(marks)
    return [n for n, m in places if isinstance(m, StreamChoice) and m.numbers in own]
