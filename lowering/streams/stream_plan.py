"""The streams of a program, and the answers of marks that led to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.requests import merge_choices
from jhost.lowering.streams.participation import (
    Participation,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Met:
    """Two streams met: whether their marks agree, and whether they became one."""

    kept: str
    taken: str
    agree: bool
    merged: bool

    def holds_for(self, marks: dict[str, StreamChoice]) -> bool:
        both = merge_choices(marks[self.kept], marks[self.taken])
        if both is not None and self.merged:
            marks[self.kept] = both
        return (both is not None) == self.agree


@dataclasses.dataclass(frozen=True, slots=True)
class Admitted:
    """A stream reached a node with so many steps, maybe too few for the chunks."""

    stream: str
    steps: Fraction
    too_few_for: int | None

    def holds_for(self, marks: dict[str, StreamChoice]) -> bool:
        return too_few_for(marks[self.stream], self.steps) == self.too_few_for


Answer: TypeAlias = Met | Admitted
"""An answer that the spreading of streams got from their marks."""


@dataclasses.dataclass(frozen=True, slots=True)
class StreamPlan:
    """The streams of a program.

    Attributes:
        marks: the mark of each stream; streams that met have one together.
        participations: the nodes in streams, by number.
        extents: for each stream, the steps that its loop can cut into chunks, or could
            cut for fewer chunks.
        declined: for each node where a stream stops, why.
        merged: pairs of streams in the order in which the first took in the second.
        uncut: nodes that only pass a stream on, because their own steps are no whole
            number in each group.
        answers: all answers that marks gave on the way, so that a plan can be reused.
    """

    marks: Mapping[str, StreamChoice]
    participations: Mapping[int, Participation]
    extents: Mapping[str, int]
    declined: Mapping[int, str]
    merged: Sequence[tuple[str, str]] = ()
    uncut: Mapping[int, Participation] = dataclasses.field(
        default_factory=dict[int, Participation]
    )
    answers: Sequence[Answer] = dataclasses.field(default=(), compare=False, repr=False)

    def holds_for(self, marks: Mapping[str, StreamChoice]) -> bool:
        """Whether other marks on the same values and dims lead to the same plan."""
        marks = dict(marks)  # answers merge marks in it
        return all(answer.holds_for(marks) for answer in self.answers)

    def participations_of(self, stream: str) -> dict[int, Participation]:
        """The nodes that join `stream`."""
        return {
            n: part for n, part in self.participations.items() if part.stream == stream
        }


def too_few_for(mark: StreamChoice, steps: Fraction) -> int | None:
    """The chunks that a mark asks for, if there are fewer steps; None otherwise."""
    # The chunks of a p2p pipeline are counted on all devices together, and checked
    # later.
    count = mark.spec.chunks if mark.spec.pipeline != "p2p" else None
    return count if isinstance(count, int) and steps < count else None
