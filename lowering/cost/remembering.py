"""Passes that remember what they made of a program, for the next candidate.

Candidates differ in the choice for one mark or a few.  Most passes see nothing of that
in most bodies, and would make the same result again.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from jhost.lowering.ir.bodies import EachProgram, held_bodies, is_alike, with_each_body
from jhost.lowering.ir.derived import Shared
from jhost.lowering.ir.marks import Mark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LayoutReport, Remark
from jhost.lowering.ir.requests import stream_choices
from jhost.lowering.streams.plan import take_known, takes_plan, with_plan_of


class FollowingPass(Protocol):
    """A pass that lowers a candidate further."""

    def apply(self, program: Program) -> Program: ...


def through(steps: Iterable[FollowingPass], program: Program) -> Program:
    """What passes make of a program, one after another."""
    for step in steps:
        program = step.apply(program)
    return program


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """What a pass made of a program.

    Attributes:
        before: the program.
        after: what the pass made of it.
        seen: what the pass saw of the program's stream marks.
        every: `after` with each choice of marks that was asked for since; the pass does
            not see how they differ.
    """

    before: Program
    after: Program
    seen: object
    every: list[Program]

    def of(self, program: Program, sees: Callable[[], object]) -> Program | None:
        """What the pass would make of another program, or None if this does not say."""
        remarks = self.remarks(program)
        if remarks is None or not is_alike(self.before, program):
            return None
        # Equal marks are compared first: finding what a pass sees of them takes time.
        if self.before.marks != program.marks and self.seen != sees():
            return None
        # The pass changes nothing, and marks stand in no statement.
        if self.after is self.before:
            return program
        marks = _with_choices(self.after.marks, stream_choices(program))
        made = dataclasses.replace(
            self.after, marks=marks, remarks=remarks, streamed=program.streamed
        )
        # The same object as before, so that the programs around it can be the same too.
        for other in self.every:
            if other == made and other.streamed == made.streamed:
                return other
        if not take_known(made, self.every) and takes_plan(self.after):
            with_plan_of(program, made)
        self.every.append(made)
        return made

    def remarks(self, program: Program) -> tuple[Remark, ...] | None:
        """The program's remarks and the pass's own; None if that is not known.

        A pass drops reports on how values lie where it changed them, and no others.
        """
        before, after = self.before.remarks, self.after.remarks
        if before == program.remarks:
            return after
        if after[: len(before)] == before:
            return (*program.remarks, *after[len(before) :])
        known, kept = {*map(id, before)}, {*map(id, after)}
        left = [remark for remark in before if id(remark) in kept]
        others = [remark for remark in program.remarks if id(remark) not in known]
        if any(isinstance(remark, LayoutReport) for remark in others):
            return None
        if not all(map(operator.is_, left, after)):
            return None
        stay = (r for r in program.remarks if id(r) in kept or id(r) not in known)
        return (*stay, *after[len(left) :])


class Remembering:
    """A pass that remembers what it made of each program and body.

    A pass that is no `EachProgram` sees a whole program, with all bodies in it.  It has
    to remember by itself what it makes of programs with stream marks.
    """

    def __init__(self, step: FollowingPass, name: str = "") -> None:
        self.step, self.name = step, name
        self.made = Shared[_Made]()
        self.bodies = Shared[Program]()
        self.last: tuple[Program, Program] | None = None

    def apply(self, program: Program) -> Program:
        step = self.step
        if not isinstance(step, EachProgram):
            if stream_choices(program):
                return self.again(program)
            return self.remembered(program, lambda: None, step.apply)
        return self.remembered(
            program,
            functools.cache(lambda: step.sees(program)),
            lambda program: step.change(self.with_bodies(program)),
        )

    def again(self, program: Program) -> Program:
        """What a pass by itself makes of a program, which may be the one before."""
        if self.last is None or self.last[0] is not program:
            self.last = (program, self.step.apply(program))
        return self.last[1]

    def with_bodies(self, program: Program) -> Program:
        """The program after the pass on its bodies; equal bodies give one object."""
        after = with_each_body(program, self.apply)
        if after is program:
            return program
        known = self.bodies.of(program)
        bodies = [*held_bodies(after)]
        for each in known:
            if all(map(operator.is_, held_bodies(each), bodies)):
                return dataclasses.replace(after, body=each.body)
        known.append(after)
        return after

    def remembered(
        self,
        program: Program,
        sees: Callable[[], object],
        make: Callable[[Program], Program],
    ) -> Program:
        """What the pass makes of a program, which may be known."""
        known = self.made.of(program)
        for each in known:
            if (after := each.of(program, sees)) is not None:
                return after
        after = make(program)
        if _keeps_choices(program, after):
            known.append(_Made(program, after, sees(), [after]))
        return after


def _keeps_choices(before: Program, after: Program) -> bool:
    """Whether the pass kept each stream mark once, or removed all.

    Other passes make several marks of one, and then no mark says which it came from.
    """
    return len(stream_choices(after)) in (0, len(stream_choices(before)))


def _with_choices(
    marks: Sequence[Mark], said: Sequence[StreamChoice]
) -> tuple[Mark, ...]:
    """`marks` on their values, with the stream marks' choices taken from `said`."""
    choices = iter(said)
    return tuple(
        dataclasses.replace(next(choices), buffer=mark.buffer, dim=mark.dim)
        if isinstance(mark, StreamChoice)
        else mark
        for mark in marks
    )
