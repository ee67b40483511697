"""What runs of whole steps came to, as tables."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.run_file import RESULTS

Record = Mapping[str, Any]

SUFFIX = "-whole"
"""Of the files' names."""

HEAD = (
    "",
    "ms, minimum / median",
    "jit by it",
    "tuned by it",
    "temporary memory, MB",
    "lowering + compilation, s",
    "nothing computes",
    "right",
    "streams",
)


def stored() -> list[dict[str, Any]]:
    """The runs in benchmarks/results, as they began."""
    runs = [json.loads(file.read_text()) for file in RESULTS.glob(f"*{SUFFIX}.json")]
    return sorted(runs, key=lambda run: run["started"])


_HOW_TO_READ = """\
### Whole steps

Embedding, layers, output weights, loss, clipping, AdamW, donation. *jit by it* and
*tuned by it*: how many times as fast as these an arm is, by minima / medians. It is
*right* if its first losses and moments are those of `jit`. `fsdp2` (PyTorch) ran before
the others, in processes of its own.
[What the arms are](../benchmarks/README.md#a-users-whole-training-step).
"""


def section(runs: Sequence[Mapping[str, Any]]) -> str:
    """For the page."""
    return f"{_HOW_TO_READ}\n{measured(runs)}"


def measured(runs: Sequence[Mapping[str, Any]]) -> str:
    """A table for each case; of the same arms the last record counts."""
    found: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for run in runs:
        for record in run["measurements"]:
            of_case = found.setdefault(title(run, record), {})
            of_case[tuple(record["arms"])] = _parts(record)
    parts = ["\n".join(map(report.run_line, runs))]
    for name, of_case in found.items():
        parts += [f"#### {name}", *itertools.chain.from_iterable(of_case.values())]
    return "\n\n".join(parts)


def title(run: Mapping[str, Any], record: Record) -> str:
    mesh, kind = report.mesh_text(run, record), run["environment"]["device_kind"]
    loop = record["loop"].replace("-", " with ")
    cast = "in the layer" if record["cast"] == "layer" else "before the layers"
    return (
        f"{record['model']}, {mesh}, {kind}{_link(run)}: "
        f"{record['layers']} layers, {loop}, cast {cast}, "
        f"{record['sequences']} sequences of {record['length']}"
    )


def line(record: Record) -> str:
    """The minima of a record's arms."""
    return " ".join(
        f"{arm} {entry['min_ms']:.2f}" if "min_ms" in entry else f"{arm} -"
        for arm, entry in record["arms"].items()
    )


def _link(run: Mapping[str, Any]) -> str:
    if not run.get("slow_link"):
        return ""
    return f", slow link ({run['link']['received_gb_per_s']:.1f} GB/s)"


def _parts(record: Record) -> list[str]:
    arms = record["arms"]
    rows = [_row(record, arm) for arm, entry in arms.items() if "min_ms" in entry]
    missing = [
        f"- {arm}: {entry.get('error') or entry.get('skipped')}"
        for arm, entry in arms.items()
        if "min_ms" not in entry
    ]
    return [report.table(HEAD, rows), *(["\n".join(missing)] if missing else [])]


def _row(record: Record, arm: str) -> list[str]:
    entry = record["arms"][arm]
    share = entry.get("without_computation")
    return [
        arm,
        f"{entry['min_ms']:.2f} / {entry['median_ms']:.2f}",
        _gain(record, "jit", arm),
        _gain(record, "tuned", arm),
        f"{entry['temp_bytes'] / 1e6:,.0f}" if "temp_bytes" in entry else "",
        f"{entry['lower_s']:.1f} + {entry['compile_s']:.1f}"
        if "compile_s" in entry
        else "",
        "" if share is None else f"{share:.1%}",
        _verdict(record["checks"].get(arm)),
        record["explain"].get(arm, {}).get("choices", ""),
    ]


def _gain(record: Record, other: str, arm: str) -> str:
    """How many times as fast as the other it is, by minima and by medians."""
    entry, beside = record["arms"][arm], record["arms"].get(other, {})
    if "min_ms" not in beside:
        return ""
    gains = (beside[key] / entry[key] for key in ("min_ms", "median_ms"))
    return " / ".join(f"{gain:.3f}" for gain in gains)


def _verdict(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return "yes" if found["right"] else f"WRONG by {found['loss_difference']:.1%}"
