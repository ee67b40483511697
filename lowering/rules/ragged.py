"""The dim rule of products with groups of rows, such as those of experts.

`jax.lax.ragged_dot_general` runs as `jhost.ragged_dot` does, which has kernels for
GPUs.

A device may have the weights of some groups.  It multiplies the rows of its groups and
gives 0 for other rows, so the sum over the devices is the result.  The gradient of the
weights is then on the devices that have the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import aval_of
from jhost._ragged.forms import Form, numbers
from jhost._ragged.primitives import multiplied, ragged_dot_p
from jhost.lowering.rules.building import Factors
from jhost.lowering.rules.contract import DotNumbers, product, rebind_product
from jhost.lowering.rules.dim_rule import DimRule, Dims, FactorDim, Shard, shape_of
from jhost.lowering.rules.flops import matmul_of
from jhost.lowering.rules.reducers import Reducer, sum_of
from jhost.lowering.rules.registry import rule
from jhost.lowering.rules.rows import can_be_summed

_FORMS: dict[Any, Form] = {numbers(form, batch=0): form for form in get_args(Form)}
"""The dimension numbers that `jhost.ragged_dot` has a form for.

`jax.lax.ragged_dot` and its derivatives have these.
"""


@rule("ragged_dot_general", ragged_dot_p.name)
def ragged_dot_general(eqn: JaxprEqn) -> DimRule:
    """As `dot_general`, with a ragged dim that is counted, and groups that are picked.

    A part of the ragged dim counts how many of its rows are in each group.  A part of
    the groups works on the rows that are in its groups.
    """
    numbered = _numbers(eqn)
    (ragged,) = numbered.lhs_ragged_dimensions
    products, of_rhs = numbered.dot_dimension_numbers, numbered.rhs_group_dimensions
    factors = Factors()
    lhs, rhs, out = product(factors, eqn, products, of_rhs)
    groups = _groups(factors, eqn, ragged, products)
    rhs = tuple(groups if dim in of_rhs else mapped for dim, mapped in enumerate(rhs))
    # A contraction of the rows has a result for each group.  JAX puts that dim in
    # front, and jhost's primitive puts it behind the batch dims.
    if len(out) < len(shape_of(eqn.outvars[0])):
        front = len(products[1][0]) if eqn.primitive is ragged_dot_p else 0
        out = (*out[:front], groups, *out[front:])
    # Sizes of groups may differ along the dims in front of the ragged one; then the
    # sizes have these dims too.
    ahead = tuple(lhs[dim] for dim in _ahead(len(lhs), ragged, products))
    sizes = (*ahead[: len(shape_of(eqn.invars[2])) - 1], None)
    grouped = _Grouped(rows=lhs[ragged], groups=groups, maps=(lhs, rhs, sizes, out))
    made = factors.rule([lhs, rhs, sizes], [out], grouped.rebind)
    picked = frozenset[int]() if groups is None else frozenset({groups.factor})
    return dataclasses.replace(
        made,
        # The positions of a part's rows say which group each of them is in.
        counted=picked | {lhs[ragged].factor},
        picked=picked,
        reason="the devices compute where the rows of each group are",
        matmul=lambda shard: grouped.matmul(made, shard),
    )


def _numbers(eqn: JaxprEqn) -> Any:
    """The dimension numbers, as in `jax.lax.ragged_dot_general`."""
    if eqn.primitive is ragged_dot_p:
        return numbers(eqn.params["form"], batch=len(shape_of(eqn.invars[0])) - 2)
    return eqn.params["ragged_dot_dimension_numbers"]


def _groups(
    factors: Factors, eqn: JaxprEqn, ragged: int, numbers: DotNumbers
) -> FactorDim | None:
    """The groups as a dim of the values, or None where they cannot be cut."""
    (contracted, _), (batch, _) = numbers
    count = shape_of(eqn.invars[2])[-1]
    dtype = aval_of(eqn.outvars[0]).dtype
    reducer: Reducer | None = None if ragged in contracted else sum_of(dtype)
    cannot = reducer and not can_be_summed(dtype)
    if ragged in batch or count < 2 or cannot:
        return None
    return FactorDim(factors.new(count, reducer))


def _ahead(rank: int, ragged: int, numbers: DotNumbers) -> list[int]:
    """The dims of lhs along which the sizes of groups may differ, in order."""
    (contracted, _), (batch, _) = numbers
    if ragged in batch:
        return list(batch[: batch.index(ragged)])
    free = [dim for dim in range(rank) if dim not in (*contracted, *batch)]
    kind = contracted if ragged in contracted else free
    return [*batch, *kind[: kind.index(ragged)]]


def _rebind_product(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
    """As `rebind_product`, but a JAX primitive becomes jhost's if that has the form."""
    form = None if eqn.primitive is ragged_dot_p else _FORMS.get(_numbers(eqn))
    if form is None or eqn.params["group_offset"] is not None:
        return rebind_product(eqn, args, shard)
    wanted = shard.accumulator or eqn.params["preferred_element_type"]
    lhs, rhs, sizes = args
    precision = eqn.params["precision"] or "default"
    return multiplied(lhs, rhs, sizes, form, precision, wanted)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Grouped:
    """A product by groups.

    Attributes:
        rows: the ragged dim.
        groups: the groups, or None where they cannot be cut.
        maps: the maps of lhs, rhs, the sizes of groups, and the result.
    """

    rows: FactorDim
    groups: FactorDim | None
    maps: tuple[Dims, Dims, Dims, Dims]

    def rebind(self, eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        """Multiplies the rows here with the groups here, by counts of the rows here."""
        lhs, rhs, sizes = args
        rows = shape_of(eqn.invars[0])[self.maps[0].index(self.rows)]
        fewer = self.groups and shard.size(self.groups.factor) != sizes.shape[-1]
        if not fewer and shard.size(self.rows.factor) == rows:
            return _rebind_product(eqn, args, shard)
        # `ends`: where each group ends in the whole, then how many rows here are before
        # that end.  The counts of rows here are the differences.
        ends = jnp.cumsum(sizes, axis=-1).astype(np.int32)
        positions = shard.positions(self.rows.factor)
        ends = jnp.searchsorted(positions, ends, method="compare_all")
        counts = jnp.diff(ends, prepend=0)
        if not fewer:
            return _rebind_product(eqn, [lhs, rhs, counts.astype(sizes.dtype)], shard)
        # The product begins with row 0, and gives 0 for rows behind all groups.  So the
        # rows of the groups here are rotated to the front, and their results back: no
        # other row is multiplied.
        before = self._here(ends - counts, shard)[..., 0]
        counts = self._here(counts, shard).astype(sizes.dtype)
        lhs, rhs = (self._rotated(i, x, before) for i, x in enumerate((lhs, rhs)))
        (out,) = _rebind_product(eqn, [lhs, rhs, counts], shard)
        return [self._rotated(3, out, -before)]

    def _here(self, x: Any, shard: Shard) -> Any:
        """The entries of `x` for the groups here; 0 for groups that are padding."""
        assert self.groups is not None
        count = shard.size(self.groups.factor)
        first = lax.index_in_dim(shard.positions(self.groups.factor), 0, keepdims=False)
        more = jnp.zeros_like(x, shape=(*x.shape[:-1], count))
        padded = lax.concatenate([x, more], x.ndim - 1)
        return lax.dynamic_slice_in_dim(padded, first, count, x.ndim - 1)

    def _rotated(self, value: int, x: Any, by: Any) -> Any:
        """`x`, which `self.maps[value]` maps, with its rows rotated by `by`."""
        dims = self.maps[value]
        if self.rows not in dims:
            return x
        front = [dims.index(dim) for dim in (*self.maps[2][:-1], self.rows)]

        def rotate(x: Any, by: Any) -> Any:
            return jnp.roll(x, -by, 0)

        for _ in front[1:]:
            rotate = jax.vmap(rotate)
        rotated = rotate(jnp.moveaxis(x, front, range(len(front))), by)
        return jnp.moveaxis(rotated, range(len(front)), front)

    def matmul(self, rule: DimRule, shard: Shard) -> tuple[int, int, int, int]:
        """Batch, m, n and k, if all groups have the same number of rows."""
        batch, m, n, k = matmul_of(rule, shard)
        if self.groups is None:
            return batch, m, n, k
        parts = -(-rule.sizes[self.groups.factor] // shard.size(self.groups.factor))
        if rule.reducers[self.rows.factor]:
            return batch, m, n, -(-k // parts)
        return batch, -(-m // parts), n, k
