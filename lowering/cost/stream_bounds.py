"""Bounds of what a stream could hide, found before any loop is planned for it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TypeAlias

from jhost.lowering.cost.kernels import kernels
from jhost.lowering.cost.outcomes import gain_of
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.rows_of_layers import rows_apart
from jhost.lowering.cost.work_beside import WorkBeside
from jhost.lowering.ir.bodies import ITERATIONS, programs
from jhost.lowering.ir.border import scan_border
from jhost.lowering.ir.derived import derived_with
from jhost.lowering.ir.graph import Graph, graph_of
from jhost.lowering.ir.index import Index, Rank
from jhost.lowering.ir.layout import axes_size, bytes_in, bytes_of
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import between_processes
from jhost.lowering.ir.statements import Communicate, Compute, Cond, Scan, Stmt, While
from jhost.lowering.ir.transfers import SHORT_TRANSFER, larger_side, received_bytes
from jhost.lowering.streams.found import found_streams
from jhost.lowering.streams.found_stream import FoundStream

CanHide: TypeAlias = Callable[[Communicate, Mapping[str, int]], bool]
"""Whether a transfer may stand beside work on a mesh, outside of loops over chunks."""


def least_gain(stream: FoundStream, rates: Rates) -> float:
    """The seconds that a stream has to gain.

    They are a share of its own work, because a prediction is as wrong as it is for what
    the stream changes.  An optimizer beside it makes no gain less certain.
    """
    return (1 - gain_of(rates)) * stream.work


@dataclasses.dataclass(frozen=True, slots=True)
class _Times:
    """The seconds of a program's statements, as far as they matter for streams.

    Attributes:
        graph: the nodes of the program.
        work: for each node, what its contractions take.
        hidden: for each contraction, what it takes, and for each transfer what only a
            stream could hide; by the identities of statements.
        uneven: as in `StreamBounds.uneven`, by the identities of statements.
    """

    graph: Graph
    work: Sequence[float]
    hidden: Mapping[int, float]
    uneven: Mapping[int, float]


class StreamBounds:
    """The streams that could hide enough to gain, by lower bounds of all times."""

    def __init__(self, rates: Rates, can_hide: CanHide) -> None:
        self.rates, self.can_hide = rates, can_hide

    def streams(
        self, program: Program, *, spares: bool = False
    ) -> list[list[FoundStream]]:
        """For each of `programs`, the streams that are worth a closer look.

        `spares` is as in `found_streams`.
        """
        every = [*programs(program)]
        scans = (stmt for each in every for stmt in each.body if isinstance(stmt, Scan))
        carried = {id(s.body): _carried(s) for s in scans if s.length > 1}
        return [self.streams_of(e, carried.get(id(e)), spares) for e in every]

    def streams_of(
        self, program: Program, carried: Mapping[str, str] | None, spares: bool
    ) -> list[FoundStream]:
        """The streams of one program, or of a body that hands on values to itself."""
        times = _times(program, self, carried)
        if times is None:
            return []
        every = found_streams(
            program,
            times.graph,
            lambda s: times.hidden.get(id(s), 0.0),
            lambda s: times.uneven[id(s)],
            spares,
        )
        every = [e for e in every if e.hidden > least_gain(e, self.rates)]
        spare = self.spare_host(program) if every else 0.0
        every = [e for e in every if spare > self.more_host(program, e.moved)]
        return [part for each in every for part in rows_apart(each, times.work)]

    def times(
        self, program: Program, carried: Mapping[str, str] | None
    ) -> _Times | None:
        """The times of a program; None if it has nothing that a stream could hide."""
        if not any(map(self.may_hide, program.body)):
            return None
        graph, mesh = graph_of(program), dict(program.mesh.shape)
        work = [self.work_of(node.stmt, mesh) for node in graph]
        hidden = self.exposed(graph, mesh, WorkBeside(graph, work, carried))
        uneven = {id(n.stmt): self.uneven(n.stmt, mesh) for n in graph}
        if not any((*hidden.values(), *uneven.values())):
            return None
        hidden |= {id(n.stmt): s for n, s in zip(graph, work, strict=True) if s}
        return _Times(graph, work, hidden, uneven)

    def exposed(
        self, graph: Graph, mesh: Mapping[str, int], beside: WorkBeside
    ) -> dict[int, float]:
        """What each transfer takes that no work outside of loops can hide.

        All of them share the work that may stand beside them.  Small ones take nothing:
        no loop hides latencies, and its permutes have more of them.
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
            if seconds
            and isinstance(stmt := graph[number].stmt, Communicate)
            and larger_side(stmt) >= SHORT_TRANSFER
        }

    def spare_host(self, program: Program) -> float:
        """The most seconds for which launches could leave the host idle.

        Nobody knows yet what fuses.  So contractions and communications are launched,
        and nothing else, but all computations take the time of their bytes.
        """
        mesh = dict(program.mesh.shape)
        return sum(self.spare_host_of(stmt, mesh) for stmt in program.body)

    def spare_host_of(self, stmt: Stmt, mesh: Mapping[str, int]) -> float:
        match stmt:
            case Communicate(kind=kind, axes=axes):
                host = self.rates.link(kind, axes).host
                return seconds_of_transfer(stmt, mesh, self.rates) - host
            case Compute() if has_contraction(stmt):
                return self.seconds(stmt, mesh) - self.rates.host
            case Compute(ins=ins, outs=outs):
                return bytes_in((*ins, *outs)) / self.rates.memory
            case _:
                return in_bodies(stmt, self.spare_host)

    def more_host(self, program: Program, moved: Set[str]) -> float:
        """The seconds for which launching permutes keeps the host at least.

        They stand for communications that are `moved`, and take their turn.
        """
        mesh, put = dict(program.mesh.shape), self.rates.put or self.rates.permute
        each = min(put.host, self.rates.permute.host)
        stmts = (s for s in program.body if isinstance(s, Communicate))
        return sum(
            (axes_size(s.axes, mesh) - 1) * each - self.rates.link(s.kind, s.axes).host
            for s in stmts
            if s.name in moved
        )

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
        if isinstance(stmt, Compute):
            return self.seconds(stmt, mesh)
        return in_bodies(stmt, self.work)

    def seconds(self, stmt: Stmt, mesh: Mapping[str, int]) -> float:
        """What a contraction or a communication takes by itself; others nothing."""
        match stmt:
            case Compute() if has_contraction(stmt):
                # The last device: under a causal mask no other has as much work.
                return self.seconds_at(stmt, mesh, [n - 1 for n in mesh.values()])
            case Communicate() if self.may_hide(stmt):
                return seconds_of_transfer(stmt, mesh, self.rates)
            case _:
                return 0.0

    def seconds_at(
        self, stmt: Compute, mesh: Mapping[str, int], ranks: Sequence[int]
    ) -> float:
        """What a contraction takes on the device with these ranks along the axes."""
        at: dict[Index, int] = dict(zip(map(Rank, mesh), ranks, strict=True))
        return sum(k.seconds(self.rates) for k in kernels(stmt, mesh, at))

    def uneven(self, stmt: Stmt, mesh: Mapping[str, int]) -> float:
        """How much longer the last device takes than all do on average."""
        if not isinstance(stmt, Compute) or not has_contraction(stmt):
            return 0.0
        (unit_eqn,) = stmt.unit.eqns
        window = unit_eqn.rule.window
        if window is None or not window.is_causal:
            return 0.0
        axes = unit_eqn.axes[window.queries]
        if not axes or between_processes(axes, self.rates.reach):
            return 0.0
        places = (range(n) if axis in axes else (0,) for axis, n in mesh.items())
        every = [self.seconds_at(stmt, mesh, at) for at in itertools.product(*places)]
        return max(every) - sum(every) / len(every)


@derived_with
def _times(
    program: Program, bounds: StreamBounds, carried: Mapping[str, str] | None
) -> _Times | None:
    """The times by these bounds, which search a program twice."""
    return bounds.times(program, carried)


def seconds_of_transfer(
    stmt: Communicate, mesh: Mapping[str, int], rates: Rates
) -> float:
    """What a communication takes by itself."""
    devices, link = axes_size(stmt.axes, mesh), rates.link(stmt.kind, stmt.axes)
    received = received_bytes(stmt.kind, bytes_of(stmt.source), devices)
    return link.seconds(stmt.kind, received, devices)


def in_bodies(stmt: Stmt, seconds: Callable[[Program], float]) -> float:
    """What the bodies of a statement take, as often as they run."""
    match stmt:
        case Scan(body=body, length=length):
            return length * seconds(body)
        case While(body=body):
            # Nobody knows before how many times it will run.
            return ITERATIONS * seconds(body)
        case Cond(branches=branches):
            # Nor which branch will run, so the slowest counts.
            return max(map(seconds, branches), default=0.0)
        case _:
            return 0.0


def _carried(scan: Scan) -> Mapping[str, str]:
    """The result of a body that makes each carried param for the next iteration."""
    border = scan_border(scan)
    pairs = zip(border.carry, border.carried, strict=True)
    return {before.inside.name: after.inside.name for before, after in pairs}
