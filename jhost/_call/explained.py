"""What an explanation says of a lowered function: predictions, XLA's options, notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jhost._calibration_holds import rates_here
from jhost._call.config import Config, puts_are_known
from jhost._call.execute import loops_of
from jhost._call.once_a_line import notes_of_unread
from jhost._call.program import unpipelined_program
from jhost._call.whole import Whole
from jhost.lowering.cost.choose_permutes import ranked_kinds
from jhost.lowering.cost.leave_to_xla import left_to_xla
from jhost.lowering.explain import DeviceFacts, explain_program, puts
from jhost.lowering.explanation import Explanation
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import between_processes, permutes, why_not_hidden
from jhost.runtime.compiler_options import options_report
from jhost.runtime.devices import Devices, devices_of


def explained(program: Program | Whole, config: Config, call_jaxpr: Any) -> Explanation:
    """The remarks of passes on a jaxpr's `program`, and XLA's options for its loops."""
    if isinstance(program, Whole):
        # It has no streams, or it would not stay whole.
        return _explained_whole(program, config)
    devices = devices_of(config.mesh)
    explanation = explain_program(program, _known(devices, program))
    explanation = _with_times(explanation, program, config, call_jaxpr)
    loops = loops_of(program)
    options: tuple[str, ...] = ()
    if loops is not None:
        options = options_report(config.name, config.mesh, **loops)
    notes = (
        *explanation.notes,
        *notes_of_unread(call_jaxpr),
        *_notes_of_nothing_marked(explanation, config),
        *_notes_of_reach(program, devices),
        *_notes_of_puts(explanation, config),
        *_notes_of_rates(explanation, devices),
    )
    return dataclasses.replace(
        explanation, name=config.title, notes=notes, options=options
    )


def _known(devices: Devices, program: Program) -> DeviceFacts:
    """The facts that predictions use; no rates where nothing can overlap."""
    rates = rates_here(devices, puts(program))
    return DeviceFacts(rates if rates and rates.overlaps else None, devices.reach)


def _with_times(
    explanation: Explanation, program: Program, config: Config, call_jaxpr: Any
) -> Explanation:
    """The explanation with what the program takes, and would without jhost."""
    devices = devices_of(config.mesh)
    if devices.count == 1 or left_to_xla(program):
        return explanation
    explanation = dataclasses.replace(
        explanation, devices=f"{devices.count} x {devices.kind}"
    )
    rates = rates_here(devices, puts(program))
    if rates is None or not rates.overlaps:
        return dataclasses.replace(explanation, nothing_overlaps=rates is not None)
    plain = unpipelined_program(call_jaxpr, config)
    (_, predicted), *_ = ranked_kinds(program, rates)
    (_, unpipelined), *_ = ranked_kinds(plain, rates)
    return dataclasses.replace(
        explanation, predicted=predicted, unpipelined=unpipelined
    )


def _explained_whole(whole: Whole, config: Config) -> Explanation:
    """Says that jhost makes no program, and why."""
    none = Explanation(
        name=config.title,
        loops=0,
        streams=(),
        layouts=(),
        communications=(),
        notes=(str(whole), *whole.reasons),
    )
    unmarked = _notes_of_nothing_marked(none, config)
    return dataclasses.replace(none, notes=(*none.notes, *unmarked))


def _notes_of_nothing_marked(explanation: Explanation, config: Config) -> Iterator[str]:
    """Says that settings for streams were given, but no value is marked."""
    given = {"pipeline": config.pipeline, "chunks": config.chunks}
    asked = [f"{name}={value!r}" for name, value in given.items() if value != "auto"]
    # Only for the function itself, and not again for programs derived from it.
    unmarked = all(stream.found for stream in explanation.streams)
    if asked and unmarked and not config.role:
        apply = "apply" if len(asked) > 1 else "applies"
        yield (
            f"nothing is marked: {' and '.join(asked)} only {apply} to values that "
            f"jhost.stream marks; with pipeline='auto' jhost finds streams itself"
        )


def _notes_of_rates(explanation: Explanation, devices: Devices) -> Iterator[str]:
    """Says where the rates come from by which streams were chosen, on GPUs."""
    weighed = any(stream.predicted for stream in explanation.streams)
    rates = rates_here(devices) if devices.platform == "gpu" else None
    if weighed and rates is not None:
        measures = "; python -m jhost calibrate measures them" * rates.estimated
        yield f"predicted by rates of {devices.kind} {rates.source}{measures}"


def _notes_of_puts(explanation: Explanation, config: Config) -> Iterator[str]:
    """Says why the kind of permutes was not chosen here."""
    pipelines = {stream.pipeline for stream in explanation.streams}
    if config.embedded and "p2p" in pipelines and puts_are_known(config.mesh):
        yield (
            "jhost assumes that permutes are peer copies, as jhost.compiler_options() "
            "sets them: only the outer program can set their kind"
        )


def _notes_of_reach(program: Program, devices: Devices) -> Iterator[str]:
    """Why permutes that were asked for hide less than copies."""
    axes = sorted(permutes(program))
    if devices.platform == "gpu" and between_processes(axes, devices.reach):
        text = why_not_hidden(axes, devices.reach, dict(program.mesh.shape))
        yield f"a p2p pipeline hides little here: {text}"
