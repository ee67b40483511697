"""The dim rule of lookups, such as the lookup of tokens in an embedding's table.

A device may have some rows of the table.  It gives the rows that it has, and for the
others the neutral element of sums (-0.0 for floats, as 0.0 would lose the sign of a
-0.0).  So the sum over the devices is the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import aval_of
from jhost.lowering.rules.building import Factors, without
from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    Rebind,
    Shard,
    bind,
    part_shape,
    shape_of,
)
from jhost.lowering.rules.elements import Elements, elements_of
from jhost.lowering.rules.reducers import Reducer, identity, sum_of
from jhost.lowering.rules.registry import rule
from jhost.lowering.rules.rows import (
    MODES,
    Rows,
    batched,
    can_be_added_up,
    can_be_summed,
    differing,
    holds_first,
    interleave,
    rows_of,
)


@rule("gather")
def gather(eqn: JaxprEqn) -> DimRule:
    """Dims of the indices are factors, and so are operand dims gathered in full.

    A batching dim is a dim of both the indices and the operand.  A dim whose single
    elements are looked up is summed over, because each part has some of the elements.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = (shape_of(v) for v in eqn.invars)
    batching = dict(
        zip(
            numbers.operand_batching_dims,
            numbers.start_indices_batching_dims,
            strict=True,
        )
    )
    missing = (*numbers.collapsed_slice_dims, *batching)
    reducer = _reducer(eqn)
    factors = Factors()
    # The last dim of the indices has the components of one index.
    batch = factors.dims(indices[:-1])
    window = factors.dims(operand, whole=(*missing, *differing(operand, sizes)))
    rows = rows_of(
        factors,
        operand,
        sizes,
        numbers.start_index_map,
        cut=_read(operand, sizes, missing) if reducer else (),
        reducer=reducer,
    )
    present = [dim for dim in range(len(operand)) if dim not in missing]
    elements = elements_of(rows, len(batch), numbers.offset_dims, present)
    result = interleave(without(window, missing), numbers.offset_dims, batch)
    made = factors.rule(
        [rows.map(batched(window, batching, batch)), (*batch, None)],
        [result],
        _rebind(rows, window, elements),
    )
    return dataclasses.replace(made, counted=rows.cuttable, picked=rows.cuttable)


@rule("permute_rows")
def permute_rows(eqn: JaxprEqn) -> DimRule:
    """The rows that `order` names, taken out of all rows; see `jhost._ragged`."""
    rows, order, _ = (shape_of(v) for v in eqn.invars)
    factors = Factors()
    taken = factors.dims(order)
    features = factors.dims(rows, whole=range(len(order)))[-1]
    all_rows = *taken[:-1], None
    return factors.rule([(*all_rows, features), taken, all_rows], [(*taken, features)])


def _reducer(eqn: JaxprEqn) -> Reducer | None:
    """The reducer of parts' results, or None where they cannot be added up."""
    dtype = aval_of(eqn.invars[0]).dtype
    if eqn.params["mode"] not in MODES or not can_be_summed(dtype):
        return None
    return sum_of(dtype)


def _read(
    operand: Sequence[int], sizes: Sequence[int], missing: Collection[int]
) -> list[int]:
    """The dims that can be cut: at most half of the dim is read, or single elements."""
    return [
        dim
        for dim, (size, width) in enumerate(zip(operand, sizes, strict=True))
        if dim in missing or (width and can_be_added_up(width, size))
    ]


def _rebind(rows: Rows, window: Dims, elements: Elements) -> Rebind:
    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        sizes = part_shape(window, eqn.params["slice_sizes"], shard)
        if not rows.are_cut(shape_of(eqn.invars[0]), shard):
            return bind(eqn, args, slice_sizes=sizes)
        return [_of_part(eqn, args, sizes, rows, elements, shard)]

    return rebind


def _of_part(
    eqn: JaxprEqn,
    args: Sequence[Any],
    sizes: Sequence[int],
    rows: Rows,
    elements: Elements,
    shard: Shard,
) -> jax.Array:
    """The result of a lookup in one part; the sum over all parts is the whole's."""
    operand, indices = args
    fills = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    if fills:  # JAX (0.10 to 0.12) does so too, and indices of 64 bits wrap round
        indices = lax.convert_element_type(indices, np.int32)
    # In the other modes indices out of bounds are clipped, as XLA does it, even where
    # the user promised that there are none.
    indices = rows.bounded(indices, clip=not fills)
    # An index of another part's row is clipped into this part, and the wrong row that
    # it finds is replaced below.
    local, here = rows.of_elements.found_in(shard, elements.indices(indices))
    found = _looked_up(eqn, operand, local, sizes, elements)

    def over_result(mask: Any) -> Any:
        return lax.broadcast_in_dim(mask, found.shape, range(mask.ndim))

    # Selected, not multiplied by 0: the table may hold infinities.
    nothing = lax.full_like(found, identity(sum_of(found.dtype), found.dtype))
    found = lax.select(over_result(here), found, nothing)
    if fills:
        # The parts are added up, so only one of them gives the fill value.
        fill = lax.full_like(found, eqn.params["fill_value"])
        fill = lax.select(holds_first(shard, rows.cuttable), fill, nothing)
        found = lax.select(over_result(rows.in_bounds(indices)), found, fill)
    return elements.together(found)


def _looked_up(
    eqn: JaxprEqn, operand: Any, indices: Any, sizes: Sequence[int], elements: Elements
) -> jax.Array:
    """What stands at indices in bounds: windows, or single elements of cut dims."""
    numbers = eqn.params["dimension_numbers"]
    (found,) = bind(
        eqn,
        (operand, indices),
        dimension_numbers=numbers._replace(
            offset_dims=elements.others,
            collapsed_slice_dims=_with(numbers.collapsed_slice_dims, elements),
        ),
        slice_sizes=tuple(
            1 if dim in elements.dims else size for dim, size in enumerate(sizes)
        ),
        mode=lax.GatherScatterMode.CLIP,
        # Clipping to a part and its elements may have changed their order.
        indices_are_sorted=False,
    )
    return found


def _with(collapsed: Sequence[int], elements: Elements) -> tuple[int, ...]:
    return tuple(sorted((*collapsed, *elements.dims)))
