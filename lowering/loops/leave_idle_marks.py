"""Marks that lead to no loop are removed before anything is ordered for loops.

A mark may ask for a pipeline that jhost predicts not to gain, or nothing may move along
its dim on this mesh.  The program then becomes the one without the mark.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import stream_choices, without_stream_choices
from jhost.lowering.loops.planned import planned


@dataclasses.dataclass(frozen=True, slots=True)
class LeaveIdleMarks(EachProgram):
    """Programs whose streams get no loop -> the same without marks of streams.

    The remarks on these marks are made here, because no later pass sees the marks.
    """

    name: ClassVar[str] = "leave_idle_marks"

    strict: bool = True

    def change(self, program: Program) -> Program:
        if not stream_choices(program):
            return program
        streams = planned(program, self.strict)
        if streams.pipelined:
            return program
        remarks = (*program.remarks, *streams.remarks())
        return dataclasses.replace(without_stream_choices(program), remarks=remarks)
