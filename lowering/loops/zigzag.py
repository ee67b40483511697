"""Causal attention in a p2p pipeline, with an equal share of work for every device.

In order of position the queries of the last device see all keys, and the queries of the
first device see only its own keys.  So the loop works on sequences in zigzag order
(`ir/zigzag.py`).  Devices exchange halves of its operands before the loop.  They
exchange its results back only where something reads them in order of position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jhost._text import counted
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Node, written_by
from jhost.lowering.ir.index import Constant
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.operation import operand_maps
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.ir.zigzag import exchanges
from jhost.lowering.loops.causal import window_of
from jhost.lowering.loops.chunk import LoopSpec
from jhost.lowering.loops.p2p import P2PLoop
from jhost.lowering.rules.dim_rule import Dims
from jhost.lowering.schedule.permutes import part_of, permute
from jhost.lowering.streams.participation import rule_of


class ZigzagLoop(P2PLoop):
    """A p2p loop with exchanges along the `dims` of its operands and results.

    `ordered` has the buffers in zigzag order by the names of the originals; the loop
    adds its own.
    """

    def __init__(
        self, spec: LoopSpec, dims: Mapping[str, int], ordered: dict[str, ir.Buffer]
    ) -> None:
        self.exchanges: list[tuple[ir.Buffer, int]] = []
        for buffer in _accessed(spec):
            # A buffer is exchanged once in a program: later loops find it in `ordered`.
            if buffer.name in dims and buffer.name not in ordered:
                name = spec.names.fresh(f"{buffer.name}_zigzag")
                ordered[buffer.name] = dataclasses.replace(buffer, name=name)
                self.exchanges.append((buffer, dims[buffer.name]))
        self.ordered = ordered
        self.made = written_by(spec.nodes)
        super().__init__(_reordered(spec, {name: ordered[name] for name in dims}))

    def statements(self) -> list[ir.Stmt]:
        return [
            *(
                stmt
                for buffer, dim in self.exchanges
                if buffer.name not in self.made
                for stmt in self.exchange(buffer, dim, back=False)
            ),
            *super().statements(),
        ]

    def exchanged_back(self) -> dict[str, list[ir.Stmt]]:
        """The statements that bring results into order of position, by name."""
        return {
            buffer.name: [*self.exchange(buffer, dim, back=True)]
            for buffer, dim in self.exchanges
            if buffer.name in self.made
        }

    def exchange(self, buffer: ir.Buffer, dim: int, back: bool) -> Iterator[ir.Stmt]:
        """A value's halves from order of position to zigzag order, or `back`."""
        ordered = self.ordered[buffer.name]
        size, names = buffer.shape[dim] // 2, self.spec.names
        waits: list[ir.Stmt] = []
        yield ir.Allocate(buffer=buffer if back else ordered)
        for each in exchanges(self.rank, self.devices):
            half, slot = (
                part_of(whole, dim, number * size, size, names, called="half")
                for whole, number in (
                    (buffer, Constant(each.half)),
                    (ordered, each.slot),
                )
            )
            yield from (half, slot)
            source, out = (slot, half) if back else (half, slot)
            shift = (each.source if back else each.target) - self.rank
            move = permute(source.out, out.out, self.axes, shift, names)
            yield move
            waits.append(ir.Wait(communication=move.name))
        yield from waits


def _accessed(spec: LoopSpec) -> Iterator[ir.Buffer]:
    """Each buffer that the nodes read or write, once."""
    every = (b for node in spec.nodes for b in (*node.reads, *node.writes))
    yield from {buffer.name: buffer for buffer in every}.values()


def _reordered(spec: LoopSpec, ordered: Mapping[str, ir.Buffer]) -> LoopSpec:
    """The work on buffers in zigzag order instead."""
    devices = axes_size(spec.choice.axes, spec.mesh)
    new = {id(node): _node_on(node, ordered, devices) for node in spec.nodes}
    parts = {id(new[id(node)]): spec.participation(node) for node in spec.nodes}
    # Exchanges read these outside of the loop.
    leaving = spec.leaving | {buffer.name for buffer in ordered.values()}
    return dataclasses.replace(
        spec, nodes=tuple(new.values()), participations=parts, leaving=leaving
    )


def _node_on(node: Node, ordered: Mapping[str, ir.Buffer], devices: int) -> Node:
    first, *rest = (replace_buffers(stmt, ordered) for stmt in node.stmts)
    if isinstance(first, ir.Compute):
        (unit_eqn,) = first.unit.eqns
        if unit_eqn.rule.window is not None:
            # The mask compares positions, and a device's positions are in zigzag order.
            unit_eqn = dataclasses.replace(unit_eqn, zigzag=devices)
        unit = dataclasses.replace(first.unit, eqns=(unit_eqn,))
        first = dataclasses.replace(first, unit=unit)
    reads, writes = (
        tuple(ordered.get(buffer.name, buffer) for buffer in buffers)
        for buffers in (node.reads, node.writes)
    )
    return dataclasses.replace(node, stmts=(first, *rest), reads=reads, writes=writes)


# --- Which loops, and what they exchange -------------------------------------------- #


def is_causal(spec: LoopSpec) -> bool:
    """Whether queries, sharded as keys are, see all keys up to their positions."""
    return any(_is_triangular(node, spec) for node in spec.nodes)


def _is_triangular(node: Node, spec: LoopSpec) -> bool:
    seen = window_of(node, spec)
    return seen is not None and seen.is_causal


def share_of_work(spec: LoopSpec, dims: Mapping[str, int] | str) -> Note:
    """Says how a causal loop shares its work: it exchanges `dims`, or says why not."""
    values = tuple(buffer.name for node in spec.nodes for buffer in node.writes)
    devices = axes_size(spec.choice.axes, spec.mesh)
    if isinstance(dims, str):
        text = f"position, so the last device has {2 * devices - 1}/{devices**2}"
        return Note(form=f"{{}}: in order of {text} of the work: {dims}", values=values)
    text = f"in zigzag order, so each device has 1/{devices} of the work"
    return Note(form=f"{{}}: {text}", values=values)


def dims_in_zigzag_order(spec: LoopSpec) -> Mapping[str, int] | str:
    """The dims to exchange of a causal loop's operands and results.

    Or the reason why the loop has to keep sequences in order of position.
    """
    if not spec.choice.spec.zigzag:
        return "exchanges are predicted to take longer than they save"
    if spec.extent % 2:
        return f"a device's {counted(spec.extent, 'position')} cannot be halved"
    made = written_by(spec.nodes)
    for node in spec.nodes:
        if reason := _reason(node, spec, made):
            return reason
    used: dict[str, set[int | None]] = {}
    for node in spec.nodes:
        for name, dim in _uses(node, spec):
            used.setdefault(name, set()).add(dim)
    # An exchange moves one dim of a value.
    mixed = [name for name, dims in used.items() if len(dims) > 1]
    if mixed:
        return f"{mixed[0]} is read along several dims"
    dims = {name: dim for name, (dim,) in used.items()}
    return {name: dim for name, dim in dims.items() if dim is not None}


def _reason(node: Node, spec: LoopSpec, made: set[str]) -> str:
    """Why a node cannot work on sequences in another order, if it cannot."""
    part, rule = spec.participation(node), rule_of(node)
    counts = rule is not None and part.factor in rule.counted
    if counts and not _is_triangular(node, spec):
        return "the loop counts positions outside of the mask"
    moves = isinstance(node.stmt, ir.Communicate) and node.stmt.kind != "AllToAll"
    comes = moves and part.ratio > 1
    goes = moves and part.ratio < 1
    if not comes and any(node.reads[i].name not in made for i in part.reads):
        return "the loop reads parts of a value that no transfer brings"
    if not goes and any(spec.leaves(node.writes[i]) for i in part.writes):
        return "something reads after the loop what it makes part by part"
    return ""


def _uses(node: Node, spec: LoopSpec) -> Iterator[tuple[str, int | None]]:
    """The values from outside, or for outside, of a node, with the dim to exchange."""
    part, stmt = spec.participation(node), node.stmt
    if isinstance(stmt, ir.Communicate):
        if part.ratio > 1:
            yield stmt.source.name, stmt.dim
        elif part.ratio < 1:
            yield stmt.out.name, stmt.dim
        return
    rule = rule_of(node)
    queries = None if rule is None or rule.window is None else rule.window.queries
    if not isinstance(stmt, ir.Compute) or rule is None:
        return
    for buffers, maps, cut in (
        (node.reads, operand_maps(stmt), part.reads),
        (node.writes, rule.results, part.writes),
    ):
        for i, (buffer, dims) in enumerate(zip(buffers, maps, strict=True)):
            if i not in cut:
                yield buffer.name, _dim_of(dims, queries)


def _dim_of(dims: Dims, factor: int | None) -> int | None:
    found = [n for n, dim in enumerate(dims) if dim and dim.factor == factor]
    return found[0] if found else None
