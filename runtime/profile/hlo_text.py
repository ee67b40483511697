"""The text of an XLA module, read into the instructions of its computations.

It knows the syntax and no more: `schedule.py` says what the instructions mean.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction; `attributes` is what stands behind its operands, as text."""

    name: str
    opcode: str
    bytes: int  # of its result; a tuple's parts together
    operands: tuple[str, ...]
    operand_bytes: int
    called: tuple[str, ...]  # computations: a fusion's, a loop's body, a reducer
    attributes: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module; in a scheduled one, instructions stand in the order they are issued."""

    name: str
    scheduled: bool
    devices: int
    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]


_COMMENT = re.compile(r"/\*.*?\*/")  # `/*index=5*/` in long tuples
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
_PARENTHESIS = re.compile(r"[()]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|condition|body|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)"
)
_ARRAY = re.compile(r"\b([a-z]+(\d*)\w*)\[([\d,<=]*)\]")


def parse_module(text: str) -> Module:
    """The module whose text this is, as `as_text()` of an executable gives it."""
    header, *lines = text.splitlines() or [""]
    computations: dict[str, dict[str, Instruction]] = {}
    entry = inside = ""
    for line in lines:
        if match := _COMPUTATION.match(line):
            inside = match[2]
            computations[inside] = {}
            entry = inside if match[1] else entry
        elif inside and (match := _NAME.match(line)):
            so_far = computations[inside]
            so_far[match[1]] = _instruction(match[1], line[match.end() :], so_far)
    return Module(
        name=_first(r"^HloModule ([\w.\-]+)", header) or "",
        scheduled="is_scheduled=true" in header,
        # XLA leaves a count of 1 out of the header.
        devices=_count("num_partitions", header) * _count("replica_count", header),
        entry=entry,
        computations={
            name: tuple(found.values()) for name, found in computations.items()
        },
    )


def group_size(instruction: Instruction, devices: int) -> int:
    """How many devices a collective works across, of all the module runs on.

    The groups are lists (`{{0,1},{2,3}}`), a shape of rows (`[2,4]<=[8]`), or from JAX
    0.11 on axes of a mesh (`mesh['dp'=2,'tp'=4] {'tp'}`).
    """
    text = instruction.attributes
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        return _axes_size(axes[1], axes[2])
    if shape := _first(r"replica_groups=\[\d+,(\d+)\]<=", text):
        return int(shape)
    if listed := _first(r"replica_groups=\{\{([\d,]+)\}", text):
        return listed.count(",") + 1
    return devices


def _axes_size(mesh: str, axes: str) -> int:
    """The devices along `'dp','tp'` of a mesh, or along a part of one: `'tp':(2)2`."""
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh))
    parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", axes)
    return math.prod(int(part or sizes[name]) for name, part in parts)


def _instruction(
    name: str, text: str, so_far: Mapping[str, Instruction]
) -> Instruction:
    """An instruction, from the text behind its name and the instructions before it."""
    text = _COMMENT.sub("", text)
    opcode = _end_of_shape(text)
    opening = text.index("(", opcode)
    closing = _closing(text, opening)
    operands = _OPERAND.findall(text[opening:closing])
    attributes = text[closing + 1 :]
    called = [
        name
        for names in _CALLED.findall(attributes)
        for name in re.findall(r"[\w.\-]+", names)
    ]
    return Instruction(
        name=name,
        opcode=text[opcode:opening].strip(),
        bytes=_bytes(text[:opcode]),
        operands=tuple(operands),
        operand_bytes=sum(so_far[o].bytes for o in operands if o in so_far),
        called=tuple(called),
        attributes=attributes,
    )


def _end_of_shape(text: str) -> int:
    """A tuple's shape has spaces inside its parentheses, an array's has none."""
    return _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")


def _closing(text: str, opening: int) -> int:
    """The place of the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _bytes(shape: str) -> int:
    """The bytes of all arrays in a shape's text; tokens have none."""
    return sum(
        # The size of a dynamic dim is written `<=5`.  `pred` names no bits and has 8.
        math.prod(int(size.lstrip("<=")) for size in dims.split(",") if size)
        * (8 if dtype == "pred" else int(bits or 0))
        // 8
        for dtype, bits, dims in _ARRAY.findall(shape)
    )


def _count(name: str, header: str) -> int:
    return int(_first(rf"\b{name}=(\d+)", header) or 1)


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
