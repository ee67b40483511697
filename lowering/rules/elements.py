"""Windows at indices, taken apart into single elements along dims that are cut.

A window of a dim may lie on several devices, and each has some of its elements.  So
each element of the window gets an index of its own.  The indices get one more dim for
each such window, behind their own dims.
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
    """Which windows are taken apart, and where their elements go.

    The *values* are the result of a lookup, or the updates of a scatter.

    Attributes:
        wide: the components of an index whose windows are taken apart.
        dims: the operand's dims along which those windows lie.
        widths: the elements of each of those windows.
        batch: the number of the indices' own dims.
        order: for each dim of the values, its position once windows are apart.  The
            indices' dims come first, then the elements of each window, then the rest.
    """

    wide: tuple[int, ...]
    dims: tuple[int, ...]
    widths: tuple[int, ...]
    batch: int
    order: tuple[int, ...]

    @property
    def indexed(self) -> range:
        """The dims of the values for which there are indices."""
        return range(self.batch + len(self.dims))

    @property
    def others(self) -> tuple[int, ...]:
        """The other dims of the values, which stay dims of windows."""
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
        """Updates, from the user's order of dims to `order`."""
        return _in_order(values, tuple(np.argsort(self.order).tolist()))

    def together(self, values: Any) -> Any:
        """The result of a lookup, from `order` back to the user's order of dims."""
        return _in_order(values, self.order)


def elements_of(
    rows: Rows, batch: int, windows: Sequence[int], present: Sequence[int]
) -> Elements:
    """How to take windows apart along dims that can be cut.

    `windows` are the dims of the values that lie along the dims `present` of the
    operand.  The other dims of the values are the `batch` dims of the indices.
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
