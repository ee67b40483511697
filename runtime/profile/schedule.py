"""What XLA made of a program: its communications, and the kernels beside each.

XLA issues a scheduled module's instructions in the order of its text.  A communication
with a `start` and a `done` runs beside the instructions between the two.  Any other
communication holds up the instructions behind it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from jhost import errors
from jhost._damaged import damage_refused
from jhost._text import bytes_text, counted
from jhost.lowering.ir.transfers import ScheduledKind, received_bytes
from jhost.runtime.profile.hlo_text import Instruction, Module, group_size, parse_module
from jhost.runtime.profile.instructions import (
    COLLECTIVES,
    CONTROL,
    attribute,
    base_opcode,
    collectives,
    ends,
    is_matmul,
    issued,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledCommunication:
    """A communication as XLA runs it, and the kernels that are issued beside it.

    Attributes:
        name: the name of the instruction in the text of the module.
        operation: JAX's name of the operation that it comes from.
        kind: the kind of communication, as in the Host IR.
        computation: the body of the loop, branch or call around it, or "".
        bytes: the bytes that each device receives; in a loop, in one iteration.
        values: how many values it moves; above 1 if XLA combined communications.
        asynchronous: whether other work can run beside it.
        matmuls: the names of the matmuls beside it.
        others: the names of the other kernels beside it.
        stream: the number of its queue, which XLA calls a stream; None if the number is
            not known (JAX before 0.12), or the communication is not asynchronous.
    """

    name: str
    operation: str
    kind: ScheduledKind
    computation: str
    bytes: int
    values: int
    asynchronous: bool
    matmuls: tuple[str, ...]
    others: tuple[str, ...]
    stream: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What XLA runs on each device; `str` is a table.

    Attributes:
        communications: all communications, in the order in which they start.
        matmuls: the names of all matmuls; a matmul in the body of a loop is there once.
        others: the names of all other kernels.
    """

    communications: tuple[ScheduledCommunication, ...]
    matmuls: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def streams(self) -> tuple[int, ...]:
        """The numbers of the queues that have communications, if they are known."""
        numbers = {each.stream for each in self.communications}
        return tuple(sorted(number for number in numbers if number is not None))

    def __str__(self) -> str:
        rows = [_cells(communication) for communication in self.communications]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        counts = (
            counted(len(rows), "communication"),
            counted(len(self.matmuls), "matmul"),
            counted(len(self.others), "other kernel"),
        )
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n  ".join([f"schedule: {', '.join(counts)}", *lines])


def with_streams(schedule: Schedule, streams: Sequence[int] | None) -> Schedule:
    """`schedule` with the streams of its asynchronous communications, in their order.

    If there are more or fewer than in the text, nothing says which is which, and they
    are left out.
    """
    started = [each for each in schedule.communications if each.asynchronous]
    if streams is None or len(streams) != len(started):
        return schedule
    left = iter(streams)
    communications = tuple(
        dataclasses.replace(each, stream=next(left)) if each.asynchronous else each
        for each in schedule.communications
    )
    return dataclasses.replace(schedule, communications=communications)


def parse_schedule(text: str) -> Schedule:
    """The schedule in the text of a compiled module.

    Raises:
        ScheduleError: it is not the text of a scheduled module.
    """
    try:
        with damage_refused():
            return _schedule(parse_module(text))
    except ValueError as error:
        raise errors.ScheduleError(
            "A schedule is read from the text of a module that XLA has compiled, as "
            "jax.stages.Compiled.as_text gives it, if the backend has it.",
            [str(error) if text else "no text"],
        ) from error


def _schedule(module: Module) -> Schedule:
    if not module.scheduled:
        raise ValueError(f"{module.name} has no is_scheduled=true")
    matmuls, others = _kernels(module, module.computations[module.entry])
    return Schedule(
        communications=tuple(_communications(module, module.entry)),
        matmuls=matmuls,
        others=others,
    )


# --- Communications --------------------------------------------------------------- #


def _communications(
    module: Module, computation: str
) -> Iterator[ScheduledCommunication]:
    """The communications of a computation, and of those it calls, as they start."""
    instructions = module.computations[computation]
    for position, instruction in enumerate(instructions):
        if instruction.opcode in CONTROL:
            for name in instruction.called:
                yield from _communications(module, name)
        elif parts := list(collectives(module, instruction)):
            matmuls, others = _kernels(module, _beside(instructions, position))
            yield ScheduledCommunication(
                name=instruction.name,
                operation=attribute("op_name", parts[0]),
                kind=COLLECTIVES[base_opcode(parts[0])],
                computation="" if computation == module.entry else computation,
                bytes=sum(_received(module, part) for part in parts),
                values=sum(_values(module, part) for part in parts),
                asynchronous=_is_asynchronous(instruction),
                matmuls=matmuls,
                others=others,
            )


def _is_asynchronous(instruction: Instruction) -> bool:
    """Whether a communication is asynchronous."""
    # Up to JAX 0.10 XLA writes a synchronous collective as a pair with `is_sync`, and
    # from JAX 0.11 on as the plain operation.
    is_sync = re.search(r'"is_sync":\s*true', instruction.attributes)
    return instruction.opcode.endswith("-start") and not is_sync


def _beside(instructions: Sequence[Instruction], position: int) -> list[Instruction]:
    """The instructions issued after a start and before its done.

    If the done is in the next iteration of a loop, they are the rest of this iteration.
    """
    start = instructions[position]
    beside: list[Instruction] = []
    if not _is_asynchronous(start):
        return beside
    names = {start.name}
    for instruction in instructions[position + 1 :]:
        follows = ends(instruction) and not names.isdisjoint(instruction.operands)
        if not follows:
            beside.append(instruction)
        elif instruction.opcode.endswith("-done"):
            break
        else:
            names.add(instruction.name)
    return beside


def _received(module: Module, collective: Instruction) -> int:
    devices = group_size(collective, module.devices)
    kind = COLLECTIVES[base_opcode(collective)]
    return received_bytes(kind, collective.operand_bytes, devices)


def _values(module: Module, collective: Instruction) -> int:
    """How many values a collective moves: several where XLA combined as many."""
    count = len(collective.operands)
    if (
        base_opcode(collective) == "all-to-all"
        and "dimensions=" not in collective.attributes
    ):
        return count // group_size(collective, module.devices)  # one for each device
    return count


# --- Kernels ---------------------------------------------------------------------- #


def _kernels(
    module: Module, instructions: Iterable[Instruction]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the kernels among them: matmuls, and others."""
    found = [(k.name, is_matmul(module, k)) for k in issued(module, instructions)]
    return (
        tuple(name for name, is_matmul in found if is_matmul),
        tuple(name for name, is_matmul in found if not is_matmul),
    )


# --- The table -------------------------------------------------------------------- #


def _cells(communication: ScheduledCommunication) -> tuple[str, ...]:
    combined = f" of {communication.values} values" if communication.values > 1 else ""
    return (
        communication.name,
        communication.kind + combined,
        bytes_text(communication.bytes),
        _how(communication),
    )


def _how(communication: ScheduledCommunication) -> str:
    where = f", in {communication.computation}" if communication.computation else ""
    if not communication.asynchronous:
        return "synchronous" + where
    counts = [
        counted(len(names), noun)
        for names, noun in (
            (communication.matmuls, "matmul"),
            (communication.others, "other kernel"),
        )
        if names
    ]
    queue = "" if communication.stream is None else f", queue {communication.stream}"
    return f"asynchronous, beside {' and '.join(counts) or 'nothing'}{queue}{where}"
