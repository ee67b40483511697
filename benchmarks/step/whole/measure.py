"""One step through all arms: compiled, compared, timed in turns, traced."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.runner import OUT_OF_TIME, Entry, Plan, error_text
from benchmarks.step.measure import choices, profiled, timed
from benchmarks.step.whole import arms as all_arms
from benchmarks.step.whole.model import State, first_state, tokens_of
from benchmarks.step.whole.sizes import Case
from jhost.runtime.accepted_options import accepted

STEPS_COMPARED = 4
LOSS_AT_MOST, MOMENT_AT_MOST = 0.01, 0.05
"""How far losses of the first steps may be from the first arm's, and norms of an array
of first moments: bfloat16 rounds by 0.4 %, and a sum that is left out is half of it."""


class Training:
    """The state that the arms hand on: each step is given the last one's for good."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        shardings, _ = _laid(case, mesh)
        first = functools.partial(first_state, case)
        self._first = jax.jit(first, out_shardings=shardings)
        tokens = NamedSharding(mesh, case.token_spec)
        self._tokens = jax.jit(lambda: tokens_of(case), out_shardings=tokens)()
        self.state: State | None = None

    def types(self) -> tuple[Any, Any]:
        """Of a step's arguments."""
        state = jax.eval_shape(self._first)
        tokens = jax.ShapeDtypeStruct(self._tokens.shape, self._tokens.dtype)
        return state, tokens

    def begin(self) -> None:
        """From the first state again; the old one is freed before."""
        self.state = None
        self.state = self._first()

    def step(self, compiled: Any, number: int = 0) -> tuple[State, jax.Array]:
        """One by this arm; if it fails the next one begins again."""
        if self.state is None:
            self.begin()
        given, self.state = self.state, None
        state, loss = compiled(given, self._tokens)
        self.state = state
        return state, loss


def measure(
    case: Case,
    mesh: Mesh,
    plan: Plan,
    trace: Path | None = None,
    xla: Mapping[str, Any] = MappingProxyType({}),
) -> Entry:
    """Everything about one case on one mesh.

    Traces go into the folder `trace`.  All arms are compiled with the options in `xla`.
    """
    entry: Entry = {
        "case": case.name,
        "model": case.model.name,
        "loop": case.loop,
        "cast": case.cast,
        "layers": case.layers,
        "sequences": case.sequences,
        "length": case.model.sequence,
        "mesh": dict(case.axes),
        "arms": {arm: dict(OUT_OF_TIME) for arm in plan.arms if arm in all_arms.ARMS},
        "checks": {},
        "explain": {},
    }
    arms = entry["arms"]
    training = Training(case, mesh)
    compiled = _all_compiled(case, mesh, training, plan, xla, entry)
    entry["checks"] = _compared(training, compiled, mesh, arms)
    calls = {
        arm: functools.partial(training.step, each) for arm, each in compiled.items()
    }
    for arm in timed(calls, plan, entry, lambda ms: 1e3 * case.tokens / ms):
        arms[arm] |= profiled(compiled[arm], lambda arm=arm: calls[arm]()[1], plan)
        if trace is not None and not plan.deadline.passed():
            _trace(calls[arm], trace / _file_name(case, arm))
    return entry


def _laid(case: Case, mesh: Mesh) -> tuple[Any, Any]:
    """The layouts of a state, and of tokens."""
    ins, _ = all_arms.shardings(case)
    return jax.tree.map(
        functools.partial(NamedSharding, mesh),
        ins,
        is_leaf=lambda leaf: isinstance(leaf, P),
    )


# --- Compiling ---------------------------------------------------------------------- #


def _all_compiled(
    case: Case,
    mesh: Mesh,
    training: Training,
    plan: Plan,
    xla: Mapping[str, Any],
    entry: Entry,
) -> dict[str, Any]:
    """The arms that compile; the others are left with an error, or without time."""
    found: dict[str, Any] = {}
    for name in entry["arms"]:
        if plan.deadline.passed():
            break
        arm = all_arms.ARMS[name]
        arm = dataclasses.replace(arm, wanted={**arm.wanted, **xla})
        try:
            found[name], entry["arms"][name], text = _compile(case, mesh, training, arm)
            if text:
                entry["explain"][name] = text
        except Exception as error:
            entry["arms"][name] = {"error": error_text(error)}
    return found


def _compile(case: Case, mesh: Mesh, training: Training, arm: all_arms.Arm) -> Any:
    """An arm compiled, what it took, and what jhost says of it."""
    options = accepted(mesh, arm.wanted)
    start = time.perf_counter()
    lowered = arm.make(case, mesh).lower(*training.types())
    middle = time.perf_counter()
    compiled = lowered.compile(compiler_options=options or None)
    end = time.perf_counter()
    costs = {"lower_s": middle - start, "compile_s": end - middle}
    costs |= {"options": {name: str(value) for name, value in options.items()}}
    costs |= {"left_out": [name for name in arm.wanted if name not in options]}
    costs |= _memory(compiled.memory_analysis())
    if not hasattr(lowered, "explain"):
        return compiled, costs, {}
    said = lowered.explain()
    costs["options"] = list(said.options)
    return compiled, costs, {"choices": choices(said), "text": str(said)}


def _memory(analysis: Any) -> Entry:
    """Of one device; what is donated counts once."""
    if analysis is None:
        return {}
    given, made = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
    donated, temporary = analysis.alias_size_in_bytes, analysis.temp_size_in_bytes
    return {
        "temp_bytes": temporary,
        "peak_bytes": given + made - donated + temporary,
        "donated_bytes": donated,
    }


# --- Whether all train alike -------------------------------------------------------- #


def _compared(
    training: Training, compiled: dict[str, Any], mesh: Mesh, arms: Entry
) -> dict[str, Entry]:
    """The first steps of each arm beside the first one's; who fails is left out."""
    norms = _norms(mesh)
    found: dict[str, Entry] = {}
    first: tuple[list[float], list[float]] | None = None
    for name in list(compiled):
        try:
            seen = _first_steps(training, compiled[name], norms)
        except Exception as error:
            del compiled[name]
            arms[name]["error"] = error_text(error)
            continue
        arms[name]["losses"] = seen[0]
        if not all_arms.ARMS[name].compared:
            continue
        first = first or seen
        found[name] = compared(seen, first)
    return found


def _first_steps(
    training: Training, compiled: Any, norms: Callable[[Any], Any]
) -> tuple[list[float], list[float]]:
    """Losses, and the norm of each array of first moments after them."""
    training.begin()
    losses = [float(training.step(compiled)[1]) for _ in range(STEPS_COMPARED)]
    assert training.state is not None
    moments = optax.tree_utils.tree_get(training.state.optimizer, "mu")
    return losses, [float(norm) for norm in norms(moments)]


def _norms(mesh: Mesh) -> Callable[[Any], Any]:
    def norms(tree: Any) -> list[jax.Array]:
        return [jnp.linalg.norm(leaf.ravel()) for leaf in jax.tree.leaves(tree)]

    return jax.jit(norms, out_shardings=NamedSharding(mesh, P()))


def compared(
    seen: tuple[list[float], list[float]], first: tuple[list[float], list[float]]
) -> Entry:
    """The largest relative differences, and whether they are small."""
    loss, moment = (
        float(np.max(np.abs(np.array(own) / np.array(its) - 1)))
        for own, its in zip(seen, first, strict=True)
    )
    right = loss <= LOSS_AT_MOST and moment <= MOMENT_AT_MOST
    return {"loss_difference": loss, "moment_difference": moment, "right": right}


# --- Traces ------------------------------------------------------------------------- #


def _file_name(case: Case, arm: str) -> str:
    text = f"{case.name}-{case.mesh_name}-{arm}"
    return "".join(each if each.isalnum() else "-" for each in text)


def _trace(call: Callable[[], Any], path: Path) -> None:
    """Two steps by `jax.profiler`, in one file for each process, compressed."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.block_until_ready(call())
    process = f"-{jax.process_index()}" if jax.process_count() > 1 else ""
    folder = path.parent / f"unpacked{process}"
    jax.profiler.start_trace(folder, profiler_options=options)
    jax.block_until_ready([call()[1] for _ in range(2)])
    jax.profiler.stop_trace()
    for file in folder.rglob("*.xplane.pb"):
        whole = gzip.compress(file.read_bytes())
        path.with_name(f"{path.name}{process}.xplane.pb.gz").write_bytes(whole)
    shutil.rmtree(folder)
