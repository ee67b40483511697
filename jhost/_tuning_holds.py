"""Whether a tuning holds: in its environment, for a program of that fingerprint."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping, Sequence

import jax

from jhost import _text
from jhost._tuning import Environment, TunedProgram, Tuning
from jhost._version import __version__
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import Tuned, Tunings
from jhost.lowering.ir.unit_printer import type_text
from jhost.runtime.devices import devices_of
from jhost.runtime.mesh import AnyMesh


def environment_of(mesh: AnyMesh | None) -> Environment:
    """The environment of a program on `mesh`, here and now."""
    devices = devices_of(mesh)
    axes = {} if mesh is None else dict(mesh.shape)
    return Environment(
        jhost=__version__,
        jax=jax.__version__,
        jaxlib=_version("jaxlib"),
        platform=devices.platform,
        device_kind=devices.kind,
        devices=devices.count,
        processes=devices.processes,
        mesh=", ".join(f"{name}={size}" for name, size in axes.items()),
    )


@functools.cache
def _version(package: str) -> str:
    return importlib.metadata.version(package)


def arguments_text(program: Program) -> tuple[str, ...]:
    """Each parameter with its type, as `x: f32[8, 4]`."""
    return tuple(f"{param.name}: {type_text(param)}" for param in program.params)


def tuned_here(tunings: Sequence[Tuning], mesh: AnyMesh | None) -> Tunings:
    """The measured choices for each program that hold in this environment."""
    found: dict[str, Mapping[int, Tuned]] = {}
    for tuning in tunings:
        # If several hold for one program, the last one counts.
        if not _text.changes(tuning.environment, environment_of(mesh)):
            found |= {p.fingerprint: _tuned_marks(p) for p in tuning.programs}
    return found


def _tuned_marks(program: TunedProgram) -> dict[int, Tuned]:
    return {
        mark: Tuned(
            spec=stream.candidates[0].spec,
            reason=stream.reason(),
            measured=stream.times(),
        )
        for stream in program.streams
        if stream.candidates
        for mark in stream.marks
    }


def changes(
    tuning: Tuning, mesh: AnyMesh | None, program: Program, fingerprint: str
) -> list[str]:
    """What keeps `tuning` from holding for `program`, a line each."""
    found = _text.changes(tuning.environment, environment_of(mesh))
    if any(p.fingerprint == fingerprint for p in tuning.programs):
        return found
    # A fingerprint only says that something differs.  Other types can be named.
    now = arguments_text(program)
    if all(p.arguments != now for p in tuning.programs):
        was = tuning.programs[0].arguments if tuning.programs else ()
        return [*found, f"arguments: {', '.join(was)} -> {', '.join(now)}"]
    return [*found, "the function: what it computes, its marks or its shardings"]
