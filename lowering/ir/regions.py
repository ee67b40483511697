"""Which elements of a buffer an alias covers, at every rank.

A dim of a region is an array over the ranks (of size 1 along mesh axes that do not
matter) of runs: ascending half-open intervals of the buffer's own dim.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from jhost.lowering.ir.ranks import AtRanks

Stretch: TypeAlias = tuple[int, int]
Stretches: TypeAlias = tuple[Stretch, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Elements of a buffer: runs for each of its dims, and the dims an alias keeps."""

    dims: tuple[np.ndarray, ...]
    kept: tuple[int, ...]

    def select(
        self, dim: int, index: AtRanks, size: int, groups: int = 1, drop: bool = False
    ) -> Region:
        """The part `[index : index + size]` of each of `groups` parts of a dim."""
        root_dim = self.kept[dim]
        dims = list(self.dims)
        # Ranks may differ in the number of runs, which no array of numbers could hold.
        take = np.frompyfunc(lambda runs, start: _take(runs, groups, start, size), 2, 1)
        dims[root_dim] = np.asarray(take(dims[root_dim], index), dtype=object)
        kept = tuple(d for d in self.kept if not (drop and d == root_dim))
        return Region(tuple(dims), kept)


@functools.lru_cache(maxsize=4096)
def whole_region(shape: tuple[int, ...], mesh_dims: int) -> Region:
    """Every element of a buffer of `shape`, on a mesh of that many axes."""
    return Region(tuple(_one(n, mesh_dims) for n in shape), tuple(range(len(shape))))


def is_empty(region: Region) -> bool:
    """Whether the region has no elements on any device."""
    return any(
        all(first == stop for runs in dim.flat for first, stop in runs)
        for dim in region.dims
    )


def overlap(a: Region, b: Region) -> bool:
    """Whether the regions share an element on some device."""
    return bool(np.any(_compare(_INTERSECT, a, b)))


def same(a: Region, b: Region) -> bool:
    """Whether the regions are the same elements on every device."""
    return bool(np.all(_compare(_EQUAL, a, b)))


def _one(extent: int, mesh_dims: int) -> np.ndarray:
    # A mesh without axes has no rank dims; one of size 1 keeps this an array.
    dim = np.empty((1,) * max(mesh_dims, 1), dtype=object)
    dim.flat[0] = ((0, extent),)
    dim.flags.writeable = False  # regions share it
    return dim


def _take(runs: Stretches, groups: int, start: int, size: int) -> Stretches:
    part = sum(stop - first for first, stop in runs) // groups
    taken: list[Stretch] = []
    for group in range(groups):
        for first, stop in _cut(runs, group * part + start, size):
            # Those that meet are one, or equal regions would not be equal tuples.
            if taken and taken[-1][1] == first:
                first = taken.pop()[0]
            taken.append((first, stop))
    return tuple(taken)


def _cut(runs: Stretches, start: int, size: int) -> Iterator[Stretch]:
    """The elements at positions `[start : start + size]` of the runs end to end."""
    for first, stop in runs:
        low, high = max(start, 0), min(start + size, stop - first)
        if low < high:
            yield first + low, first + high
        start -= stop - first


def _intersect(a: Stretches, b: Stretches) -> bool:
    return any(x[0] < y[1] and y[0] < x[1] for x in a for y in b)


# An array of runs holds tuples, which numpy's own `equal` would compare by element.
_INTERSECT = np.frompyfunc(_intersect, 2, 1)
_EQUAL = np.frompyfunc(operator.eq, 2, 1)


def _compare(test: np.ufunc, a: Region, b: Region) -> np.ndarray:
    """Where `test` holds in all dims, an entry for each rank that matters."""
    result = np.asarray(True)
    for x, y in zip(a.dims, b.dims, strict=True):
        result = result & np.asarray(test(x, y), dtype=bool)
    return result
