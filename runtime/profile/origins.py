"""What the instructions of a compiled module do, and the statements they are from."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from jhost.lowering.ir.scopes import Origin, origin_of
from jhost.runtime.profile.hlo_text import Instruction, Module
from jhost.runtime.profile.instructions import (
    CONTROL,
    attribute,
    collectives,
    is_matmul,
)

Activity: TypeAlias = Literal["communication", "computation"]
"""Copies inside a device, fills and the like are computation."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOperation:
    """What an instruction does, and the statement and iteration that it comes from.

    Loops, branches and calls do nothing themselves, so their activity is None.
    """

    activity: Activity | None
    origin: Origin | None


class Operations:
    """What the instructions of a module do."""

    def __init__(self, module: Module) -> None:
        self._by_name: dict[str, DeviceOperation] = {}
        self._started: dict[str, DeviceOperation] = {}
        for instruction in itertools.chain(*module.computations.values()):
            found = _operation(module, instruction, self._by_name)
            self._by_name[instruction.name] = found
            op_name = attribute("op_name", instruction)
            if op_name and instruction.opcode.endswith("-start"):
                self._started[op_name] = found

    def find(self, name: str, op_name: str, kernel: str) -> DeviceOperation:
        """What `kernel` did, for an instruction of that name and metadata."""
        # An asynchronous instruction runs one inside it, whose name is not in the text
        # of the module.  Both have the same metadata.
        if found := self._by_name.get(name) or self._started.get(op_name):
            return found
        activity = "communication" if _MOVES.search(kernel) else "computation"
        return DeviceOperation(activity, origin_of(op_name))


# NCCL's kernels, and copies between GPUs.
_MOVES = re.compile(r"nccl|P2P", re.IGNORECASE)


def _operation(
    module: Module, instruction: Instruction, before: Mapping[str, DeviceOperation]
) -> DeviceOperation:
    if instruction.opcode in CONTROL:
        return DeviceOperation(activity=None, origin=None)
    if instruction.opcode.endswith(("-done", "-update")):
        # The profiler records the end of a transfer too.  It belongs to the start.
        started = before.get(instruction.operands[0] if instruction.operands else "")
        if started is not None:
            return started
    moves = any(collectives(module, instruction))
    return DeviceOperation(
        activity="communication" if moves else "computation",
        origin=next(_origins(module, instruction), None),
    )


def _origins(module: Module, instruction: Instruction) -> Iterator[Origin]:
    """The origins of an instruction, with the one of its main work first."""
    # A fusion has the metadata of one of its parts, and that may be a slice that feeds
    # its matmul.  So collectives and matmuls in it come first.
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
