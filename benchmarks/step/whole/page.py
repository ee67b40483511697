"""What runs of whole steps came to, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.step import records
from benchmarks.step.records import Record

SUFFIX = "-whole"
"""Of the files' names."""

HEAD = (
    "",
    "ms, minimum / median",
    "jit / arm",
    "tuned / arm",
    "temporary memory, MB",
    "lowering + compilation, s",
    "nothing computes",
    "right",
    "streams",
)


def stored() -> list[dict[str, Any]]:
    """The runs in benchmarks/results, as they began."""
    return records.stored(SUFFIX)


_HOW_TO_READ = """\
### Whole steps

A whole step has an embedding, layers, output weights, a loss, clipping, AdamW and
donation. *jit / arm* is the time of `jit`, divided by the time of the arm: the first
number has the minima, the second the medians. *tuned / arm* is the same for `tuned`. An
arm is *right* if its first losses and moments equal those of `jit`. `fsdp2` (PyTorch)
ran before the others, in processes of its own.
[A user's whole training step](../benchmarks/README.md#a-users-whole-training-step)
says what the arms are.
"""


def section(runs: Sequence[Mapping[str, Any]]) -> str:
    """For the page."""
    return f"{_HOW_TO_READ}\n{measured(runs)}"


def measured(runs: Sequence[Mapping[str, Any]]) -> str:
    """A table for each case; of the same arms the last record counts."""
    parts = ["\n".join(map(report.run_line, runs))]
    for name, of_case in records.by_title(runs, title, _parts).items():
        parts += [f"#### {name}", *of_case]
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


def _link(run: Mapping[str, Any]) -> str:
    if not run.get("slow_link"):
        return ""
    return f", slow link ({run['link']['received_gb_per_s']:.1f} GB/s)"


def _parts(record: Record) -> list[str]:
    return records.table(record, HEAD, _row)


def _row(record: Record, arm: str) -> list[str]:
    entry = record["arms"][arm]
    return [
        arm,
        records.times(entry),
        _gain(record, "jit", arm),
        _gain(record, "tuned", arm),
        *records.costs(entry),
        _verdict(record["checks"].get(arm)),
        records.choices(record, arm),
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
