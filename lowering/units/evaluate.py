"""Runs a unit's equations on the part that one device has in one loop iteration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var

from jhost._jax import aval_of, traced_on_mesh, user_context
from jhost.lowering.ir import zigzag
from jhost.lowering.ir.axis_parts import given_axis
from jhost.lowering.ir.index import Index, ranks
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.statements import Chunk, Unit, UnitEqn
from jhost.lowering.rules.dim_rule import Dims, part_shape, shape_of
from jhost.lowering.rules.properties import has_callback
from jhost.lowering.rules.shard_map import bind_in_place
from jhost.lowering.units.callbacks import call_once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAt:
    """An `ir.Chunk` at one iteration; `start` may be a traced scalar.

    `index` is the expression that `start` is the value of.
    """

    start: Any
    size: int
    extent: int
    groups: int = 1
    grain: int = 1
    index: Index | None = None

    @classmethod
    def of(cls, chunk: Chunk, start: Any, size: int) -> Self:
        """`chunk` with the start and the size that it has in one iteration."""
        return cls(
            start=start,
            size=size,
            extent=chunk.extent,
            groups=chunk.groups,
            grain=chunk.grain,
            index=chunk.start,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One device and one iteration; `rank` gives the position along an axis."""

    mesh: Mapping[str, int]
    rank: Callable[[str], Any]
    chunk: ChunkAt | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EqnShard:
    """The `rules.Shard` of one equation."""

    unit_eqn: UnitEqn
    site: Site

    def size(self, factor: int) -> int:
        """The number of steps of `factor` here."""
        chunk = self._chunk(factor)
        if chunk is None:  # the most frequent case
            axes, steps = self.unit_eqn.axes[factor], self.unit_eqn.rule.sizes[factor]
            return steps // axes_size(axes, self.site.mesh) if axes else steps
        return chunk.groups * chunk.size * self._unit(factor, chunk)

    def positions(self, factor: int) -> Any:
        """The position in the whole of each step of `factor` here."""
        first, chunk = self._first(factor), self._chunk(factor)
        if chunk is None:
            steps = first + lax.iota(np.int32, self._local(factor))
            return self._position(factor, steps)
        unit = self._unit(factor, chunk)
        # A row for each group; groups are the same distance apart.
        shape = chunk.groups, chunk.size * unit
        group = lax.broadcasted_iota(np.int32, shape, 0)
        step = lax.broadcasted_iota(np.int32, shape, 1)
        steps = lax.reshape(group * (chunk.extent * unit) + step, (self.size(factor),))
        return self._position(factor, first + steps)

    def starts(self, factor: int) -> Sequence[Any]:
        """Where the stretches of steps of `factor` here begin in the whole."""
        first, chunk = self._first(factor), self._chunk(factor)
        size, groups, apart = self._local(factor), 1, 0
        if chunk is not None:
            unit = self._unit(factor, chunk)
            size, groups, apart = chunk.size * unit, chunk.groups, chunk.extent * unit
        # In zigzag order a part has two stretches, which no grain crosses.
        stretch = self.grain(factor) if self._is_zigzag(factor) else size
        return [
            self._position(factor, first + group * apart + step)
            for group in range(groups)
            for step in range(0, size or 1, stretch or 1)  # an empty chunk has a start
        ]

    def grain(self, factor: int) -> int:
        """A number that divides the stretches' size, and where each begins."""
        grain, chunk = self._local(factor), self._chunk(factor)
        if chunk is not None:
            grain = math.gcd(chunk.grain, chunk.extent) * self._unit(factor, chunk)
        if self._is_zigzag(factor):
            parts = 2 * self.unit_eqn.zigzag
            grain = math.gcd(grain, self.unit_eqn.rule.sizes[factor] // parts)
        return grain

    def varies(self, factor: int) -> bool:
        """Whether devices work on different steps of `factor`."""
        chunk = self._chunk(factor)
        index = chunk.index if chunk is not None else None
        by_rank = index is not None and bool(ranks(index))
        return by_rank or bool(self.unit_eqn.axes[factor])

    def parts(self, factor: int) -> int:
        """The number of parts of this size, over devices and in a loop over chunks."""
        devices, chunk = self._devices(factor), self._chunk(factor)
        chunks = 1 if chunk is None else -(-chunk.extent // (chunk.size or 1))
        return devices * chunks

    @property
    def zigzag(self) -> int:
        """The number of devices that have counted factors in zigzag order, or 1."""
        return self.unit_eqn.zigzag

    @property
    def accumulator(self) -> np.dtype | None:
        """The dtype that a sum must have because an accumulator goes on with it."""
        return next(filter(None, self.unit_eqn.accumulators), None)

    def _first(self, factor: int) -> Any:
        """The first step of `factor` on this device, or in this device's chunk."""
        first: Any = 0
        # The first axis of a factor is the major one.
        for axis in self.unit_eqn.axes[factor]:
            first = first * self.site.mesh[axis] + self.site.rank(axis)
        first = first * self._local(factor)
        chunk = self._chunk(factor)
        if chunk is None:
            return first
        return first + chunk.start * self._unit(factor, chunk)

    def _position(self, factor: int, step: Any) -> Any:
        """The position in the whole of a step that is counted part by part."""
        if not self._is_zigzag(factor):
            return step
        size, devices = self.unit_eqn.rule.sizes[factor], self.unit_eqn.zigzag
        return zigzag.position(step, size, devices)

    def _is_zigzag(self, factor: int) -> bool:
        return self.unit_eqn.zigzag > 1 and factor in self.unit_eqn.rule.counted

    def _chunk(self, factor: int) -> ChunkAt | None:
        return self.site.chunk if factor == self.unit_eqn.stream else None

    def _local(self, factor: int) -> int:
        return self.unit_eqn.rule.sizes[factor] // self._devices(factor)

    def _devices(self, factor: int) -> int:
        return axes_size(self.unit_eqn.axes[factor], self.site.mesh)

    def _unit(self, factor: int, chunk: ChunkAt) -> int:
        """How many steps of `factor` one step of the loop's extent is."""
        return self._local(factor) // (chunk.groups * chunk.extent)


def evaluate_unit(
    unit: Unit,
    args: Sequence[Any],
    site: Site,
    widen: bool = True,
    more: Sequence[Var] = (),
) -> list[Any]:
    """The unit's results at `site`, each equation under its user's line.

    An accumulator may need a wider dtype than a kernel returns.  With `widen` results
    are converted to it; otherwise they stay as they came.  Values of the unit that are
    asked for come behind its results: `more`.
    """
    env: dict[Var, Any] = dict(zip(unit.invars, args, strict=True))
    axes = tuple(dict.fromkeys(map(given_axis, site.mesh)))
    for unit_eqn in unit.eqns:
        eqn = unit_eqn.eqn
        operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        with user_context(eqn):
            # Not by its rule, which would make every device call.
            if has_callback(eqn):
                outs = call_once(eqn, operands, axes)
            elif unit_eqn.rule.opaque and traced_on_mesh(eqn):
                outs = bind_in_place(eqn, operands)
            else:
                outs = unit_eqn.rule.rebind(eqn, operands, EqnShard(unit_eqn, site))
                outs = _for_accumulators(unit_eqn, outs, widen)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [env[var] for var in (*unit.outvars, *more)]


def _for_accumulators(
    unit_eqn: UnitEqn, outs: Sequence[Any], widen: bool
) -> Sequence[Any]:
    """Results for accumulators in their dtypes, and other results in their own."""
    if not unit_eqn.accumulators:
        return outs
    own = (aval_of(var).dtype for var in unit_eqn.eqn.outvars)
    return [
        out if wide and not widen else lax.convert_element_type(out, wide or dtype)
        for out, wide, dtype in zip(outs, unit_eqn.accumulators, own, strict=True)
    ]


LocalType: TypeAlias = jax.ShapeDtypeStruct | None
"""The local type of an operand or a result of a unit; None if no equation uses it."""

UnitTypes: TypeAlias = tuple[Sequence[LocalType], Sequence[LocalType]]
"""The types of a unit's operands, and the types of its results."""


def unit_types(unit: Unit, site: Site) -> UnitTypes:
    """The types of operands and results at `site`."""
    types: dict[Var, jax.ShapeDtypeStruct] = {}
    for unit_eqn in unit.eqns:
        eqn, rule = unit_eqn.eqn, unit_eqn.rule
        shard = EqnShard(unit_eqn, site)
        for var, dims in zip(eqn.invars, rule.operands, strict=True):
            if not isinstance(var, Literal):
                types.setdefault(var, _type(var, dims, shard, None))
        accumulators = unit_eqn.accumulators or (None,) * len(eqn.outvars)
        results = zip(eqn.outvars, rule.results, accumulators, strict=True)
        types |= {var: _type(var, dims, shard, dtype) for var, dims, dtype in results}
    return [types.get(v) for v in unit.invars], [types.get(v) for v in unit.outvars]


def _type(
    var: Var, dims: Dims, shard: EqnShard, accumulator: np.dtype | None
) -> jax.ShapeDtypeStruct:
    dtype = accumulator or getattr(var.aval, "dtype", np.dtype(object))
    return jax.ShapeDtypeStruct(part_shape(dims, shape_of(var), shard), dtype)
