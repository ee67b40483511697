"""Give every value a layout: which mesh axes shard its dims on every device.

`solve_layouts` decides, and `Rewriter` writes the decisions into the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import ClassVar, TypeAlias

from jhost.lowering.ir.bodies import is_alike
from jhost.lowering.ir.derived import Shared
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import stream_choices
from jhost.lowering.ir.statements import Compute, Set
from jhost.lowering.layouts.activations import Staying
from jhost.lowering.layouts.flat_bodies import FlatBody, flattened
from jhost.lowering.layouts.hidden_dims import (
    StreamedDim,
    one_way_each,
    streamed_dims,
)
from jhost.lowering.layouts.interned import Interned
from jhost.lowering.layouts.kinds import OfKinds
from jhost.lowering.layouts.remarks import LayoutRemarks
from jhost.lowering.layouts.rewriter import Rewriter
from jhost.lowering.layouts.solve import Solution, solve_layouts
from jhost.lowering.streams.plan import take_known

Solutions: TypeAlias = dict[Hashable, Solution]
"""Solutions by all that they depend on."""


@dataclasses.dataclass(frozen=True, slots=True)
class _LaidOut:
    """A program before and after layouts, with the dims that its streams would cut.

    `every` has the programs with other stream marks that cut the same dims.
    """

    before: Program
    streamed: Mapping[str, StreamedDim]
    rewriter: Rewriter
    after: Program
    every: list[Program]

    def is_of(self, program: Program) -> bool:
        """Whether another program, which only has other stream marks, is cut alike."""
        if self.streamed != streamed_dims(program):
            return False
        self.every.append(program)
        return True

    def of(self, program: Program) -> Program:
        """Another program laid out as this one, with its own stream marks."""
        added = self.after.remarks[len(self.before.remarks) :]
        return dataclasses.replace(
            self.after,
            marks=tuple(self.rewriter.marks(program.marks)),
            remarks=(*program.remarks, *added),
        )


@dataclasses.dataclass(slots=True)
class _SharedLayouts:
    """What candidates share: solutions, and the bodies written for them."""

    solutions: Solutions = dataclasses.field(default_factory=dict[Hashable, Solution])
    kinds: OfKinds = dataclasses.field(default_factory=OfKinds)
    written: Interned = dataclasses.field(default_factory=Interned)
    programs: Shared[_LaidOut] = dataclasses.field(default_factory=Shared[_LaidOut])


@dataclasses.dataclass(frozen=True, slots=True)
class PropagateLayouts:
    """A program with global shapes -> the program of one device of the mesh.

    Of two layouts, the one that leaves fewer bytes to hide wins.  Bytes that the chosen
    pipelines can hide only break ties.
    """

    name: ClassVar[str] = "propagate_layouts"

    known: _SharedLayouts = dataclasses.field(
        default_factory=_SharedLayouts, compare=False, repr=False
    )

    def apply(self, program: Program) -> Program:
        # There is one device, and nothing to lay out.
        if not program.mesh.shape:
            return program
        known = self.known.programs.of(program)
        alike = [each for each in known if is_alike(each.before, program)]
        for each in alike:
            if take_known(program, each.every):
                return each.of(program)
        for each in alike:
            if each.is_of(program):
                return each.of(program)
        solution = self.solution(program)
        marks = shardings_of(solution.flat)
        remarks = LayoutRemarks(solution, marks, dict(program.mesh.shape))
        rewriter = Rewriter(solution.flat, solution, remarks, self.known.written)
        after = rewriter.rewrite()
        streamed = streamed_dims(program)
        known.append(_LaidOut(program, streamed, rewriter, after, [program]))
        return after

    def close(self, program: Program) -> tuple[Staying, ...]:
        """What else could stay over a mesh axis for at most twice the bytes."""
        if not program.mesh.shape:
            return ()
        return self.solution(program).close

    def solution(self, program: Program) -> Solution:
        return solve_program(program, self.known.solutions, self.known.kinds)


def solve_program(
    program: Program, known: Solutions | None = None, kinds: OfKinds | None = None
) -> Solution:
    """The solution for a program with its marks, which may be among the `known`.

    Findings about `kinds` of operations hold for it as well.
    """
    known = {} if known is None else known
    operations, flat = whole = flattened(program)
    streamed = {
        each.prefix + name: dim
        for each in flat.walk()
        for name, dim in streamed_dims(each.program).items()
    }
    shardings = shardings_of(flat)
    # Candidates of the cost model share statements, and most have equal solutions.
    key = (
        tuple(id(op.stmt) for op in operations if isinstance(op.stmt, Compute | Set)),
        tuple(shardings.items()),
        (program.staying, program.mesh),
        tuple(streamed.items()),
    )
    # A known solution keeps its statements alive, so ids in keys stay theirs.
    if key not in known:
        ways = one_way_each(streamed, program.mesh.axis_names)
        near = known.get((*key[:-1], ())) if _are_found(flat) else None
        solved = [solve_layouts(whole, shardings, way, near, kinds) for way in ways]
        # The first of equals: chunks then move along the innermost axis.
        known[key] = min(solved, key=lambda solution: solution.price.in_bytes.all)
    return dataclasses.replace(known[key], flat=flat)


def _are_found(flat: FlatBody) -> bool:
    """Whether nobody asked for its streams.

    They were found where a solution without any moves something, and are near it,
    unless they are to spare what it moves.
    """
    marks = (mark for each in flat.walk() for mark in stream_choices(each.program))
    return all(mark.found and not mark.spares for mark in marks)


def shardings_of(flat: FlatBody) -> dict[str, ShardMark]:
    """The shardings that the user gave, by the names of values in `flattened`."""
    return {
        each.prefix + mark.buffer: mark
        for each in flat.walk()
        for mark in each.program.marks
        if isinstance(mark, ShardMark)
    }
