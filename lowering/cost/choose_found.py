"""Choose for each stream that was found whether a loop gains, and which."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.cost.candidates import (
    Evaluation,
    Outcome,
    Predictions,
    gain_of,
    ranking_text,
)
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.remembering import FollowingPass
from jhost.lowering.cost.sections import Sections
from jhost.lowering.ir.bodies import all_marks
from jhost.lowering.ir.marks import Mark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LeftStream
from jhost.lowering.streams.found import FoundStream

_CLOSE = 0.98
"""From this share of a time on, what could still be gained is not looked for."""

_HOPELESS = 1.05
"""From so many times the time without a loop on, a candidate is not varied."""

Number: TypeAlias = tuple[int, ...]
"""What tells a mark that was found from the others: its `numbers`."""


class FoundStreamsChoice:
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
        self.left: list[LeftStream] = []

    def choose(self, stream: FoundStream) -> None:
        """Choose for the marks of one stream."""
        before = dict(self.chosen)
        plain = self.outcome(self.plain, stream, None)
        if plain is None:
            self.leave(stream, before)
            return
        outcomes = [plain]
        kept = before
        for candidate in self.candidates(stream):
            if not self.leaves_more(outcomes):
                break
            outcome = self.outcome(self.looped, stream, candidate)
            if outcome is None:
                break  # and so will the others be: they differ in little
            if all(outcome.seconds < each.seconds for each in outcomes[1:]):
                kept = dict(self.chosen)
            outcomes.append(outcome)
            if outcome.seconds > _HOPELESS * plain.seconds:
                break
        best = min((each.seconds for each in outcomes[1:]), default=math.inf)
        if best < gain_of(self.rates) * plain.seconds:
            self.chosen = self.said(stream, kept, outcomes)
        else:
            self.leave(stream, before, outcomes)

    def leave(
        self,
        stream: FoundStream,
        before: dict[Number, StreamChoice],
        outcomes: Sequence[Outcome] = (),
    ) -> None:
        """Choose no loop for a stream, and say what was weighed."""
        self.chosen = before
        lines = dict.fromkeys(line for mark in stream.every_mark for line in mark.lines)
        predicted = tuple((each.text, each.seconds) for each in outcomes)
        self.left.append(LeftStream(lines=tuple(lines), predicted=predicted))

    def candidates(self, stream: FoundStream) -> Iterator[StreamChoice]:
        """What the marks may ask for, what wins most often first."""
        first = stream.marks[0][0]
        yield first
        if first.spec.sums != "in chunks":
            yield first.with_spec(sums="whole")
            yield first.with_spec(sums="in chunks")
        yield first.with_spec(zigzag=False)

    def leaves_more(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether another candidate could gain on the best one so far."""
        best = min(outcomes, key=lambda outcome: outcome.seconds)
        most = gain_of(self.rates) if len(outcomes) == 1 else _CLOSE
        return best.compute < most * best.seconds

    def outcome(
        self,
        sections: Sections,
        stream: FoundStream,
        way: StreamChoice | None,
    ) -> Outcome | None:
        """What a stream comes to whose marks all ask for that, or for no loop."""
        self.chosen |= {mark.numbers: _as(mark, way) for mark in stream.every_mark}
        marks = self.marks(sections.program)
        numbers = numbers_of(marks, stream.marks[0])
        section = sections.holding(numbers, marks)
        evaluation = Evaluation(
            section, self.following, self.rates, predictions=self.predictions
        )
        return evaluation.evaluate(_as(stream.marks[0][0], way))

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
            for mark in stream.every_mark
        }
        return {**chosen, **said}


def _as(mark: StreamChoice, way: StreamChoice | None) -> StreamChoice:
    """A mark that asks for what another does, or for no loop."""
    if way is None or way.unpipelined:
        return dataclasses.replace(mark.with_spec(pipeline=None), unpipelined=True)
    return dataclasses.replace(
        way, buffer=mark.buffer, dim=mark.dim, lines=mark.lines, numbers=mark.numbers
    )


def numbers_of(marks: Sequence[Mark], group: Sequence[StreamChoice]) -> list[int]:
    """The places among a program's marks of those of a group."""
    own = {mark.numbers for mark in group}
    places = enumerate(marks)
    return [n for n, m in places if isinstance(m, StreamChoice) and m.numbers in own]
