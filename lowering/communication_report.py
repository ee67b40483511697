"""What is said of one communication: what moves, how far, beside which work."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from jhost._text import bytes_text, counted, seconds_text
from jhost.lowering.ir.reach import Lane


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationReport:
    """One communication of the program.

    Attributes:
        kind: such as `"AllGather"`.
        axes: the mesh axes whose devices take part.
        value: the user's name of the value that moves.
        bytes: the bytes that each device receives in all.
        chunks: the number of chunks that it moves in; 1 outside a loop over chunks.
        times: how often it runs, in a `lax.scan`.
        written: whether the user wrote it, in a `jax.shard_map`.  For a ragged one,
            `bytes` is the most that there is room for.
        where: the line of that `jax.shard_map`, if it is known.
        lane: what moves it between GPUs: copy engines ("copies"), kernels of NCCL's
            in a host ("collectives"), or the network between hosts.
        beside: how many matmuls, and other kernels that sum products, stand between
            where it is issued and where it is waited for, outside a loop over chunks.
        behind: the work that it is issued behind; empty in a loop over chunks.
        before: the work before which it is waited for, likewise.
        between: the work between the two, likewise.
        seconds: the predicted seconds in all; None if nothing is predicted.
        exposed: the part of these seconds in which the device computes nothing.
    """

    kind: str
    axes: tuple[str, ...]
    value: str
    bytes: int
    chunks: int
    times: int = 1
    written: bool = False
    where: str = ""
    lane: Lane = "collectives"
    beside: int = 0
    behind: str = ""
    before: str = ""
    between: tuple[str, ...] = ()
    seconds: float | None = None
    exposed: float | None = None

    def __str__(self) -> str:
        times = f", {self.times} times" if self.times > 1 else ""
        most = "at most " if self.kind == "RaggedAllToAll" else ""
        return (
            f"{self.kind} of {self.value} over {', '.join(self.axes)}: "
            f"{most}{bytes_text(self.bytes)} a device{self.how}{times}"
        ) + (f" [{self.where}]" if self.where else "")

    @property
    def how(self) -> str:
        """What hides it, by the program."""
        if self.written:
            return ", as written"
        if self.beside:
            return f", beside {counted(self.beside, 'matmul')}"
        return f" in {self.chunks} chunks" if self.chunks > 1 else ", not in a loop"

    @property
    def detail(self) -> str:
        """Its lane, its time and its place among the work of the program."""
        said = [f"lane: {self.lane}"]
        if self.seconds is not None:
            exposed = seconds_text(self.exposed) if self.exposed else "none"
            said.append(f"takes {seconds_text(self.seconds)}, {exposed} of it exposed")
        if self.chunks > 1:
            said.append("in a loop, among the work on other chunks")
        if self.behind:
            said += [f"issued behind {self.behind}", f"waited for before {self.before}"]
            between = _folded(self.between) or "nothing"
            said.append(f"between: {between}")
        return "; ".join(said)


def _folded(texts: Iterable[str]) -> str:
    """Each text once, with its count."""
    counts = Counter(texts)
    return ", ".join(f"{n} x {text}" if n > 1 else text for text, n in counts.items())
