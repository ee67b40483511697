"""What the instructions of a compiled module do, and the statements they come from."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from jhost.lowering.scopes import Origin, origin_of
from jhost.runtime.hlo_text import Instruction, Module
from jhost.runtime.schedule import CONTROL, attribute, collectives, is_matmul

Activity: TypeAlias = Literal["communication", "computation"]
"""Copies inside a device, fills and the like are computation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """An instruction: what it does, and the statement and iteration it is from.

    Loops, branches and calls do nothing (None) but hold others that do.
    """

    activity: Activity | None
    origin: Origin | None


def operations(module: Module) -> Mapping[str, Operation]:
    """What the instructions of `module` do, by their names.

    A name that ends a communication counts as the one that started it.
    """
    found: dict[str, Operation] = {}
    for instruction in itertools.chain(*module.computations.values()):
        found[instruction.name] = _operation(module, instruction, found)
    return found


def _operation(
    module: Module, instruction: Instruction, before: Mapping[str, Operation]
) -> Operation:
    if instruction.opcode in CONTROL:
        return Operation(activity=None, origin=None)
    if instruction.opcode.endswith(("-done", "-update")):
        started = before.get(instruction.operands[0] if instruction.operands else "")
        if started is not None:
            return started
    moves = any(collectives(module, instruction))
    return Operation(
        activity="communication" if moves else "computation",
        origin=next(_origins(module, instruction), None),
    )


def _origins(module: Module, instruction: Instruction) -> Iterator[Origin]:
    """What an instruction comes from, first what it is there for.

    A fusion has the metadata of one of its parts, which may be a slice that feeds the
    matmul in it.
    """
    parts = [i for name in instruction.called for i in _within(module, name)]
    heavy = [part for part in parts if is_matmul(module, part)]
    for part in (*collectives(module, instruction), *heavy, instruction, *parts):
        if origin := origin_of(attribute("op_name", part)):
            yield origin


def _within(module: Module, computation: str) -> Iterator[Instruction]:
    for instruction in module.computations.get(computation, ()):
        yield instruction
        for name in instruction.called:
            yield from _within(module, name)
