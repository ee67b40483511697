"""The JSON file of a run, and how a command reads what is wanted of one."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from benchmarks import environment, runner
from benchmarks.runner import Plan
from jhost._progress import Progress

T = TypeVar("T")

FORMAT = 1
RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass
class Run:
    """The JSON file of a run: written anew after every case, by process 0."""

    path: Path
    content: dict[str, Any]

    def write(self) -> None:
        if jax.process_index():
            return  # process 0 writes for all
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(beside, self.path)

    def measure(
        self,
        what: str,
        plan: Plan,
        bar: Progress,
        measured: Callable[[], dict[str, Any]],
        line: Callable[[dict[str, Any]], str],
    ) -> None:
        """Adds the record of a case, or why there is none, and says so in a line."""
        bar.step(what)
        if plan.deadline.passed():
            self.content["not_measured"].append(what)
            return
        try:
            record = measured()
            self.content["measurements"].append(record)
            bar.say(line(record))
        except Exception as error:
            # What fails outside of an arm: operands that do not fit, say.
            self.content["failed"].append({what: runner.error_text(error)})
            bar.say(f"{what}: {runner.error_text(error)}")
        finally:
            self.write()
            runner.forget()


def new_run(path: Path | None, plan: Plan, on_gpu: bool, suffix: str = "") -> Run:
    """A run without measurements; `suffix` ends the name that it gets without one."""
    now = datetime.datetime.now(datetime.UTC)
    facts = environment.describe()
    if path is None:
        kind = facts["device_kind"].replace(" ", "-").lower()
        path = RESULTS / f"{now:%Y-%m-%d-%H%M}-{kind}{suffix}.json"
    content: dict[str, Any] = {
        "format": FORMAT,
        "claims": on_gpu,
        "started": now.isoformat(timespec="seconds"),
        "environment": facts,
        "effort": dataclasses.asdict(plan.effort),
        "arms": list(plan.arms),
        "clocks_at_start": environment.clocks(),
        "measurements": [],
        "failed": [],
        "not_measured": [],
    }
    return Run(path, content)


def separated(convert: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A type for argparse: several, with commas between them."""

    def parse(text: str) -> list[T]:
        return [convert(part) for part in text.split(",") if part]

    parse.__name__ = "list"  # what argparse calls it in its errors
    return parse
