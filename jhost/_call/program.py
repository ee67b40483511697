"""From a call's annotated jaxpr to its Host IR program.

JAX's transforms have acted on the jaxpr by the time these functions see it, so every
derived program (backward, batched, rematerialized) comes through here as well.
"""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jhost import errors
from jhost._annotate import Pipeline
from jhost._calibration import rates_here
from jhost._call.shard_maps import check_devices
from jhost._jax import (
    Derivation,
    arg_names,
    cached,
    cached_by_jaxpr,
    calls,
    close,
    evaluate,
    result_paths,
    without_dead_code,
)
from jhost._primitives import Spec, stream_p
from jhost._tuning import Tuning, changes, tuned_here
from jhost.lowering.frontend.build import SaidNames
from jhost.lowering.frontend.value_names import Variables
from jhost.lowering.ir.fingerprint import fingerprint
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import ReplicationReport
from jhost.lowering.ir.requests import REFUSALS, StreamDefaults
from jhost.lowering.ir.said import said_remarks
from jhost.lowering.layouts.hidden_dims import reached_by_streams
from jhost.lowering.pipeline import Pass, Passes, lower_jaxpr, passes, run_passes
from jhost.runtime import dump
from jhost.runtime.devices import devices_of
from jhost.runtime.mesh import AnyMesh, abstract

Role: TypeAlias = Literal["", "forward", "recomputed", "tangents", "backward"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What holds for a jhost function and for every program derived from it.

    `embedded` calls stand in a trace of somebody else's; the others in a `jax.jit` of
    jhost's own, which sees to the compiler options.  `compared` ones are lowered in
    order to run: not those of `lower`, which one process may call alone.  `role` and
    `batched` say what JAX derived; neither is in what the user called.  `operands` are
    names for messages, of a program that JAX has made without any.
    """

    name: str
    mesh: AnyMesh | None
    chunks: int | Literal["auto"]
    pipeline: Pipeline
    streams: int
    interpret: bool
    replication_limit: int
    compiler_options: tuple[tuple[str, Any], ...] = ()
    tunings: tuple[Tuning, ...] = ()
    embedded: bool = False
    compared: bool = True
    identity: tuple[str, ...] = ()
    role: Role = ""
    batched: bool = False
    operands: tuple[str, ...] = ()

    @property
    def derived(self) -> tuple[str, ...]:
        """What JAX derived, in words: none of what the user called."""
        return tuple(filter(None, ("batched" if self.batched else "", self.role)))

    @property
    def title(self) -> str:
        """The function and what of it, as `mlp (backward)`."""
        derived = ", ".join(self.derived)
        return f"{self.name} ({derived})" if derived else self.name


def derived_params(
    params: Mapping[str, Any], how: Derivation, operands: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A call's parameters, where JAX has derived its program from another's."""
    config: Config = params["config"]
    if how != "batched":
        config = dataclasses.replace(config, operands=operands)
    match how:
        case "batched":
            config = dataclasses.replace(config, batched=True)
        case "known" | "unknown":
            if how == "known" and config.role == "tangents":
                config = dataclasses.replace(config, role="recomputed")
        case "forward":
            # What is differentiated once more stays the backward, say.
            config = dataclasses.replace(config, role=config.role or "forward")
        case _:
            config = dataclasses.replace(config, role=how)
    return {**params, "config": config}


class Call(NamedTuple):
    """One call of the primitive: what it runs, and on which operands."""

    call_jaxpr: Any
    config: Config
    operands: tuple[Any, ...]


@cached_by_jaxpr
def annotate(
    jaxpr: Any,
    mesh: AnyMesh,
    in_specs: tuple[Spec | None, ...],
    out_specs: tuple[Spec | None, ...],
) -> Any:
    """`jaxpr` with the shardings of its operands and results as constraints in it.

    Every operand and result gets one, which may leave all dims free: JAX looks for the
    devices of a program in the shardings inside, and would compile one without any for
    one device.
    """

    def annotated(*args: Any) -> list[Any]:
        return _constrain(
            evaluate(jaxpr, _constrain(args, mesh, in_specs)), mesh, out_specs
        )

    closed_jaxpr = jax.make_jaxpr(annotated)(*jaxpr.in_avals)
    # The user's names, not those of the function above.
    named = close(closed_jaxpr.jaxpr.replace(debug_info=jaxpr.jaxpr.debug_info))
    return without_dead_code(named)


def _constrain(
    values: Sequence[Any], mesh: AnyMesh, specs: Sequence[Spec | None]
) -> list[Any]:
    free = PartitionSpec.UNCONSTRAINED
    constrained: list[Any] = []
    for value, spec in zip(values, specs, strict=True):
        entries = (
            [free] * jnp.ndim(value)
            if spec is None
            else [axes or None for axes in spec]
        )
        sharding = NamedSharding(mesh, PartitionSpec(*entries))
        constrained.append(jax.lax.with_sharding_constraint(value, sharding))
    return constrained


def host_program(call_jaxpr: Any, config: Config) -> Program:
    """The Host IR program of an annotated jaxpr, as the user wrote it.

    Raises:
        StreamDimError, ChunksError, PipelineError: marks that cannot be followed.
    """
    config = plain(config)
    if not config.tunings:
        return _lowered(call_jaxpr, config)
    _warn_if_stale(call_jaxpr, config)
    try:
        return _lowered(call_jaxpr, config)
    except REFUSALS as refusal:
        untuned = dataclasses.replace(config, tunings=())
        program = _lowered(call_jaxpr, untuned)  # raises what is the user's doing
        _warn_of_tuning(config, [errors.first_line(refusal)])
        return program


def derived_program(call_jaxpr: Any, config: Config) -> Program:
    """The program of a jaxpr that JAX may have derived, where marks may be left out."""
    config = plain(config)
    for tunings in dict.fromkeys((config.tunings, ())):
        try:
            return _lowered(call_jaxpr, dataclasses.replace(config, tunings=tunings))
        except REFUSALS:
            pass
    return _lowered(call_jaxpr, config, strict=False)


def plain(config: Config) -> Config:
    """What a program depends on: it is the same wherever it is called."""
    return dataclasses.replace(config, embedded=False, compared=True, identity=())


@cached_by_jaxpr
def laid_out(call_jaxpr: Any, config: Config) -> Program:
    """Its program with layouts, and no more: no communications and no loops yet."""
    return _lower(call_jaxpr, config, _passes(config, strict=False).up_to_layouts)


Streams: TypeAlias = Sequence[tuple[str, StreamChoice] | None]


@cached_by_jaxpr
def streams_of(call_jaxpr: Any, config: Config) -> tuple[Streams, Streams]:
    """For each operand and each result, the stream that reaches it, and its mark."""
    if not calls(call_jaxpr, stream_p):
        return [None] * len(call_jaxpr.in_avals), [None] * len(call_jaxpr.out_avals)
    program = _settings(config).applied_to(_lower(call_jaxpr, config, ()))
    reached = reached_by_streams(program)
    return (
        [reached.get(param.name) for param in program.params],
        [reached.get(result.name) for result in program.results],
    )


@cached_by_jaxpr
def _lowered(call_jaxpr: Any, config: Config, strict: bool = True) -> Program:
    sequence = _passes(config, strict).all
    after_pass = dump.pass_dumper(config.name, config.derived)
    program = _lower(call_jaxpr, config, sequence, after_pass)
    dump.dump_host_ir(config.name, program, config.derived)
    _warn_of_replication(program, config.replication_limit)
    return program


def _warn_of_replication(program: Program, limit: int) -> None:
    """Says once a line what every device repeats, if it has to receive much for it."""
    for report in said_remarks(program):
        if isinstance(report, ReplicationReport) and report.bytes >= limit:
            line = report.where or f"{report.primitive} of {program.name}"
            if line in _warned_lines():
                continue
            _warned_lines().add(line)
            warnings.warn(
                f"{program.name}: {report}. Shard another dim of it, or call it in a "
                "jax.shard_map, whose specs say how its operands lie. "
                "jhost.jit(replication_limit=...) says from how many bytes on this is "
                "worth a warning.\n" + errors.more_in_help(errors.ReplicationWarning),
                errors.ReplicationWarning,
                stacklevel=2,
            )


@cached(1)
def _warned_lines() -> set[str]:
    return set()


class Planned(NamedTuple):
    """A program whose pipelines are to be chosen, and its passes."""

    program: Program
    passes: Passes

    def finish(self, program: Program) -> Program:
        """The program of a candidate, after all passes."""
        return run_passes(program, self.passes.finish)


def planned(call_jaxpr: Any, config: Config) -> Planned:
    """The program of an annotated jaxpr before anything is chosen for its marks."""
    strict = True
    try:
        _lowered(call_jaxpr, config)
    except REFUSALS:
        strict = False  # as for `derived_program`
    every = _passes(config, strict)
    program = _lower(call_jaxpr, config, every.before_choice)
    return Planned(_settings(config).applied_to(program), every)


@cached_by_jaxpr
def _warn_if_stale(call_jaxpr: Any, config: Config) -> None:
    """Says once of a program why none of its tunings holds for it."""
    program = planned(call_jaxpr, config).program
    mesh, digest = config.mesh, fingerprint(program)
    found = [changes(tuning, mesh, program, digest) for tuning in config.tunings]
    if not all(found):
        return
    _warn_of_tuning(config, [line for lines in found for line in lines])


def _warn_of_tuning(config: Config, changed: Sequence[str]) -> None:
    lines = [f"  * {line}" for line in changed]
    warnings.warn(
        f"The tuning of {config.name} does not hold here and is ignored: its streams "
        f"are chosen by prediction. Tune again with jhost.tune({config.name}, ...). "
        "What changed:\n" + "\n".join(lines),
        stacklevel=2,
    )


def _passes(config: Config, strict: bool) -> Passes:
    devices = devices_of(config.mesh)
    return passes(
        settings=_settings(config),
        streams=config.streams,
        strict=strict,
        rates=rates_here(devices),
        device_kind=devices.kind,
        tuned=tuned_here(config.tunings, config.mesh),
    )


def _settings(config: Config) -> StreamDefaults:
    return StreamDefaults(config.chunks, config.pipeline)


def _lower(
    call_jaxpr: Any,
    config: Config,
    sequence: Sequence[Pass],
    after_pass: Callable[[str, Program], None] | None = None,
) -> Program:
    # Of programs that JAX derived from a split one, only messages have the names.
    given = () if config.role else arg_names(call_jaxpr)
    params = _names(given, len(call_jaxpr.in_avals), "x")
    results = _names(result_paths(call_jaxpr), len(call_jaxpr.out_avals), "y")
    check_devices(config.name, call_jaxpr, config.mesh)
    with _no_garbage_collection():
        return lower_jaxpr(
            call_jaxpr,
            name="_".join((config.name, *config.derived)),
            mesh=abstract(config.mesh),
            param_names=params,
            result_names=results,
            said_names=_said_names(call_jaxpr, config),
            sequence=sequence,
            after_pass=after_pass,
        )


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    """Passes make many objects at once, which live, and hardly a cycle of them.

    Looking for garbage among them is up to a third of their time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _said_names(call_jaxpr: Any, config: Config) -> SaidNames:
    """What messages call the operands and the results.

    The paths of results that JAX makes up for a derived program are not the user's.
    """
    derived = bool(config.role)
    other = "operand {} of the " + config.role if derived else "closed-over array {}"
    count = len(call_jaxpr.in_avals)
    own = arg_names(call_jaxpr)
    names = own if any(own) else config.operands
    if len(names) != count:  # dead code has gone since, and operands with it
        names = [""] * count
    params = [name or other.format(number) for number, name in enumerate(names)]
    paths = () if derived else result_paths(call_jaxpr)
    results = [path or None for path in paths] or [None] * len(call_jaxpr.out_avals)
    return SaidNames(params, results, _VARIABLES[config.role])


_VARIABLES: Mapping[Role, Variables] = {
    "": "all",
    "forward": "alone",
    "recomputed": "alone",
    "tangents": "none",
    "backward": "none",
}


def _names(names: Sequence[str | None], count: int, prefix: str) -> tuple[str, ...]:
    """The user's names, or numbered ones in programs that JAX derived."""
    given = list(names) or [None] * count
    return tuple(name or f"{prefix}{number}" for number, name in enumerate(given))
