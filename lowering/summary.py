"""A screen that says what a function gains, which transfers are hidden, and why.

Equal rows are folded into one, and only the most important rows are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from jhost._text import bytes_text, counted, seconds_text
from jhost.lowering.advice import advice, too_little
from jhost.lowering.cost.outcomes import NOT_PIPELINED
from jhost.lowering.folded_transfers import (
    NOTHING,
    FoldedTransfer,
    folded_transfers,
    stands_beside_work,
)
from jhost.lowering.ir.remarks import LayoutReport, Prediction, StreamReport

if TYPE_CHECKING:
    from jhost.lowering.explanation import Explanation

T = TypeVar("T")

_STREAMS, _TRANSFERS, _LAYOUTS, _NOTES = 6, 10, 5, 4
"""The most rows of each kind on a screen."""


_SMALL = 1000
"""Transfers of fewer bytes are folded into one row."""


def summary_lines(explained: Explanation) -> Iterator[str]:
    """The lines of the screen: at most forty."""
    yield explained.title
    yield from (f"  {line}" for line in gain_lines(explained))
    if explained.programs:
        programs = Counter(each.title for each in explained.programs)
        yield f"  {_clipped('programs: ' + '; '.join(programs))}"
    transfers = folded_transfers(explained.communications)
    for title, rows, most in (
        ("streams", [*_folded_streams(explained.streams)], _STREAMS),
        ("transfers", [*_transfer_rows(transfers)], _TRANSFERS),
        ("layouts", [*_layout_rows(explained.layouts)], _LAYOUTS),
        ("notes", [*_note_rows(explained)], _NOTES),
    ):
        if rows:
            yield f"  {title}:"
            yield from (f"    {_clipped(row)}" for row in rows[:most])
        if len(rows) > most:
            yield f"    and {len(rows) - most} more"
    schedule = explained.schedule.splitlines()
    yield from (f"  {line}" for line in schedule[:1])
    if explained.communications:
        yield "  all of it: explain(..., detail=True), or save it as a page (.html)"


# --- The gain ----------------------------------------------------------------------- #


def gain_lines(explained: Explanation) -> Iterator[str]:
    """The time with and without jhost, the exposed part, and what to change first."""
    if explained.predicted is not None:
        yield _time_line(explained, explained.predicted)
    elif explained.communications and explained.devices:
        yield f"nothing is predicted for {explained.devices}{_why_not(explained)}"
    if explained.communications:
        yield _hidden_line(explained)
    if largest := largest_exposed(explained):
        yield f"largest exposed transfer: {largest.text}"
    if text := advice(explained, largest.reports if largest else ()):
        yield _clipped(f"to change first: {text}")


def _why_not(explained: Explanation) -> str:
    if not explained.nothing_overlaps:
        return "; python -m jhost calibrate measures them"
    return (
        ", where nothing runs beside computation; jhost explain --device H200 predicts "
        "for GPUs"
    )


def _time_line(explained: Explanation, predicted: Prediction) -> str:
    on = f" on {explained.devices}" if explained.devices else ""
    said = f"predicted to take {seconds_text(predicted.total)}{on}"
    without = explained.unpipelined
    if without is None:
        return said
    ratio = without.total / max(predicted.total, 1e-12)
    gain = f"{ratio:.2f} times as fast"
    return f"{said}, and {seconds_text(without.total)} without jhost ({gain})"


def _hidden_line(explained: Explanation) -> str:
    """How much of all transfers is beside computation."""
    reports, predicted = explained.communications, explained.predicted
    whole = bytes_text(sum(report.bytes for report in reports))
    if predicted is not None and predicted.communication:
        over = predicted.total - predicted.compute
        # Over the computation there is also idle time, in which devices wait for the
        # host.
        exposed = min(max(over, 0.0), predicted.communication)
        hidden = predicted.communication - exposed
        share = f"{exposed / predicted.total:.0%} of the time"
        moved = f"{whole} in {seconds_text(predicted.communication)}"
        return (
            f"each device receives {moved}: computation hides {_time_text(hidden)}, "
            f"and {_time_text(exposed)} is exposed ({share})"
        )
    beside = bytes_text(sum(r.bytes for r in reports if stands_beside_work(r)))
    return f"each device receives {whole}, {beside} of it beside work"


def _time_text(seconds: float) -> str:
    return seconds_text(seconds) if seconds > NOTHING else "none of it"


def largest_exposed(explained: Explanation) -> FoldedTransfer | None:
    """The transfer that a device waits for longest, or the largest beside nothing."""
    folded = folded_transfers(explained.communications)
    alone = [
        each
        for each in folded
        if (each.exposed or 0.0) > NOTHING
        or (each.exposed is None and not each.stands_beside_work)
    ]
    if not alone or (explained.predicted and too_little(explained.predicted)):
        return None
    return alone[0]


# --- Transfers, streams, layouts, notes --------------------------------------------- #


def _transfer_rows(transfers: Sequence[FoldedTransfer]) -> Iterator[str]:
    # A step has dozens of sums of single numbers, which would push all else off the
    # screen.
    small = [each for each in transfers if each.bytes < _SMALL]
    yield from (each.text for each in transfers if each.bytes >= _SMALL)
    if small and len(small) < len(transfers):
        times, moved = sum(each.times for each in small), sum(e.bytes for e in small)
        whole = bytes_text(moved)
        yield f"{counted(times, 'small transfer')}, {whole} a device in all"
    elif small:
        yield from (each.text for each in small)


def _folded_streams(streams: Sequence[StreamReport]) -> Iterator[str]:
    """One row for all marks with the same choice."""
    groups: dict[str, list[StreamReport]] = {}
    for stream in streams:
        groups.setdefault(_choice_text(stream), []).append(stream)
    for text, group in groups.items():
        many = f"{len(group)} x " if len(group) > 1 else ""
        lines = dict.fromkeys(line for each in group for line in each.lines)
        yield f"{many}{text} [{_lines_text(list(lines))}]"


def _choice_text(stream: StreamReport) -> str:
    """The choice and the best other candidate, in short."""
    if not stream.predicted:
        return stream.text.removeprefix(f"{stream.stream} ").removeprefix("on ")
    (chosen, seconds), *others = stream.predicted
    found = "found on " if stream.found else ""
    text = f"{found}axis {stream.axis}: {chosen}, predicted {seconds_text(seconds)}"
    if stream.found:  # what it gains, and not how close another loop comes
        others = [each for each in others if each[0] == NOT_PIPELINED] or others
    if others:
        other, more = min(others, key=lambda each: each[1])
        text += f"; {other} {seconds_text(more)}"
        text += ", which gains too little" if more < seconds else ""
    idle = "" if stream.moves else "; nothing moves in this loop: it hides nothing"
    return text + idle


def _lines_text(lines: Sequence[str]) -> str:
    if len(lines) == 1:
        return lines[0]
    return ", ".join(line.partition(" (")[0] for line in lines)


def _layout_rows(layouts: Sequence[LayoutReport]) -> Iterator[str]:
    """A row for each value and change, the largest first; small ones share a row."""
    groups: dict[object, list[LayoutReport]] = {}
    for row in layouts:
        groups.setdefault((row.value, row.before, row.after), []).append(row)
    totals = [(sum(row.bytes for row in rows), rows) for rows in groups.values()]
    totals.sort(key=lambda each: each[0], reverse=True)
    large = [each for each in totals if each[0] >= _SMALL] or totals
    for moved, rows in large:
        first = rows[0]
        places = f" in {len(rows)} places" if len(rows) > 1 else ""
        change = f"{first.value}: {first.before} -> {first.after}{places}"
        yield f"{change}: {bytes_text(moved)} a device{_reason_text(rows)}"
    if small := len(totals) - len(large):
        yield f"{counted(small, 'value')} of less than 1 kB"


def _reason_text(rows: Sequence[LayoutReport]) -> str:
    """The reason, which is of one place, and may be another one in the next."""
    largest = max(rows, key=lambda row: row.bytes)
    if not largest.reason:
        return ""
    if len(rows) == 1:
        return f"; {largest.reason}"
    if len({row.reason for row in rows}) == 1:
        return f"; in each of them: {largest.reason}"
    return f"; in one of them, of {bytes_text(largest.bytes)}: {largest.reason}"


def _note_rows(explained: Explanation) -> Iterator[str]:
    """Notes: refused and missed options come first, and stops of streams last."""
    options = (o for o in explained.options if not o.startswith("applied: "))
    notes = Counter((*options, *map(str, explained.permutes), *explained.notes))
    for note in sorted(notes, key=lambda note: note.startswith("streams stop")):
        yield f"{notes[note]} x {note}" if notes[note] > 1 else note


_WIDEST = 240


def _clipped(row: str) -> str:
    return row if len(row) <= _WIDEST else f"{row[: _WIDEST - 3]}..."
