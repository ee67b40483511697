"""What `python -m jhost doctor` found, and how it says it."""

from __future__ import annotations

import dataclasses
from typing import Any

from jhost._text import counted
from jhost.runtime.problem import Problem

JAX = ((0, 10), (0, 13))
"""The first version of JAX that jhost works with, and the first that it does not."""


@dataclasses.dataclass(slots=True)
class Report:
    """What was found: facts by title and name, notes, and problems."""

    facts: dict[str, dict[str, Any]] = dataclasses.field(
        default_factory=dict[str, dict[str, Any]]
    )
    notes: list[str] = dataclasses.field(default_factory=list[str])
    problems: list[Problem] = dataclasses.field(default_factory=list[Problem])

    def __str__(self) -> str:
        lines: list[str] = []
        for title, facts in self.facts.items():
            lines.append(title)
            lines += [f"  {name:<20} {value}" for name, value in facts.items()]
        lines += [f"note: {note}" for note in self.notes]
        for problem in self.problems:
            lines += [f"PROBLEM: {problem.what}", f"  what to do: {problem.advice}"]
        lines.append(f"{counted(len(self.problems), 'problem')} found")
        return "\n".join(lines)
