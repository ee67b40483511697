"""Choose what the user left open about streams: pipeline, chunk count, or neither.

Where a program was tuned, what was measured best is taken.  Otherwise each candidate is
lowered, and the simulation of `cost.py` says what the program would then take.  Not to
pipeline is a candidate like any other, and wins unless another gains more than the
simulation may be wrong by.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, cast

from jhost import errors
from jhost.lowering.cost import predict, seconds_text
from jhost.lowering.fingerprint import fingerprint
from jhost.lowering.ir import Compute, Mark, Program, StreamMark
from jhost.lowering.marks import Tuned, Tunings, resolved_mark
from jhost.lowering.rates import Rates

GAIN = 0.97
"""What a pipeline's time must be below, as a share of the time without."""

_AHEAD = 0.75
"""Up to this share of a program's time, launching it leaves the host ahead of it."""

_COUNTS = (4, 2, 8)
"""Chunk counts of a collective pipeline, the default first."""


class _Pass(Protocol):
    def apply(self, program: Program) -> Program: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ChoosePipelines:
    """Marks that leave something open -> marks that say it, with the reason.

    `following` are the passes up to the loops; `rates` are those of devices of
    `device_kind`, if they are known; `tuned` is what was measured.
    """

    name: ClassVar[str] = "choose_pipelines"

    following: tuple[_Pass, ...]
    chunks: int | Literal["auto"] = "auto"
    pipeline: str = "auto"
    rates: Rates | None = None
    device_kind: str = "unknown"
    tuned: Tunings = dataclasses.field(default_factory=dict[str, Mapping[int, Tuned]])

    def apply(self, program: Program) -> Program:
        program = self.resolved(program)
        marks, tuned = list(program.marks), self.tuned_marks(program)
        open_ones = open_marks(program)
        for group in marks_alike(program):
            known = [number for number in group if number in tuned]
            for number in known:
                marks[number] = tuned[number].settle(open_ones[number])
            if others := [number for number in group if number not in known]:
                choice = self.choice(program, marks, others)
                settle(marks, others, choice)
        return dataclasses.replace(program, marks=tuple(marks))

    def choice(
        self, program: Program, marks: Sequence[Mark], numbers: Sequence[int]
    ) -> StreamMark:
        """What is chosen for some marks alike, the others as they are."""
        mark = open_marks(program)[numbers[0]]
        why_not = self.nothing_to_gain(program)
        if why_not or self.rates is None:
            return dataclasses.replace(mark, why=_left_open(mark, why_not))
        return Trial(program, marks, numbers, self.following, self.rates).best(mark)

    def resolved(self, program: Program) -> Program:
        """`program` with the function's settings in the marks that have none."""
        marks = [
            resolved_mark(mark, self.chunks, self.pipeline)
            if isinstance(mark, StreamMark)
            else mark
            for mark in program.marks
        ]
        return dataclasses.replace(program, marks=tuple(marks))

    def tuned_marks(self, program: Program) -> Mapping[int, Tuned]:
        """What was measured for the marks of a resolved program, by number."""
        return self.tuned.get(fingerprint(program), {}) if self.tuned else {}

    def trial(
        self, program: Program, marks: Sequence[Mark], numbers: Sequence[int]
    ) -> Trial:
        """A trial of all candidates for some marks of a resolved program, together."""
        following, rates = self.following, self.rates
        return Trial(program, marks, numbers, following, rates, to_measure=True)

    def nothing_to_gain(self, program: Program) -> str:
        """Why no pipeline could win here, if none could."""
        if program.mesh.size == 1:
            return "there is one device, and nothing moves"
        if self.rates is None:
            return f"nothing was measured on devices of the kind {self.device_kind}"
        if not (
            self.rates.permute.beside_compute or self.rates.collective.beside_compute
        ):
            return f"on {self.device_kind} devices no transfer runs beside computation"
        return ""


def open_marks(program: Program) -> dict[int, StreamMark]:
    """The stream marks that leave something open, by their number among all."""
    return {
        number: mark
        for number, mark in enumerate(program.marks)
        if isinstance(mark, StreamMark) and not _is_settled(mark)
    }


def marks_alike(program: Program) -> list[tuple[int, ...]]:
    """The open marks by number; those of equal values made on one line go together.

    So the layers of a model, written one after another by a loop, have one choice.
    """
    makers = {
        buffer.name: stmt
        for stmt in program.body
        if isinstance(stmt, Compute)
        for buffer in stmt.outs
    }
    groups: dict[Any, list[int]] = {}
    for number, mark in open_marks(program).items():
        maker = makers.get(mark.buffer)
        made = maker and (
            maker.unit.eqns[0].eqn.primitive.name,
            *(buffer.shape for buffer in (*maker.ins, *maker.outs)),
        )
        key = (mark.where, mark.dim, mark.pipeline, mark.chunks, made)
        groups.setdefault(key, []).append(number)
    return [tuple(numbers) for numbers in groups.values()]


def settle(marks: list[Mark], numbers: Sequence[int], choice: StreamMark) -> None:
    """Put what was chosen for one mark in the place of those alike."""
    for number in numbers:
        marks[number] = dataclasses.replace(choice, buffer=marks[number].buffer)


def _is_settled(mark: StreamMark) -> bool:
    known = mark.pipeline is not None and mark.chunks is not None
    return known or mark.pipeline == "off"


def _left_open(mark: StreamMark, why_not: str) -> str:
    """The reason of a mark that asks for nothing; others keep theirs."""
    if mark.pipeline is None and mark.chunks is None:
        return f"auto: {why_not}; ask with chunks= or pipeline="
    return mark.why


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One candidate: the mark that asks for it, and the seconds it would take.

    `compute` are those of its computations alone, `host_share` is the part for which
    launches keep the host, and `program` what it would be.  Times are NaN where the
    devices' rates are not known.
    """

    mark: StreamMark
    text: str
    seconds: float
    compute: float
    host_share: float
    program: Program


class Trial:
    """The candidates for one of the marks, or some alike, the others as they are.

    Those that are `to_measure` include what cannot win by prediction.
    """

    def __init__(
        self,
        program: Program,
        marks: Sequence[Mark],
        numbers: Sequence[int],
        following: Sequence[_Pass],
        rates: Rates | None,
        *,
        to_measure: bool = False,
    ) -> None:
        self.program = program
        self.marks = marks
        self.numbers = numbers
        self.following = following
        self.rates = rates
        self.to_measure = to_measure
        self.outcomes: list[Outcome] = []
        self.refusals: list[str] = []

    def best(self, mark: StreamMark) -> StreamMark:
        """`mark` with the choice made: simple ones first, then those that gain."""
        for candidate in self.candidates(mark):
            if (outcome := self.weigh(candidate)) is not None:
                self.outcomes.append(outcome)
        if not self.outcomes:
            return mark  # the loops will say what is wrong with it
        chosen = self.chosen()
        others = [outcome for outcome in self.outcomes if outcome is not chosen]
        others.sort(key=lambda outcome: outcome.seconds)
        chosen = self.on_fewer_streams(chosen)
        ranked = [chosen, *others]
        return dataclasses.replace(
            chosen.mark,
            why=self.reason(ranked),
            predicted=tuple((o.text, o.seconds) for o in ranked),
        )

    def chosen(self) -> Outcome:
        """The first of the outcomes, but for one that gains enough."""
        chosen, *others = self.outcomes
        for outcome in others:
            if outcome.seconds < GAIN * chosen.seconds:
                chosen = outcome
        return chosen

    def measurable(self, mark: StreamMark) -> list[Outcome]:
        """All candidates that make different programs."""
        for candidate in self.candidates(mark):
            if (outcome := self.weigh(candidate)) is not None:
                self.outcomes.append(outcome)
            if outcome is not None and candidate.pipeline == "p2p":
                fewer = self.weigh(dataclasses.replace(candidate, streams=2))
                self.outcomes += [fewer] if fewer else []
        programs = {str(outcome.program): outcome for outcome in self.outcomes[::-1]}
        return [o for o in self.outcomes if programs[str(o.program)] is o]

    def reason(self, ranked: Sequence[Outcome]) -> str:
        """The prediction for the choice, and for what it was chosen from."""
        rows = [(outcome.text, outcome.seconds) for outcome in ranked]
        return ranking_text("predicted", rows, self.refusals)

    def candidates(self, mark: StreamMark) -> Iterator[StreamMark]:
        """What could be done with a mark, as far as it leaves that open."""
        given = mark.chunks is not None
        if mark.pipeline is None and not given:
            yield mark
        if mark.pipeline is None or mark.pipeline == "collective":
            beside = self.to_measure or self.known.collective.beside_compute
            for count in [mark.chunks] if given else _COUNTS if beside else []:
                yield dataclasses.replace(mark, pipeline="collective", chunks=count)
        beside = self.to_measure or self.known.permute.beside_compute
        if mark.pipeline in (None, "p2p") and beside:
            named = self.to_measure or mark.pipeline is not None
            p2p = dataclasses.replace(mark, pipeline="p2p", by_name=named)
            yield p2p
            devices = None if given else self.devices()
            if devices is not None and self.hides_too_little():
                yield dataclasses.replace(p2p, chunks=2 * devices)

    def hides_too_little(self) -> bool:
        """Whether the candidate weighed last would win if more chunks hid the rest."""
        if self.to_measure:
            return True
        return self.outcomes[-1].compute < GAIN * self.chosen().seconds

    @property
    def known(self) -> Rates:
        assert self.rates is not None, "only candidates to measure need no rates"
        return self.rates

    def devices(self) -> int | None:
        """The chunks that the p2p candidate got, if it is the one weighed last."""
        last = self.outcomes[-1] if self.outcomes else None
        if last is None or last.mark.pipeline != "p2p":
            return None
        for remark in last.program.remarks:
            facts = dict(remark.facts)
            if last.mark.where in remark.where and facts.get("pipeline") == "p2p":
                return cast(int, facts["chunks"])
        return None

    def weigh(self, candidate: StreamMark) -> Outcome | None:
        """What the program would take with `candidate`; why it cannot be is noted."""
        marks = list(self.marks)
        settle(marks, self.numbers, candidate)
        program = dataclasses.replace(self.program, marks=tuple(marks))
        text = _text(candidate)
        try:
            for step in self.following:
                program = step.apply(program)
        except (
            errors.PipelineError,
            errors.ChunksError,
            errors.StreamDimError,
        ) as refusal:
            self.refusals.append(f"not {text}: {str(refusal).splitlines()[0]}")
            return None
        if self.rates is None:
            return Outcome(candidate, text, math.nan, math.nan, math.nan, program)
        predicted = predict(program, self.rates)
        total, compute = predicted.total, predicted.compute
        host_share = predicted.host / max(total, 1e-12)
        return Outcome(candidate, text, total, compute, host_share, program)

    def on_fewer_streams(self, outcome: Outcome) -> Outcome:
        """The same on two streams, where that costs nothing and the host is ahead.

        A transfer is then launched an iteration before it is needed, not all of them
        before the first matmul: 0.50 ms instead of 0.59 for gathered queries, keys and
        values of a 70B model on four H200s.
        """
        mark = outcome.mark
        if mark.pipeline != "p2p" or outcome.host_share > _AHEAD:
            return outcome
        fewer = self.weigh(dataclasses.replace(mark, streams=2))
        if fewer is None or str(fewer.program) == str(outcome.program):
            return outcome
        return fewer if fewer.seconds <= outcome.seconds else outcome


def ranking_text(
    how: str, ranked: Sequence[tuple[str, float]], left_out: Sequence[str]
) -> str:
    """The seconds of the choice, and of what it was chosen from; the best first."""
    (first, seconds), *rest = ranked
    said = [f"{text} {seconds_text(each)}" for text, each in rest]
    said[:1] = [f"runner-up: {text}" for text in said[:1]]
    said = [f"{first}, {how} to take {seconds_text(seconds)}", *said, *left_out]
    return "; ".join(said)


def _text(mark: StreamMark) -> str:
    if mark.pipeline is None:
        return "not pipelined"
    count = "a chunk a device" if mark.chunks is None else f"{mark.chunks} chunks"
    streams = f" on {mark.streams} streams" if mark.streams else ""
    return f"{mark.pipeline} with {count}{streams}"
