"""Leave a program to XLA where jhost has little to add to it.

Between processes jhost chooses no loop over chunks by itself; it only orders the
transfers that have work to stand beside.  Where these are less than half of the bytes
that move, as for the activations of tensor parallelism, the program runs as in
`jax.jit`.

A program without transfers to order, as with `pipeline="off"`, runs as in `jax.jit`
too.  If most of its bytes have work to stand beside, XLA gets options to begin
collectives early and to have several under way.  In other programs these options would
make collectives delay the computations that they have nothing to do with.

A program that communicates along several axes does not get the options.  With them,
collectives over different devices may wait for each other forever.  That was seen on
four H200s in two processes without peer access (JAX 0.11.2).  A training step of 8B
over dp=2, tp=2 never ended in `jax.jit` with the options.  It ended without them, and
in jhost's order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from jhost._jax import is_own
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import has_loops, statements
from jhost.lowering.ir.layout import axes_size, bytes_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.queues import MAIN, TRANSFERS
from jhost.lowering.ir.remarks import LeftToXla
from jhost.lowering.ir.transfers import received_bytes
from jhost.lowering.schedule.order import beside_work


@dataclasses.dataclass(frozen=True, slots=True)
class LeaveToXla:
    """A program in order -> the same, with a remark if XLA is to partition it.

    `between` has the axes along which GPUs of several processes lie.
    """

    name: ClassVar[str] = "leave_to_xla"

    between: frozenset[str]

    def apply(self, program: Program) -> Program:
        if not self.between:
            return program
        moved = list(_moved(program, self.between))
        if not moved or has_loops(program) or has_own_kernels(program):
            return program
        # By bytes, not by seconds: all processes have to write one program, and the
        # rates that they have measured may differ.
        hidden = sum(each.bytes for each in moved if each.beside_work)
        most = 2 * hidden >= sum(each.bytes for each in moved)
        if most and any(each.in_order for each in moved):
            return program
        axes = dict.fromkeys(axis for each in moved for axis in each.axes)
        early = most and is_over_same_devices(program)
        report = LeftToXla(axes=tuple(axes), early=early)
        return dataclasses.replace(program, remarks=(*program.remarks, report))


@dataclasses.dataclass(frozen=True, slots=True)
class _Moved:
    """What each device receives from other processes by one communication.

    Attributes:
        axes: the axes between processes that it moves along.
        bytes: the bytes received, in all iterations.
        beside_work: whether there is work that it could stand beside.
        in_order: whether jhost has put it beside that work.
    """

    axes: tuple[str, ...]
    bytes: int
    beside_work: bool
    in_order: bool


def _moved(
    program: Program, between: frozenset[str], times: int = 1
) -> Iterator[_Moved]:
    """The communications between processes in a program and in its bodies."""
    mesh = dict(program.mesh.shape)
    could = {stmt.name for stmt in beside_work(program, lambda _: True)}
    stream = MAIN
    for stmt in ir.walk(program.body):
        match stmt:
            case ir.SetCurrentStream():
                stream = stmt.stream
            case ir.Communicate() if not between.isdisjoint(stmt.axes):
                axes = [axis for axis in stmt.axes if axis in between]
                devices = axes_size(stmt.axes, mesh)
                moved = received_bytes(stmt.kind, bytes_of(stmt.source), devices)
                ordered = stream == TRANSFERS
                beside = ordered or stmt.name in could
                yield _Moved(tuple(axes), times * moved, beside, ordered)
            case ir.Scan() | ir.While() | ir.Cond():
                length = stmt.length if isinstance(stmt, ir.Scan) else 1
                for body in stmt.bodies:
                    yield from _moved(body, between, times * length)
            case _:
                pass


def is_over_same_devices(program: Program) -> bool:
    """Whether all communications go along the same axes."""
    moved = (s for s in statements(program) if isinstance(s, ir.Communicate))
    return len({stmt.axes for stmt in moved}) == 1


def has_own_kernels(program: Program) -> bool:
    """Whether it has computations of jhost's own, which XLA cannot partition."""
    return any(
        is_own(eqn.eqn.primitive)
        for stmt in statements(program)
        if isinstance(stmt, ir.Compute)
        for eqn in stmt.unit.eqns
    )


def left_to_xla(program: Program) -> LeftToXla | None:
    """The remark that XLA is to partition a program, if it is."""
    return next((r for r in program.remarks if isinstance(r, LeftToXla)), None)
