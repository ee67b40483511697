"""Timelines as a picture: a lane for each queue, with exposed parts in orange."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jhost import errors
from jhost.runtime.profile.intervals import Interval
from jhost.runtime.profile.timeline import Span, Timeline

# Colors of Okabe and Ito's palette, which color-blind readers can tell apart.  The
# lighter of two shades is for every other chunk.
_COMPUTATION = ("#0072b2", "#4c9fd4")
_COMMUNICATION = ("#009e73", "#5bc2a5")
_EXPOSED = "#d55e00"
_INK, _RULE = "#303030", "#c8c8c8"
_NUMBER = {"color": "white", "ha": "center", "va": "center", "fontsize": 8}
_LANE = 0.28  # inches
_HEAD = 0.35
_WIDTH = 9.0
_LABELLED = 0.015  # of the width: shorter spans have no room for a number
_UNIT = 1e3  # seconds are drawn as milliseconds


def save_picture(panels: Sequence[tuple[str, Timeline]], path: Path) -> None:
    """Draws timelines one below another, each under its title, to one scale.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    _draw(panels, path, path.suffix.lower().removeprefix("."))


def svg_picture(panels: Sequence[tuple[str, Timeline]]) -> bytes:
    """The same as the text of an `.svg` file.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    file = io.BytesIO()
    _draw(panels, file, "svg")
    return file.getvalue()


def _draw(
    panels: Sequence[tuple[str, Timeline]], file: Path | io.BytesIO, kind: str
) -> None:
    figure_type, style = _matplotlib()
    lanes = [_lanes(timeline) for _, timeline in panels]
    heights = [_HEAD + _LANE * len(rows) for rows in lanes]
    # With a salt of its own, or matplotlib would name parts of a picture at random.
    with style({"svg.hashsalt": "jhost", "font.size": 9}):
        figure = figure_type(figsize=(_WIDTH, 0.8 + sum(heights)), layout="constrained")
        column = figure.subplots(
            len(panels), sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        longest = max(timeline.total for _, timeline in panels)
        for axes, rows, (title, timeline) in zip(column, lanes, panels, strict=True):
            for row, lane in enumerate(rows):
                _draw_lane(axes, row, _of_lane(timeline, *lane), longest)
            _finish(axes, timeline, rows, title)
        column[0].set_xlim(0, longest * _UNIT)
        column[-1].set_xlabel("time since the call began, in ms; numbers are chunks")
        _add_legend(figure)
        figure.savefig(file, format=kind, dpi=200, metadata=_metadata(kind))


def _lanes(timeline: Timeline) -> list[tuple[int, str]]:
    """A device and a stream each."""
    return [
        (device, stream)
        for device in timeline.devices
        for stream in timeline.streams(device)
    ]


def _matplotlib() -> tuple[Any, Any]:
    """The two names needed of matplotlib; they leave its global state alone."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise errors.MissingPackageError(
            "A picture is drawn by matplotlib, which is not installed: "
            "`pip install matplotlib` brings it. A trace (.json) needs nothing.",
            [str(error)],
        ) from error
    return Figure, rc_context


def _metadata(kind: str) -> dict[str, Any]:
    """None of the day, so that the same timeline makes the same file."""
    return {"Date": None} if kind == "svg" else {}


def _of_lane(timeline: Timeline, device: int, stream: str) -> list[Span]:
    return [span for span in timeline.of_device(device) if span.stream == stream]


def _draw_lane(axes: Any, row: int, spans: Sequence[Span], longest: float) -> None:
    parts: dict[str, list[Interval]] = {}
    for span in spans:
        parts.setdefault(_shade(span), []).append((span.start, span.end))
    parts[_EXPOSED] = [part for span in spans for part in span.exposed]
    for color, intervals in parts.items():
        # A hair between parts of the exposed color, which has no shades.
        edge = {"edgecolors": "white", "linewidth": 0.3 if color == _EXPOSED else 0}
        place = row - 0.4, 0.8
        axes.broken_barh(_drawn(intervals), place, facecolors=color, **edge)
    for span in spans:
        if span.iterations and span.end - span.start > _LABELLED * longest:
            label = ".".join(map(str, span.iterations))
            axes.text((span.start + span.end) / 2 * _UNIT, row, label, **_NUMBER)


def _shade(span: Span) -> str:
    computes = span.activity == "computation"
    shades = _COMPUTATION if computes else _COMMUNICATION
    return shades[sum(span.iterations) % len(shades)]


def _drawn(parts: Sequence[Interval]) -> list[tuple[float, float]]:
    """Their starts and widths in the units of the picture."""
    return [(start * _UNIT, (end - start) * _UNIT) for start, end in parts]


def _finish(
    axes: Any, timeline: Timeline, lanes: Sequence[tuple[int, str]], title: str
) -> None:
    """Names, and rules between devices."""
    axes.set_title(title, loc="left", color=_INK, fontsize=9)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    names = [f"{timeline.platform} {device}, {stream}" for device, stream in lanes]
    axes.set_yticks(range(len(lanes)), names)
    axes.tick_params(left=False, color=_RULE)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)
    for row, (before, after) in enumerate(itertools.pairwise(lanes)):
        if before[0] != after[0]:
            axes.axhline(row + 0.5, color=_RULE, linewidth=0.8)


def _add_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    keys = {
        "computation": _COMPUTATION[0],
        "communication, hidden": _COMMUNICATION[0],
        "communication, exposed": _EXPOSED,
    }
    figure.legend(
        [Patch(color=color) for color in keys.values()],
        list(keys),
        loc="outside upper right",
        ncols=len(keys),
        frameon=False,
        handlelength=1.2,
    )
