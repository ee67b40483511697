"""Bounds of what a stream could hide, found before any loop is planned for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from jhost.lowering.cost.candidates import gain_of
from jhost.lowering.cost.kernels import kernels
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.work_beside import WorkBeside
from jhost.lowering.ir.bodies import ITERATIONS, programs
from jhost.lowering.ir.graph import Graph, graph_of
from jhost.lowering.ir.index import Index, Rank
from jhost.lowering.ir.layout import axes_size, bytes_of
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import between_processes
from jhost.lowering.ir.statements import Communicate, Compute, Cond, Scan, Stmt, While
from jhost.lowering.ir.transfers import received_bytes
from jhost.lowering.streams.found import FoundStream, found_streams

CanHide: TypeAlias = Callable[[Communicate, Mapping[str, int]], bool]
"""Whether a transfer may stand beside work on a mesh, outside of loops over chunks."""


class StreamBounds:
    """The streams that could hide enough to gain, by lower bounds of all times."""

    def __init__(self, rates: Rates, can_hide: CanHide) -> None:
        self.rates, self.can_hide = rates, can_hide

    def streams(self, program: Program) -> list[list[FoundStream]]:
        """For each of `programs`, the streams that are worth a closer look."""
        every = [*programs(program)]
        scans = (stmt for each in every for stmt in each.body if isinstance(stmt, Scan))
        again = {id(scan.body) for scan in scans if scan.length > 1}
        return [self.streams_of(each, id(each) in again) for each in every]

    def streams_of(self, program: Program, again: bool) -> list[FoundStream]:
        """Those of one program, or of a body that runs `again` and again."""
        if not any(map(self.may_hide, program.body)):
            return []
        graph, mesh = graph_of(program), dict(program.mesh.shape)
        work = [self.work_of(node.stmt, mesh) for node in graph]
        seconds = self.exposed(graph, mesh, WorkBeside(graph, work, again))
        least = (1 - gain_of(self.rates)) * sum(work)
        # No stream hides more than all that moves, which is known before any is found.
        if sum(seconds.values()) <= least:
            return []
        seconds |= {id(n.stmt): s for n, s in zip(graph, work, strict=True) if s}
        every = found_streams(program, lambda stmt: seconds.get(id(stmt), 0.0))
        return [each for each in every if each.hidden > least]

    def exposed(
        self, graph: Graph, mesh: Mapping[str, int], beside: WorkBeside
    ) -> dict[int, float]:
        """What each transfer takes that no work outside of loops can hide.

        All of them share the work that may stand beside them.
        """
        moves = {
            number: self.seconds(node.stmt, mesh)
            for number, node in enumerate(graph)
            if isinstance(node.stmt, Communicate)
        }
        every = sum(moves.values())
        return {
            id(stmt): seconds * max(0.0, 1 - beside.of(number) / every)
            if self.can_hide(stmt, mesh)
            else seconds
            for number, seconds in moves.items()
            if seconds and isinstance(stmt := graph[number].stmt, Communicate)
        }

    def may_hide(self, stmt: Stmt) -> bool:
        """Whether it is a transfer that copy engines could make beside work."""
        return isinstance(stmt, Communicate) and not between_processes(
            stmt.axes, self.rates.reach
        )

    def work(self, program: Program) -> float:
        """The seconds of a program's contractions, in its bodies too."""
        mesh = dict(program.mesh.shape)
        return sum(self.work_of(stmt, mesh) for stmt in program.body)

    def work_of(self, stmt: Stmt, mesh: Mapping[str, int]) -> float:
        match stmt:
            case Compute():
                return self.seconds(stmt, mesh)
            case Scan(body=body, length=length):
                return length * self.work(body)
            case While(body=body):
                # Nobody knows before how many times it will run.
                return ITERATIONS * self.work(body)
            case Cond(branches=branches):
                # Nor which branch will run, so the slowest counts.
                return max(map(self.work, branches), default=0.0)
            case _:
                return 0.0

    def seconds(self, stmt: Stmt, mesh: Mapping[str, int]) -> float:
        """What a contraction or a communication takes by itself; others nothing."""
        match stmt:
            case Compute() if has_contraction(stmt):
                # The last device: under a causal mask no other has as much work.
                at: dict[Index, int] = {Rank(axis): n - 1 for axis, n in mesh.items()}
                return sum(k.seconds(self.rates) for k in kernels(stmt, mesh, at))
            case Communicate(kind=kind, axes=axes, source=source):
                if not self.may_hide(stmt):
                    return 0.0
                devices = axes_size(axes, mesh)
                received = received_bytes(kind, bytes_of(source), devices)
                return self.rates.link(kind, axes).seconds(kind, received, devices)
            case _:
                return 0.0
