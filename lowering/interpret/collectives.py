"""Communications between NumPy arrays: each device takes from all devices' arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jhost.lowering.interpret.arrays import OnDevices
from jhost.lowering.ir.ranks import AtRanks, Ranks
from jhost.lowering.ir.statements import Communicate
from jhost.lowering.rules.reducers import Reducer

_UFUNCS: Mapping[Reducer, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


def reduced(reducer: Reducer, values: Sequence[np.ndarray]) -> np.ndarray:
    """All `values` combined in their order, with a rounding after each."""
    # NumPy returns a wider dtype for dtypes that are narrower than a byte.
    dtype, combine = values[0].dtype, _UFUNCS[reducer]
    return functools.reduce(lambda a, b: np.asarray(combine(a, b), dtype), values)


def communicate(
    stmt: Communicate, values: OnDevices, ranks: Ranks, shift: AtRanks
) -> OnDevices:
    """Each device's value of `stmt.out`, from each device's value of `stmt.source`."""
    numbers = np.arange(ranks.count).reshape(ranks.shape)
    groups = ranks.in_rows(stmt.axes, numbers).T.tolist()
    targets = ranks.targets(stmt.axes, shift).T.tolist()
    outs = list(values)
    for members, there in zip(groups, targets, strict=True):
        results = _results(stmt, [values[device] for device in members], there)
        for device, result in zip(members, results, strict=True):
            outs[device] = result
    return outs


def _results(stmt: Communicate, every: OnDevices, targets: Sequence[int]) -> OnDevices:
    """The results of the devices of one group, from `every` source of the group."""
    count, dim = len(every), stmt.dim or 0
    match stmt.kind:
        case "AllGather":
            return [np.concatenate(every, dim)] * count
        case "AllReduce":
            return [_total(stmt, every)] * count
        case "ReduceScatter":
            return np.split(_total(stmt, every), count, dim)
        case "AllToAll":
            pieces = [np.split(x, count, dim) for x in every]
            there = zip(*pieces, strict=True)
            return [np.concatenate(each, stmt.source_dim or 0) for each in there]
        case "CollectivePermute":
            assert sorted(targets) == list(range(count)), stmt.name
            # A device receives from the device whose target it is.
            return [every[targets.index(device)] for device in range(count)]
        case "SwapAxes":
            size = math.isqrt(count)
            mirrored = np.arange(count).reshape(size, size).T.ravel()
            return [every[rank] for rank in mirrored]


def _total(stmt: Communicate, every: OnDevices) -> np.ndarray:
    assert stmt.reducer is not None
    return reduced(stmt.reducer, every)
