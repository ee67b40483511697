"""Choose what the user left open about streams: the pipeline, and the chunk count.

If the program was tuned, the candidate that was measured fastest is taken.  Otherwise
each candidate is lowered, and `simulate.py` predicts how long the program then takes.
One candidate has no loop.  Any other must gain more than the error of the simulation.
In the end the whole program is weighed against the one without any of these loops, as
`jax.jit` has it with options that begin collectives early.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jhost.lowering.cost.candidates import Evaluation
from jhost.lowering.cost.choose_schedule import WholePrograms
from jhost.lowering.cost.evaluator import Evaluator, Predictions
from jhost.lowering.cost.outcomes import NOT_PIPELINED, ranking_text
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.remembering import FollowingPass
from jhost.lowering.cost.sections import Section, Sections
from jhost.lowering.ir.bodies import all_marks, programs, with_marks
from jhost.lowering.ir.fingerprint import fingerprint
from jhost.lowering.ir.marks import Mark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import between_processes, why_not_hidden
from jhost.lowering.ir.requests import (
    StreamDefaults,
    Tuned,
    Tunings,
    marks_alike,
    open_marks,
    set_choice,
)
from jhost.lowering.streams.plan import take_known


@dataclasses.dataclass(frozen=True, slots=True)
class ChoosePipelines:
    """Marks that leave something open -> marks that leave nothing open, with a reason.

    Attributes:
        following: the passes up to the loops, which remember what they made.
        whole: what says how long whole programs take; None where that decides nothing.
        settings: the defaults for what a request leaves out.
        rates: the rates of the devices, if they are known.
        device_kind: JAX's name for the kind of devices.
        tuned: the choice that was measured fastest, by program and mark.
    """

    name: ClassVar[str] = "choose_pipelines"

    following: tuple[FollowingPass, ...]
    settings: StreamDefaults
    whole: WholePrograms | None = None
    rates: Rates | None = None
    device_kind: str = "unknown"
    tuned: Tunings = dataclasses.field(default_factory=dict[str, Mapping[int, Tuned]])

    def apply(self, program: Program) -> Program:
        program = self.settings.applied_to(program)
        marks, tuned = all_marks(program), self.tuned_marks(program)
        open_ones, sections = open_marks(program), Sections(program)
        predictions: Predictions = []
        weighed: list[int] = []
        # Each group is evaluated with the choices for the groups before it.
        for group in marks_alike(program):
            known = [number for number in group if number in tuned]
            for number in known:
                marks[number] = tuned[number].choice_for(open_ones[number])
            if others := [number for number in group if number not in known]:
                choice, may_lose = self.choice(sections, marks, others, predictions)
                set_choice(marks, others, choice)
                weighed += others if may_lose else []
        chosen = self.if_faster(program, marks, weighed)
        # A program whose marks left nothing open may have its streams planned already.
        for before, after in zip(programs(program), programs(chosen), strict=True):
            take_known(after, [before])
        return chosen

    def if_faster(
        self, program: Program, marks: list[Mark], numbers: Sequence[int]
    ) -> Program:
        """`program` with its choices, or with no loop at some marks if that is faster.

        A mark was weighed in its section, and only whole programs are left to XLA.
        """
        chosen = with_marks(program, marks)
        every = [(n, marks[n]) for n in numbers]
        loops = [(n, m) for n, m in every if isinstance(m, StreamChoice)]
        if self.whole is None or all(mark.unpipelined for _, mark in loops):
            return chosen
        others = [*marks]
        for number, mark in loops:
            others[number] = mark.without_loop()
        without = self.whole.early(with_marks(program, others))
        within = self.whole.predicted(chosen).total
        if within <= without:
            return chosen
        predicted = ((NOT_PIPELINED, without), ("pipelined", within))
        reason = ranking_text("predicted", predicted, ())
        for number, mark in loops:
            others[number] = dataclasses.replace(
                mark.without_loop(), reason=reason, predicted=predicted
            )
        return with_marks(program, others)

    def choice(
        self,
        sections: Sections,
        marks: Sequence[Mark],
        numbers: Sequence[int],
        predictions: Predictions,
    ) -> tuple[StreamChoice, bool]:
        """The choice for some marks alike, with all other marks as they are.

        Candidates are evaluated in the section that `Sections` finds for them.  The
        choice may also lose to no loop, as `jax.jit` would have it with options.
        """
        mark = open_marks(sections.program)[numbers[0]]
        why_not = self.nothing_to_gain(sections.program)
        if why_not or self.rates is None:
            return dataclasses.replace(mark, reason=_left_open(mark, why_not)), False
        section = sections.holding(numbers, marks)
        evaluator = Evaluator(section, self.following, self.rates, predictions)
        evaluation = Evaluation(evaluator)
        return evaluation.best(mark), evaluation.may_lose_early()

    def tuned_marks(self, program: Program) -> Mapping[int, Tuned]:
        """The measured choices for the marks of a resolved program, by number."""
        return self.tuned.get(fingerprint(program), {}) if self.tuned else {}

    def evaluation(
        self, program: Program, marks: Sequence[Mark], numbers: Sequence[int]
    ) -> Evaluation:
        """An evaluation of some marks of a resolved program, for measuring."""
        section = Section(program=with_marks(program, marks), numbers=numbers)
        evaluator = Evaluator(section, self.following, self.rates)
        return Evaluation(evaluator, to_measure=True)

    def nothing_to_gain(self, program: Program) -> str:
        """Why no pipeline could win here, if none could."""
        if program.mesh.size <= 1:  # an empty mesh has size 0
            return "there is one device, so nothing moves"
        if self.rates is None:
            return (
                f"jhost has no rates of {self.device_kind} devices; python -m jhost "
                f"calibrate measures them"
            )
        if not self.rates.overlaps:
            return f"on {self.device_kind} devices no transfer runs beside computation"
        mesh, reach = dict(program.mesh.shape), self.rates.reach
        axes = [axis for axis, size in mesh.items() if size > 1]
        # One axis within a process is enough: loops along it may gain.
        if len(between_processes(axes, reach)) == len(axes):
            return why_not_hidden(axes, reach, mesh)
        return ""


def _left_open(mark: StreamChoice, why_not: str) -> str:
    """The reason of a mark that asks for nothing; other marks keep their reason."""
    if mark.spec.pipeline is None and mark.spec.chunks is None:
        asked = "" if mark.unmet else "; ask with chunks= or pipeline="
        return f"auto: {why_not}{asked}"
    return mark.reason
