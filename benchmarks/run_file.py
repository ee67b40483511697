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

from benchmarks import environment
from benchmarks.runner import Plan

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
