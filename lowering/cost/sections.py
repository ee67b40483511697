"""The section of a program in which a choice is evaluated.

The section is the body whose marks are open.  Layers that are written out one after
another get one choice, so one layer stands for all.  Each candidate is then lowered for
one layer and not for the whole model, and its gain does not get lost in the time of the
other layers.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence, Set as AbstractSet
from typing import Any

from jhost.lowering.ir.bodies import all_marks, programs, with_marks
from jhost.lowering.ir.derived import Shared
from jhost.lowering.ir.effects import read_and_made, reads_writes
from jhost.lowering.ir.graph import makers_of
from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.marks import Mark
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import marks_alike
from jhost.lowering.ir.statements import Wait
from jhost.lowering.layouts.section import CutOut, layouts_in_whole, with_fixed_border
from jhost.lowering.schedule.compute_late import ComputeLate

LAYERS = 3
"""From so many marks alike on, a layer in the middle stands for all layers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A program in which some marks are evaluated.

    Attributes:
        program: the program, with its border laid out as in the whole.
        numbers: which of its marks are evaluated.
        in_pieces: the values that pass between layers in the chunks they are made in.
        carried: for each param that the layer before makes, the name of the result by
            which this layer makes it for the next one.
    """

    program: Program
    numbers: Sequence[int]
    in_pieces: AbstractSet[str] = frozenset()
    carried: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    @property
    def how(self) -> dict[str, Any]:
        """How it stands in the whole, as arguments of `predict`."""
        return {
            "in_pieces": self.in_pieces,
            "carried": self.carried,
        }


def _border(program: Program) -> set[str]:
    return {buffer.name for buffer in (*program.params, *program.results)}


class Sections:
    """A program, its bodies and their layers, each as a program of its own.

    Cheap values are computed in the section that reads them, so that only kept values
    cross the borders.

    `alike` is for a program that is laid out already, and says which of its marks are
    alike.  Its borders stay as they are, and the following passes say what is computed
    late.
    """

    def __init__(
        self, program: Program, alike: Sequence[Sequence[int]] | None = None
    ) -> None:
        if alike is None:
            program = ComputeLate().apply(program)
        self.program = program
        self.laid_out = alike is not None
        self.alike = marks_alike(program) if alike is None else alike
        self.programs = list(programs(program))
        self.cuts = Shared[CutOut]()
        counts = (len(each.marks) for each in self.programs)
        self.firsts = [0, *itertools.accumulate(counts)][:-1]
        self.makers = [
            makers_of((b.name for b in reads_writes(stmt)[1]) for stmt in each.body)
            for each in self.programs
        ]

    def holding(self, numbers: Sequence[int], marks: Sequence[Mark]) -> Section:
        """The section in which to evaluate some marks alike, with `marks`.

        Values that cross its border lie there as in the whole program.
        """
        holder = self.holder(numbers)
        first = self.firsts[holder]
        body = self.programs[holder]
        body = with_marks(body, marks[first : first + len(all_marks(body))])
        alike = [body.marks[number - first] for number in numbers]
        layer = self.layer(numbers)
        own = body if layer is None else self.cut(body, layer).out_of(body)
        if (holder or layer) and not self.laid_out:
            own = with_fixed_border(own, self.layouts[holder])
        return Section(
            program=own,
            numbers=[n for n, m in enumerate(own.marks) if any(m is a for a in alike)],
            in_pieces=_border(own) - _border(body),
            carried={} if layer is None else self.carried(holder, layer, own),
        )

    def cut(self, program: Program, layer: range) -> CutOut:
        """Where a layer of a program is cut out, whatever its marks ask for."""
        known = self.cuts.of(program)
        for cut in known:
            if cut.numbers == layer:
                return cut
        known.append(CutOut.of(program, layer))
        return known[-1]

    def carried(self, holder: int, layer: range, own: Program) -> Mapping[str, str]:
        """The params of a layer that the layer before it makes, if both are alike.

        Each param has the name of the result that the layer itself makes in its stead.
        """
        body, start = self.programs[holder].body, layer.start - len(layer)
        # The statements before it are not one whole layer.
        if start not in (0, *self.borders[holder]):
            return {}
        _, earlier = read_and_made(body[start : layer.start])
        _, made = read_and_made(body[layer.start : layer.start + len(layer)])
        alike = {
            buffer.name: again.name
            for buffer, again in zip(earlier.values(), made.values(), strict=False)
            if (buffer.shape, buffer.dtype) == (again.shape, again.dtype)
        }
        results = {result.name for result in own.results}
        read = (param.name for param in own.params)
        return {name: alike[name] for name in read if alike.get(name) in results}

    @functools.cached_property
    def layouts(self) -> list[Mapping[str, Layout]]:
        """How values lie in the whole."""
        return layouts_in_whole(self.program)

    def holder(self, numbers: Sequence[int]) -> int:
        """The program among `programs` that has marks alike."""
        return bisect.bisect_right(self.firsts, numbers[0]) - 1

    def layer(self, numbers: Sequence[int]) -> range | None:
        """The statements of the middle one of the layers that have marks alike."""
        holder, made = self.holder(numbers), self.made(numbers)
        if not made or not self.borders[holder]:
            return None
        borders = [0, *self.borders[holder], len(self.programs[holder].body)]
        layers = sorted({bisect.bisect_right(borders, number) for number in made})
        # The middle one: the first layer has nothing before it, the last nothing behind
        # it, and so they hide less.
        after = layers[len(layers) // 2]
        return range(borders[after - 1], borders[after])

    @functools.cached_property
    def borders(self) -> list[list[int]]:
        """Where layers begin: behind marks alike, if each layer has one of them.

        The layers of a backward pass have borders of their own, behind the last layer
        of the forward pass.
        """
        found: list[list[int]] = [[] for _ in self.programs]
        for numbers in sorted(self.alike, key=len):
            made, borders = self.made(numbers), found[self.holder(numbers)]
            between = {bisect.bisect(borders, number) for number in made}
            # All stand between the same borders, so they are layers of one row.
            if len(made) >= LAYERS and len(between) == 1:
                behind = (self.behind(numbers, number) for number in made)
                borders[:] = sorted([*borders, *behind])
        return found

    def behind(self, numbers: Sequence[int], number: int) -> int:
        """The number of the statement behind a statement and its wait."""
        body = self.programs[self.holder(numbers)].body
        number += 1
        return number + (number < len(body) and isinstance(body[number], Wait))

    def made(self, numbers: Sequence[int]) -> list[int]:
        """The statements that make values with marks alike; none of them is a param."""
        holder = self.holder(numbers)
        marks, first = self.programs[holder].marks, self.firsts[holder]
        names = [marks[number - first].buffer for number in numbers]
        makers = self.makers[holder]
        return [makers[name] for name in names] if makers.keys() >= set(names) else []
