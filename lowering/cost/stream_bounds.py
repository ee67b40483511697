"""Bounds of what a stream could hide, found before any loop is planned for it."""

from __future__ import annotations

from jhost.lowering.cost.candidates import gain_of
from jhost.lowering.cost.kernels import kernels
from jhost.lowering.cost.rates import Rates
from jhost.lowering.ir.bodies import ITERATIONS, programs
from jhost.lowering.ir.index import Index, Rank
from jhost.lowering.ir.layout import axes_size, bytes_of
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import between_processes
from jhost.lowering.ir.statements import Communicate, Compute, Cond, Scan, Stmt, While
from jhost.lowering.ir.transfers import received_bytes
from jhost.lowering.streams.found import FoundStream, found_streams


class StreamBounds:
    """The streams that could hide enough to gain, by lower bounds of all times."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def streams(self, program: Program) -> list[list[FoundStream]]:
        """For each of `programs`, the streams that are worth a closer look."""
        return [self.streams_of(each) for each in programs(program)]

    def streams_of(self, program: Program) -> list[FoundStream]:
        if not any(map(self.may_hide, program.body)):
            return []
        mesh = dict(program.mesh.shape)
        least = (1 - gain_of(self.rates)) * self.work(program)
        every = found_streams(program, lambda stmt: self.seconds(stmt, mesh))
        return [each for each in every if each.hidden > least]

    def may_hide(self, stmt: Stmt) -> bool:
        """Whether it is a transfer that copy engines could make beside work."""
        return isinstance(stmt, Communicate) and not between_processes(
            stmt.axes, self.rates.reach
        )

    def work(self, program: Program) -> float:
        """The seconds of a program's contractions, in its bodies too."""
        mesh = dict(program.mesh.shape)
        return sum(self.work_of(stmt, mesh) for stmt in program.body)

    def work_of(self, stmt: Stmt, mesh: dict[str, int]) -> float:
        match stmt:
            case Compute():
                return self.seconds(stmt, mesh)
            case Scan(body=body, length=length):
                return length * self.work(body)
            case While(body=body):
                return ITERATIONS * self.work(body)
            case Cond(branches=branches):
                return max(map(self.work, branches), default=0.0)
            case _:
                return 0.0

    def seconds(self, stmt: Stmt, mesh: dict[str, int]) -> float:
        """The seconds of a contraction or a communication by itself; 0 for others."""
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
