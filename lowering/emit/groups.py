"""Axes of a program as those of the user's mesh, which are what `shard_map` knows.

A program may have parts of an axis (`ir/axis_parts.py`).  A collective over some parts
is one over the whole axis in groups of devices.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from jhost.lowering.ir.axis_parts import beside, given_axes, given_axis
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.ranks import Ranks


def over(axes: Sequence[str], ranks: Ranks) -> dict[str, Any]:
    """The arguments by which a `lax` collective communicates over axes."""
    given = given_axes(axes, ranks.sizes)
    if given is not None:
        return {"axis_name": given}
    among = Ranks({a: ranks.sizes[a] for a in beside(axes, ranks.sizes)})
    numbers = among.in_rows(axes, np.arange(among.count).reshape(among.shape))
    # A column has the devices of one group, in the order of the axes.
    return {
        "axis_name": given_axes([*among.sizes], among.sizes),
        "axis_index_groups": numbers.T.tolist(),
    }


def axis_index(axes: str | Sequence[str], sizes: Mapping[str, int]) -> Any:
    """This device's position along axes together, the first the major one."""
    if isinstance(axes, str):
        return _along_one(axes, sizes)
    given = given_axes(axes, sizes)
    if given is not None:
        return lax.axis_index(given)
    found: Any = 0
    for axis in axes:
        found = found * sizes[axis] + _along_one(axis, sizes)
    return found


def _along_one(axis: str, sizes: Mapping[str, int]) -> Any:
    index, parts = lax.axis_index(given_axis(axis)), beside([axis], sizes)
    if len(parts) == 1:
        return index
    behind = axes_size(parts[parts.index(axis) + 1 :], sizes)
    return index // behind % sizes[axis]


def rank_in(sizes: Mapping[str, int]) -> Any:
    """`lax.axis_index` for the axes of a program."""
    return functools.partial(axis_index, sizes=sizes)
