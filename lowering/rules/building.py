"""Dim rules written down: their factors, and the forms that many of them have."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    FactorDim,
    Rebind,
    Shard,
    bind,
    bind_same,
    part_shape,
    shape_of,
)
from jhost.lowering.rules.reducers import Reducer


class Factors:
    """Collects the factors of a rule while its maps are written down."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.reducers: list[Reducer | None] = []

    def new(self, size: int, reducer: Reducer | None = None) -> int:
        """A new factor."""
        self.sizes.append(size)
        self.reducers.append(reducer)
        return len(self.sizes) - 1

    def dims(self, shape: Sequence[int], whole: Container[int] = ()) -> Dims:
        """A new factor for each dim of `shape` that is not among the `whole` ones."""
        return tuple(
            None if dim in whole else FactorDim(self.new(size))
            for dim, size in enumerate(shape)
        )

    def rule(
        self,
        operands: Sequence[Sequence[FactorDim | None]],
        results: Sequence[Sequence[FactorDim | None]],
        rebind: Rebind = bind_same,
        pinned: Sequence[tuple[str, ...]] | None = None,
    ) -> DimRule:
        """The finished rule."""
        return DimRule(
            sizes=tuple(self.sizes),
            reducers=tuple(self.reducers),
            operands=tuple(tuple(dims) for dims in operands),
            results=tuple(tuple(dims) for dims in results),
            rebind=rebind,
            pinned=None if pinned is None else tuple(pinned),
        )


def along(eqn: JaxprEqn, axes: Container[int], sizes: str | None = None) -> DimRule:
    """The rule of an equation that works along `axes`, which stay whole.

    Its values share the other dims.  A value may lack `axes`, or be a scalar.  `sizes`
    names the equation's parameter that has a size for each dim, if there is one.
    """
    factors = Factors()
    dims = factors.dims(shape_of(eqn.invars[0]), whole=axes)
    kept = without(dims, axes)
    # An initial value has no dims, a reduced result lacks `axes`, others have all.
    by_rank: dict[int, Dims] = {0: (), len(kept): kept, len(dims): dims}
    return factors.rule(
        [by_rank[len(shape_of(v))] for v in eqn.invars],
        [by_rank[len(shape_of(v))] for v in eqn.outvars],
        rebind_local(sizes, dims) if sizes else bind_same,
    )


def leading(eqn: JaxprEqn, rank: int) -> DimRule:
    """The rule of an equation that repeats itself over the first `rank` dims."""
    factors = Factors()
    batch = factors.dims(shape_of(eqn.invars[0])[:rank])

    def dims(atom: Any) -> Dims:
        # Matrices may have other shapes in results than in operands; the batch has one.
        return batch + (None,) * (len(shape_of(atom)) - rank)

    return factors.rule([dims(v) for v in eqn.invars], [dims(v) for v in eqn.outvars])


def without(dims: Dims, removed: Container[int]) -> Dims:
    """`dims` without the ones at the positions `removed`."""
    return tuple(dim for position, dim in enumerate(dims) if position not in removed)


def first_step(shard: Shard, factor: int) -> Any:
    """Where the steps of `factor` at `shard` begin in the whole."""
    return lax.index_in_dim(shard.positions(factor), 0, keepdims=False)


def rebind_local(parameter: str, dims: Dims) -> Rebind:
    """The rebind of equations whose `parameter` has the sizes of `dims`."""

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        # The parameter has the sizes of the whole array, so that unchanged it would
        # make the whole on each device.
        sizes = part_shape(dims, eqn.params[parameter], shard)
        return bind(eqn, args, **{parameter: sizes})

    return rebind
