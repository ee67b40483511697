"""Move the user's marks to the padded values that stand for the marked ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.marks import (
    BarrierMark,
    Mark,
    SerialMark,
    ShardMark,
    StreamChoice,
    StreamRequest,
)
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer


def move_marks(
    program: Program,
    padded: Mapping[str, Sequence[Buffer]],
    read_unpadded: Collection[str],
) -> Program:
    """`program`, which got its padding, with the marks that it had before.

    `padded` has the padded values that bear another name, and `read_unpadded` the
    values that something reads as they were.
    """
    mesh, shapes = dict(program.mesh.shape), shapes_of(program)
    moved: list[Mark] = []
    for mark in program.marks:
        others = padded.get(mark.buffer, ())
        match mark:
            case ShardMark():
                moved += _shardings(mark, shapes[mark.buffer], others, mesh)
            case StreamRequest() | StreamChoice():
                names = _streamed(mark, shapes[mark.buffer], others)
                # Readers of the unpadded value are in the stream too.
                if mark.buffer in read_unpadded:
                    names = {mark.buffer: None, **names}
                moved += [dataclasses.replace(mark, buffer=name) for name in names]
            case SerialMark():
                names = [mark.buffer, *(b.name for b in others)]
                moved += [dataclasses.replace(mark, buffer=name) for name in names]
            case BarrierMark():
                names = [mark.buffer, *(b.name for b in others)]
                moved += [dataclasses.replace(mark, buffer=name) for name in names]
    return dataclasses.replace(program, marks=tuple(moved))


def possible_marks(program: Program) -> Program:
    """`program` less the shardings of dims that nothing could pad."""
    mesh = dict(program.mesh.shape)
    shapes = shapes_of(program)
    marks = tuple(
        _possible(m, shapes[m.buffer], mesh) if isinstance(m, ShardMark) else m
        for m in program.marks
    )
    # The program itself: known facts go with the object.
    if marks == program.marks:
        return program
    return dataclasses.replace(program, marks=marks)


def shapes_of(program: Program) -> dict[str, tuple[int, ...]]:
    """The shape of each value of a program, by name."""
    shapes = {param.name: param.shape for param in program.params}
    for stmt in program.body:
        shapes |= {buffer.name: buffer.shape for buffer in reads_writes(stmt)[1]}
    return shapes


def _streamed(
    mark: StreamRequest | StreamChoice, shape: Sequence[int], others: Sequence[Buffer]
) -> dict[str, None]:
    """Where a stream begins: work is on the padded values, if the dim is padded."""
    # Other padded forms keep the marked dim: the stream begins at this one.
    longer = [other.name for other in others if other.shape[mark.dim] > shape[mark.dim]]
    return dict.fromkeys(longer or [mark.buffer])


def _shardings(
    mark: ShardMark,
    shape: Sequence[int],
    others: Sequence[Buffer],
    mesh: Mapping[str, int],
) -> list[ShardMark]:
    """A value that cannot be laid out as asked leaves that to its padded forms."""
    own = _possible(mark, shape, mesh)
    if own == mark:
        return [mark]
    return [own] + [
        _possible(dataclasses.replace(mark, buffer=other.name), other.shape, mesh)
        for other in others
    ]


def _possible(
    mark: ShardMark, shape: Sequence[int], mesh: Mapping[str, int]
) -> ShardMark:
    """`mark` less what does not come in equal parts: there jhost may choose."""
    spec = tuple(
        None if axes and size % axes_size(axes, mesh) else axes
        for axes, size in zip(mark.spec, shape, strict=True)
    )
    return dataclasses.replace(mark, spec=spec)
