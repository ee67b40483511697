"""What a Host IR program pipelines and communicates, and where streams stop."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from jhost._page import (
    Bar,
    bars,
    element,
    fold,
    fragment,
    listed,
    save_page,
    table,
    titled,
)
from jhost._text import bytes_text, counted, seconds_text
from jhost.lowering.communication_report import CommunicationReport
from jhost.lowering.ir.remarks import (
    LayoutReport,
    PermuteReport,
    Prediction,
    Search,
    StreamReport,
)
from jhost.lowering.steps import Step
from jhost.lowering.summary import gain_lines, summary_lines


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What `jhost.explain` returns.

    `str` is one screen with what matters most, and `text` has everything.

    Attributes:
        name: the function's name, and what JAX derived from the function.
        loops: the number of loops over chunks.
        streams: what jhost makes of each mark, and why.
        layouts: each value that changes its layout, and the bytes of the alternative.
        communications: all communications, with their bytes.
        permutes: if jhost chose the kind of permutes that move chunks: the kind, and
            why.
        notes: where streams stop, and other remarks.
        options: XLA's options for the overlap: applied, refused and missing ones.
        schedule: the text of `Compiled.schedule`, if XLA has compiled the program.
        programs: for a function that calls jhost functions, an explanation of each of
            their programs.  The rows here include the rows of all programs.
        bodies: an explanation of the body of each loop and branch in a program.  The
            rows here include their rows, too.
        calls: how often the outer function runs the program, scans included.  The rows
            are of one run.
        steps: the steps of the program and its bodies in order, the picture's boxes.
        predicted: seconds of one run; None if the devices are unknown, or cannot
            overlap.
        unpipelined: seconds of one run without jhost: without loops over chunks, and
            with each transfer where its result is needed.
        devices: number and kind of the devices.
        nothing_overlaps: whether the devices cannot overlap anything with computation.
        searches: for each program without a mark, the streams that jhost found and
            left.
        detailed: whether `str` has everything.
    """

    name: str
    loops: int
    streams: tuple[StreamReport, ...]
    layouts: tuple[LayoutReport, ...]
    communications: tuple[CommunicationReport, ...]
    permutes: tuple[PermuteReport, ...] = ()
    notes: tuple[str, ...]
    options: tuple[str, ...] = ()
    schedule: str = ""
    programs: tuple[Explanation, ...] = ()
    bodies: tuple[Explanation, ...] = ()
    calls: int = 1
    steps: tuple[Step, ...] = ()
    predicted: Prediction | None = None
    unpipelined: Prediction | None = None
    devices: str = ""
    nothing_overlaps: bool = False
    searches: tuple[Search, ...] = ()
    detailed: bool = False

    def __str__(self) -> str:
        return self.text if self.detailed else "\n".join(summary_lines(self))

    @property
    def text(self) -> str:
        """Everything, program by program and body by body."""
        head = [f"  {line}" for line in gain_lines(self)]
        return "\n".join([self.title, *head, *_lines(self)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a page: programs as boxes, predicted times as bars.

        Args:
            path: a file name that ends in `.html`.  The page needs no other file.

        Raises:
            OptionError: the path has another ending.
            FileNotFoundError: the folder does not exist.

        Example:
            >>> import pathlib, tempfile
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: jhost.stream(x * 2, axis=0, chunks=2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     jhost.explain(f, jnp.ones(4)).save(pathlib.Path(folder) / "f.html")
        """
        save_page(path, self.name, _page(self, self.steps, gain_lines(self)))

    def _repr_html_(self) -> str:
        return fragment(_page(self, self.steps, gain_lines(self)))

    @property
    def title(self) -> str:
        """The function's name, how often it runs, and the number of its loops."""
        calls = f", run {self.calls} times" if self.calls > 1 else ""
        return f"{self.name}{calls}: {counted(self.loops, 'loop')}"


ROWS = {
    "streams": "streams",
    "communications": "communications",
    "layouts": "layouts",
    "permutes": "permutes",
    "notes": "notes",
    "XLA options": "options",
}
"""The fields of an explanation that hold rows, by the title above them."""


def _lines(explanation: Explanation) -> Iterator[str]:
    """All rows below the title; programs and bodies have titles of their own."""
    for title, rows in _own_rows(explanation):
        yield f"  {title}:"
        for row in rows:
            yield f"    {row}"
            if isinstance(row, CommunicationReport):
                yield f"      {row.detail}"
    # Programs and bodies come last, and none of their rows is said twice.
    for each in (*explanation.programs, *explanation.bodies):
        yield f"  {each.title}"
        yield from (f"  {line}" for line in _lines(each))
    yield from (f"  {line}" for line in explanation.schedule.splitlines())


def _own_rows(explanation: Explanation) -> Iterator[tuple[str, list[Any]]]:
    """The rows that no program or body in it has, by the title above them."""
    inner = (*explanation.programs, *explanation.bodies)
    for title, field in ROWS.items():
        inside = [row for each in inner for row in getattr(each, field)]
        if rows := _without(getattr(explanation, field), inside):
            yield title, rows


def _without(rows: Sequence[Any], inside: Sequence[Any]) -> list[Any]:
    """The rows that are not among those `inside`, which may be equal to others."""
    left = Counter(inside)
    own: list[Any] = []
    for row in rows:
        if left[row]:
            left[row] -= 1
        else:
            own.append(row)
    return own


# --- The page ---------------------------------------------------------------------- #


def _page(
    explanation: Explanation, steps: Sequence[Step], head: Iterable[str] = ()
) -> Element:
    """An explanation below its title, with the boxes of `steps`."""
    return fold(
        explanation.title,
        *(element("p", line) for line in head),
        *([_boxes(steps)] if steps else []),
        *(part for rows in _own_rows(explanation) for part in _rows(*rows)),
        *(_page(program, program.steps) for program in explanation.programs),
        *(_page(body, ()) for body in explanation.bodies),  # boxes of its program
        *([element("pre", explanation.schedule)] if explanation.schedule else []),
    )


def _boxes(steps: Sequence[Step]) -> Element:
    return element("div", *map(_box, steps), cls="boxes")


def _box(step: Step) -> Element:
    if step.steps:
        return element("div", step.text, _boxes(step.steps), cls="box loop")
    what = "communication" if step.communication else "computation"
    return element("div", step.text, element("code", step.layout), cls=f"box {what}")


def _rows(title: str, rows: Sequence[Any]) -> list[Element]:
    """The page elements for rows of one kind."""
    # All rows under one title are of one type.
    match rows[0]:
        case StreamReport():
            return titled(title, *(part for row in rows for part in _stream(row)))
        case LayoutReport():
            return titled(title, table(_LAYOUT, map(_layout_cells, rows)))
        case CommunicationReport():
            received = "bytes that a device receives"
            drawn = bars([_received_bar(row) for row in rows], received, _bytes_text)
            return titled(title, drawn)
        case _:
            return titled(title, listed(rows))


def _stream(row: StreamReport) -> list[Element]:
    """The choice, above a bar with the seconds of each candidate."""
    found = {"predicted": row.predicted, "measured": row.measured}
    drawn = [
        Bar(text, ((what, seconds),), f"{seconds_text(seconds)} {what}")
        for what, times in found.items()
        for text, seconds in times
    ]
    said = element("p", str(row))
    return [said, bars(drawn, "time of one run", seconds_text)] if drawn else [said]


_LAYOUT = ("value", "before", "after", "a device receives", "why", "line")


def _layout_cells(row: LayoutReport) -> list[str]:
    received = bytes_text(row.bytes)
    return [row.value, row.before, row.after, received, row.reason, row.where]


def _bytes_text(length: float) -> str:
    return bytes_text(int(length))


def _received_bar(row: CommunicationReport) -> Bar:
    return Bar("", (("communication", row.bytes),), f"{row}; {row.detail}")
