"""Cheap work that stands beside the last sends of a loop.

A loop that sums over devices ends with a transfer, and only the device's own chunk
stands beside it.  What comes next reads the sum.  But some of it, such as the cast of
the next layer's weights, waits for nothing that the loop makes, and is written for the
next work in any case.  It stands before the device's own chunk, and not behind the sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from jhost.lowering.ir.graph import Group, read_by, written_by
from jhost.lowering.ir.layout import bytes_in
from jhost.lowering.schedule.shards_ahead import WorkAhead

_LEAST = 1 << 20
"""Less than so many bytes takes no time, and stays where it is."""


def beside_last_sends(
    order: WorkAhead, loop: Group, given: Collection[str]
) -> list[Group]:
    """The groups between a loop and the next work that are made of what is `given`.

    They make something large, and only work reads it.
    """
    behind = order.groups[order.groups.index(loop) + 1 :]
    stretch = [*itertools.takewhile(lambda group: not order.is_work(group), behind)]
    ready = _made_of(order, stretch, {*given})
    rest = (group for group in stretch if group not in ready)
    read_by_rest = read_by(itertools.chain(*rest))
    chosen = list[Group]()
    wanted = set[str]()
    for group in reversed(ready):
        made = written_by(group)
        size = bytes_in(buffer for node in group for buffer in node.writes)
        if (made & wanted or size >= _LEAST) and made.isdisjoint(read_by_rest):
            chosen.append(group)
            wanted |= read_by(group)
        else:
            read_by_rest |= read_by(group)
    return chosen[::-1]


def _made_of(
    order: WorkAhead, stretch: Sequence[Group], known: set[str]
) -> list[Group]:
    """The cheap groups of a stretch that read only what is known, or one another."""
    found = list[Group]()
    for group in stretch:
        (node, *more), in_loops = group, order.contractions.in_loops
        reads = read_by([node])
        if more or node.barrier or id(node) in in_loops or not reads:
            continue
        if reads <= known and order.goes_along(group):
            found.append(group)
            known |= written_by([node])
    return found
