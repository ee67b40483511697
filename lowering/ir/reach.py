"""How far apart the devices along an axis of the mesh lie, and what that means.

Only GPUs of one process copy to each other by copy engines, which run beside any
kernel.  All other transfers are kernels of NCCL's.  A matmul leaves them no
multiprocessors, so they start when that matmul ends, and run beside the next ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.program import Program

Reach: TypeAlias = Literal["process", "host", "hosts"]
"""In one process, in several of one host, or on several hosts."""

WHERE: Mapping[Reach, str] = {
    "process": "in one process",
    "host": "in several processes of a host",
    "hosts": "on several hosts",
}
"""Where the devices along an axis are."""

_WHAT_HELPS: Mapping[Reach, str] = {
    "host": "one process a host, with all its GPUs, would let it be pipelined",
    "hosts": "an axis that is pipelined has to lie within a host, in one process",
}


Lane: TypeAlias = Literal["copies", "collectives", "network"]
"""What moves a transfer: copy engines, NCCL's kernels in a host, or the network."""


def lane_of(stmt: ir.Communicate, reach: Mapping[str, Reach]) -> Lane:
    """The lane of a transfer between GPUs that lie so far apart."""
    reaches = {reach.get(axis, "process") for axis in stmt.axes}
    # The farthest axis decides, because a ring is as slow as its slowest link.
    if "hosts" in reaches:
        return "network"
    # An engine copies; what adds up, or brings several parts, is a kernel.
    copied = stmt.kind == "CollectivePermute" and reaches == {"process"}
    return "copies" if copied else "collectives"


def between_processes(axes: Iterable[str], reach: Mapping[str, Reach]) -> list[str]:
    """The axes among some whose devices are not in one process."""
    return [axis for axis in axes if reach.get(axis, "process") != "process"]


def why_not_hidden(
    axes: Iterable[str], reach: Mapping[str, Reach], mesh: Mapping[str, int]
) -> str:
    """Why jhost chooses no loop that moves chunks along these axes, and what helps."""
    names = between_processes(axes, reach)
    farthest: Reach = "hosts" if "hosts" in map(reach.get, names) else "host"
    helps = laid_better(names, reach, mesh) or _WHAT_HELPS[farthest]
    return (
        f"the devices along {' and '.join(names)} are {WHERE[farthest]}. Between "
        "processes a chunk is sent by a kernel, which starts when the running matmul "
        f"ends; {helps}"
    )


def laid_better(
    names: Sequence[str], reach: Mapping[str, Reach], mesh: Mapping[str, int]
) -> str:
    """How to lay axes within a process that could lie there in place of others.

    Empty where they could not.
    """
    within = [axis for axis in reach if axis not in between_processes(reach, reach)]
    room = math.prod(mesh[axis] for axis in within)
    size = math.prod(mesh[axis] for axis in names)
    # The other axes have to fill the rest of the process evenly.
    if size == 1 or room % size:
        return ""
    inner = {axis: mesh[axis] for axis in names}
    others = {axis: size for axis, size in mesh.items() if axis not in inner}
    return (
        f"they would fit into one process, where {' and '.join(within)} lies: "
        f"jhost.distributed.make_mesh({others | inner})"
    )


def permutes(program: Program) -> Counter[str]:
    """How many permutes go along each axis of the mesh."""
    return Counter(axis for stmt in statements(program) for axis in _along(stmt))


def _along(stmt: ir.Stmt) -> tuple[str, ...]:
    match stmt:
        case ir.Communicate(kind="CollectivePermute" | "SwapAxes", axes=axes):
            return axes
        case _:
            return ()
