"""Verification of loops over chunks, whose iterations may be issued in stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from jhost.lowering.ir.regions import overlap
from jhost.lowering.ir.stages import OwnNames, StageRun, stage_runs, stages_of
from jhost.lowering.ir.statements import For, Stmt
from jhost.lowering.verify.known import InFlight, KnownBuffer, Scope
from jhost.lowering.verify.state import State


@dataclasses.dataclass(slots=True)
class _UnderWay:
    """The roots that an iteration has made, and its communications in flight."""

    scope: Scope = dataclasses.field(default_factory=Scope)
    in_flight: dict[str, InFlight] = dataclasses.field(
        default_factory=dict[str, InFlight]
    )


@dataclasses.dataclass(slots=True)
class _Staged:
    """A loop in stages: its current iteration, and all reads and writes so far.

    Each entry has the iteration, whether it was a write, and the buffer.
    """

    iteration: int = 0
    touched: dict[int, list[tuple[int, bool, KnownBuffer]]] = dataclasses.field(
        default_factory=dict[int, list[tuple[int, bool, KnownBuffer]]]
    )
    """By identity of the memory."""

    def ahead(self, known: KnownBuffer, writes: bool) -> list[int]:
        """The later iterations that came first to this memory, where that matters."""
        before = self.touched.setdefault(id(known.root), [])
        found = [
            iteration
            for iteration, wrote, other in before
            if iteration > self.iteration
            and (writes or wrote)
            and overlap(known.region, other.region)
        ]
        before.append((self.iteration, writes, known))
        return found


def check_loop(
    state: State, stmt: For, check_body: Callable[[State, Sequence[Stmt]], None]
) -> None:
    """The stages of all iterations, as they are issued."""
    if stmt.index in state.loops:
        state.fail("a new index", stmt.index, "nested loops have indices of their own")
    _check_order(state, stmt)
    before = state.current
    buffers = OwnNames(stmt, state.known)
    iterations = [_UnderWay() for _ in range(stmt.extent)]
    staged = _Staged()
    if stmt.order:
        # Only a loop with an order lets an iteration overtake another.
        state.staged.append(staged.ahead)
    for stage in stage_runs(stmt):
        staged.iteration = stage.iteration
        own = iterations[stage.iteration]
        with (
            state.iteration(stmt, stage.iteration),
            buffers.of(stage.iteration),
            _in_flight(state, f"{stmt.index} = {stage.iteration}", stage, own),
            state.scope(own.scope, ends=stage.last),
        ):
            check_body(state, stage.body)
        # Messages name `state.stmt`, and the body has set it to its last statement.
        state.stmt = stmt
        state.check_restored(before, "the loop")
    if stmt.order:
        state.staged.pop()


def _check_order(state: State, stmt: For) -> None:
    """Each stage of each iteration comes once, and behind its earlier stages."""
    stages = range(len(stages_of(stmt)))
    for iteration in range(stmt.extent) if stmt.order else ():
        found = [stage for number, stage in stmt.order if number == iteration]
        if found != [*stages]:
            state.fail(
                f"stages {[*stages]} of iteration {iteration} in order",
                f"{found}",
                "an iteration goes through all stages of its loop",
            )
    if stmt.order and len(stmt.order) != stmt.extent * len(stages):
        state.fail(
            f"stages of {stmt.extent} iterations",
            f"{len(stmt.order)} in all",
            "an iteration goes through all stages of its loop",
        )


@contextmanager
def _in_flight(
    state: State, place: str, stage: StageRun, own: _UnderWay
) -> Generator[None]:
    """Communications of `own` have plain names inside, and with `place` outside."""
    # All iterations have the same names for their communications, so the names of
    # iterations that wait for their next stage must differ.
    for name in own.in_flight:
        state.in_flight[name] = state.in_flight.pop(f"{name} of {place}")
    before = state.in_flight.keys() - own.in_flight.keys()
    yield
    names = [] if stage.last else [n for n in state.in_flight if n not in before]
    own.in_flight = {name: state.in_flight.pop(name) for name in names}
    for name, flight in own.in_flight.items():
        state.in_flight[f"{name} of {place}"] = flight
