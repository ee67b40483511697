"""Turn a `Neighbours` into permutes of the pieces needed, and assemble windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.index import Constant, Index, Listed, linear_rank
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.layouts.halo import Halo, HaloPiece
from jhost.lowering.layouts.joined import plan_join
from jhost.lowering.layouts.together import plan_together
from jhost.lowering.rules.halo import edge_p, window_p
from jhost.lowering.units.make import type_of, unit_of


class HaloWriter:
    """Writes the statements of one program, and sends no piece twice."""

    def __init__(self, mesh: dict[str, int], names: FreshNames) -> None:
        self.mesh = mesh
        self.names = names
        self.sent: dict[Any, ir.Buffer] = {}
        self.together: dict[str, Halo] = {}

    def plan(self, body: Sequence[ir.Stmt]) -> None:
        """Plan which windows of one value are made of the same permutes."""
        groups: dict[Any, list[ir.Neighbours]] = {}
        for stmt in body:
            if isinstance(stmt, ir.Neighbours) and len(stmt.sources) == 1:
                (source,) = stmt.sources
                groups.setdefault((source.name, stmt.dim, stmt.axes), []).append(stmt)
        for (_, dim, axes), group in groups.items():
            part = group[0].sources[0].shape[dim]
            reads, counts = zip(*((*s.reads, s.count) for s in group), strict=True)
            halos = plan_together(reads, counts, part, axes_size(axes, self.mesh))
            named = (stmt.out.name for stmt in group)
            self.together |= zip(named, halos, strict=True)

    def statements(self, stmt: ir.Neighbours) -> list[ir.Stmt]:
        devices = axes_size(stmt.axes, self.mesh)
        halo = self.planned(stmt, devices)
        made: list[ir.Stmt] = []
        found = halo.pieces
        # No step reads anything, so any values of the right shape will do.
        if not found:
            first, every = (0,) * devices, tuple(range(devices))
            size = min(stmt.sources[0].shape[stmt.dim], halo.window)
            found = (HaloPiece(sources=every, size=size, starts=first, places=first),)
        pieces = [self.piece(stmt, piece, made) for piece in found]
        lengths = [piece.lengths or (piece.size,) * devices for piece in found]
        params = {
            "dim": stmt.dim,
            "size": stmt.out.shape[stmt.dim],
            "places": tuple(piece.places for piece in found),
            "lengths": tuple(lengths),
        }
        return [*made, self.compute("window", window_p, pieces, stmt.out, stmt, params)]

    def planned(self, stmt: ir.Neighbours, devices: int) -> Halo:
        if len(stmt.sources) == 1:
            return self.together[stmt.out.name]
        parts = [source.shape[stmt.dim] for source in stmt.sources]
        shared = [bool(source.dims[stmt.dim].axes) for source in stmt.sources]
        held = [part if n else None for part, n in zip(parts, shared, strict=True)]
        return plan_join(stmt.reads, tuple(held), stmt.count, devices)

    def piece(
        self, stmt: ir.Neighbours, piece: HaloPiece, made: list[ir.Stmt]
    ) -> ir.Buffer:
        """The buffer of a piece: the device's own, or received."""
        names = tuple(source.name for source in stmt.sources)
        key = names, stmt.dim, stmt.axes, piece.sent
        # Windows of one value may share a piece, which then moves once.
        if key not in self.sent:
            edge = self.edge(stmt, piece, made)
            self.sent[key] = (
                edge if piece.stays else self.moved(stmt, piece, edge, made)
            )
        return self.sent[key]

    def edge(
        self, stmt: ir.Neighbours, piece: HaloPiece, made: list[ir.Stmt]
    ) -> ir.Buffer:
        """The stretch of a device's part that it sends, or keeps as a piece."""
        # One array may be read several times, and is one operand here.
        read = [stmt.sources[n] for n in piece.arrays or (0,)]
        sources = [*{source.name: source for source in read}.values()]
        source, dim = sources[0], stmt.dim
        if len(sources) == 1 and piece.size == source.shape[dim]:
            return source
        shape = list(source.shape)
        shape[dim] = piece.size
        name = self.names.fresh(f"{source.name}_edge")
        out = dataclasses.replace(
            source, name=name, shape=tuple(shape), dims=stmt.out.dims
        )
        if len(sources) == 1 and len(set(piece.starts)) == 1:
            made.append(
                ir.Select(
                    out=out,
                    source=source,
                    dim=dim,
                    index=Constant(piece.starts[0]),
                    size=Constant(piece.size),
                )
            )
            return out
        numbers = {source.name: n for n, source in enumerate(sources)}
        chosen = tuple(numbers[source.name] for source in read)
        params = {"dim": dim, "size": piece.size, "starts": piece.starts}
        params["chosen"] = chosen if piece.arrays else chosen * len(piece.starts)
        made.append(self.compute("edge", edge_p, sources, out, stmt, params))
        return out

    def moved(
        self,
        stmt: ir.Neighbours,
        piece: HaloPiece,
        edge: ir.Buffer,
        made: list[ir.Stmt],
    ) -> ir.Buffer:
        name = self.names.fresh(f"{stmt.sources[0].name}_beside")
        out = dataclasses.replace(edge, name=name)
        communicate = ir.Communicate(
            name=self.names.fresh("c"),
            kind="CollectivePermute",
            out=out,
            source=edge,
            axes=stmt.axes,
            shift=self.shift(stmt, piece),
        )
        made += [communicate, ir.Wait(communication=communicate.name)]
        return out

    def shift(self, stmt: ir.Neighbours, piece: HaloPiece) -> Index:
        """The distance from a device to the one that it sends to."""
        devices = axes_size(stmt.axes, self.mesh)
        pairs = enumerate(piece.sources)
        shifts = {source: (device - source) % devices for device, source in pairs}
        if len(set(shifts.values())) == 1:
            return Constant(shifts[0])
        rank = linear_rank(stmt.axes, self.mesh)
        # In a reversal the ranks of both have the same sum.
        sums = {(2 * source + n) % devices for source, n in shifts.items()}
        if len(sums) == 1:
            return Constant(sums.pop()) - rank * 2
        return Listed(tuple(shifts[device] for device in range(devices)), rank)

    def compute(
        self,
        name: str,
        primitive: Any,
        ins: list[ir.Buffer],
        out: ir.Buffer,
        stmt: ir.Neighbours,
        params: dict[str, Any],
    ) -> ir.Compute:
        unit = unit_of(
            name,
            _bound,
            *map(type_of, ins),
            primitive=primitive,
            params=tuple(params.items()),
        )
        (unit_eqn,) = unit.eqns
        # Its one factor is the devices, whatever layouts its operands have.
        unit_eqn = dataclasses.replace(unit_eqn, axes=(stmt.axes,))
        unit = dataclasses.replace(unit, eqns=(unit_eqn,))
        return ir.Compute(unit=unit, ins=tuple(ins), outs=(out,))


def _bound(
    *values: jax.Array, primitive: Any, params: tuple[tuple[str, Any], ...]
) -> jax.Array:
    return primitive.bind(*values, **dict(params))[0]
