"""One candidate for stream marks: its program, and how long that takes by simulation.

`simulate.py` says when the program would be done.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from jhost.errors import first_line
from jhost.lowering.cost.choose_permutes import ranked_kinds
from jhost.lowering.cost.outcomes import Outcome, left_out_text, text_of
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.remembering import FollowingPass, through
from jhost.lowering.cost.sections import Section
from jhost.lowering.ir.bodies import all_marks, with_marks
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import between_processes, permutes, why_not_hidden
from jhost.lowering.ir.remarks import Prediction
from jhost.lowering.ir.requests import REFUSALS, set_choice

_UNKNOWN = Prediction(
    total=math.nan, compute=math.nan, communication=math.nan, host=math.nan
)
"""What is predicted where no rates are known."""

Predictions: TypeAlias = list[tuple[Program, Mapping[str, object], Prediction]]
"""Predictions: each has a program, how it stands in the whole, and its times."""


class Evaluator:
    """Lowers candidates for some marks alike of a section, and times their programs.

    `following` are the passes behind the choice.  `refusals` says which candidates were
    left out, and why.  Nothing is timed where no rates are known.
    """

    def __init__(
        self,
        section: Section,
        following: Sequence[FollowingPass],
        rates: Rates | None,
        predictions: Predictions | None = None,
    ) -> None:
        self.section = section
        self.marks = all_marks(section.program)
        self.following = following
        self.rates = rates
        self.predictions = [] if predictions is None else predictions
        self.refusals: list[str] = []

    def evaluate(
        self, candidate: StreamChoice, simplest: Program | None = None
    ) -> Outcome | None:
        """The outcome of `candidate`, or None and an entry in `refusals`.

        `simplest` is the program of the simplest candidate, if it was evaluated.
        """
        # Without wishes a candidate is made or refused, but never made in another way.
        candidate = dataclasses.replace(candidate, wished=())
        marks = list(self.marks)
        set_choice(marks, self.section.numbers, candidate)
        # The whole section is lowered anew: layouts depend on the choice as well.
        program = with_marks(self.section.program, marks)
        text = text_of(candidate)
        try:
            program = through(self.following, program)
        except REFUSALS as refusal:
            self.refusals.append(left_out_text(text, first_line(refusal)))
            return None
        if why_not := self.moves_between_processes(candidate, program, simplest):
            self.refusals.append(left_out_text(text, why_not))
            return None
        if self.rates is None:
            predicted = _UNKNOWN
        else:
            predicted = self.predicted(program, self.rates)
        return Outcome(
            mark=candidate,
            text=text,
            seconds=predicted.total,
            compute=predicted.compute,
            moving=predicted.communication,
            host_share=predicted.host / max(predicted.total, 1e-12),
            program=program,
        )

    def predicted(self, program: Program, rates: Rates) -> Prediction:
        """The prediction of a program, which may be known from an equal one."""
        how = self.section.how
        for other, its, prediction in self.predictions:
            same = other.body is program.body and other.results == program.results
            if same and how == its:
                return prediction
        (_, prediction), *_ = ranked_kinds(program, rates, **how, followed=True)
        self.predictions.append((program, how, prediction))
        return prediction

    def moves_between_processes(
        self, candidate: StreamChoice, program: Program, simplest: Program | None
    ) -> str:
        """Why a candidate that nobody named cannot hide its permutes; "" if it can."""
        if self.rates is None or candidate.spec.pipeline != "p2p" or candidate.by_name:
            return ""
        already = permutes(simplest) if simplest is not None else Counter[str]()
        more = [axis for axis, n in permutes(program).items() if n > already[axis]]
        mesh, reach = dict(program.mesh.shape), self.rates.reach
        return (
            why_not_hidden(more, reach, mesh) if between_processes(more, reach) else ""
        )
