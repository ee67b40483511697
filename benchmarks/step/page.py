"""What runs of `python -m benchmarks.step` came to, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.step import records
from benchmarks.step.records import Record
from benchmarks.step.whole import page as whole

HEAD = (
    "",
    "ms, minimum / median",
    "of plain",
    "tokens/s",
    "temporary memory, MB",
    "lowering + compilation, s",
    "nothing computes",
    "right",
    "streams",
)


PICTURE = "benchmarks-step.svg"
"""Beside the page."""


def stored() -> list[dict[str, Any]]:
    """The runs in benchmarks/results, as they began."""
    return records.stored("-step")


def every() -> str:
    """All that is between the marks of the page: whole steps after those of layers."""
    wholes = whole.stored()
    return "\n\n".join([measured(), *([whole.section(wholes)] if wholes else [])])


def measured(runs: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Tables of steps of layers.

    Of a case the last record of the same arms counts: ratios hold within a run.
    """
    runs = stored() if runs is None else runs
    if not runs:
        return "No run is stored yet."
    parts = ["\n".join(map(report.run_line, runs)), *_picture()]
    for name, of_case in records.by_title(runs, title, _parts).items():
        parts += [f"### {name}", *of_case]
    return "\n\n".join(parts)


def _picture() -> list[str]:
    """The timelines of a step that `benchmarks.timelines` has drawn, if it has."""
    if not (report.PAGE.parent / PICTURE).exists():
        return []
    return [f"![A step on one device, before jhost and with it]({PICTURE})"]


def title(run: Mapping[str, Any], record: Record) -> str:
    mesh, kind = report.mesh_text(run, record), run["environment"]["device_kind"]
    return (
        f"{record['case']}, {mesh}, {kind}, {report.PASSES[record['pass']]}: "
        f"{record['layers']} layers, "
        f"{record['sequences']} sequences of {record['length']}"
    )


def _parts(record: Record) -> list[str]:
    return records.table(record, HEAD, _row)


def _row(record: Record, arm: str) -> list[str]:
    entry, plain = record["arms"][arm], record["arms"].get("plain", {}).get("min_ms")
    return [
        arm,
        records.times(entry),
        f"{entry['min_ms'] / plain:.3f}" if plain else "",
        f"{entry['tokens_per_s']:,.0f}",
        *records.costs(entry),
        _verdict(record["checks"].get(arm)),
        records.choices(record, arm),
    ]


def _verdict(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else "yes" if found["right"] else "no"
