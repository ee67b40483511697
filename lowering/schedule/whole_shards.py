"""When the transfers of a loop of whole shards are issued, and what stands beside them.

A loop whose rows a waiting contraction reads has no chunks.  Its transfers move whole
shards, and waiting contractions stand beside them (`waiting_contractions.py`).
`loops/whole_shard_loop.py` writes the statements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Group, Node, written_by
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.queues import OWN, on_stream

_MOVES = ir.Stream(name="moves")
"""The queue of the transfers."""


def in_turns(
    nodes: Sequence[Node], is_moved: Callable[[Node], bool]
) -> Iterator[tuple[Group, Group]]:
    """The nodes of a loop in order, in turns: transfers, and the work behind them.

    Transfers of values from outside of the loop come first.  Transfers in a row are
    issued together, beside the same contractions.
    """
    made = written_by(nodes)
    # A stable sort: apart from those transfers, all keep the order of the program.
    order = sorted(
        nodes, key=lambda node: not is_moved(node) or node.reads[0].name in made
    )
    moved: Group = []
    for moves, group in itertools.groupby(order, is_moved):
        if moves:
            moved = [*group]
        else:
            yield moved, [*group]
            moved = []
    if moved:
        yield moved, []


def as_they_arrive(moved: Group, work: Group) -> Iterator[tuple[Group, Group]]:
    """Which transfers to wait for, one after another, and the work before the next.

    Work that needs no transfer comes first.  A transfer is waited for alone if that
    releases a product, which the others then stand beside.
    """
    waiting, left = [*moved], [*work]
    # Whatever needs no transfer stands beside the first, hence the empty list.
    for arrives in ([], *([node] for node in moved)):
        others = [node for node in waiting if node not in arrives]
        if others and (released := _released(left, others)):
            yield arrives, released
            waiting, left = others, [node for node in left if node not in released]
    yield waiting, left


def products_of(node: Node, others: Group, work: Group) -> Group:
    """The products that wait for a transfer, and for none of the others."""
    free = _released(work, [node, *others])
    return [each for each in _released(work, others) if each not in free]


def _released(work: Group, waiting: Group) -> Group:
    """The products that need none of the transfers that are waited for.

    With what they are made of.  Other cheap work comes later, because XLA fuses it with
    what reads it only if no wait stands between the two.
    """
    unmade = written_by(waiting)
    ready: list[Node] = []
    for node in work:
        if unmade.isdisjoint((*(buffer.name for buffer in node.reads), *node.barrier)):
            ready.append(node)
        else:
            unmade |= {buffer.name for buffer in node.writes}
    wanted: set[str] = set()
    found: list[Node] = []
    for node in reversed(ready):
        made = {buffer.name for buffer in node.writes}
        if has_contraction(node.stmt) or not made.isdisjoint(wanted):
            found.insert(0, node)
            wanted |= {buffer.name for buffer in node.reads}
    return found


def issued(moved: Sequence[ir.Stmt]) -> list[ir.Stmt]:
    """Transfers, issued behind the work so far; what comes next stands beside them."""
    return [
        *on_stream(_MOVES, [ir.Synchronize(stream=OWN), *moved], back=OWN),
        ir.Synchronize(stream=_MOVES),
    ]


def waited_for(waits: Sequence[ir.Stmt]) -> list[ir.Stmt]:
    """The waits for transfers, before what reads these.

    XLA makes a transfer synchronous if it finds nothing to run beside it.
    """
    if not waits:
        return []
    return [*on_stream(_MOVES, waits, back=OWN), ir.Synchronize(stream=_MOVES)]
