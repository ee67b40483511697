"""The part of a program in which a choice is weighed.

That is the section of a program, or of a body, that makes the marked value, and that
no loop crosses.  Of layers written out one after another, which have one choice, it is
one layer's.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Mapping, Sequence

from jhost.lowering.ir.bodies import all_marks, programs, with_marks
from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.marks import Mark
from jhost.lowering.ir.program import Program
from jhost.lowering.layouts.alone import alone, layouts_in_whole, section
from jhost.lowering.streams.sections import sections


class Parts:
    """A program, its bodies and their sections, each as a program of its own."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.programs = list(programs(program))
        counts = (len(each.marks) for each in self.programs)
        self.firsts = [0, *itertools.accumulate(counts)][:-1]
        self.sections: dict[int, dict[str, range]] = {}

    @functools.cached_property
    def layouts(self) -> list[Mapping[str, Layout]]:
        """How values lie in the whole."""
        return layouts_in_whole(self.program)

    def holding(
        self, numbers: Sequence[int], marks: Sequence[Mark]
    ) -> tuple[Program, list[int]]:
        """The part to weigh some marks alike in, with `marks`; and their numbers there.

        Crossing its border, values lie as they do in the whole.
        """
        place = bisect.bisect_right(self.firsts, numbers[0]) - 1
        first = self.firsts[place]
        body = self.programs[place]
        body = with_marks(body, marks[first : first + len(all_marks(body))])
        alike = [body.marks[number - first] for number in numbers]
        one = self.one_of(place, alike)
        part = body if one is None else section(body, one)
        if place or one:
            part = alone(part, self.layouts[place])
        inner = [n for n, m in enumerate(part.marks) if any(m is a for a in alike)]
        return part, inner

    def one_of(self, place: int, alike: Sequence[Mark]) -> range | None:
        """The section to weigh marks alike in, if the program has several.

        What a loop gains is a small part of a whole model.  Of layers alike it is one
        in the middle: the first and the last have less around them.
        """
        if place not in self.sections:
            self.sections[place] = sections(self.programs[place], self.layouts[place])
        known = self.sections[place]
        if not all(mark.buffer in known for mark in alike):
            return None
        if len(set(known.values())) == 1:
            return None
        found = sorted({known[mark.buffer] for mark in alike}, key=lambda r: r.start)
        return found[len(found) // 2]
