"""Remarks on a program, by its passes for `jhost.explain`, and predictions."""

from __future__ import annotations

from typing import Literal, TypeAlias

from jhost._text import bytes_text, counted, flops_text, seconds_text
from jhost.lowering.ir.marks import OnLines, Wish
from jhost.lowering.ir.statements import PipelineKind, node


@node
class Note:
    """Something to know of `values`, or of the user's line `where`, if there is one.

    `{}` in the form of the text stands for the values, by the names of their buffers.
    """

    form: str
    where: str = ""
    values: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        values = ", ".join(self.values)
        return self.form.replace("{}", values) if values else self.form

    def __str__(self) -> str:
        return self.text + (f" [{self.where}]" if self.where else "")


@node
class LayoutReport:
    """A value that changes its layout, and why.

    Attributes:
        value: the user's name of the value.
        before: its layout before, as a spec; or over which axes it is a partial sum.
        after: its layout behind the change, as a spec.
        bytes: the bytes that each device receives; a later pass may find a cheaper way.
        reason: the operation that needs the change, and what the alternative moves.
        text: all of this in one row.
        where: the user's line.
    """

    value: str
    before: str
    after: str
    bytes: int
    reason: str
    text: str
    where: str

    def __str__(self) -> str:
        return self.text + (f" [{self.where}]" if self.where else "")


@node
class StreamReport(OnLines):
    """What became of one stream, and why.

    Attributes:
        lines: the user's lines, of all marks that make up the stream, or of the
            products in a stream that jhost found.
        stream: its name in the text of the program.
        axis: the dim of the marked value.
        pipeline: "off" if it was not pipelined.
        chunks: the number of chunks; 1 if it was not pipelined.
        extent: the number of steps that could be cut.
        reason: who asked for this choice, or the predictions that led to it.
        predicted: the name of each choice that was weighed, with the seconds that the
            program, body or layer around it would take; the best is first.
        measured: the name of each choice in a `jhost.Tuning` that the stream follows,
            with the seconds that it took; the chosen one is first.
        moves: whether anything moves in the loop.  If not, it saves memory at most.
        fewer: why there are fewer chunks than the user asked for; "" if there are not.
        found: whether jhost found the stream, with no mark.
    """

    stream: str
    axis: int
    pipeline: PipelineKind
    chunks: int
    extent: int
    reason: str
    predicted: tuple[tuple[str, float], ...] = ()
    measured: tuple[tuple[str, float], ...] = ()
    moves: bool = True
    fewer: str = ""
    found: bool = False

    @property
    def hides(self) -> bool:
        """Whether work of one chunk may hide what another chunk moves."""
        return self.pipeline != "off" and self.moves

    @property
    def text(self) -> str:
        how = f"{self.pipeline} pipeline" if self.chunks > 1 else "not pipelined"
        # A prediction begins with what the candidate is called, and so does this text.
        said = self.reason.removeprefix(f"{how}, ")
        colon = ":" if said == self.reason else ","
        idle = "" if self.moves else "; nothing moves in this loop: it hides nothing"
        found = " found" if self.found else ""
        return f"{self.stream}{found} on axis {self.axis}: {how}{colon} {said}{idle}"

    def __str__(self) -> str:
        return f"{self.text} [{self.where}]"


@node
class LeftStream(OnLines):
    """A stream that jhost found and left: no loop is predicted to gain enough.

    Attributes:
        lines: the user's lines, of the products in the stream.
        predicted: the seconds without a loop, and then the seconds with each loop that
            was weighed.  If no loop could gain enough, none was weighed.
    """

    predicted: tuple[tuple[str, float], ...] = ()


@node
class Search:
    """That jhost looked for streams, because nothing is marked, and what it `left`."""

    left: tuple[LeftStream, ...] = ()

    @property
    def text(self) -> str:
        were = "was" if len(self.left) == 1 else "were"
        return (
            f"{counted(len(self.left), 'more stream')} {were} looked at and left: no "
            "loop is predicted to gain enough there"
        )


@node
class UnmetWish:
    """Says that the marks of some `numbers` cannot follow a function's setting.

    The program is lowered again without that wish: no finished one has such a remark.
    """

    numbers: tuple[int, ...]
    wish: Wish
    reason: str


@node
class ReplicationReport:
    """Work that every device repeats, on operands that were spread over the devices.

    Attributes:
        primitive: JAX's name of the operation.
        values: the user's names of the operands.
        reason: why no device can do a part of the work.
        bytes: the bytes that each device receives of all operands.
        flops: the floating-point operations of each device.
        where: the user's line.
    """

    primitive: str
    values: tuple[str, ...]
    reason: str
    bytes: int
    flops: int
    where: str

    def __str__(self) -> str:
        return (
            f"{self.primitive} is repeated on every device, which receives "
            f"{bytes_text(self.bytes)} of {' and '.join(self.values)} for it and "
            f"computes {flops_text(self.flops)}: {self.reason}"
        ) + (f" [{self.where}]" if self.where else "")


@node
class Prediction:
    """What one run of a program takes on each device, in seconds.

    Attributes:
        total: the whole run, at least `compute` and `host`.  The part of it above
            `compute` is exposed communication.
        compute: all kernels but those of transfers.
        communication: all transfers, hidden and exposed ones.
        host: what the host takes to launch everything.
    """

    total: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    host: float = 0.0

    def __add__(self, other: Prediction) -> Prediction:
        return Prediction(
            total=self.total + other.total,
            compute=self.compute + other.compute,
            communication=self.communication + other.communication,
            host=self.host + other.host,
        )

    def __mul__(self, times: int) -> Prediction:
        return Prediction(
            total=self.total * times,
            compute=self.compute * times,
            communication=self.communication * times,
            host=self.host * times,
        )

    def __str__(self) -> str:
        return (
            f"{seconds_text(self.total)} (compute {seconds_text(self.compute)}, "
            f"communication {seconds_text(self.communication)}, "
            f"host {seconds_text(self.host)})"
        )


PermuteKind: TypeAlias = Literal["peer copies", "puts"]
"""Copied by XLA from device to device of a process, or put there by NCCL."""


@node
class PermuteReport:
    """How all permutes of a program go; `predicted` has each way, this one first."""

    kind: PermuteKind
    predicted: tuple[tuple[PermuteKind, Prediction], ...]

    def __str__(self) -> str:
        (_, chosen), *others = self.predicted
        said = [f"{self.kind}, predicted to take {_with_host(chosen)}"]
        said += [f"{kind} {_with_host(each)}" for kind, each in others]
        return "; ".join(said)


def _with_host(predicted: Prediction) -> str:
    return f"{seconds_text(predicted.total)} (host {seconds_text(predicted.host)})"


@node
class LeftToXla:
    """That XLA partitions the whole program, as in `jax.jit`.

    It moves data along `axes` between processes, and nothing in it is pipelined.
    Collectives begin `early` if there is work for most of them to stand beside.  If it
    is left because that is predicted to gain, `predicted` has the seconds of the
    program, and those in jhost's order; the options are then part of the prediction.
    """

    axes: tuple[str, ...]
    early: bool
    predicted: tuple[float, float] | None = None

    def __str__(self) -> str:
        said = (
            "XLA partitions this program and orders its communications, as in jax.jit"
        )
        said += " with options that begin collectives early" * self.early
        if self.predicted is not None:
            written, in_order = map(seconds_text, self.predicted)
            return (
                f"{said}: predicted to take {written}, and {in_order} in jhost's order"
            )
        return (
            f"{said}: the devices along {' and '.join(self.axes)} are in several "
            "processes, and no stream is pipelined"
        )


Remark: TypeAlias = (
    Note
    | LayoutReport
    | LeftToXla
    | ReplicationReport
    | StreamReport
    | Search
    | PermuteReport
    | UnmetWish
)
"""What a pass says of its decisions, for `jhost.explain`."""
