"""Records of steps as tables, whatever the step is of."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from benchmarks import report
from benchmarks.run_file import RESULTS

Record: TypeAlias = Mapping[str, Any]
Entry: TypeAlias = Mapping[str, Any]


def stored(suffix: str) -> list[dict[str, Any]]:
    """The runs in benchmarks/results whose names end so, as they began."""
    runs = [json.loads(file.read_text()) for file in RESULTS.glob(f"*{suffix}.json")]
    return sorted(runs, key=lambda run: run["started"])


def by_title(
    runs: Sequence[Mapping[str, Any]],
    title: Callable[[Mapping[str, Any], Record], str],
    parts: Callable[[Record], list[str]],
) -> dict[str, list[str]]:
    """The parts of all records; of a case the last one of the same arms counts.

    Ratios hold within a run.
    """
    found: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for run in runs:
        for record in run["measurements"]:
            of_case = found.setdefault(title(run, record), {})
            of_case[tuple(record["arms"])] = parts(record)
    return {
        name: [*itertools.chain.from_iterable(each.values())]
        for name, each in found.items()
    }


def line(record: Record) -> str:
    """The minima of a record's arms."""
    return " ".join(
        f"{arm} {entry['min_ms']:.2f}" if "min_ms" in entry else f"{arm} -"
        for arm, entry in record["arms"].items()
    )


def table(
    record: Record, head: Sequence[str], row: Callable[[Record, str], list[str]]
) -> list[str]:
    """A row for each arm that was timed, and below them why others were not."""
    arms = record["arms"]
    rows = [row(record, arm) for arm, entry in arms.items() if "min_ms" in entry]
    missing = [
        f"- {arm}: {entry.get('error') or entry.get('skipped')}"
        for arm, entry in arms.items()
        if "min_ms" not in entry
    ]
    return [report.table(head, rows), *(["\n".join(missing)] if missing else [])]


def times(entry: Entry) -> str:
    """The least of an arm's times, and the one in the middle."""
    return f"{entry['min_ms']:.2f} / {entry['median_ms']:.2f}"


def costs(entry: Entry) -> list[str]:
    """Its memory, what making it took, and the share in which nothing computes."""
    share = entry.get("without_computation")
    return [
        f"{entry['temp_bytes'] / 1e6:,.0f}" if "temp_bytes" in entry else "",
        f"{entry['lower_s']:.1f} + {entry['compile_s']:.1f}"
        if "compile_s" in entry
        else "",
        "" if share is None else f"{share:.1%}",
    ]


def choices(record: Record, arm: str) -> str:
    """What became of the streams of an arm of jhost's."""
    return record["explain"].get(arm, {}).get("choices", "")
