"""The machine that programs run on: mesh, loops and streams.

The verifier, emission, interpretation and prediction all walk through a program.  They
share this state, which has the values of indices and the identities of streams.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import NoReturn, TypeAlias

from jhost import errors
from jhost.lowering.ir.index import Index
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.ranks import AtRanks, Ranks
from jhost.lowering.ir.statements import (
    For,
    GetCurrentStream,
    Neighbours,
    Reshard,
    SetCurrentStream,
    Stream,
)

StreamKey: TypeAlias = tuple[str, int]
DEFAULT_STREAM: StreamKey = ("", -1)


def stream_key_text(key: StreamKey) -> str:
    """A stream in words."""
    if key == DEFAULT_STREAM:
        return "the first stream"
    return key[0] or f"stream[{key[1]}]"


def refuse_reshard(program: Program, stmt: Reshard | Neighbours) -> NoReturn:
    """Refuses a program that is laid out, and has no communications yet."""
    sources = stmt.sources if isinstance(stmt, Neighbours) else (stmt.source,)
    names = ", ".join(source.name for source in sources)
    error = errors.VerifyError(
        f"got a {type(stmt).__name__} of {names} to {stmt.out.name}: it is "
        "made communication before a program runs"
    )
    error.add_note(str(program))
    raise error


class Machine:
    """Where in its loops a walk through a program is, and on which stream."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.ranks = Ranks(mesh)
        self.loops: dict[str, int] = {}
        self.current = DEFAULT_STREAM
        self._captured: dict[str, StreamKey] = {}

    # --- Indices -------------------------------------------------------------- #

    def value(self, index: Index) -> AtRanks:
        """The value of `index` here: an int where all ranks agree."""
        return self.ranks.value(index, self.loops)

    def static(self, index: Index, what: str = "index") -> int:
        """The value of an index that does not depend on the rank; `what` it is."""
        value = self.value(index)
        assert isinstance(value, int), what
        return value

    @contextmanager
    def iteration(self, loop: For, number: int) -> Generator[None]:
        """Inside, the walk is in that iteration of `loop`."""
        self.loops[loop.index] = number
        yield
        # Not in a `finally`: behind an error no walk goes on.
        del self.loops[loop.index]

    # --- Streams -------------------------------------------------------------- #

    @property
    def on_default_stream(self) -> bool:
        """Whether the current stream is the one that the program began on."""
        return self.current == DEFAULT_STREAM

    def stream_key(self, stream: Stream) -> StreamKey:
        """Which queue `stream` is, here."""
        if stream.name:
            # A name that captured no stream is a queue of its own, such as `own`.
            return self._captured.get(stream.name, (stream.name, 0))
        return ("", self.static(stream.index, "stream index"))

    def switch(self, stmt: GetCurrentStream | SetCurrentStream) -> None:
        """Remembers the current stream, or goes on another."""
        match stmt:
            case GetCurrentStream(stream=stream):
                self._captured[stream.name] = self.current
            case SetCurrentStream(stream=stream):
                self.current = self.stream_key(stream)
