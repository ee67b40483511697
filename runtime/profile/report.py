"""The report of `jhost.profile`: the times of a call, as a table and a picture."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from jhost import errors
from jhost._page import (
    Bar,
    bars,
    element,
    ends_in,
    fold,
    fragment,
    image,
    key,
    save_page,
    table,
    titled,
)
from jhost._text import counted, seconds_text
from jhost.lowering.ir.remarks import Prediction
from jhost.runtime.profile.overlap import (
    TIMES,
    DeviceOverlap,
    StatementOverlap,
    device_overlap,
    mean_overlap,
    predicted_overlap,
    statement_overlaps,
)
from jhost.runtime.profile.perfetto import perfetto_trace
from jhost.runtime.profile.picture import save_picture, svg_picture
from jhost.runtime.profile.timeline import Timeline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OverlapReport:
    """How much communication a function hid in a run; `str` is a table.

    Times are in seconds.

    Attributes:
        name: the function's name.
        mesh: the axes and sizes of its mesh.
        device_kind: JAX's name for the devices.
        devices: the times of each device.
        mean: the mean of the devices.
        predicted: the times that the cost model predicts; None if it knows no rates.
        statements: the Host IR statements that took time.
        timeline: every span of the call, and the times of the other calls.
    """

    name: str
    mesh: str
    device_kind: str
    devices: tuple[DeviceOverlap, ...]
    mean: DeviceOverlap
    predicted: DeviceOverlap | None
    statements: tuple[StatementOverlap, ...]
    timeline: Timeline

    @property
    def title(self) -> str:
        """The function, the devices, and how long a call took."""
        calls = self.timeline.calls
        where = f" on {self.mesh}" if self.mesh else ""
        return (
            f"{self.name}{where}, {self.device_kind}: "
            f"{seconds_text(self.timeline.total)}, the median of {len(calls)} calls "
            f"({seconds_text(min(calls))} to {seconds_text(max(calls))})"
        )

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as numbers, texts and lists, for JSON.

        Returns:
            A dict with an entry for each attribute.  Times are in seconds.

        Example:
            >>> import json
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: jhost.stream(x @ x, axis=0, chunks=2))
            >>> report = jhost.profile(f, jnp.ones((64, 64))).to_dict()
            >>> report["name"], report["mean"]["communication"]
            ('<lambda>', 0.0)
            >>> len(json.dumps(report)) > 100
            True
        """
        return dataclasses.asdict(self) | {
            "devices": [_numbers(device) for device in self.devices],
            "mean": _numbers(self.mean),
            "predicted": self.predicted and _numbers(self.predicted),
        }

    def save(
        self, path: str | os.PathLike[str], *, devices: Sequence[int] | None = None
    ) -> None:
        """Writes the report to a file, in the form that the ending of its name says.

        Args:
            path: a file name.  `.png` and `.svg` are pictures with a lane for each
                queue.  `.html` is a page with the picture (if matplotlib is installed)
                and the tables as bars.  `.json` is a trace that
                https://ui.perfetto.dev opens.
            devices: the numbers of the devices in the timeline; all by default.

        Raises:
            OptionError: the path has another ending, or a device ran nothing.
            FileNotFoundError: the folder does not exist.
            MissingPackageError: a picture needs matplotlib, which is not installed.

        Example:
            >>> import pathlib, tempfile
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: jhost.stream(x @ x, axis=0, chunks=2))
            >>> report = jhost.profile(f, jnp.ones((64, 64)))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     report.save(pathlib.Path(folder) / "f.json")
        """
        path, shown = Path(path), self.timeline.only(devices)
        match path.suffix.lower():
            case ".png" | ".svg":
                save_picture([(self.title, shown)], path)
            case ".json":
                path.write_text(json.dumps(perfetto_trace(shown)))
            case ".html":
                save_page(path, self.name, _page(self, shown))
            case _:
                raise errors.OptionError(
                    "A timeline is saved as a picture (.png, .svg), as a page (.html) "
                    "or as a trace for Perfetto (.json).",
                    [ends_in(path)],
                )

    def _repr_html_(self) -> str:
        return fragment(_page(self, self.timeline))


def overlap_report(
    timeline: Timeline, *, mesh: str, device_kind: str, prediction: Prediction | None
) -> OverlapReport:
    """The sums over a timeline, with the prediction for its devices."""
    devices = tuple(device_overlap(timeline, number) for number in timeline.devices)
    return OverlapReport(
        name=timeline.name,
        mesh=mesh,
        device_kind=device_kind,
        devices=devices,
        mean=mean_overlap(devices),
        predicted=None if prediction is None else predicted_overlap(prediction),
        statements=tuple(statement_overlaps(timeline)),
        timeline=timeline,
    )


def _numbers(overlap: DeviceOverlap) -> dict[str, Any]:
    return dataclasses.asdict(overlap) | {"efficiency": overlap.efficiency}


# --- The table -------------------------------------------------------------------- #


def _lines(report: OverlapReport) -> Iterator[str]:
    yield report.title
    yield from _aligned([_OVERLAP, *map(_overlap_cells, _overlaps(report))])
    if report.predicted is None:
        yield f"  predicted  {_unknown(report)}"
    header = ["", "", "times", "took", "exposed", "value"]
    rows = [header, *map(_statement_cells, _statements(report))]
    yield from _aligned(rows, left=(0, 5))


_OVERLAP = ["", *TIMES, "efficiency"]


def _overlaps(report: OverlapReport) -> list[DeviceOverlap]:
    mean = [report.mean] if len(report.devices) > 1 else []
    return [*report.devices, *mean, *([report.predicted] if report.predicted else [])]


def _unknown(report: OverlapReport) -> str:
    return f"nothing: the rates of {report.device_kind} are not known"


def _statements(report: OverlapReport) -> list[StatementOverlap]:
    return [statement for statement in report.statements if statement.seconds]


def _overlap_cells(overlap: DeviceOverlap) -> list[str]:
    share = overlap.efficiency
    times = [_time(getattr(overlap, name)) for name in TIMES]
    return [overlap.device, *times, "-" if share is None else f"{share:.0%}"]


_WIDTH = 64  # of a statement, and of the names of its values


def _statement_cells(statement: StatementOverlap) -> list[str]:
    shown = _shortened(statement.text)
    exposed = statement.exposed if statement.activity == "communication" else None
    cells = [shown, statement.activity, str(statement.times), _time(statement.seconds)]
    moved = "" if exposed is None else _time(exposed)
    return [*cells, moved, _shortened(statement.values)]


def _shortened(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _time(seconds: float) -> str:
    return seconds_text(round(seconds, 12))  # differences leave rounding errors


def _aligned(
    rows: Sequence[Sequence[str]], left: Collection[int] = (0,)
) -> Iterator[str]:
    """Rows of cells, some columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if n in left else str.rjust for n in range(len(widths))]
    for row in rows:
        cells = (a(b, c) for a, b, c in zip(sides, row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


# --- The page --------------------------------------------------------------------- #

_PARTS = {
    "computation": "computation",
    "communication": "computation that hides communication",
    "exposed": "exposed communication",
    "idle": "idle",
}


def _page(report: OverlapReport, shown: Timeline) -> Element:
    """The page: tables as bars, and the timeline of the devices that are `shown`."""
    rows = _overlaps(report)
    unknown = [] if report.predicted else [f"predicted: {_unknown(report)}"]
    statements = [_statement_bar(s) for s in _statements(report)]
    return fold(
        report.title,
        element("p", _hidden_text(report.mean)),
        key(_PARTS),
        bars([_overlap_bar(row) for row in rows], "time of the call", seconds_text),
        table(_OVERLAP, map(_overlap_cells, rows)),
        *(element("p", text) for text in unknown),
        *titled("timeline", _drawn(report.title, shown)),
        *titled("statements", bars(statements, "mean time of a device", seconds_text)),
    )


def _hidden_text(mean: DeviceOverlap) -> str:
    if not mean.communication:
        return "nothing was communicated"
    share = mean.exposed / mean.total if mean.total else 0.0
    return (
        f"computation hid {seconds_text(mean.hidden)} of "
        f"{seconds_text(mean.communication)} of communication; "
        f"{seconds_text(mean.exposed)} was exposed, {share:.0%} of the call "
        "(means of the devices)"
    )


def _overlap_bar(row: DeviceOverlap) -> Bar:
    """A bar that is as long as the total, in its parts."""
    parts = {
        "computation": row.computation - row.hidden,
        "communication": row.hidden,
        "exposed": row.exposed,
        "idle": row.idle,
    }
    return Bar(row.device, tuple(parts.items()), _time(row.total))


def _statement_bar(row: StatementOverlap) -> Bar:
    _, _, times, took, exposed, values = _statement_cells(row)
    text = f"{counted(times, 'time')}, {took}{', ' * bool(values)}{values}"
    if not exposed:
        return Bar(row.text, (("computation", row.seconds),), text)
    parts = ("communication", row.seconds - row.exposed), ("exposed", row.exposed)
    return Bar(row.text, parts, f"{text}, exposed {exposed}")


def _drawn(title: str, timeline: Timeline) -> Element:
    """The timeline as a picture, or why there is none; the page is useful without."""
    try:
        return image(svg_picture([(title, timeline)]), title)
    except Exception as error:  # the user's settings of matplotlib may be at fault
        return element("p", f"No picture: {errors.first_line(error)}")
