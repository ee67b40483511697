"""Choose layouts by predicted time, where two move about as many bytes.

Bytes do not say what stands beside them.  A weight that is gathered an iteration early
costs no time, and an activation that is gathered where it is read costs all of it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jhost._text import seconds_text
from jhost.lowering.cost.find_streams import FindStreams
from jhost.lowering.cost.rates import Rates
from jhost.lowering.ir.bodies import rebuilt
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note
from jhost.lowering.layouts.activations import Staying
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts

_GAIN = 0.99
"""The time by other layouts must be below this share of the time by bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChooseLayouts:
    """A program with its streams -> the same, where something may have to stay.

    Attributes:
        layouts: what decides layouts by bytes, and knows how many others move.
        finding: the pass that finds streams; each of the layouts gets its own.
        rates: the rates of the devices; None where bytes are to decide.
    """

    name: ClassVar[str] = "choose_layouts"

    layouts: PropagateLayouts
    finding: FindStreams
    rates: Rates | None = None

    def apply(self, program: Program) -> Program:
        if self.rates is None or program.mesh.size <= 1:
            return program
        close = self.layouts.close(program)
        if not close:
            return program  # most programs end here
        found = self.finding.apply(program)
        predicted = self.finding.whole.predicted(found)
        # What moves is all that other layouts could save.
        if predicted.total - predicted.communication >= _GAIN * predicted.total:
            return found
        best, seconds = found, _GAIN * predicted.total
        for staying in close:
            other = self.finding.apply(where_stay(program, staying))
            again = self.finding.whole.predicted(other).total
            if again < seconds:
                best, seconds = _said(other, staying, again, predicted.total), again
        return best


def where_stay(program: Program, staying: Staying) -> Program:
    """`program` with that staying over a mesh axis, in its bodies too."""
    return rebuilt(program, lambda each: dataclasses.replace(each, staying=staying))


def _said(
    program: Program, staying: Staying, seconds: float, by_bytes: float
) -> Program:
    where = "{} stay over {}".format(*staying) if staying else "activations may move"
    text = (
        f"layouts: {where}, predicted to take {seconds_text(seconds)}; "
        f"the layouts that move the fewest bytes take {seconds_text(by_bytes)}"
    )
    note = Note(form=text)
    return dataclasses.replace(program, remarks=(*program.remarks, note))
