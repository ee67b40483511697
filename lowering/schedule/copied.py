"""Statements written once more, under other names."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.units.make import with_own_variables


def copied(
    stmts: Sequence[ir.Stmt], known: Mapping[str, ir.Buffer], names: FreshNames
) -> tuple[list[ir.Stmt], dict[str, ir.Buffer]]:
    """A copy of some statements that reads `known` values instead of the original ones.

    Returns:
        The statements, and the values that they make, by the names of the original.
    """
    made: dict[str, ir.Buffer] = {}
    communications: dict[str, str] = {}
    for stmt in ir.walk(tuple(stmts)):
        for buffer in [] if isinstance(stmt, ir.For) else reads_writes(stmt)[1]:
            if buffer.name not in made:
                name = names.fresh(buffer.name)
                made[buffer.name] = dataclasses.replace(buffer, name=name)
        if isinstance(stmt, ir.Communicate):
            # A wait finds its communication by name, so two that may be under way at
            # one time must not share a name.
            communications[stmt.name] = names.fresh(stmt.name)
    replaced = {**known, **made}
    copies = [
        _with_own_names(replace_buffers(stmt, replaced), communications)
        for stmt in stmts
    ]
    return copies, made


def with_names(stmts: Sequence[ir.Stmt], names: Mapping[str, str]) -> list[ir.Stmt]:
    """Statements with some names of values and communications replaced.

    They keep their variables, and are for another program.
    """
    if not names:
        return [*stmts]
    buffers = {
        buffer.name: dataclasses.replace(buffer, name=names[buffer.name])
        for stmt in ir.walk(tuple(stmts))
        for buffer in itertools.chain(*reads_writes(stmt))
        if buffer.name in names
    }
    return [_renamed(replace_buffers(stmt, buffers), names) for stmt in stmts]


def _renamed(stmt: ir.Stmt, names: Mapping[str, str]) -> ir.Stmt:
    """A statement with other names of communications."""
    match stmt:
        case ir.Communicate(name=name) if name in names:
            return dataclasses.replace(stmt, name=names[name])
        case ir.Wait(communication=name) if name in names:
            return ir.Wait(communication=names[name])
        case ir.For(body=body):
            return dataclasses.replace(
                stmt, body=tuple(_renamed(each, names) for each in body)
            )
        case _:
            return stmt


def _with_own_names(stmt: ir.Stmt, communications: Mapping[str, str]) -> ir.Stmt:
    """A statement with communications and variables of its own."""
    match stmt:
        case ir.Communicate():
            return dataclasses.replace(stmt, name=communications[stmt.name])
        case ir.Wait(communication=name):
            return ir.Wait(communication=communications[name])
        case ir.Compute(unit=unit):
            return dataclasses.replace(stmt, unit=with_own_variables(unit))
        case ir.For(body=body):
            copies = (_with_own_names(each, communications) for each in body)
            return dataclasses.replace(stmt, body=tuple(copies))
        case _:
            return stmt
