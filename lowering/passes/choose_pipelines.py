"""Choose what the user left open about streams: pipeline, chunk count, or neither.

Each candidate is lowered, and the simulation of `cost.py` says what the program would
then take.  Not to pipeline is a candidate like any other, and wins unless another gains
more than the simulation may be wrong by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, Protocol, cast

from jhost import errors
from jhost.lowering.cost import predict, seconds_text
from jhost.lowering.ir import Mark, Program, StreamMark
from jhost.lowering.marks import resolved_mark
from jhost.lowering.rates import Rates

_GAIN = 0.97
"""What a pipeline's predicted time must be below, as a share of the time without."""

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
    `device_kind`, if they are known.
    """

    name: ClassVar[str] = "choose_pipelines"

    following: tuple[_Pass, ...]
    chunks: int | Literal["auto"] = "auto"
    pipeline: str = "auto"
    rates: Rates | None = None
    device_kind: str = "unknown"

    def apply(self, program: Program) -> Program:
        marks = [
            resolved_mark(mark, self.chunks, self.pipeline)
            if isinstance(mark, StreamMark)
            else mark
            for mark in program.marks
        ]
        why_not = self.nothing_to_gain(program)
        for number, mark in enumerate(marks):
            if not isinstance(mark, StreamMark) or _is_settled(mark):
                continue
            if why_not or self.rates is None:
                marks[number] = dataclasses.replace(mark, why=_left_open(mark, why_not))
            else:
                trial = _Trial(program, marks, number, self.following, self.rates)
                marks[number] = trial.best(mark)
        return dataclasses.replace(program, marks=tuple(marks))

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


def _is_settled(mark: StreamMark) -> bool:
    known = mark.pipeline is not None and mark.chunks is not None
    return known or mark.pipeline == "off"


def _left_open(mark: StreamMark, why_not: str) -> str:
    """The reason of a mark that asks for nothing; others keep theirs."""
    if mark.pipeline is None and mark.chunks is None:
        return f"auto: {why_not}; ask with chunks= or pipeline="
    return mark.why


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """One candidate: the mark that asks for it, and the seconds it would take.

    `host_share` is the part of them for which launches keep the host, and `program`
    what it would be.
    """

    mark: StreamMark
    text: str
    seconds: float
    host_share: float
    program: Program


class _Trial:
    """The candidates for one of the marks, the others as they are."""

    def __init__(
        self,
        program: Program,
        marks: Sequence[Mark],
        number: int,
        following: Sequence[_Pass],
        rates: Rates,
    ) -> None:
        self.program = program
        self.marks = marks
        self.number = number
        self.following = following
        self.rates = rates
        self.outcomes: list[_Outcome] = []
        self.refusals: list[str] = []

    def best(self, mark: StreamMark) -> StreamMark:
        """`mark` with the choice made: simple ones first, then those that gain."""
        for candidate in self.candidates(mark):
            if (outcome := self.weigh(candidate)) is not None:
                self.outcomes.append(self.on_fewer_streams(outcome))
        if not self.outcomes:
            return mark  # the loops will say what is wrong with it
        chosen = self.outcomes[0]
        for outcome in self.outcomes[1:]:
            if outcome.seconds < _GAIN * chosen.seconds:
                chosen = outcome
        others = [outcome for outcome in self.outcomes if outcome is not chosen]
        ranked = [chosen, *sorted(others, key=lambda outcome: outcome.seconds)]
        return dataclasses.replace(
            chosen.mark,
            why=self.reason(ranked),
            predicted=tuple((o.text, o.seconds) for o in ranked),
        )

    def reason(self, ranked: Sequence[_Outcome]) -> str:
        """The prediction for the choice, and for what it was chosen from."""
        said = [f"{o.text} {seconds_text(o.seconds)}" for o in ranked]
        first = ranked[0]
        said[0] = f"{first.text}, predicted to take {seconds_text(first.seconds)}"
        said[1:2] = [f"runner-up: {text}" for text in said[1:2]]
        return "; ".join((*said, *self.refusals))

    def candidates(self, mark: StreamMark) -> Iterator[StreamMark]:
        """What could be done with a mark, as far as it leaves that open."""
        given = mark.chunks is not None
        if mark.pipeline is None and not given:
            yield mark
        if mark.pipeline is None or mark.pipeline == "collective":
            beside = self.rates.collective.beside_compute
            for count in [mark.chunks] if given else _COUNTS if beside else []:
                yield dataclasses.replace(mark, pipeline="collective", chunks=count)
        if mark.pipeline in (None, "p2p") and self.rates.permute.beside_compute:
            named = mark.pipeline is not None
            p2p = dataclasses.replace(mark, pipeline="p2p", by_name=named)
            yield p2p
            devices = None if given else self.devices()
            if devices is not None:
                yield dataclasses.replace(p2p, chunks=2 * devices)

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

    def weigh(self, candidate: StreamMark) -> _Outcome | None:
        """What the program would take with `candidate`; why it cannot be is noted."""
        marks = list(self.marks)
        marks[self.number] = candidate
        program = dataclasses.replace(self.program, marks=tuple(marks))
        text = _text(candidate)
        try:
            for step in self.following:
                program = step.apply(program)
        except (errors.PipelineError, errors.ChunksError) as refusal:
            self.refusals.append(f"not {text}: {str(refusal).splitlines()[0]}")
            return None
        predicted = predict(program, self.rates)
        host_share = predicted.host / max(predicted.total, 1e-12)
        return _Outcome(candidate, text, predicted.total, host_share, program)

    def on_fewer_streams(self, outcome: _Outcome) -> _Outcome:
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


def _text(mark: StreamMark) -> str:
    if mark.pipeline is None:
        return "not pipelined"
    count = "a chunk a device" if mark.chunks is None else f"{mark.chunks} chunks"
    streams = f" on {mark.streams} streams" if mark.streams else ""
    return f"{mark.pipeline} with {count}{streams}"
