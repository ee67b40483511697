"""When the transfers of a loop of whole shards are issued, and what stands beside them.

A loop whose rows a waiting contraction reads has no chunks.  Its transfers move whole
shards, and waiting contractions stand beside them (`waiting_contractions.py`).
`loops/beside.py` writes the statements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Group, Node
from jhost.lowering.ir.queues import OWN, on_stream

_MOVES = ir.Stream(name="moves")
"""The queue of the transfers."""


def in_turns(
    nodes: Sequence[Node], is_moved: Callable[[Node], bool]
) -> Iterator[tuple[bool, Group]]:
    """The nodes of a loop in order, in groups, and whether a group is of transfers.

    Transfers of values from outside of the loop come first.  Transfers in a row are
    issued together, beside the same contractions.
    """
    made = {buffer.name for node in nodes for buffer in node.writes}
    order = sorted(
        nodes, key=lambda node: not is_moved(node) or node.reads[0].name in made
    )
    for moves, group in itertools.groupby(order, is_moved):
        yield moves, [*group]


def with_work_beside(
    moved: Sequence[ir.Stmt], work: Sequence[ir.Stmt]
) -> list[ir.Stmt]:
    """Transfers that are issued before `work`, and waited for behind it.

    XLA makes a transfer synchronous if it finds nothing to run beside it.
    """
    waits = [stmt for stmt in moved if isinstance(stmt, ir.Wait)]
    issued = [stmt for stmt in moved if not isinstance(stmt, ir.Wait)]
    return [
        *on_stream(_MOVES, [ir.Synchronize(stream=OWN), *issued], back=OWN),
        ir.Synchronize(stream=_MOVES),
        *work,
        *on_stream(_MOVES, waits, back=OWN),
        ir.Synchronize(stream=_MOVES),
    ]
