"""What becomes of one candidate for a stream mark, what it must gain, and its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jhost._text import seconds_text
from jhost.lowering.cost.rates import Rates
from jhost.lowering.ir.bodies import all_remarks
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.pipelines import SumsPosition
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import StreamReport

GAIN = 0.97
"""What a pipeline's time must be below, as a share of the time without."""

CLEAR_GAIN = 0.9
"""The same by rates that are estimated."""

NOT_PIPELINED = "not pipelined"
"""What the candidate without a loop is called."""

SUMS: Mapping[SumsPosition, str] = {
    "whole": "behind the loops",
    "beside transfers": "beside transfers",
}
"""Where sums stand that no loop adds up in chunks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One candidate for a mark, lowered and timed.

    Attributes:
        mark: the mark that asks for it.
        text: what messages call it.
        seconds: how long the program takes; NaN where the devices' rates are unknown.
        compute: the seconds of its computations alone; NaN likewise.
        moving: the seconds of its transfers alone; NaN likewise.
        host_share: the share of `seconds` for which launches keep the host busy.
        program: the lowered program.
    """

    mark: StreamChoice
    text: str
    seconds: float
    compute: float
    moving: float
    host_share: float
    program: Program


def gain_of(rates: Rates) -> float:
    """What a pipeline's time must be below, as a share of the time without."""
    return CLEAR_GAIN if rates.estimated else GAIN


def chunks_of(outcome: Outcome) -> int | None:
    """The chunks that a p2p candidate got by default: one for each device."""
    for report in all_remarks(outcome.program):
        if isinstance(report, StreamReport) and report.pipeline == "p2p":
            if set(outcome.mark.lines) <= set(report.lines):
                return report.chunks
    return None


def ranking_text(
    how: str, ranked: Sequence[tuple[str, float]], left_out: Sequence[str]
) -> str:
    """The seconds of the choice and of the other candidates in words, best first."""
    (first, seconds), *rest = ranked
    said = [f"{text} {seconds_text(each)}" for text, each in rest]
    said[:1] = [f"runner-up: {text}" for text in said[:1]]
    said = [f"{first}, {how} to take {seconds_text(seconds)}", *said, *left_out]
    return "; ".join(said)


def left_out_text(candidate: str, why: str) -> str:
    """Why a candidate could not be chosen."""
    return f"{candidate} is left out: {why}"


def text_of(mark: StreamChoice) -> str:
    spec = mark.spec
    if spec.pipeline is None:
        return NOT_PIPELINED if mark.unpipelined else "as the stream that reaches it"
    count = "a chunk a device" if spec.chunks is None else f"{spec.chunks} chunks"
    queues = f" on {spec.streams} queues" if spec.streams else ""
    order = "" if spec.zigzag else " in order of position"
    sums = f" and sums {SUMS[spec.sums]}" if spec.sums in SUMS else ""
    return f"{spec.pipeline} with {count}{queues}{order}{sums}"
