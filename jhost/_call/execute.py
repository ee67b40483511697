"""The call primitive's meaning: the program of its jaxpr, as XLA or step by step.

In a multi-process run, processes first see that all are about to run the same.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import jax
from jax.sharding import Mesh
from jaxlib.version import __version__ as jaxlib_version

from jhost import errors
from jhost._call.config import Config
from jhost._call.left_to_xla import for_xla
from jhost._call.program import derived_program
from jhost._call.whole import Whole, stays_whole
from jhost._jax import (
    as_weak,
    cached_by_jaxpr,
    def_impl,
    evaluate,
    is_wide,
    register_lowering,
    under_outer_trace,
    with_width,
)
from jhost._primitives import jhost_p
from jhost.lowering.cost.leave_to_xla import left_to_xla
from jhost.lowering.emit.program import emit
from jhost.lowering.explain import puts
from jhost.lowering.interpret.program import Record, interpret
from jhost.lowering.ir.bodies import adds_up, is_pipelined, most_under_way
from jhost.lowering.ir.fingerprint import fingerprint_lines
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import permutes
from jhost.runtime import dump
from jhost.runtime.accepted_options import explained_refusals
from jhost.runtime.agreement import compare_programs
from jhost.runtime.compiler_options import (
    Loops,
    options_text,
    overlap_options,
    warn_of_missed_options,
)


def emitted(
    program: Program, config: Config, call_jaxpr: Any
) -> Callable[..., Sequence[Any]]:
    """The JAX function of flat arrays that a program stands for, by its jaxpr."""
    avals, wide = call_jaxpr.out_avals, is_wide(call_jaxpr)
    mesh = program.mesh if config.mesh is None else config.mesh
    if left_to_xla(program):
        held: Any = weakref.ref(call_jaxpr)  # by which results of this are cached
        return lambda *args: evaluate(for_xla(held(), mesh), args)
    on_mesh = emit(program, mesh)

    def run(*args: Any) -> Sequence[Any]:
        with with_width(wide):
            results = on_mesh(*args)
        return as_weak(results, avals)

    return run


def _run(*args: Any, call_jaxpr: Any, config: Config) -> Sequence[Any]:
    if is_interpreting():
        program = derived_program(call_jaxpr, config)
        results, _ = interpreted(program, config, call_jaxpr, args)
        return results
    with explained_refusals(config.name, dict(config.compiler_options)):
        return _compiled(call_jaxpr, config)(*args)


_INTERPRETING = ContextVar("interpreting", default=False)


def is_interpreting() -> bool:
    """Whether programs that Python calls are interpreted."""
    return _INTERPRETING.get()


@contextmanager
def interpreting() -> Generator[None]:
    """Inside, programs that Python calls run statement by statement, for tests.

    Those in a program around them are compiled with it.
    """
    before = _INTERPRETING.set(True)
    try:
        yield
    finally:
        _INTERPRETING.reset(before)


def interpreted(
    program: Program, config: Config, call_jaxpr: Any, args: Sequence[Any]
) -> tuple[tuple[jax.Array, ...], list[Record]]:
    """The results of a jaxpr's `program` statement by statement, and what ran."""
    compare(program, config)
    mesh = program.mesh if config.mesh is None else config.mesh
    with with_width(is_wide(call_jaxpr)):
        results, trace = interpret(program, cast(Mesh, mesh), args)
    return as_weak(results, call_jaxpr.out_avals), trace


@cached_by_jaxpr
def _compiled(call_jaxpr: Any, config: Config) -> Callable[..., Sequence[Any]]:
    # Called from Python, also where a transform has traced the call.
    if stays_whole(call_jaxpr, config.mesh is not None):
        held: Any = weakref.ref(call_jaxpr)  # by which this is cached
        options = dict(config.compiler_options)
        return jax.jit(lambda *args: evaluate(held(), args), compiler_options=options)
    config = dataclasses.replace(config, embedded=False)
    program = derived_program(call_jaxpr, config)
    compare(program, config)
    return jitted(program, config, call_jaxpr)


def jitted(program: Program, config: Config, call_jaxpr: Any) -> Any:
    """`program` as a function that XLA compiles with the options that it wants."""
    options = executable_options(program, config)
    run = emitted(program, config, call_jaxpr)
    jaxpr: Any = weakref.ref(call_jaxpr)  # by which this is cached

    @functools.wraps(run)
    def traced(*args: Any) -> Sequence[Any]:
        if under_outer_trace():
            return run(*args)
        # In `jax.disable_jit`, or where `jax.debug_nans` looks for what made a NaN.
        # The user's own line says more than the program of a device.  And JAX (0.10 to
        # 0.12) never ends when it looks for that line in a `shard_map`.
        return evaluate(jaxpr(), args)

    return jax.jit(traced, compiler_options=options)


def executable_options(
    program: Program | Whole, config: Config
) -> dict[str, Any] | None:
    """What XLA is told for `program` alone: jhost's wishes, then the user's."""
    return _asked(program, config) | dump.compiler_options() or None


def _asked(program: Program | Whole, config: Config) -> dict[str, Any]:
    loops = None if isinstance(program, Whole) else loops_of(program)
    wishes = {} if loops is None else overlap_options(config.mesh, **loops)
    return wishes | dict(config.compiler_options)


def loops_of(program: Program) -> Loops | None:
    """What XLA's options for `program` depend on, if it needs any."""
    if (left := left_to_xla(program)) is not None:
        return {"left_to_xla": True} if left.early else None
    if not is_pipelined(program):
        return None
    return {
        "adds_up": adds_up(program),
        "permuted": permutes(program),
        "puts": puts(program),
        "under_way": most_under_way(program),
    }


def compare(program: Program, config: Config) -> None:
    """Sees that every process of the mesh is about to run `program`.

    Raises:
        ProcessMismatchError, ProcessTimeoutError: some process is not.
    """

    def describe() -> list[str]:
        # Of an outer program's options jhost knows nothing.
        options = {} if config.embedded else _asked(program, config)
        shown = {n: v for n, v in options.items() if not n.startswith("xla_dump")}
        assert isinstance(config.mesh, Mesh)
        return [
            *fingerprint_lines(program),
            *config.identity,
            f"devices {config.mesh.device_ids.tolist()}",
            f"XLA's options {options_text(dict(sorted(shown.items())))}",
            f"JAX {jax.__version__}, jaxlib {jaxlib_version}",
        ]

    compare_programs(config.name, config.mesh, describe)


def check_has_no_options(config: Config) -> None:
    """Refuses the user's options for a part of a program, where they would be lost.

    So does JAX, as it traces a `jax.jit` in another (`pjit_staging_rule`).

    Raises:
        CompilerOptionError: there are some.
    """
    if options := dict(config.compiler_options):
        raise errors.CompilerOptionError(
            "`compiler_options` can only be passed to top-level `jax.jit` and "
            f"`jhost.jit`. Got compiler_options={options} specified on a nested "
            f"jhost.jit with name: {config.name}. XLA takes options for a whole "
            "program: give them to the jit around."
        )


def _trace_late(
    *args: Any, call_jaxpr: Any, config: Config, devices: int
) -> Sequence[Any]:
    """Inside an outer program: XLA compiles it, with that program's options.

    If nobody told jhost the mesh of a program on several `devices`, XLA places the
    communications, and loops over chunks would have more of them.  What JAX has derived
    may hold references, which stood in bodies before.
    """
    if config.embedded:
        check_has_no_options(config)
    has_mesh = config.mesh is not None
    left = config.left_to_xla or (not has_mesh and devices > 1)
    if left or stays_whole(call_jaxpr, has_mesh):
        return evaluate(call_jaxpr, args)
    program = derived_program(call_jaxpr, config)
    if config.compared:
        compare(program, config)
    # XLA's own way needs no options: the program is the one of an outer `jax.jit`.
    partitioned = left_to_xla(program)
    if config.embedded and (partitioned is None or partitioned.early):
        options = executable_options(program, config) or {}
        warn_of_missed_options(config.name, config.mesh, options)
    return emitted(program, config, call_jaxpr)(*args)


def_impl(jhost_p, _run)
register_lowering(jhost_p, _trace_late)
