"""The one thing to change first, where a device waits for an exposed transfer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jhost._text import seconds_text
from jhost.lowering.communication_report import CommunicationReport
from jhost.lowering.cost.outcomes import NOT_PIPELINED
from jhost.lowering.ir.marks import OnLines
from jhost.lowering.ir.remarks import LayoutReport, LeftStream, Prediction, StreamReport
from jhost.lowering.places import END, START

if TYPE_CHECKING:
    from jhost.lowering.explanation import Explanation

_LITTLE = 0.03
"""Predictions are not exact enough for gains of less than this share of the time."""

_CLOSE = 1 + _LITTLE
"""A choice predicted to take at most so many times as long may still be faster."""


def too_little(predicted: Prediction) -> bool:
    """Whether less is exposed than the error of predictions."""
    return predicted.total - predicted.compute < _LITTLE * predicted.total


def _loses(explained: Explanation, predicted: Prediction) -> bool:
    """Whether a loop that was asked for is predicted to take longer than none."""
    plain = explained.unpipelined
    asked = any(map(_is_asked_for, explained.streams))
    return asked and plain is not None and plain.total < predicted.total


def _is_asked_for(stream: StreamReport) -> bool:
    """Whether it has a loop that prediction and measurement could not leave out."""
    weighed = any(text == NOT_PIPELINED for text, _ in stream.predicted)
    return stream.hides and not weighed and not stream.measured


def advice(explained: Explanation, exposed: Sequence[CommunicationReport]) -> str:
    """What to change first about the most exposed transfers; "" for nothing."""
    predicted = explained.predicted
    if predicted is None:
        return ""
    # First of all: a pipeline that was asked for costs more than any transfer.
    if _loses(explained, predicted):
        ask = "the pipeline asked for is predicted to be slower"
        return f'leave chunks= and pipeline= open ("auto"): {ask}'
    if too_little(predicted):
        return "nothing: computation takes more than 97 % of the time"
    # What stands in a `jax.shard_map` runs as the user wrote it.
    if not exposed or exposed[0].written:
        return ""
    # It only changes how a value lies: with one layout there would be none.
    if exposed[0].kind == "AllToAll":
        return _one_layout(explained, exposed[0])
    texts = [*_texts(explained, exposed)]
    near = [each for each in explained.streams if _is_near(each, texts)]
    if not near and not explained.searches:
        return _unmarked(exposed[0]) or _reason(explained, exposed[0])
    if not near:
        return _left(explained, texts, exposed[0]) or _reason(explained, exposed[0])
    weighed = [each for each in near if not each.hides and len(each.predicted) > 1]
    if not weighed:
        return _reason(explained, exposed[0])
    return _measured_or_moved(min(weighed, key=_lost), exposed[0])


def _unmarked(report: CommunicationReport) -> str:
    """Says that a mark on the work beside a transfer could hide it."""
    # A gather can run beside its reader, and a sum beside its terms' makers.
    work = report.before if report.kind == "AllGather" else report.behind
    if not work or work in (START, END):
        return ""
    return (
        f"mark {work} with jhost.stream(value, axis=...), along the dim that moves. "
        f"The transfer can then move in chunks, beside that work"
    )


def _left(
    explained: Explanation, texts: Sequence[str], report: CommunicationReport
) -> str:
    """That jhost looked at a stream beside the transfer, and why it left it."""
    left = [each for search in explained.searches for each in search.left]
    weighed = [each for each in left if len(each.predicted) > 1]
    near = [each for each in weighed if _is_near(each, texts)]
    if not near:
        return ""
    stream = min(near, key=_lost)
    _, times = _best_loop(stream)
    lines = ", ".join(_without_functions(stream))
    looked = f"jhost found a stream at {lines} and left it"
    if _lost(stream) < _CLOSE:
        return (
            f"{looked}, too close to choose by prediction ({times}): mark it "
            f"with jhost.stream, and jhost.tune measures both"
        )
    return (
        f"fewer devices along {' and '.join(report.axes)}, or more rows a device: "
        f"{looked}, because its chunks are too small to gain ({times})"
    )


def _best_loop(stream: StreamReport | LeftStream) -> tuple[str, str]:
    """The best loop that was weighed, and the times with it and without."""
    (_, chosen), *others = stream.predicted
    text, seconds = min(others, key=lambda each: each[1])
    times = f"{seconds_text(seconds)} with a loop and {seconds_text(chosen)} without"
    return text, times


def _measured_or_moved(stream: StreamReport, report: CommunicationReport) -> str:
    """That measuring may choose otherwise, or what would change the prediction."""
    text, times = _best_loop(stream)
    if _lost(stream) < _CLOSE:
        return (
            f"measure with jhost.tune: at {stream.where} {text} is too close to choose "
            f"by prediction ({times})"
        )
    return (
        f"use fewer devices along {' and '.join(report.axes)}, or more rows on each "
        f"device: at {stream.where} chunks are too small to gain ({text}: {times})"
    )


def _lost(stream: StreamReport | LeftStream) -> float:
    """What the best other choice takes, as a share of the chosen one."""
    (_, chosen), *others = stream.predicted
    # An empty program may be predicted to take no time.
    return min(seconds for _, seconds in others) / max(chosen, 1e-12)


def _is_near(stream: OnLines, texts: Sequence[str]) -> bool:
    """Whether a stream stands on the line of work beside the transfers."""
    lines = _without_functions(stream)
    # Whole numbers: `model.py:12` is not on the line `model.py:123`.
    return any(re.search(rf"{re.escape(line)}\b", t) for line in lines for t in texts)


def _without_functions(stream: OnLines) -> list[str]:
    """`model.py:12` of `model.py:12 (mlp)`."""
    return [line.partition(" (")[0] for line in stream.lines]


def _texts(
    explained: Explanation, reports: Sequence[CommunicationReport]
) -> Iterator[str]:
    """What names the transfers, the work beside them, and the lines of both."""
    for report in reports:
        yield from (report.value, report.behind, report.before, *report.between)
        row = _layout_of(explained, report)
        if row is not None:
            yield row.where


def _one_layout(explained: Explanation, largest: CommunicationReport) -> str:
    """Says that a value is made in one layout and read in another of the same size."""
    row = _layout_of(explained, largest)
    if row is None:
        return ""
    return (
        f"how {largest.value} is sharded ({row.before} -> {row.after}). A "
        f"with_sharding_constraint on it, or on its operands, could avoid the change"
    )


def _reason(explained: Explanation, largest: CommunicationReport) -> str:
    """What a user can change where jhost found nothing to hide a transfer."""
    row = _layout_of(explained, largest)
    if row is None:
        return ""
    change = f"{row.before} -> {row.after}; {row.reason}"
    return (
        f"how {largest.value} is sharded, or use fewer devices along "
        f"{' and '.join(largest.axes)}, or more rows on each device: nothing hides its "
        f"change of sharding ({change})"
    )


def _layout_of(
    explained: Explanation, largest: CommunicationReport
) -> LayoutReport | None:
    """The layout row that moves most, among those of the transfer's value."""
    rows = [row for row in explained.layouts if row.value == largest.value]
    return max(rows, key=lambda row: row.bytes) if rows else None
