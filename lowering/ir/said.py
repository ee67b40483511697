"""What a program says to the user: of values by the names that those have for him."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jhost.lowering.ir.bodies import held_statements, programs
from jhost.lowering.ir.effects import written
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LayoutReport, Note, Remark, ReplicationReport


def said(program: Program, name: str) -> str:
    """What a message calls a buffer: what the value is called that it is made of.

    A pass that makes a buffer of another's value puts a word behind that one's name.
    """
    base = name
    while base and base not in program.said:
        base = base.rpartition("_")[0]
    return program.said.get(base, name)


def said_statements(program: Program) -> tuple[str, ...]:
    """What each of `statements` makes, and what the program returns."""
    made = (
        _all_said(p, [b.name for b in written(s)]) for p, s in held_statements(program)
    )
    results = _all_said(program, [buffer.name for buffer in program.results])
    return (*(", ".join(names) for names in made), ", ".join(results))


def said_remarks(program: Program) -> list[Remark]:
    """The remarks on a program and on all bodies in it, in the user's names."""
    return [
        _said(each, remark) for each in programs(program) for remark in each.remarks
    ]


def _said(program: Program, remark: Remark) -> Remark:
    match remark:
        case Note() | ReplicationReport():
            values = _all_said(program, remark.values)
            return dataclasses.replace(remark, values=values)
        case LayoutReport(value=value):
            name = said(program, value)
            text = name + remark.text.removeprefix(value)
            return dataclasses.replace(remark, value=name, text=text)
        case _:
            return remark


def _all_said(program: Program, names: Sequence[str]) -> tuple[str, ...]:
    """Each once: several buffers may be parts of one value."""
    return tuple(dict.fromkeys(said(program, name) for name in names))
