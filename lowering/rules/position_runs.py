"""Runs of positions, by which attention on a part of it is cut into blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jhost.lowering.rules.dim_rule import AttentionWindow, Shard

# In all chunks of a loop together: XLA compiles a few matmuls for each.
_MOST_BLOCKS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class PositionRun:
    """`size` steps of a factor from `at` on; in the whole they lie within `span`.

    The first of them stands at `first` there.
    """

    at: int
    size: int
    first: Any
    span: Any

    def is_like(self, other: PositionRun) -> bool:
        """Whether both are of one size and have all positions of their spans."""
        spans = self.size, other.size, self.span, other.span
        return all(isinstance(span, int) for span in spans) and len({*spans}) == 1


def blocks_of(
    window: AttentionWindow, sizes: tuple[int, int], shard: Shard
) -> tuple[list[PositionRun], list[PositionRun]]:
    """The runs of queries and those of keys: squares, if those are not too many.

    `sizes` are the queries and keys of the whole.
    """
    both = window.queries, window.keys
    starts, here = [*map(shard.starts, both)], [*map(shard.size, both)]
    most = max(_MOST_BLOCKS * here[1] // sizes[1], 1)
    side = math.gcd(*map(shard.grain, both))
    if window.right == 0 and math.prod(n // side for n in here) <= most:
        rows, columns = (_runs(*each, side) for each in zip(starts, here, strict=True))
        return rows, columns
    rows = _runs(starts[0], here[0], here[0] // len(starts[0]))
    # Keys of a row are cut as its queries are: they have no smaller blocks to skip.
    stretch = here[1] // len(starts[1])
    columns = _runs(starts[1], here[1], math.gcd(stretch, rows[0].size))
    return rows, _joined(columns, max(most // len(rows), 1))


def sees(
    window: AttentionWindow, row: PositionRun, column: PositionRun, distance: Any
) -> tuple[Any, Any]:
    """Whether a run of queries sees no key of another run, and whether it sees all.

    The first query stands `distance` behind the first key.
    """
    nearest, farthest = distance - column.span + 1, distance + row.span - 1
    left, right = window.left, window.right
    hidden, seen = False, True
    if left is not None:
        hidden, seen = hidden | (nearest > left), seen & (farthest <= left)
    if right is not None:
        hidden, seen = hidden | (farthest < -right), seen & (nearest >= -right)
    return hidden, seen


def _runs(starts: Sequence[Any], here: int, size: int) -> list[PositionRun]:
    """The stretches of a factor that begin there, cut into runs of one size."""
    stretch = here // len(starts)
    return [
        PositionRun(number * stretch + at, size, start + at, size)
        for number, start in enumerate(starts)
        for at in range(0, stretch, size)
    ]


def _joined(runs: Sequence[PositionRun], most: int) -> list[PositionRun]:
    """Neighbours among the runs made one, equally many in each, to have so few."""
    each = next(
        n
        for n in range(1, len(runs) + 1)
        if not len(runs) % n and len(runs) <= n * most
    )
    return [
        dataclasses.replace(
            first, size=each * first.size, span=last.first - first.first + last.span
        )
        for first, last in zip(runs[::each], runs[each - 1 :: each], strict=True)
    ]
