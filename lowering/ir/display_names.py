"""A program's statements and remarks with the user's names for values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jhost.lowering.ir.bodies import held_statements, programs
from jhost.lowering.ir.effects import written
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LayoutReport, Note, Remark, ReplicationReport


def display_name(program: Program, name: str) -> str:
    """The name of a buffer in messages: the user's name of the value it comes from.

    A pass that makes a buffer from another one adds a word to that one's name.
    """
    base = name
    # Word by word from the end: users' names have underscores as well.
    while base and base not in program.display_names:
        base = base.rpartition("_")[0]
    return program.display_names.get(base, name)


def displayed_statements(program: Program) -> tuple[str, ...]:
    """What each of `statements` makes, and what the program returns."""
    made = (
        _display_names(p, [b.name for b in written(s)])
        for p, s in held_statements(program)
    )
    results = _display_names(program, [buffer.name for buffer in program.results])
    return (*(", ".join(names) for names in made), ", ".join(results))


def displayed_remarks(program: Program) -> list[Remark]:
    """The remarks on a program and on all bodies in it, in the user's names."""
    return [
        _displayed(each, remark)
        for each in programs(program)
        for remark in each.remarks
    ]


def _displayed(program: Program, remark: Remark) -> Remark:
    match remark:
        case Note() | ReplicationReport():
            values = _display_names(program, remark.values)
            return dataclasses.replace(remark, values=values)
        case LayoutReport(value=value):
            name = display_name(program, value)
            # The text was written when only the buffer's name was known, and begins
            # with it.
            text = name + remark.text.removeprefix(value)
            return dataclasses.replace(remark, value=name, text=text)
        case _:
            return remark


def _display_names(program: Program, names: Sequence[str]) -> tuple[str, ...]:
    """Each once: several buffers may be parts of one value."""
    return tuple(dict.fromkeys(display_name(program, name) for name in names))
