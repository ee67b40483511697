"""Windows at indices, taken apart into single elements along dims that are cut.

A window of a dim may lie on several devices, of which each has some of its elements.
So each element gets an index of its own there.  The indices get a dim for each such
window, behind their own dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from jhost.lowering.rules.rows import Rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Which windows are taken apart, and where their elements come to be.

    `wide` are the components of an index whose windows are, `dims` the operand's dims
    along which they lie.  `order` has, for each dim of what is looked up or written,
    its place once the windows are apart: the indices' dims, then the elements of each
    window, then the others.
    """

    wide: tuple[int, ...]
    dims: tuple[int, ...]
    widths: tuple[int, ...]
    batch: int
    order: tuple[int, ...]

    @property
    def indexed(self) -> range:
        """The dims of what is looked up or written for which there are indices."""
        return range(self.batch + len(self.dims))

    @property
    def others(self) -> tuple[int, ...]:
        """The dims that windows have beside, which stay as they are."""
        return tuple(range(self.indexed.stop, len(self.order)))

    def indices(self, indices: Any) -> Any:
        """An index for each element of the windows that are taken apart."""
        *batch, components = indices.shape
        shape = (*batch, *self.widths, components)
        indices = lax.broadcast_in_dim(
            indices, shape, (*range(self.batch), len(shape) - 1)
        )
        for number, component in enumerate(self.wide):
            step = lax.broadcasted_iota(np.int32, shape, self.batch + number)
            here = np.arange(components) == component
            step = lax.mul(step, np.broadcast_to(here, shape).astype(np.int32))
            indices = lax.add(indices, step)
        return indices

    def apart(self, values: Any) -> Any:
        """What is written, in the order of the windows that are taken apart."""
        return _in_order(values, tuple(np.argsort(self.order).tolist()))

    def together(self, values: Any) -> Any:
        """What is looked up, in the order of the windows as they were."""
        return _in_order(values, self.order)


def elements_of(
    rows: Rows, batch: int, windows: Sequence[int], present: Sequence[int]
) -> Elements:
    """How to take windows apart along dims that can be cut.

    Of what is looked up or written, `windows` are the dims that lie along the dims
    `present` of the operand; the others are the `batch` dims of the indices.
    """
    wide = tuple(
        n
        for n, factor in enumerate(rows.factors)
        if factor is not None and rows.dims[n] in present
    )
    dims = tuple(rows.dims[n] for n in wide)
    along = dict(zip(windows, present, strict=True))
    kept = [dim for dim in present if dim not in dims]
    places = {dim: batch + n for n, dim in enumerate((*dims, *kept))}
    free = iter(range(batch))
    order = tuple(
        places[along[dim]] if dim in along else next(free)
        for dim in range(batch + len(present))
    )
    widths = tuple(rows.windows[n] for n in wide)
    return Elements(wide=wide, dims=dims, widths=widths, batch=batch, order=order)


def _in_order(values: Any, order: Sequence[int]) -> Any:
    if [*order] == [*range(len(order))]:
        return values
    return lax.transpose(values, order)
