"""What runs of `python -m benchmarks.step` came to, as tables."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.run_file import RESULTS
from benchmarks.step.whole import page as whole

Record = Mapping[str, Any]

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
    runs = [json.loads(file.read_text()) for file in RESULTS.glob("*-step.json")]
    return sorted(runs, key=lambda run: run["started"])


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
    found: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for run in runs:
        for record in run["measurements"]:
            of_case = found.setdefault(title(run, record), {})
            of_case[tuple(record["arms"])] = _parts(record)
    parts = ["\n".join(map(report.run_line, runs)), *_picture()]
    for name, of_case in found.items():
        parts += [f"### {name}", *itertools.chain.from_iterable(of_case.values())]
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


def line(record: Record) -> str:
    """The minima of a record's arms."""
    return " ".join(
        f"{arm} {entry['min_ms']:.2f}" if "min_ms" in entry else f"{arm} -"
        for arm, entry in record["arms"].items()
    )


def _parts(record: Record) -> list[str]:
    rows = [
        _row(record, arm) for arm, entry in record["arms"].items() if "min_ms" in entry
    ]
    missing = [
        f"- {arm}: {entry.get('error') or entry.get('skipped')}"
        for arm, entry in record["arms"].items()
        if "min_ms" not in entry
    ]
    return [report.table(HEAD, rows), *(["\n".join(missing)] if missing else [])]


def _row(record: Record, arm: str) -> list[str]:
    entry, plain = record["arms"][arm], record["arms"].get("plain", {}).get("min_ms")
    share = entry.get("without_computation")
    return [
        arm,
        f"{entry['min_ms']:.2f} / {entry['median_ms']:.2f}",
        f"{entry['min_ms'] / plain:.3f}" if plain else "",
        f"{entry['tokens_per_s']:,.0f}",
        f"{entry['temp_bytes'] / 1e6:,.0f}" if "temp_bytes" in entry else "",
        f"{entry['lower_s']:.1f} + {entry['compile_s']:.1f}"
        if "compile_s" in entry
        else "",
        "" if share is None else f"{share:.1%}",
        _verdict(record["checks"].get(arm)),
        record["explain"].get(arm, {}).get("choices", ""),
    ]


def _verdict(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else "yes" if found["right"] else "no"
