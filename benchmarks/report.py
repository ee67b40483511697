"""Makes the tables and plots of docs/benchmarks.md from the JSON files of runs.

    python -m benchmarks.report [FILE ...] [--no-plots]

Without files: all in benchmarks/results.  Where several runs measured one case, the
last one counts; a row's ratios are always of one run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import checks, figures, plots, targets
from jhost._text import counted

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = Path(__file__).parent / "results"

MODES = {"program": "in program", "once": "one op per call"}
PASSES = {"forward": "forward", "backward": "forward + backward"}

COLUMNS = (
    ("speedup", "speedup"),
    ("ceiling", "ceiling"),
    ("over_compute", "over compute"),
    ("to_the_limit", "to the limit"),
    ("efficiency", "efficiency"),
    ("versus_async_tp", "vs AsyncTP"),
    ("versus_torch", "vs torch"),
    ("versus_xla", "vs XLA"),
    ("versus_recipe", "vs recipe"),
    ("versus_ring", "vs ring"),
    ("versus_pallas", "vs Pallas"),
)

Record = Mapping[str, Any]


class Group(NamedTuple):
    """What one table is of; `mesh` is empty for tp alone in one process."""

    kind: str
    devices: int
    pass_: str
    mode: str
    mesh: str = ""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page and its plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--no-plots", action="store_true")
    arguments = parser.parse_args(argv)
    runs = stored(arguments.files)
    pictures = {} if arguments.no_plots else _draw(runs, arguments.page.parent)
    text = measured(runs, pictures)
    arguments.page.write_text(replaced(arguments.page.read_text(), text))
    print(f"{len(runs)} runs > {arguments.page.name}")


def stored(files: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """The runs in those files, or in all of benchmarks/results, as they began.

    Runs of `python -m benchmarks.step` have other forms, and tables of their own.
    """
    every = sorted(RESULTS.glob("*.json"))
    steps = ("-step.json", "-whole.json")
    files = files or [file for file in every if not file.name.endswith(steps)]
    runs = (json.loads(file.read_text()) for file in files)
    return sorted(runs, key=lambda run: run["started"])


def replaced(page: str, text: str, what: str = "measured") -> str:
    """The page with `text` between its two marks for `what`."""
    begin, end = f"<!-- begin: {what} -->", f"<!-- end: {what} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"


def groups(runs: Iterable[Mapping[str, Any]]) -> dict[Group, dict[str, Record]]:
    """The last record of each case, by table; runs on CPUs have a kind of their own."""
    found: dict[Group, dict[str, Record]] = {}
    for run in runs:
        kind = run["environment"]["device_kind"]
        for record in run["measurements"]:
            one = run["environment"].get("processes", 1) == 1
            along_tp = one and len(record.get("mesh", {})) < 2
            mesh = "" if along_tp else mesh_text(run, record)
            for mode in record["modes"]:
                group = Group(kind, record["devices"], record["pass"], mode, mesh)
                found.setdefault(group, {})[record["case"]] = record
    return found


def mesh_text(run: Mapping[str, Any], record: Record) -> str:
    """The axes of the mesh, and the processes that shared it."""
    axes = ", ".join(f"{axis} = {size}" for axis, size in record["mesh"].items())
    processes = run["environment"].get("processes", 1)
    return f"{axes} in {processes} processes" if processes > 1 else axes


def measured(
    runs: Sequence[Mapping[str, Any]], pictures: Mapping[Group, str] | None = None
) -> str:
    """All that is between the marks, as Markdown."""
    if not runs:
        return "No run is stored yet."
    parts = ["## Runs", "\n".join(run_line(run) for run in runs)]
    if not all(run["claims"] for run in runs):
        parts.append(
            "Runs on CPUs only show that the code works. Their times say nothing."
        )
    for group, records in groups(runs).items():
        parts += _group_parts(group, records, (pictures or {}).get(group))
    return "\n\n".join(parts)


def run_line(run: Mapping[str, Any]) -> str:
    facts = run["environment"]
    versions = ", ".join(f"{name} {v}" for name, v in facts["versions"].items())
    effort = run["effort"]
    led_in = f" after {effort['lead_in']} untimed" if "lead_in" in effort else ""
    line = (
        f"- {run['started'][:16].replace('T', ' ')} UTC, {facts['device_kind']}, "
        f"{len(run['measurements'])} measurements of {effort['blocks']} blocks of "
        f"{effort['calls']} calls{led_in}; {versions}; {_clocks(run)}"
    )
    if run["not_measured"]:
        line += f"; no time was left for {', '.join(run['not_measured'])}"
    if gone := run.get("superseded"):
        names = ", ".join(record["case"] for record in gone["measurements"])
        line += f"; kept in the file but not below, {gone['why']}: {names}"
    return line


def _clocks(run: Mapping[str, Any]) -> str:
    """What the GPUs' clocks were right after the cases."""
    seen = [
        gpu["clocks.sm"]
        for record in run["measurements"]
        for gpu in record.get("clocks") or ()
    ]
    if not seen:
        return "no clocks"
    clocks = sorted({int(text.split()[0]) for text in seen})
    return f"SM clocks {clocks[0]} to {clocks[-1]} MHz"


def _group_parts(
    group: Group, records: Mapping[str, Record], picture: str | None
) -> list[str]:
    kind, devices, pass_, mode, mesh = group
    where = f" ({mesh})" if mesh else ""
    title = f"## {devices} x {kind}{where}, {PASSES[pass_]}, {MODES[mode]}"
    parts = [title, _headline(records, mode)]
    if pass_ == "backward":
        parts.append(cotangents(records))
    if picture is not None:
        limited = any("ceiling" in _own(record, mode) for record in records.values())
        ceiling = ", and its ceiling" if limited else ""
        parts.append(f"![Speedup of each case{ceiling}]({picture})")
    parts += [_ratio_table(records, mode), _time_table(records, mode)]
    if pass_ == "forward" and mode == "program" and kind != "cpu":
        parts += _prediction_parts(records)
        parts += [] if mesh else _target_parts(records, devices)
    parts += _notes(records, mode)
    return parts


def _own(record: Record, mode: str) -> Mapping[str, float]:
    return record["figures"].get(mode, {}).get("jhost", {})


def _headline(records: Mapping[str, Record], mode: str) -> str:
    speedups = [
        _own(record, mode)["speedup"]
        for record in records.values()
        if "speedup" in _own(record, mode)
    ]
    mean = figures.geometric_mean(speedups)
    if mean is None:
        return "jhost and plain were not both measured."
    losses = sum(speedup < 1 for speedup in speedups)
    return (
        f"The geometric mean of the speedup over plain is **{mean:.3f}**, over "
        f"{counted(len(speedups), 'case')}. jhost is slower than plain in {losses}."
    )


def cotangents(records: Mapping[str, Record]) -> str:
    """Since when backward passes had what they start from; older records do not say."""
    early = [case for case, record in records.items() if "cotangent" not in record]
    if not early:
        return "The cotangent waits for the forward's result, as in a step."
    named = "" if len(early) == len(records) else f" in {', '.join(early)}"
    return (
        f"The cotangent was an argument{named}. So XLA could gather it during plain's "
        "forward. A training step cannot do that."
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; all but the first column are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(map(row_text, lines))


def row_text(cells: Sequence[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def _ratio_table(records: Mapping[str, Record], mode: str) -> str:
    shown = [
        (name, title)
        for name, title in COLUMNS
        if any(name in _own(record, mode) for record in records.values())
    ]
    rows = [
        [
            case,
            *(_number(_own(record, mode).get(name)) for name, _ in shown),
            _verdict(record),
        ]
        for case, record in records.items()
    ]
    return table(["case", *(title for _, title in shown), "right"], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _verdict(record: Record) -> str:
    """Whether every arm that was checked passed; else which did not."""
    checked = record["checks"]
    wrong = [arm for arm, found in checked.items() if not checks.passed(found)]
    if wrong:
        return f"no: {', '.join(wrong)}"
    return "yes" if checked else ""


def _time_table(records: Mapping[str, Record], mode: str) -> str:
    """Milliseconds of every arm: minimum / median over blocks."""
    timed = dict.fromkeys(
        arm
        for record in records.values()
        for arm, entry in record["modes"][mode].items()
        if "min_ms" in entry
    )
    rows = [
        [case, *(_times(record["modes"][mode].get(arm, {})) for arm in timed)]
        for case, record in records.items()
    ]
    return "Milliseconds, minimum / median over blocks:\n\n" + table(
        ["case", *timed], rows
    )


def _times(entry: Mapping[str, Any]) -> str:
    if "min_ms" not in entry:
        return ""
    return f"{entry['min_ms']:.3f} / {entry['median_ms']:.3f}"


def _prediction_parts(records: Mapping[str, Record]) -> list[str]:
    """Predictions of the cost model beside measurements, in milliseconds."""
    rows: list[list[str]] = []
    for case, record in records.items():
        said, entries = record.get("predicted", {}), record["modes"]["program"]
        pairs = [_predicted(said, entries, arm) for arm in ("jhost", "plain")]
        if any(pairs):
            rows.append([case, *pairs])
    if not rows:
        return []
    head = ["predicted / measured", "jhost", "plain"]
    return [f"The cost model, in milliseconds:\n\n{table(head, rows)}"]


def _predicted(
    said: Mapping[str, float], entries: Mapping[str, Mapping[str, Any]], arm: str
) -> str:
    measured = entries.get(arm, {}).get("min_ms")
    if measured is None or arm not in said:
        return ""
    return f"{said[arm]:.3f} / {measured:.3f} ({said[arm] / measured - 1:+.0%})"


def _target_parts(records: Mapping[str, Record], devices: int) -> list[str]:
    rows: list[list[str]] = []
    for case, record in records.items():
        wanted, own = targets.target(case, devices), _own(record, "program")
        if wanted is not None and own:
            missed = targets.misses(wanted, own)
            rows.append([case, "; ".join(missed) or "met"])
    return [f"Targets:\n\n{table(['case', 'result'], rows)}"] if rows else []


def _notes(records: Mapping[str, Record], mode: str) -> list[str]:
    """Memory, compilation and host time of plain and jhost; then what failed."""
    rows: list[list[str]] = []
    failures: list[str] = []
    for case, record in records.items():
        entries = record["modes"][mode]
        pair = [entries.get(arm, {}) for arm in ("plain", "jhost")]
        rows.append([case, *(_pair(pair, *column) for column in _COSTS)])
        failures += [
            f"- {case}, {arm}: {entry['error']}"
            for arm, entry in entries.items()
            if "error" in entry
        ]
    head = ["plain / jhost", "peak memory, MB", "compilation, s", "host, us a call"]
    parts = [table(head, rows)]
    if failures:
        parts.append("Arms that failed:\n\n" + "\n".join(failures))
    return parts


_COSTS = (
    (("peak_bytes",), 1e-6, 0),
    (("compile_s", "first_call_s"), 1.0, 1),
    (("host_us",), 1.0, 0),
)


def _pair(
    entries: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    scale: float,
    digits: int,
) -> str:
    found = [[entry[name] for name in names if name in entry] for entry in entries]
    if not all(found):
        return ""
    values = [each[0] for each in found]
    return " / ".join(f"{value * scale:.{digits}f}" for value in values)


def _draw(runs: Sequence[Mapping[str, Any]], folder: Path) -> dict[Group, str]:
    """The plots of the GPU tables, by their file names beside the page."""
    drawn: dict[Group, str] = {}
    for group, records in groups(run for run in runs if run["claims"]).items():
        kind, devices, pass_, mode, mesh = group
        where = f"{kind} {mesh}".strip().lower().replace(" = ", "")
        slug = "".join(c if c.isalnum() else "-" for c in where)
        name = f"benchmarks-{devices}x-{slug}-{pass_}-{mode}.svg"
        bars = {
            case: (own["speedup"], own.get("ceiling"))
            for case, record in records.items()
            if "speedup" in (own := _own(record, mode))
        }
        if bars:
            plots.speedups(bars, folder / name)
            drawn[group] = name
    return drawn


if __name__ == "__main__":
    main()
