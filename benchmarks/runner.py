"""One case through all arms: compiled, checked, timed in turns, and written down."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jhost
from benchmarks import arms, checks, environment, figures, operands, timing
from benchmarks.arms.base import COTANGENT, Built, Unavailable
from benchmarks.arms.plain import collectives
from benchmarks.case import Case
from benchmarks.timing import Deadline, Effort

Mode = Literal["program", "once"]
Entry = dict[str, Any]

OUT_OF_TIME = {"skipped": "no time left"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is wanted of every case."""

    arms: Sequence[str]
    modes: Sequence[Mode]
    effort: Effort
    deadline: Deadline
    checked: bool
    profiled: bool = False


@dataclasses.dataclass
class Session:
    """One case on one mesh, forward or with its gradients, while it is measured."""

    case: Case
    mesh: Mesh
    backward: bool
    plan: Plan
    _sets: dict[tuple[Any, ...], list[operands.Set]] = dataclasses.field(
        default_factory=dict
    )
    _chosen: dict[str, Built] = dataclasses.field(default_factory=dict)

    def sets(self, built: Built) -> list[operands.Set]:
        """The operand sets of an arm; the same ones for arms that take the same."""
        if built.operands not in self._sets:
            count = operands.set_count(self.case.operands, self.mesh)
            self._sets[built.operands] = [
                operands.random_set(built.operands, self.mesh, seed)
                for seed in range(count)
            ]
        return self._sets[built.operands]

    def build(self, arm: str) -> Built:
        """The arm's function; of several variants the fastest of a few calls.

        Raises:
            Unavailable: it cannot run the case here.
        """
        if arm not in self._chosen:
            variants = arms.ARMS[arm](self.case, self.mesh, self.backward)
            self._chosen[arm] = (
                variants[0] if len(variants) == 1 else self._fastest(variants)
            )
        return self._chosen[arm]

    def _fastest(self, variants: Sequence[Built]) -> Built:
        """Variants that fail are left out, as long as one works."""
        times: list[tuple[float, int]] = []
        failure: Exception | None = None
        for number, built in enumerate(variants):
            try:
                times.append((self._short_time(built), number))
            except Exception as error:
                failure = error
        if not times:
            raise failure or Unavailable("there is no variant")
        return variants[min(times)[1]]

    def _short_time(self, built: Built) -> float:
        call, sets = built.once(), self.sets(built)
        for _ in range(3):
            jax.block_until_ready(call(*sets[0]))
        start = time.perf_counter()
        jax.block_until_ready([call(*sets[n % len(sets)]) for n in range(6)])
        return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Executable:
    """An arm in one mode: how to call it with a choice of sets, and what it took."""

    run: Callable[[Callable[[int], operands.Set]], Any]
    entry: Entry


def measure(case: Case, mesh: Mesh, backward: bool, plan: Plan) -> Entry:
    """Everything about one case but the arms with processes of their own."""
    session = Session(case, mesh, backward, plan)
    record: Entry = {
        "case": case.name,
        "kind": case.kind,
        "model": case.model.name,
        "tokens": case.tokens,
        "devices": case.axes.devices,
        "mesh": dict(case.axes.sizes),
        "pass": "backward" if backward else "forward",
        **({"cotangent": COTANGENT} if backward else {}),
        "flops": case.flops(backward),
        "bytes": case.bytes_moved(backward),
        "sets": operands.set_count(case.operands, mesh),
        "modes": {},
        "checks": {},
        "explain": {},
        "predicted": {},
    }
    for mode in plan.modes:
        record["modes"][mode] = _measure_mode(session, mode, record)
    record["clocks"] = environment.clocks()
    return record


def _measure_mode(session: Session, mode: Mode, record: Entry) -> dict[str, Entry]:
    plan = session.plan
    entries: dict[str, Entry] = {}
    calls: dict[str, timing.Call] = {}
    checker = Checker(session) if plan.checked and not record["checks"] else None
    for arm in [name for name in plan.arms if name in arms.ARMS]:
        if plan.deadline.passed():
            entries[arm] = dict(OUT_OF_TIME)
            continue
        try:
            built = session.build(arm)
            executable = _compiled(session, built, mode)
            entries[arm] = executable.entry
            if built.explain is not None and arm not in record["explain"]:
                explanation = built.explain(session.sets(built)[0])
                record["explain"][arm] = str(explanation)
                record["predicted"] |= predicted_ms(arm, explanation)
            if checker is not None and built.checked:
                record["checks"][arm] = checker.check(arm, built, executable)
            calls[arm] = functools.partial(_call, executable, session.sets(built))
        except Unavailable as reason:
            entries[arm] = {"skipped": str(reason)}
        except Exception as error:
            entries[arm] = {"error": error_text(error)}
    del checker
    instances = plan.effort.instances if mode == "program" else 1
    times = timing.measure(
        calls,
        plan.effort,
        instances,
        plan.deadline,
        lambda arm, error: entries[arm].update(error=error_text(error)),
        idle=arms.IDLE,
    )
    for arm, each in times.items():
        entries[arm] |= each.figures() if each.blocks_ms else dict(OUT_OF_TIME)
    return entries


def predicted_ms(arm: str, explanation: jhost.Explanation) -> dict[str, float]:
    """What jhost's cost model says of an arm, and of plain, where it chose freely.

    The choice for the last stream was made with all others known, so its numbers are
    those of the whole program.
    """
    weighed = [s.predicted for s in explanation.streams if s.predicted]
    if not weighed:
        return {}
    *_, last = weighed
    found = {arm: last[0][1]}
    if len(weighed) == 1 and "not pipelined" in dict(last):
        found["plain"] = dict(last)["not pipelined"]
    return {name: 1e3 * seconds for name, seconds in found.items()}


def _call(executable: Executable, sets: Sequence[operands.Set], number: int) -> Any:
    return executable.run(lambda instance: sets[(number + instance) % len(sets)])


def _compiled(session: Session, built: Built, mode: Mode) -> Executable:
    """Compiles an arm for a mode, and notes the time and the memory."""
    first = session.sets(built)[0]
    start = time.perf_counter()
    if mode == "once":
        function = built.once()
        jax.block_until_ready(function(*first))
        entry = {"first_call_s": time.perf_counter() - start}
        return Executable(lambda choose: function(*choose(0)), entry)
    count = session.plan.effort.instances
    compiled = built.program().lower(*[first] * count).compile()
    entry = {"compile_s": time.perf_counter() - start}
    entry |= memory(compiled.memory_analysis(), count)
    return Executable(
        lambda choose: compiled(*[choose(instance) for instance in range(count)]),
        entry,
    )


def memory(analysis: Any, instances: int = 1) -> Entry:
    """What one instance needs: the instances' temporaries share one place."""
    if analysis is None:
        return {}
    shared = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    temporary = analysis.temp_size_in_bytes
    return {"peak_bytes": shared // instances + temporary, "temp_bytes": temporary}


class Checker:
    """Compares what the arms return with the plain arm, which comes first."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._plain: checks.Outcome | None = None
        self._reference: Any = None

    def check(self, arm: str, built: Built, executable: Executable) -> Entry:
        """What came of it, or the error text."""
        try:
            return self._check(arm, built, executable)
        except Exception as error:
            return {"error": error_text(error)}

    def _check(self, arm: str, built: Built, executable: Executable) -> Entry:
        if self._reference is None:
            self._reference = self._float32(self._session.sets(built)[0])
        outcome = self._outcome(built, executable)
        if arm == "plain":
            self._plain = outcome
        return checks.check(outcome, self._plain, self._reference)

    def _outcome(self, built: Built, executable: Executable) -> checks.Outcome:
        random = self._session.sets(built)[0]
        integers = None
        if self._session.case.exact_integers:
            whole = operands.integer_set(built.operands, self._session.mesh, 1)
            integers = self._first_instance(executable, whole)
        return checks.Outcome(
            random=self._first_instance(executable, random),
            again=self._first_instance(executable, random),
            integers=integers,
        )

    def _first_instance(self, executable: Executable, operand_set: operands.Set) -> Any:
        result = executable.run(lambda _: operand_set)
        return result[0] if isinstance(result, list) else result

    def _float32(self, operand_set: operands.Set) -> Any:
        """The plain function on the same operands, in float32 throughout."""
        session = self._session
        case = session.case.written_out()
        plain = collectives(case, session.mesh, session.backward)[0]

        def wide(*arrays: jax.Array) -> Any:
            return plain.instance(*(array.astype(jnp.float32) for array in arrays))

        with jax.default_matmul_precision("highest"):
            return jax.jit(wide)(*operand_set)


def error_text(error: Exception) -> str:
    """The kind and the first lines of an error, without files of this machine."""
    lines = [line for line in str(error).splitlines() if "/" not in line][:4]
    return f"{type(error).__name__}: {' '.join(lines)}"[:600]


def forget() -> None:
    """Frees the executables and arrays of the cases that are done."""
    jax.clear_caches()
    gc.collect()


def add_figures(record: Entry) -> None:
    """The figures of every jhost arm, by mode, once all arms are in."""
    record["figures"] = {}
    for mode, entries in record["modes"].items():
        times = figures.minima(entries)
        record["figures"][mode] = {
            arm: figures.figures(times, arm) for arm in times if arm.startswith("jhost")
        }
