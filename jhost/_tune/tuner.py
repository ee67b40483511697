"""Tunes one program: its candidates are compiled, compared, and timed in turns.

A program is taken before anything is chosen for its marks, and tuned stream by stream:
the choice for one stays while the next is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jhost._call.config import Call
from jhost._call.execute import jitted
from jhost._call.program import Planned
from jhost._compare import beyond_tolerance, tolerances_of
from jhost._jax import evaluate
from jhost._progress import Progress, no_progress
from jhost._timing import take_turns
from jhost._tuning import Candidate, TunedProgram, TunedStream
from jhost._tuning_holds import arguments_text
from jhost.errors import first_line
from jhost.lowering.cost.outcomes import GAIN, Outcome, left_out_text
from jhost.lowering.emit.program import specs_of
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import all_marks, programs
from jhost.lowering.ir.display_names import display_name
from jhost.lowering.ir.effects import written
from jhost.lowering.ir.fingerprint import fingerprint
from jhost.lowering.ir.marks import Mark
from jhost.lowering.ir.printer import type_text
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import marks_alike, open_marks, set_choice

_HOPELESS = 3.0
"""A candidate predicted to take that many times the best is not measured."""

WARMUPS, CALLS = 3, 10
"""Calls before the first round, and in a round: as many as keep the devices busy."""

TimedCall: TypeAlias = Callable[[], Any]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class _Ready:
    """A candidate that can be timed."""

    outcome: Outcome
    run: TimedCall


class Tuner:
    """One program on its operands, and how often each candidate has its turn."""

    def __init__(self, name: str, call: Call, plan: Planned, rounds: int) -> None:
        self.name = name
        self.call = call
        self.plan = plan
        self.rounds = rounds
        self.bar = no_progress()
        self.marks: list[Mark] = all_marks(plan.program)
        self.groups = marks_alike(plan.program) if _moves(call) else []
        self.tolerances = tolerances_of(call.call_jaxpr)
        self.warnings: list[str] = []

    @property
    def steps(self) -> int:
        """How many steps the bar has: half to prepare candidates, half to time them."""
        return 2 * self.rounds * len(self.groups)

    def tuned_program(self, bar: Progress) -> TunedProgram:
        """Streams as measured; `bar` says what is under way."""
        self.bar = bar
        wanted = self.plain() if self.groups else None
        return TunedProgram(
            name=self.name,
            fingerprint=fingerprint(self.plan.program),
            arguments=arguments_text(self.plan.program),
            streams=tuple(self.tuned_stream(group, wanted) for group in self.groups),
        )

    def plain(self) -> Any:
        """The results without jhost: marks are the identity then."""
        jaxpr, _, operands = self.call
        # By `jax.jit` alone: a candidate must not be compared with jhost itself.
        return jax.jit(lambda *operands: evaluate(jaxpr, operands))(*operands)

    def tuned_stream(self, numbers: tuple[int, ...], wanted: Any) -> TunedStream:
        """Measures the candidates for some marks alike, and settles on the best."""
        program, chooser = self.plan.program, self.plan.passes.choice
        # One stream after the other: all combinations would be a product of counts.
        mark = open_marks(program)[numbers[0]]
        evaluation = chooser.evaluation(program, self.marks, numbers)
        outcomes = evaluation.measurable(mark)
        left_out = list(evaluation.evaluator.refusals)
        ready = self.prepare(_worth_it(outcomes, left_out), wanted, left_out)
        ranked = self.ranked(ready)
        if ranked:
            best, _ = ranked[0]
            set_choice(self.marks, numbers, best.outcome.mark)
        return TunedStream(
            value=_value_text(program, mark.buffer),
            where=mark.where,
            axis=mark.dim,
            marks=numbers,
            candidates=tuple(candidate for _, candidate in ranked),
            left_out=tuple(left_out),
        )

    def prepare(
        self, outcomes: Sequence[Outcome], wanted: Any, left_out: list[str]
    ) -> list[_Ready]:
        """The outcomes that compile here and give what the plain function gives."""
        ready: list[_Ready] = []
        if not outcomes:
            self.bar.step(f"{self.name}: nothing to compile", self.rounds)
        for number, outcome in enumerate(outcomes):
            steps = _share(self.rounds, number, len(outcomes))
            self.bar.step(f"{self.name}: {outcome.text}", steps)
            given = None
            run, said = _attempted(functools.partial(self.runner, outcome))
            if run is not None:
                # What compiles may still need too much memory, so it runs once before
                # it is timed.
                given, said = _attempted(run)
            if run is None or given is None:
                left_out.append(left_out_text(outcome.text, said))
            elif problems := beyond_tolerance(given, wanted, self.tolerances):
                left_out.append(left_out_text(outcome.text, problems[0]))
                self.warnings.append(_difference(self.name, outcome.text, problems))
            else:
                ready.append(_Ready(outcome, run))
        return ready

    def runner(self, outcome: Outcome) -> TimedCall:
        """A call of the compiled candidate, on operands where it wants them."""
        program, config = self.plan.finish(outcome.program), self.call.config
        operands = _placed(self.call.operands, program, config.mesh)
        function = jitted(program, config, self.call.call_jaxpr)
        # Ahead of time, so that no round has a compilation in it.
        compiled = function.lower(*operands).compile()
        return lambda: compiled(*operands)

    def ranked(self, ready: Sequence[_Ready]) -> list[tuple[_Ready, Candidate]]:
        """What each took, by their times, the chosen one first."""
        times = take_turns(
            {each.outcome.text: each.run for each in ready},
            rounds=self.rounds,
            calls=CALLS,
            warmups=WARMUPS,
            before_round=lambda n: self.bar.step(f"{self.name}: round {n + 1}"),
        )
        measured = [
            # By the slowest process, so that all processes choose alike.
            _candidate(each.outcome, _slowest(times[each.outcome.text]).tolist())
            for each in ready
        ]
        made = {id(each): one for each, one in zip(measured, ready, strict=True)}
        return [(made[id(each)], each) for each in best_first(measured)]


def _attempted(do: Callable[[], T]) -> tuple[T | None, str]:
    """What `do` gave; None and the reason, if it failed in this process or another."""
    result, said = None, "another process failed"
    try:
        result = jax.block_until_ready(do())
    except Exception as error:  # too much memory, say: other candidates may do
        said = first_line(error)
    # All processes drop it, or its collectives would wait for one that did.
    failed = bool(_slowest([result is None])[0])
    return (None if failed else result), said


def _share(total: int, number: int, count: int) -> int:
    """What one of `count` has of a total that they share: whole, and all in all."""
    return total * (number + 1) // count - total * number // count


def _value_text(program: Program, name: str) -> str:
    """What a user calls a buffer, and its type."""
    for each in programs(program):
        made = (buffer for stmt in ir.walk(each.body) for buffer in written(stmt))
        for buffer in (*each.params, *made):
            if buffer.name == name:
                return f"{display_name(each, name)}: {type_text(buffer)}"
    return name


def _moves(call: Call) -> bool:
    """Whether anything can move: on one device there is nothing to tune."""
    return isinstance(call.config.mesh, Mesh) and call.config.mesh.size > 1


def _worth_it(outcomes: Sequence[Outcome], left_out: list[str]) -> list[Outcome]:
    """The outcomes not predicted to take far longer than the best, if any is."""
    best = min((outcome.seconds for outcome in outcomes), default=math.nan)

    def is_hopeless(outcome: Outcome) -> bool:
        return bool(outcome.mark.spec.pipeline) and outcome.seconds > _HOPELESS * best

    if texts := [outcome.text for outcome in outcomes if is_hopeless(outcome)]:
        left_out.append(f"predicted to take far longer: {', '.join(texts)}")
    return [outcome for outcome in outcomes if not is_hopeless(outcome)]


def _placed(
    operands: Sequence[Any], program: Program, mesh: Any
) -> tuple[jax.Array, ...]:
    """The operands laid out as a program wants them, so that no call moves them."""
    if not isinstance(mesh, Mesh):
        return tuple(operands)
    pairs = zip(operands, specs_of(program, program.params), strict=True)
    return tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs)


def _candidate(outcome: Outcome, times: Sequence[float]) -> Candidate:
    return Candidate(
        **dataclasses.asdict(outcome.mark.spec),
        text=outcome.text,
        minimum=min(times),
        median=statistics.median(times),
        predicted=None if math.isnan(outcome.seconds) else outcome.seconds,
    )


def best_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first, unless another gains; then the others by their medians."""
    if not candidates:
        return []
    chosen = candidates[0]
    for candidate in candidates[1:]:
        if candidate.median < GAIN * chosen.median:
            chosen = candidate
    others = [candidate for candidate in candidates if candidate is not chosen]
    return [chosen, *sorted(others, key=lambda candidate: candidate.median)]


def _difference(name: str, text: str, problems: Sequence[str]) -> str:
    lines = "\n".join(f"  * {problem}" for problem in problems)
    return (
        f"jhost.tune: {name}, {text}, does not give what the plain function gives, and "
        f"is left out. If the difference is not rounding, please report it.\n{lines}"
    )


def _slowest(values: Sequence[Any]) -> np.ndarray:
    """The largest of each value that the processes have; all of them get the same."""
    array = np.asarray(values)
    if jax.process_count() == 1:
        return array
    return np.max(np.asarray(multihost_utils.process_allgather(array)), axis=0)
