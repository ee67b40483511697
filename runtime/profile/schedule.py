"""What XLA made of a program: its communications, and the kernels beside each.

XLA issues a scheduled module's instructions in the order of its text.  A communication
with a `start` and a `done` runs beside the instructions between the two.  Any other
communication holds up the instructions behind it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jhost import errors
from jhost._damaged import damage_refused
from jhost._text import bytes_text, counted
from jhost.lowering.ir.transfers import ScheduledKind, received_bytes
from jhost.runtime.profile.hlo_text import Instruction, Module, group_size, parse_module


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledCommunication:
    """A communication as XLA runs it, and the kernels that are issued beside it.

    Attributes:
        name: the name of the instruction in the text of the module.
        operation: JAX's name of the operation that it comes from.
        kind: the kind of communication, as in the Host IR.
        computation: the body of the loop, branch or call around it, or "".
        bytes: the bytes that each device receives; in a loop, those of one iteration.
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

    If their number is not that of the text, they cannot be assigned, and are left out.
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

_KINDS: Mapping[str, ScheduledKind] = {
    "all-gather": "AllGather",
    "all-reduce": "AllReduce",
    "reduce-scatter": "ReduceScatter",
    "all-to-all": "AllToAll",
    "collective-permute": "CollectivePermute",
    "collective-broadcast": "Broadcast",
}

# Instructions that these call are issued one by one.  Instructions that others call are
# parts of one kernel.
CONTROL = frozenset({"call", "while", "conditional"})


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
                kind=_KINDS[_base(parts[0])],
                computation="" if computation == module.entry else computation,
                bytes=sum(_received(module, part) for part in parts),
                values=sum(_values(module, part) for part in parts),
                asynchronous=_is_asynchronous(instruction),
                matmuls=matmuls,
                others=others,
            )


def collectives(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The collective that an instruction is, or those that it wraps.

    `async-start` has its collective in a computation of its own, and XLA puts some into
    a fusion with the slice that they read or write.
    """
    if _base(instruction) in _KINDS:
        yield instruction
    elif not _ends(instruction):
        for name in instruction.called:
            for inner in module.computations[name]:
                yield from collectives(module, inner)


def _base(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _ends(instruction: Instruction) -> bool:
    """Whether it continues or ends what another instruction started."""
    return instruction.opcode.endswith(("-done", "-update"))


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
        follows = _ends(instruction) and not names.isdisjoint(instruction.operands)
        if not follows:
            beside.append(instruction)
        elif instruction.opcode.endswith("-done"):
            break
        else:
            names.add(instruction.name)
    return beside


def _received(module: Module, collective: Instruction) -> int:
    devices = group_size(collective, module.devices)
    kind = _KINDS[_base(collective)]
    return received_bytes(kind, collective.operand_bytes, devices)


def _values(module: Module, collective: Instruction) -> int:
    """How many values a collective moves: several where XLA combined as many."""
    count = len(collective.operands)
    if _base(collective) == "all-to-all" and "dimensions=" not in collective.attributes:
        return count // group_size(collective, module.devices)  # one for each device
    return count


# --- Kernels ---------------------------------------------------------------------- #

# These run nothing on the device.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast opt-barrier after-all "
    "add-dependency domain partition-id replica-id".split()
)
_MATMULS = frozenset({"dot", "ragged-dot", "scaled-dot", "convolution"})
# `__cublas$lt$matmul`, `__cublas$gemm`, `__cudnn$fmhaSoftmax`, `__onednn$matmul`
_MATMUL_TARGET = re.compile(r"gemm|matmul|fmha|cudnn\$conv", re.IGNORECASE)
# The kernels of `jhost._ragged`, by their names in Pallas.
_MATMUL_NAME = re.compile(r"jhost_ragged_(dot|sum)/")


def _kernels(
    module: Module, instructions: Iterable[Instruction]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the kernels among them: matmuls, and others."""
    found = [(k.name, is_matmul(module, k)) for k in _issued(module, instructions)]
    return (
        tuple(name for name, is_matmul in found if is_matmul),
        tuple(name for name, is_matmul in found if not is_matmul),
    )


def _issued(
    module: Module, instructions: Iterable[Instruction]
) -> Iterator[Instruction]:
    """The instructions that compute or copy, also in called computations, in order."""
    for instruction in instructions:
        if instruction.opcode in CONTROL:
            for name in instruction.called:
                yield from _issued(module, module.computations[name])
        elif not _is_free(instruction) and not any(collectives(module, instruction)):
            yield instruction


def _is_free(instruction: Instruction) -> bool:
    if _ends(instruction) or instruction.opcode in _FREE:
        return True
    # `jax.lax.empty` becomes this.
    return attribute("custom_call_target", instruction) == "AllocateBuffer"


def is_matmul(module: Module, kernel: Instruction) -> bool:
    """Whether it is a matmul, calls one of a library, or is a fusion with one in it."""
    if kernel.opcode in _MATMULS:
        return True
    if _MATMUL_TARGET.search(attribute("custom_call_target", kernel)):
        return True
    if _MATMUL_NAME.search(attribute("op_name", kernel)):
        return True
    inner = (i for name in kernel.called for i in module.computations[name])
    return any(is_matmul(module, instruction) for instruction in inner)


def attribute(name: str, instruction: Instruction) -> str:
    """The value of an attribute that is written in quotes; "" without it."""
    match = re.search(rf'\b{name}="([^"]*)"', instruction.attributes)
    return match[1] if match else ""


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
