"""The fewest bytes from which values can be computed again.

Most of what a derivative reads is computed element by element from a few other values,
and it costs less to compute it again than to write and to read it.  The values worth
keeping are a minimum cut between those that cannot be computed again and those that are
read (Horace He, "Min-cut optimal recomputation", PyTorch 2022,
`torch/_functorch/partitioners.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T", bound=Hashable)

_COUNTED, _UNBOUNDED = 2**29, 2**30
"""The capacities of all that can be cut, and of an edge that cannot: of 32 bits."""

_SOURCE, _SINK = 0, 1


@dataclasses.dataclass(frozen=True, slots=True)
class Cut(Generic[T]):
    """The values to keep, and those to compute again from them."""

    kept: set[T]
    again: set[T]


def least_cut(
    wanted: Collection[T],
    made_of: Mapping[T, Sequence[T]],
    size: Callable[[T], int],
) -> Cut[T]:
    """The values of the smallest total size from which `wanted` can be computed again.

    `made_of` has the operands of each value that can be computed again.  In the graph a
    value is an edge, from its maker to its readers.  Among the smallest cuts it is the
    one that leaves the least to compute.
    """
    values = _needed(wanted, made_of)
    sizes = {value: size(value) for value in values}
    scale = min(1.0, _COUNTED / max(1, sum(sizes.values())))
    made = {value: 2 * number + 2 for number, value in enumerate(values)}
    edges: dict[tuple[int, int], int] = {}
    for value in values:
        # Rounded up: nothing that has a size is free to keep.
        edges[made[value], made[value] + 1] = math.ceil(sizes[value] * scale)
        if value not in made_of:
            # It cannot be computed again, so paths from it are cut at it or behind it.
            edges[_SOURCE, made[value]] = _UNBOUNDED
        for operand in made_of.get(value, ()):
            # To read costs nothing: only what is kept does, however many read it.
            edges[made[operand] + 1, made[value]] = _UNBOUNDED
        if value in wanted:
            edges[made[value] + 1, _SINK] = _UNBOUNDED
    behind = _behind_least_cut(edges, 2 * len(values) + 2)
    kept = {v for v in values if made[v] not in behind and made[v] + 1 in behind}
    return Cut(kept, again=set(_needed(wanted, made_of, kept)) - kept)


def _needed(
    wanted: Iterable[T], made_of: Mapping[T, Sequence[T]], kept: Collection[T] = ()
) -> list[T]:
    """`wanted`, and all that it can be computed again from, back to what is `kept`."""
    # A dict for its order.  A set of strings has another order in each process, and
    # processes would choose different cuts among equal ones.
    found: dict[T, None] = {}
    waiting = list(wanted)
    while waiting:
        value = waiting.pop()
        if value not in found:
            found[value] = None
            waiting += () if value in kept else made_of.get(value, ())
    return list(found)


def _behind_least_cut(edges: Mapping[tuple[int, int], int], size: int) -> set[int]:
    """The nodes on the sink's side of the least cut that is nearest to it."""
    # Here: both take 0.2 s to import, and programs without gradients need neither.
    from scipy import sparse
    from scipy.sparse import csgraph

    places = np.array(list(edges), np.int32).reshape(-1, 2).T
    capacities = np.array(list(edges.values()), np.int32)
    graph = sparse.csr_array((capacities, tuple(places)), shape=(size, size))
    left = graph - csgraph.maximum_flow(graph, _SOURCE, _SINK).flow
    # SciPy's search would go along stored zeros as well.
    left.eliminate_zeros()
    order = csgraph.breadth_first_order(left.T, _SINK, return_predecessors=False)
    return set(map(int, order))
