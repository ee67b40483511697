"""What XLA's instructions are: collectives, kernels and the matmuls among them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from jhost.lowering.ir.transfers import ScheduledKind
from jhost.runtime.profile.hlo_text import Instruction, Module

COLLECTIVES: Mapping[str, ScheduledKind] = {
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


def collectives(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The collective that an instruction is, or those that it wraps.

    `async-start` has its collective in a computation of its own, and XLA puts some into
    a fusion with the slice that they read or write.
    """
    if base_opcode(instruction) in COLLECTIVES:
        yield instruction
    elif not ends(instruction):
        for name in instruction.called:
            for inner in module.computations[name]:
                yield from collectives(module, inner)


def base_opcode(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def ends(instruction: Instruction) -> bool:
    """Whether it continues or ends what another instruction started."""
    return instruction.opcode.endswith(("-done", "-update"))


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


def issued(
    module: Module, instructions: Iterable[Instruction]
) -> Iterator[Instruction]:
    """The instructions that compute or copy, also in called computations, in order."""
    for instruction in instructions:
        if instruction.opcode in CONTROL:
            for name in instruction.called:
                yield from issued(module, module.computations[name])
        elif not _is_free(instruction) and not any(collectives(module, instruction)):
            yield instruction


def _is_free(instruction: Instruction) -> bool:
    if ends(instruction) or instruction.opcode in _FREE:
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
