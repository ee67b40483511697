"""One step through all arms: compiled, compared, timed in turns, profiled."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jhost
from benchmarks import checks, environment, operands, timing
from benchmarks.runner import OUT_OF_TIME, Entry, Plan, error_text, memory
from benchmarks.step.arms import ARMS, UNCHECKED
from benchmarks.step.programs import Step
from jhost.runtime.profile.hlo_text import parse_module
from jhost.runtime.profile.origins import Operations
from jhost.runtime.profile.overlap import device_overlap, mean_overlap
from jhost.runtime.profile.timeline import Timeline, timeline
from jhost.runtime.profile.trace import read_trace, record

NORM_AT_MOST, ERROR_AT_MOST = 0.02, 0.2
"""How far a loss or a norm may be from the first arm's, and how large the difference
of an array: layers of bfloat16 differ by some percent, and a wrong gradient by 100."""

_PROFILED_CALLS = 3


def measure(step: Step, mesh: Mesh, backward: bool, plan: Plan) -> Entry:
    """Everything about one step, forward or with its gradients."""
    entry: Entry = {
        "case": step.name,
        "model": step.model.name,
        "form": step.form,
        "layers": step.layers,
        "sequences": step.sequences,
        "length": step.model.sequence,
        "mesh": dict(step.axes.sizes),
        "pass": "backward" if backward else "forward",
        "arms": {arm: {} for arm in plan.arms if arm in ARMS},
        "checks": {},
        "explain": {},
    }
    arms = entry["arms"]
    given = operands.random_set(step.operands, mesh, seed=0)
    compiled = _all_compiled(step, mesh, backward, plan, entry)
    calls: dict[str, timing.Call] = {
        arm: functools.partial(_call, each, given) for arm, each in compiled.items()
    }
    if plan.checked:
        entry["checks"] = _compared(calls, arms)
    for arm in timed(calls, plan, entry, step.tokens_per_s):
        arms[arm] |= profiled(compiled[arm], functools.partial(calls[arm], 0), plan)
    return entry


def timed(
    calls: Mapping[str, timing.Call],
    plan: Plan,
    entry: Entry,
    tokens_per_s: Callable[[float], float],
) -> list[str]:
    """Times arms in turns, into their entries; those that did not fail."""
    arms = entry["arms"]
    times = timing.measure(
        calls,
        plan.effort,
        instances=1,
        deadline=plan.deadline,
        on_error=lambda arm, error: arms[arm].update(error=error_text(error)),
    )
    for arm, each in times.items():
        if not each.blocks_ms:
            arms[arm] |= OUT_OF_TIME
            continue
        figures = each.figures()
        arms[arm] |= figures | {"tokens_per_s": tokens_per_s(figures["min_ms"])}
    entry["clocks"] = environment.clocks()
    return list(times)


def _call(compiled: Any, given: operands.Set, number: int) -> Any:
    return compiled(*given)


def _all_compiled(
    step: Step, mesh: Mesh, backward: bool, plan: Plan, entry: Entry
) -> dict[str, Any]:
    """The arms that compile; the others are left with an error, or without time."""
    found: dict[str, Any] = {}
    for arm in entry["arms"]:
        if plan.deadline.passed():
            entry["arms"][arm] = dict(OUT_OF_TIME)
            continue
        try:
            lowered, found[arm], costs = compile_arm(step, mesh, backward, arm)
            entry["arms"][arm] = costs
            if arm.startswith("jhost"):
                entry["explain"][arm] = _explained(lowered)
        except Exception as error:
            entry["arms"][arm] = {"error": error_text(error)}
    return found


def compile_arm(step: Step, mesh: Mesh, backward: bool, arm: str) -> Any:
    """An arm lowered and compiled, and what it took: seconds, and memory for it."""
    start = time.perf_counter()
    lowered = ARMS[arm](step, mesh, backward).lower(*step.types())
    middle = time.perf_counter()
    compiled = lowered.compile()
    costs = {"lower_s": middle - start, "compile_s": time.perf_counter() - middle}
    return lowered, compiled, costs | memory(compiled.memory_analysis())


def _explained(lowered: Any) -> Entry:
    explanation = lowered.explain()
    return {"choices": choices(explanation), "text": str(explanation)}


def choices(explanation: jhost.Explanation) -> str:
    """How many of the streams go which way, in one line."""
    ways = Counter(
        f"{stream.pipeline} in {stream.chunks}" if stream.chunks > 1 else "whole"
        for stream in explanation.streams
    )
    return ", ".join(f"{count} {way}" for way, count in ways.items()) or "no stream"


# --- Whether all compute the same --------------------------------------------------- #


def _compared(calls: dict[str, timing.Call], arms: Entry) -> dict[str, Entry]:
    """Each arm's results against the first arm's; an arm that fails is left out."""
    found: dict[str, Entry] = {}
    first: Any = None
    for arm in [arm for arm in calls if arm not in UNCHECKED]:
        try:
            results = jax.block_until_ready(calls[arm](0))
            first = results if first is None else first
            found[arm] = compared(results, first)
        except Exception as error:
            del calls[arm]
            arms[arm]["error"] = error_text(error)
    return found


def compared(results: Any, first: Any) -> Entry:
    """Loss, norm of all gradients, and the largest relative error of an array."""
    loss, norm = _loss_and_norm(results)
    wanted_loss, wanted_norm = _loss_and_norm(first)
    errors = checks.errors(results, first)
    near = (
        abs(loss / wanted_loss - 1) <= NORM_AT_MOST
        and (not wanted_norm or abs(norm / wanted_norm - 1) <= NORM_AT_MOST)
        and max(errors) <= ERROR_AT_MOST
    )
    return {"loss": loss, "norm": norm, "error": max(errors), "right": near}


def _loss_and_norm(results: Any) -> tuple[float, float]:
    loss, *gradients = jax.tree.leaves(results)
    return float(loss), float(_norm(gradients)) if gradients else 0.0


@jax.jit
def _norm(gradients: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in gradients))


# --- When nothing computes ---------------------------------------------------------- #


def profiled(compiled: Any, call: Callable[[], Any], plan: Plan) -> Entry:
    """The parts of a call, and its share in which no computation runs."""
    if not plan.profiled or plan.deadline.passed():
        why = OUT_OF_TIME["skipped"] if plan.profiled else "not asked for"
        return {"without_computation": None, "why": why}
    try:
        parts = _parts(compiled, call)
    except Exception as error:
        return {"without_computation": None, "why": error_text(error)}
    share = 1 - parts["computation"] / parts["total"]
    return {"without_computation": share, "seconds": parts}


def _parts(compiled: Any, call: Callable[[], Any]) -> dict[str, Any]:
    """What a call spends on a device, in the mean, as `jhost.profile` has it."""
    found = recorded(compiled, call, "step")
    devices = [device_overlap(found, number) for number in found.devices]
    mean = dataclasses.asdict(mean_overlap(devices))
    del mean["device"]
    return mean


def recorded(compiled: Any, call: Callable[[], Any], name: str) -> Timeline:
    """What ran for a call of what XLA compiled, of a few in a row."""
    module = parse_module(compiled.as_text() or "")

    def calls() -> None:
        jax.block_until_ready([call() for _ in range(_PROFILED_CALLS)])

    return timeline(
        read_trace(record(calls)),
        Operations(module),
        calls=_PROFILED_CALLS,
        name=name,
        module=module.name,
        statements=(),
    )
