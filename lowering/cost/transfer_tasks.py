"""The tasks of a communication: a part beside which nothing runs, and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jhost.lowering.cost.rates import Link, Rates
from jhost.lowering.cost.task import Task
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.layout import axes_size, bytes_of
from jhost.lowering.ir.reach import between_processes
from jhost.lowering.ir.transfers import received_bytes

_EXCLUSIVE: Mapping[ir.CommunicationKind, float] = {"AllToAll": 0.25, "AllReduce": 1.0}
"""The share of a collective outside of loops beside which nothing runs.

XLA decides when the rest runs.  Measured on two H100s:

- A layer of experts has four all-to-alls, forward and backward, and XLA ran three of
  them alone.  With a share of a quarter, a backward behind a p2p forward is predicted
  to take 7.7 ms, and 6.5 ms with p2p as well.  Measured were 7.2 and 6.4 ms.
- Sums of gradients that take 6.0 ms made a step 6.0 ms longer.
"""

_TAKEN: Mapping[ir.CommunicationKind, float] = {"ReduceScatter": 0.6}
"""How much longer the work beside a collective takes, as a share of its time.

It holds where XLA has one collective under way, beside work that it picks.  With
options to begin all of them early it is the link's `taken`.  NCCL's kernels take
multiprocessors and memory from the work beside them.
"""


def transfer_tasks(
    stmt: ir.Communicate,
    after: frozenset[int],
    rates: Rates,
    mesh: Mapping[str, int],
    *,
    ordered: bool,
    fixed: bool,
    early: bool,
) -> Iterator[Task]:
    """The tasks of a communication behind others; the second waits for the first.

    Args:
        stmt: the communication.
        after: the numbers of the tasks that it waits for.
        rates: the rates of the devices.
        mesh: the sizes of the axes.
        ordered: whether jhost says when it is issued.
        fixed: whether XLA does not move it.
        early: whether XLA has options to begin it early.
    """
    kind = stmt.kind
    devices = axes_size(stmt.axes, mesh)
    received = received_bytes(kind, bytes_of(stmt.source), devices)
    link = rates.link(kind, stmt.axes)
    seconds = link.seconds(kind, received, devices)
    beside = link.beside_compute or ordered or early
    share = 0.0 if beside else 1.0 if fixed else _EXCLUSIVE.get(kind, 0.0)
    task = Task(
        seconds=seconds,
        host=0.0,
        after=after,
        transfer=True,
        exclusive=share > 0,
        name=stmt.name,
    )
    if 0 < share < 1:
        yield dataclasses.replace(task, seconds=share * seconds)
        seconds -= share * seconds
    yield dataclasses.replace(
        task,
        seconds=seconds,
        host=link.host,
        delay=link.delay,
        gap=link.gap,
        meet=link.meet,
        network=link.network,
        copied=link.beside_compute,
        between=bool(between_processes(stmt.axes, rates.reach)),
        exclusive=share == 1,
        unordered=share < 1 and not (link.beside_compute or ordered),
        early=early,
        taken=_taken(kind, link, early) * seconds,
    )


def _taken(kind: ir.CommunicationKind, link: Link, early: bool) -> float:
    return link.taken if early else _TAKEN.get(kind, 0.0)
