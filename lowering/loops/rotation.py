"""Rotations of values, and the factors along which values are rotated together."""

from __future__ import annotations

import dataclasses
from collections.abc import (
    Mapping,
    Sequence,
)
from fractions import Fraction
from typing import TypeAlias

import jax.numpy as jnp

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.layout import layout_of, used_axes
from jhost.lowering.ir.operation import operand_maps
from jhost.lowering.ir.ranks import Ranks
from jhost.lowering.rules.dim_rule import AttentionWindow

ValueName: TypeAlias = tuple[int, str]
"""A buffer's name, behind the identity of the program or body that has it."""

NamedDims: TypeAlias = Sequence[tuple[ValueName, int]]
"""Dims of values, counted from the last, so that they hold for stacked values too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rotation:
    """How far each device has a value rotated, as a part of a dim."""

    dim: int
    by: tuple[Fraction, ...]
    axes: frozenset[str]

    def along(self, dim: int) -> Rotation:
        """The same rotation along another dim."""
        return dataclasses.replace(self, dim=dim)


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """The dims of values that one factor of a computation of whole arrays follows.

    The factor cuts each dim into `steps`.  Dims of a `parallel` factor are rotated
    alike or not at all.  The steps of a sum may come in any order along axes that the
    sum is `spread` over, as each device has a sum of its own there.  Others need the
    order.
    """

    dims: NamedDims
    steps: int
    parallel: bool = False
    spread: frozenset[str] = frozenset()

    def takes(
        self, rotation: Rotation, rotations: Mapping[ValueName, Rotation]
    ) -> bool:
        """Whether values may be rotated so along these dims, and are."""
        free = self.parallel or rotation.axes <= self.spread
        whole = all((self.steps * by).denominator == 1 for by in rotation.by)
        alike = (rotations.get(name) == rotation.along(dim) for name, dim in self.dims)
        return free and whole and all(alike)


def dims_alike(owner: int, copy: ir.Set) -> list[Factor]:
    """Each dim of a copied value, and of its copy."""
    names = [(owner, buffer.name) for buffer in (copy.source, copy.out)]
    return [
        Factor([(name, dim - len(copy.out.shape)) for name in names], steps, True)
        for dim, steps in enumerate(copy.out.shape)
    ]


def factors_of_compute(owner: int, stmt: ir.Compute, ranks: Ranks) -> list[Factor]:
    """All factors of a computation, and as one more the dims that it takes whole."""
    rule = stmt.unit.eqns[0].rule
    dims, steps = _dims_by_factor(owner, stmt)
    # Rules count or look up the steps of these factors by position.
    placed = {
        *rule.counted,
        *rule.windowed,
        *rule.picked,
        *rule.updates,
        *rule.inner,
        *_seen(rule.window),
    }
    parallel = {f for f, reducer in enumerate(rule.reducers) if reducer is None}
    summed = rule.contracts and rule.matmul is None
    sums = {f for f, reducer in enumerate(rule.reducers) if summed and reducer == "sum"}
    # Sums of integers are equal on all devices, in whatever order they are made.
    exact = all(jnp.issubdtype(out.dtype, jnp.integer) for out in stmt.outs)
    spread = frozenset[str](ranks.sizes) if exact else _spread(stmt.outs)
    return [
        Factor(
            dims[factor],
            steps[factor],
            parallel=factor in parallel - placed,
            spread=spread if factor in sums - placed else frozenset[str](),
        )
        for factor in dims
    ]


def _dims_by_factor(
    owner: int, stmt: ir.Compute
) -> tuple[dict[int | None, list[tuple[ValueName, int]]], dict[int | None, int]]:
    """The dims that follow each factor, and its steps; None for dims taken whole."""
    maps = (*operand_maps(stmt), *stmt.unit.eqns[0].rule.results)
    dims: dict[int | None, list[tuple[ValueName, int]]] = {}
    steps: dict[int | None, int] = {}
    for buffer, mapped in zip((*stmt.ins, *stmt.outs), maps, strict=True):
        for number, dim in enumerate(mapped):
            # A device that has one step in parts has fewer elements than a step.
            count = 0 if dim is None else buffer.shape[number] // dim.scale
            factor = None if dim is None or count == 0 else dim.factor
            value = (owner, buffer.name), number - len(mapped)
            dims.setdefault(factor, []).append(value)
            steps[factor] = 1 if factor is None else count
    return dims, steps


def _seen(window: AttentionWindow | None) -> tuple[int, ...]:
    """The factors that some step does not see whole."""
    return (window.queries, window.keys) if window and not window.sees_all else ()


def _spread(outs: Sequence[ir.Buffer]) -> frozenset[str]:
    """The axes along which devices have different parts of all of these."""
    return frozenset[str].intersection(*(used_axes(layout_of(out)) for out in outs))
