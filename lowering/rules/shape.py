"""Dim rules of primitives that arrange elements, or make them from their indices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from jax import lax
from jax.extend.core import JaxprEqn

from jhost.lowering.rules.building import Factors, along, rebind_local
from jhost.lowering.rules.dim_rule import (
    DimRule,
    FactorDim,
    Shard,
    part_shape,
    shape_of,
)
from jhost.lowering.rules.registry import rule

# --- Reshape ------------------------------------------------------------------ #


@rule("reshape")
def reshape(eqn: JaxprEqn) -> DimRule:
    """The factors of each run of dims that the reshape splits, merges or leaves alone.

    `[4, 6]` that becomes `[8, 3]` has factors of 4, 2 and 3 steps: the 6 follows the
    last two, and the 8 the first two.  A run `[6, 5]` that becomes `[10, 3]` has
    gcd(6, 10) = 2 contiguous halves in both shapes, and no more factors.  A step is 3
    elements of the 6, and 5 of the 10.  With `dimensions` the operand's dims are
    permuted first, as in the gradient of a depthwise convolution.
    """
    operand, result = shape_of(eqn.invars[0]), eqn.params["new_sizes"]
    order = eqn.params["dimensions"] or range(len(operand))
    factors = Factors()
    followed: tuple[_StepsByDim, _StepsByDim] = {}, {}
    for source, target, steps in _common_steps([operand[d] for d in order], result):
        factor = factors.new(steps)
        followed[0].setdefault(order[source], []).append((factor, steps))
        followed[1].setdefault(target, []).append((factor, steps))
    operand_dims, result_dims = (
        tuple(_following(found.get(dim, ()), size) for dim, size in enumerate(shape))
        for found, shape in zip(followed, (operand, result), strict=True)
    )
    rebind = rebind_local("new_sizes", result_dims)
    return factors.rule([operand_dims], [result_dims], rebind)


_StepsByDim: TypeAlias = dict[int, list[tuple[int, int]]]
"""The factors that each dim follows, from the outermost, with their steps."""


def _following(factors: Sequence[tuple[int, int]], size: int) -> FactorDim | None:
    """How a dim of that size follows factors that have such steps."""
    if not factors:
        return None
    (factor, steps), *others = factors
    scale = size // steps
    return FactorDim(factor, scale, inside=_following(others, scale))


def _common_steps(
    operand: Sequence[int], result: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Dims of both with the steps that these have in common, in order of elements."""
    if 0 in operand:
        return
    # Left out, because dims of size 1 would make more runs on one side than the other.
    sources = (dim for dim, size in enumerate(operand) if size != 1)
    targets = (dim for dim, size in enumerate(result) if size != 1)
    for source, target in zip(sources, targets, strict=True):
        left, wanted = operand[source], result[target]
        while True:
            steps = math.gcd(left, wanted)
            if steps > 1:
                yield source, target, steps
            left, wanted = left // steps, wanted // steps
            if 1 not in (left, wanted):
                # No other part is contiguous in both shapes, up to the end of the run.
                while left != wanted:
                    if left < wanted:
                        left *= operand[next(sources)]
                    else:
                        wanted *= result[next(targets)]
            if left == wanted:
                break
            if left == 1:
                source = next(sources)
                left = operand[source]
            else:
                target = next(targets)
                wanted = result[target]


# --- Dims that come, go or change places --------------------------------------- #


@rule("broadcast_in_dim")
def broadcast_in_dim(eqn: JaxprEqn) -> DimRule:
    """All dims of the result are factors; the operand lacks new and stretched ones."""
    shape = eqn.params["shape"]
    factors = Factors()
    dims = factors.dims(shape)
    operand = [
        dims[target] if size == shape[target] else None
        for size, target in zip(
            shape_of(eqn.invars[0]), eqn.params["broadcast_dimensions"], strict=True
        )
    ]
    return factors.rule([operand], [dims], rebind_local("shape", dims))


@rule("transpose")
def transpose(eqn: JaxprEqn) -> DimRule:
    """The result has the operand's factors, permuted."""
    factors = Factors()
    dims = factors.dims(shape_of(eqn.invars[0]))
    return factors.rule([dims], [[dims[dim] for dim in eqn.params["permutation"]]])


@rule("squeeze")
def squeeze(eqn: JaxprEqn) -> DimRule:
    """The result lacks the dims squeezed."""
    return along(eqn, eqn.params["dimensions"])


@rule("stack")
def stack(eqn: JaxprEqn) -> DimRule:
    """The new dim stays whole."""
    factors = Factors()
    dims = factors.dims(shape_of(eqn.invars[0]))
    axis = eqn.params["axis"]
    return factors.rule(
        [dims for _ in eqn.invars], [(*dims[:axis], None, *dims[axis:])]
    )


@rule("split", "unstack")
def split(eqn: JaxprEqn) -> DimRule:
    """The dim taken apart stays whole."""
    return along(eqn, (eqn.params["axis"],))


# --- Values from indices ------------------------------------------------------- #


@rule("iota")
def iota(eqn: JaxprEqn) -> DimRule:
    """All dims are factors; a part of the counted dim counts its own positions."""
    shape, counted = eqn.params["shape"], eqn.params["dimension"]
    factors = Factors()
    dims = factors.dims(shape)

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        # Counted in int32 and converted once, as XLA does for narrow dtypes.  A part's
        # start would be rounded, or wrap round, if it were added in a narrow dtype.
        del args
        count = shard.positions(dims[counted].factor)
        local = part_shape(dims, shape, shard)
        count = lax.broadcast_in_dim(count, local, (counted,))
        return [lax.convert_element_type(count, eqn.params["dtype"])]

    made = factors.rule([], [dims], rebind)
    return dataclasses.replace(made, counted=frozenset({dims[counted].factor}))


@rule("empty")
def empty(eqn: JaxprEqn) -> DimRule:
    """Elements of no particular value."""
    factors = Factors()
    dims = factors.dims(eqn.params["shape"])
    return factors.rule([], [dims], rebind_local("shape", dims))
