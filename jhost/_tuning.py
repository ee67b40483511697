"""What was measured of a function's streams, where, and whether that still holds."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jax

from jhost import errors
from jhost._json import read
from jhost._text import counted, seconds_text
from jhost._version import __version__
from jhost.lowering.cost.candidates import ranking_text
from jhost.lowering.ir.printer import type_text
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import Tuned, Tunings
from jhost.lowering.ir.statements import PipelineKind
from jhost.runtime.devices import devices_of
from jhost.runtime.mesh import AnyMesh

FORMAT = 1
"""Raised when the meaning of the fields changes; others' are refused."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a measurement holds for: versions, devices, and how they form a mesh."""

    jhost: str
    jax: str
    jaxlib: str
    platform: str
    device_kind: str
    devices: int
    processes: int
    mesh: str

    def changes(self, now: Environment) -> list[str]:
        """What is different `now`, a line each."""
        names = [field.name for field in dataclasses.fields(self)]
        pairs = [(name, getattr(self, name), getattr(now, name)) for name in names]
        return [f"{name}: {was} -> {here}" for name, was, here in pairs if was != here]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a stream, and the seconds that a call of the program took then.

    `pipeline` and `chunks` are both None for none at all; `streams` is None for those
    of `jhost.jit`.  `predicted` is None where nothing is known of the devices.
    """

    text: str
    pipeline: PipelineKind | None
    chunks: int | None
    streams: int | None
    minimum: float
    median: float
    predicted: float | None

    def __post_init__(self) -> None:
        if self.pipeline not in (None, "collective", "p2p"):
            _refuse("pipeline", self.pipeline, "'collective', 'p2p' or None")
        for name in ("chunks", "streams"):
            count = getattr(self, name)
            if count is not None and count < 1:
                _refuse(name, count, "at least 1, or None")
        for name in ("minimum", "median", "predicted"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < math.inf:
                _refuse(name, seconds, "seconds, from 0 on")


def _refuse(field: str, value: object, allowed: str) -> NoReturn:
    raise errors.TuningError(
        f"{field} is {value!r}, and can be {allowed}. Tune again, or leave the tuning "
        "out."
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunedStream:
    """A stream mark, or several alike: what was measured, the chosen way first.

    `marks` are their numbers in the program, `where` the user's line, and `left_out`
    says what could not be, or was not, measured, and why.
    """

    where: str
    axis: int
    marks: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        return f"axis {self.axis}: {self.reason()} [{self.where}]"

    def reason(self) -> str:
        """The choice, and what it was chosen from."""
        if not self.candidates:
            return "; ".join(("nothing could be measured", *self.left_out))
        return ranking_text("measured", self.times(), self.left_out)

    def times(self) -> tuple[tuple[str, float], ...]:
        """The median seconds of each candidate."""
        return tuple((c.text, c.median) for c in self.candidates)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunedProgram:
    """A program, by the fingerprint of its Host IR before streams are lowered."""

    name: str
    fingerprint: str
    arguments: tuple[str, ...]
    streams: tuple[TunedStream, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What `jhost.tune` measured; `jhost.jit(..., tuning=...)` follows it.

    It holds for a function on arguments of certain types, on devices of a kind, with
    certain versions: elsewhere it is ignored, with a warning that says what changed.
    `programs` are the function's, and those of its gradients if they were tuned.
    Prints as a table; `to_json` and `from_json` write and read it.
    """

    function: str
    environment: Environment
    programs: tuple[TunedProgram, ...]

    def __str__(self) -> str:
        here = self.environment
        lines = [
            f"tuning of {self.function} on {here.devices} x {here.device_kind} "
            f"({here.mesh or 'no mesh'})"
        ]
        for program in self.programs:
            lines.append(
                f"  {program.name}: {counted(len(program.streams), 'stream')} tuned"
            )
            for stream in program.streams:
                lines.append(f"    {stream.where}, axis {stream.axis}:")
                lines += [f"      {_row(candidate)}" for candidate in stream.candidates]
                lines += [f"      {text}" for text in stream.left_out]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The tuning as text.

        Example:
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: jhost.stream(x + 1, axis=0))
            >>> tuning = jhost.tune(f, jnp.ones(4), cache=False, progress=False)
            >>> jhost.Tuning.from_json(tuning.to_json()) == tuning
            True
        """
        fields = {"jhost_tuning": FORMAT, **dataclasses.asdict(self)}
        return json.dumps(fields, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Tuning:
        """The tuning that `to_json` has written.

        Raises:
            TuningError: the text is something else, or of another version.
        """
        try:
            fields = json.loads(text)
            known = fields.pop("jhost_tuning")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise errors.TuningError(
                "This text is no tuning. Give what Tuning.to_json returned."
            ) from error
        if known != FORMAT:
            raise errors.TuningError(
                f"This tuning has format {known!r}, and jhost {__version__} reads "
                f"format {FORMAT}. Tune again."
            )
        try:
            return read(cls, fields)
        except (TypeError, ValueError) as error:
            raise errors.TuningError(f"This text is no tuning: {error}") from error


def _row(candidate: Candidate) -> str:
    said = (
        f"{candidate.text:<40} median {seconds_text(candidate.median):>8}, "
        f"minimum {seconds_text(candidate.minimum):>8}"
    )
    if candidate.predicted is None:
        return said
    return f"{said}, predicted {seconds_text(candidate.predicted):>8}"


# --- Whether it holds ----------------------------------------------------------- #


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
    """What was measured in this environment, for each program."""
    found: dict[str, Mapping[int, Tuned]] = {}
    for tuning in tunings:
        if not tuning.environment.changes(environment_of(mesh)):
            found |= {p.fingerprint: _tuned_marks(p) for p in tuning.programs}
    return found


def _tuned_marks(program: TunedProgram) -> dict[int, Tuned]:
    return {
        mark: Tuned(
            pipeline=stream.candidates[0].pipeline,
            chunks=stream.candidates[0].chunks,
            streams=stream.candidates[0].streams,
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
    found = tuning.environment.changes(environment_of(mesh))
    if any(p.fingerprint == fingerprint for p in tuning.programs):
        return found
    now = arguments_text(program)
    if all(p.arguments != now for p in tuning.programs):
        was = tuning.programs[0].arguments if tuning.programs else ()
        return [*found, f"arguments: {', '.join(was)} -> {', '.join(now)}"]
    return [*found, "the function: what it computes, its marks or its shardings"]
