"""From a call's annotated jaxpr to its Host IR program.

JAX's transforms have acted on the jaxpr by the time these functions see it, so every
derived program (backward, batched, rematerialized) comes through here as well.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from jhost import errors
from jhost._calibration_holds import rates_here
from jhost._call.build import built, lowering_of
from jhost._call.config import Config, program_config
from jhost._call.once_a_line import warn_of_program
from jhost._jax import (
    cached_by_jaxpr,
    calls,
    with_all_operands,
)
from jhost._primitives import stream_p
from jhost._tuning_holds import changes, tuned_here
from jhost.lowering.ir.bodies import all_marks, with_marks
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.fingerprint import fingerprint
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import UnmetWish
from jhost.lowering.ir.requests import REFUSALS, StreamDefaults, unmet_wishes
from jhost.lowering.layouts.hidden_dims import reached_by_streams
from jhost.lowering.pipeline import AnyPass, Passes, passes, run_passes
from jhost.runtime import dump
from jhost.runtime.devices import devices_of


def host_program(call_jaxpr: Any, config: Config) -> Program:
    """The Host IR program of an annotated jaxpr, as the user wrote it.

    Raises:
        StreamDimError, ChunksError, PipelineError: marks that cannot be followed.
    """
    config = program_config(config)
    if not config.tunings:
        return _lowered(call_jaxpr, config)
    _warn_if_stale(call_jaxpr, config)
    try:
        return _lowered(call_jaxpr, config)
    except REFUSALS as refusal:
        untuned = dataclasses.replace(config, tunings=())
        # A tuning that can no longer be followed is no error, because the program may
        # have changed since.  Mistakes of the user's raise here again.
        program = _lowered(call_jaxpr, untuned)
        _warn_of_tuning(config, [errors.first_line(refusal)])
        return program


def derived_program(call_jaxpr: Any, config: Config) -> Program:
    """The program of a jaxpr that JAX may have derived, where marks may be left out."""
    config = program_config(config)
    for tunings in dict.fromkeys((config.tunings, ())):
        try:
            return _lowered(call_jaxpr, dataclasses.replace(config, tunings=tunings))
        except REFUSALS:
            pass
    return _lowered(call_jaxpr, config, strict=False)


@cached_by_jaxpr
def laid_out(call_jaxpr: Any, config: Config) -> Program:
    """Its program with layouts, and no more: no communications and no loops yet."""
    every = _passes(config, strict=True)
    with lowering_of(call_jaxpr):
        program = run_passes(built(call_jaxpr, config), every.before_choice)
        if program is built(call_jaxpr, config):
            # Nothing was padded, so the streams are those that `streams_of` planned.
            program = _asking(call_jaxpr, config)
        return run_passes(program, (*every.choices, *every.layouts))


# Weak keys: facts about a jaxpr are dropped with its function.
_unmarked: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def lower_as(call_jaxpr: Any, unmarked: Any) -> None:
    """Has a jaxpr lowered as it was without marks, which say how values lie there.

    JAX's transforms have the marks.  Where none has acted on the jaxpr, what
    `laid_out` has made of it without them is lowered further.
    """
    _unmarked[call_jaxpr] = unmarked


ReachingStreams: TypeAlias = Sequence[tuple[str, StreamChoice] | None]


@cached_by_jaxpr
def streams_of(
    call_jaxpr: Any, config: Config
) -> tuple[ReachingStreams, ReachingStreams]:
    """For each operand and each result, the stream that reaches it, and its mark."""
    if not calls(call_jaxpr, stream_p):
        # The program need not be built to know that.
        return [None] * len(call_jaxpr.in_avals), [None] * len(call_jaxpr.out_avals)
    program = _asking(call_jaxpr, config)
    reached = reached_by_streams(program)
    return (
        [reached.get(param.name) for param in program.params],
        [reached.get(result.name) for result in program.results],
    )


@cached_by_jaxpr
def _asking(call_jaxpr: Any, config: Config) -> Program:
    """Its program before any pass, with the user's marks of streams."""
    return _settings(config).applied_to(built(call_jaxpr, config))


class _Lowering(NamedTuple):
    """A program after all passes, and the wishes that its marks could not follow."""

    program: Program
    unmet: tuple[UnmetWish, ...]


def _lowered(call_jaxpr: Any, config: Config, strict: bool = True) -> Program:
    return _lowering(call_jaxpr, config, strict).program


@cached_by_jaxpr
def _lowering(call_jaxpr: Any, config: Config, strict: bool) -> _Lowering:
    """Lowers with all wishes, and again without those that marks cannot follow.

    The second time pipelines and layouts are chosen as if there had been no wish.
    """
    if (fewer := _of_all_operands(call_jaxpr, config, strict)) is not None:
        return fewer
    unmet: tuple[UnmetWish, ...] = ()
    after_pass = dump.pass_dumper(config.name, config.derived)
    # This ends: each round drops at least one wish, and marks have finitely many.
    while True:
        every = _passes(config, strict, unmet)
        # A program that is lowered once more, or was tuned, keeps all its marks.
        again = unmet or config.tunings or not strict
        source = call_jaxpr if again else _unmarked.get(call_jaxpr, call_jaxpr)
        if source is call_jaxpr or after_pass is not None:
            program = _lower(source, config, every.all, after_pass)
        else:
            with lowering_of(source):
                program = run_passes(laid_out(source, config), every.behind_layouts)
        found = [each for each in unmet_wishes(program) if each not in unmet]
        if not found:
            break
        unmet = (*unmet, *found)
    dump.dump_host_ir(config.name, program, config.derived)
    warn_of_program(program, config.replication_limit)
    return _Lowering(program, unmet)


def _of_all_operands(call_jaxpr: Any, config: Config, strict: bool) -> _Lowering | None:
    """What a jaxpr was lowered to before JAX took operands that nothing reads."""
    if (before := with_all_operands(call_jaxpr)) is None:
        return None
    jaxpr, left = before
    lowering = _lowering(jaxpr, config, strict)
    program = lowering.program
    read = {buffer.name for stmt in program.body for buffer in reads_writes(stmt)[0]}
    read |= {result.name for result in program.results}
    pairs = [*zip(program.params, left, strict=True)]
    if any(param.name in read for param, is_left in pairs if not is_left):
        return None
    params = tuple(param for param, is_left in pairs if is_left)
    return lowering._replace(program=dataclasses.replace(program, params=params))


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
        unmet = _lowering(call_jaxpr, config, strict).unmet
    except REFUSALS:
        # As in `derived_program`: a derived program was lowered without strictness, and
        # tuning must measure the program that runs.
        strict = False
        unmet = _lowering(call_jaxpr, config, strict).unmet
    every = _passes(config, strict, unmet)
    program = _lower(call_jaxpr, config, every.before_choice)
    return Planned(_settings(config, unmet).applied_to(program), every)


@cached_by_jaxpr
def unpipelined_program(call_jaxpr: Any, config: Config) -> Program:
    """The program without any loop over chunks, and with transfers where they are read.

    It is what predictions are compared with, and has layouts of its own.
    """
    config = dataclasses.replace(
        program_config(config), chunks="auto", pipeline="off", tunings=()
    )
    every = _passes(config, strict=False)
    program = _asking(call_jaxpr, config)
    marks = [
        dataclasses.replace(mark.with_spec(pipeline="off", chunks=None), wished=())
        if isinstance(mark, StreamChoice)
        else mark
        for mark in all_marks(program)
    ]
    with lowering_of(call_jaxpr):
        return run_passes(with_marks(program, marks), every.all)


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


def _passes(config: Config, strict: bool, unmet: tuple[UnmetWish, ...] = ()) -> Passes:
    devices = devices_of(config.mesh)
    return passes(
        settings=_settings(config, unmet),
        streams=config.streams,
        strict=strict,
        rates=rates_here(devices, config.may_put),
        device_kind=devices.kind,
        between=devices.between,
        tuned=tuned_here(config.tunings, config.mesh),
    )


def _settings(config: Config, unmet: tuple[UnmetWish, ...] = ()) -> StreamDefaults:
    return StreamDefaults(config.chunks, config.pipeline, unmet, config.finds)


def _lower(
    call_jaxpr: Any,
    config: Config,
    sequence: Sequence[AnyPass],
    after_pass: Callable[[str, Program], None] | None = None,
) -> Program:
    program = built(call_jaxpr, config)
    if after_pass is not None:
        after_pass("build", program)
    with lowering_of(call_jaxpr):
        return run_passes(program, sequence, after_pass)
