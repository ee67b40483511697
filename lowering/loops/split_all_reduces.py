"""Turn all-reduces that a p2p pipeline meets into a reduce-scatter and an all-gather.

At one step the devices work on different chunks, and an all-reduce would mix them.  A
reduce-scatter moves chunks to their owners, and an all-gather moves them back.
Together they receive as many bytes as the all-reduce.  If the devices do not divide the
streamed dim, it is padded first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.graph import graph_of
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import stream_choices, unpipelined_values
from jhost.lowering.ir.statements import Buffer, Communicate, Dim, Stmt, Wait
from jhost.lowering.layouts.hidden_dims import StreamedDim, streamed_where_moved
from jhost.lowering.padding.region import PadRequest
from jhost.lowering.padding.values import pad_program


@dataclasses.dataclass(frozen=True, slots=True)
class SplitAllReduces(EachProgram):
    """AllReduce of a value with a p2p stream -> ReduceScatter and AllGather."""

    name: ClassVar[str] = "split_all_reduces"

    def sees(self, program: Program) -> object:
        unpipelined = [mark.unpipelined for mark in stream_choices(program)]
        return (program.streamed, unpipelined) if program.streamed else None

    def change(self, program: Program) -> Program:
        dims = {stmt.name: dim for stmt, dim in _on_p2p_streams(program)}
        if not dims:
            return program
        mesh = dict(program.mesh.shape)
        uneven = [
            PadRequest(
                buffer=stmt.out.name,
                dim=streamed.dim,
                size=stmt.out.shape[streamed.dim],
                axes=stmt.axes,
                devices=axes_size(stmt.axes, mesh),
                where=streamed.where,
            )
            for stmt, streamed in _on_p2p_streams(program)
        ]
        # Each device pads the end of its own part, also if axes shard the dim already.
        program = pad_program(program, uneven)
        names = FreshNames.of(program)
        body: list[Stmt] = []
        for node in graph_of(program):
            stmt = node.stmt
            if isinstance(stmt, Communicate) and stmt.name in dims:
                body += split(stmt, dims[stmt.name].dim, mesh, names)
            else:
                body += node.stmts
        return dataclasses.replace(program, body=tuple(body))


def _on_p2p_streams(program: Program) -> Iterator[tuple[Communicate, StreamedDim]]:
    """The all-reduces that p2p pipelines meet, with the dim that these cut."""
    unpipelined = unpipelined_values(program)
    for stmt in program.body if program.streamed else ():
        if not isinstance(stmt, Communicate) or stmt.kind != "AllReduce":
            continue
        streamed = streamed_where_moved(program, stmt)
        if not streamed or stmt.out.name in unpipelined:
            continue
        if streamed.pipeline == "p2p":
            yield stmt, streamed


def split(
    stmt: Communicate, dim: int, mesh: Mapping[str, int], names: FreshNames
) -> list[Stmt]:
    """The two halves of an all-reduce, unless its dim could not be padded."""
    devices = axes_size(stmt.axes, mesh)
    if stmt.out.shape[dim] % devices:
        return [stmt, Wait(communication=stmt.name)]
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
    whole: Buffer, dim: int, axes: tuple[str, ...], devices: int, names: FreshNames
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
