"""The measured choices for the streams of a function, and where they hold."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import reprlib
from collections.abc import Sequence
from typing import NoReturn

from jhost import errors
from jhost._damaged import damage_refused
from jhost._json import read
from jhost._page import fragment, save_page
from jhost._text import counted, seconds_text
from jhost._tuning_page import page_of_tuning
from jhost._version import __version__
from jhost.lowering.cost.outcomes import ranking_text
from jhost.lowering.ir.pipelines import PipelineSpec

FORMAT = 2
"""Raised when the meaning of the fields changes; others' are refused."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The versions, devices and mesh for which a measurement holds."""

    jhost: str
    jax: str
    # XLA comes with it, and JAX may have another version.
    jaxlib: str
    platform: str
    device_kind: str
    devices: int
    processes: int
    mesh: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(PipelineSpec):
    """One way to run a stream, and the seconds that a call of the program took with it.

    A tuning's file has the fields of the way beside the seconds.  The pipeline is "p2p"
    or "collective", or None for no pipeline.

    Attributes:
        text: the way in words.
        minimum: seconds of the fastest call.
        median: seconds of the median call.
        predicted: seconds by the cost model; None if it does not know the devices.
    """

    text: str
    minimum: float
    median: float
    predicted: float | None

    def __post_init__(self) -> None:
        # A file may have been edited.  A wrong count would fail deep in lowering.
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

    @property
    def spec(self) -> PipelineSpec:
        """The way alone."""
        fields = dataclasses.fields(PipelineSpec)
        return PipelineSpec(**{f.name: getattr(self, f.name) for f in fields})


def _refuse(field: str, value: object, allowed: str) -> NoReturn:
    raise errors.TuningError(
        f"{field} is {value!r}, and can be {allowed}. Tune again, or leave the tuning "
        "out."
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunedStream:
    """The measurements of a stream mark, or of several marks that are tuned as one.

    Attributes:
        value: the first marked value, with its type.
        where: the user's line.
        axis: the marked dim.
        marks: the numbers of the marks in the program.
        candidates: the measured ways, the chosen way first.
        left_out: the ways that were not measured, and why.
    """

    value: str
    where: str
    axis: int
    marks: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    # What cannot run here is a result as well: it may run with more memory.
    left_out: tuple[str, ...]

    @property
    def title(self) -> str:
        """Which it is."""
        return f"axis {self.axis} of {self.value} [{self.where}]"

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
    """A program, with the fingerprint of its Host IR before streams are lowered."""

    name: str
    fingerprint: str
    arguments: tuple[str, ...]
    streams: tuple[TunedStream, ...]

    @property
    def title(self) -> str:
        """Which it is."""
        if not self.streams:
            return (
                f"{self.name}: nothing to tune; no mark leaves its chunks or pipeline "
                "open, or nothing moves between devices"
            )
        return f"{self.name}: {counted(len(self.streams), 'stream')} tuned"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What `jhost.tune` measured and chose; `jhost.jit(..., tuning=...)` follows it.

    It holds for one function, for the types of its arguments, one kind of device, and
    one set of versions.  If any of these differs, jhost ignores the tuning, and a
    warning says what changed.  `str` is a table.  `to_json` and `from_json` write and
    read the tuning, and `save` draws it.

    Attributes:
        function: the function's name.
        environment: the versions, devices and mesh of the measurement.
        programs: the program of the function, and the programs of its gradients if they
            were tuned.  Each has its streams, with the seconds of each candidate.
    """

    function: str
    environment: Environment
    programs: tuple[TunedProgram, ...]

    @property
    def title(self) -> str:
        """The function, the devices and the mesh, as a title."""
        here = self.environment
        return (
            f"tuning of {self.function} on {here.devices} x {here.device_kind} "
            f"({here.mesh or 'no mesh'})"
        )

    def __str__(self) -> str:
        lines = [self.title]
        for program in self.programs:
            lines.append(f"  {program.title}")
            for stream in program.streams:
                lines.append(f"    {stream.title}:")
                lines += [f"      {row}" for row in _rows(stream.candidates)]
                lines += [f"      {text}" for text in stream.left_out]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with a bar for each candidate.

        Args:
            path: a file name that ends in `.html`.  The page needs no other file.

        Raises:
            OptionError: the path has another ending.  For a file that jhost can read
                again, use `to_json`.
            FileNotFoundError: the folder does not exist.

        Example:
            >>> import pathlib, tempfile
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: jhost.stream(x + 1, axis=0))
            >>> tuning = jhost.tune(f, jnp.ones(4), cache=False, progress=False)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     tuning.save(pathlib.Path(folder) / "f.html")
        """
        save_page(path, self.function, page_of_tuning(self))

    def _repr_html_(self) -> str:
        return fragment(page_of_tuning(self))

    def to_json(self) -> str:
        """The tuning as text.

        Returns:
            JSON, which `from_json` reads.

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
        """Reads a tuning that `to_json` wrote.

        Args:
            text: what `to_json` returned.

        Returns:
            The tuning.

        Raises:
            TuningError: the text is not a tuning, or is one of another version.
        """
        try:
            with damage_refused():
                fields = json.loads(text)
                # The format first: another format may have other fields.
                known = dict(fields).pop("jhost_tuning")
        except ValueError as error:
            raise errors.TuningError(
                "This text is no tuning. Give what Tuning.to_json returned."
            ) from error
        if known != FORMAT:
            raise errors.TuningError(
                f"This tuning has format {reprlib.repr(known)}, and jhost "
                f"{__version__} reads format {FORMAT}. Tune again."
            )
        try:
            with damage_refused():
                del fields["jhost_tuning"]
                return read(cls, fields)
        except ValueError as error:
            raise errors.TuningError(f"This text is no tuning: {error}") from error


def _rows(candidates: Sequence[Candidate]) -> list[str]:
    return [_row(each) + ", chosen" * (each is candidates[0]) for each in candidates]


def _row(candidate: Candidate) -> str:
    said = (
        f"{candidate.text:<40} median {seconds_text(candidate.median):>8}, "
        f"minimum {seconds_text(candidate.minimum):>8}"
    )
    if candidate.predicted is None:
        return said
    return f"{said}, predicted {seconds_text(candidate.predicted):>8}"
