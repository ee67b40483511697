"""Turn all-reduces that a p2p pipeline meets into a reduce-scatter and an all-gather.

An all-reduce would mix the chunks that the devices work on at one step.  Its two halves
move chunks to their owners and back, and the same bytes in all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from jhost.lowering.graph import Node, nodes
from jhost.lowering.ir import (
    Buffer,
    Communicate,
    Dim,
    Program,
    SerialMark,
    Stmt,
    Wait,
)
from jhost.lowering.marks import resolved_marks
from jhost.lowering.names import Names
from jhost.lowering.rules import axes_size
from jhost.lowering.stream_parts import Part
from jhost.lowering.stream_plan import plan_streams


@dataclasses.dataclass(frozen=True, slots=True)
class SplitAllReduces:
    """AllReduce of a value with a p2p stream -> ReduceScatter and AllGather."""

    name: ClassVar[str] = "split_all_reduces"

    chunks: int | Literal["auto"] = "auto"
    pipeline: str = "auto"

    def apply(self, program: Program) -> Program:
        asked = resolved_marks(program, self.chunks, self.pipeline)
        marks = [mark for mark in asked if mark.pipeline != "off"]
        if "p2p" not in {mark.pipeline for mark in marks}:
            return program
        serial = [m for m in program.marks if isinstance(m, SerialMark)]
        graph, mesh = nodes(program.body), dict(program.mesh.shape)
        plan = plan_streams(graph, marks, serial, mesh)
        names = Names.of(program)
        body: list[Stmt] = []
        for number, node in enumerate(graph):
            part = plan.parts.get(number)
            if part is not None and plan.marks[part.stream].pipeline == "p2p":
                body += split(node, part, mesh, names)
            else:
                body += node.stmts
        return dataclasses.replace(program, body=tuple(body))


def split(node: Node, part: Part, mesh: Mapping[str, int], names: Names) -> list[Stmt]:
    """The two halves of an all-reduce along its stream; any other node as it is."""
    stmt = node.stmt
    if not isinstance(stmt, Communicate) or stmt.kind != "AllReduce":
        return list(node.stmts)
    dim, devices = part.writes[0].dim, axes_size(stmt.axes, mesh)
    if stmt.out.shape[dim] % devices:
        return list(node.stmts)
    shard = sharded(stmt.out, dim, stmt.axes, devices, names)
    scatter = dataclasses.replace(stmt, kind="ReduceScatter", out=shard, dim=dim)
    gather = dataclasses.replace(
        stmt,
        name=names.fresh("c"),
        kind="AllGather",
        source=shard,
        dim=dim,
        reducer=None,
    )
    first, second = Wait(communication=stmt.name), Wait(communication=gather.name)
    return [scatter, first, gather, second]


def sharded(
    whole: Buffer, dim: int, axes: tuple[str, ...], devices: int, names: Names
) -> Buffer:
    """A buffer for one device's part of `whole` along `dim`."""
    shape, dims = list(whole.shape), list(whole.dims)
    shape[dim] //= devices
    dims[dim] = Dim(axes=(*dims[dim].axes, *axes))
    return dataclasses.replace(
        whole,
        name=names.fresh(f"{whole.name}_scattered"),
        shape=tuple(shape),
        dims=tuple(dims),
    )
