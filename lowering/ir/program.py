"""Host IR: the program of loops, streams, aliases, computations and communications.

A `Program` is what one device of the mesh runs; every device runs the same one, and
only index expressions differ by rank.  The nodes stand in the order one would explain
them.  They are nvFuser's Host IR (its pull requests 4144, 4145, 4147, 4301 and 4387),
with buffers in place of tensor views and a jaxpr's equations in place of kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, TypeAlias, TypeVar, dataclass_transform

import numpy as np
from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh

from jhost.lowering.ir.index import Constant, Index
from jhost.lowering.rules.dim_rule import DimRule, Reducer

MemorySpace: TypeAlias = Literal["device", "host"]
PipelineKind: TypeAlias = Literal["off", "collective", "p2p"]
CommunicationKind: TypeAlias = Literal[
    "AllGather",
    "AllReduce",
    "ReduceScatter",
    "AllToAll",
    "Broadcast",
    "Reduce",
    "Gather",
    "Scatter",
    "CollectivePermute",
    "SwapAxes",
]

_T = TypeVar("_T")


# pyright does not follow a decorator that is `dataclass(...)` under another name.
@dataclass_transform(frozen_default=True, kw_only_default=True)
def _node(cls: type[_T]) -> type[_T]:
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


# --- Buffers ------------------------------------------------------------------ #


@_node
class Dim:
    """How one dim of a buffer is spread: over mesh axes (major first) and in chunks."""

    axes: tuple[str, ...] = ()
    stream: str | None = None


@_node
class Buffer:
    """Memory on one device, or an alias of a part of it; `shape` is the local one.

    `partial` lists the mesh axes over which the buffer still has to be reduced, each
    with its reducer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    dims: tuple[Dim, ...]
    partial: tuple[tuple[str, Reducer], ...] = ()
    memory: MemorySpace = "device"


# --- Memory and aliases ------------------------------------------------------- #


@_node
class Allocate:
    """Make `buffer` exist; its contents are undefined unless `zero_init`."""

    buffer: Buffer
    zero_init: bool = False


@_node
class Deallocate:
    """End `buffer`'s life; nothing reads it afterwards."""

    buffer: Buffer


@_node
class Select:
    """Make `out` an alias of `source[index : index + size]` along `dim`.

    With `groups` > 1 the dim is seen as that many equal parts and the alias takes
    `[index : index + size]` of each: chunk s of a gathered dim is the s-th slice of
    every device's shard.  With `drop` the alias has one dim less (`size` is 1).
    """

    out: Buffer
    source: Buffer
    dim: int
    index: Index
    size: Index
    groups: int = 1
    drop: bool = False


@_node
class Set:
    """Copy `source` into `out`; where their layouts differ it stands for a reshard."""

    out: Buffer
    source: Buffer


# --- Computation -------------------------------------------------------------- #


@_node
class UnitEqn:
    """One equation and how its factors are spread over the mesh and the loop.

    `axes` has the mesh axes of each factor of `rule`; `stream` is the factor that the
    enclosing loop works on in chunks.  `accumulator` is the dtype of the partial result
    where that factor is reduced (float32 for a sum of bfloat16).
    """

    eqn: JaxprEqn
    rule: DimRule
    axes: tuple[tuple[str, ...], ...]
    stream: int | None = None
    accumulator: np.dtype | None = None


@_node
class Unit:
    """Equations that run together (nvFuser's HostUnit).

    `pads` says that it hands a value of the user's on, padded.
    """

    name: str
    eqns: tuple[UnitEqn, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Var, ...]
    pads: bool = False


@_node
class Chunk:
    """The part `[start : start + size]` of a loop's `extent` that a statement works on.

    With `groups` > 1 it is that part of each of as many equal stretches of the factor.
    """

    start: Index
    size: Index
    extent: int
    groups: int = 1


@_node
class Compute:
    """Run `unit` on the current stream (PostOnStream), writing into `outs`.

    With `reducer` the result is combined into what `outs` hold already: the
    accumulator of a loop over a reduced factor.
    """

    unit: Unit
    ins: tuple[Buffer, ...]
    outs: tuple[Buffer, ...]
    chunk: Chunk | None = None
    reducer: Reducer | None = None


# --- Communication ------------------------------------------------------------ #


@_node
class Communicate:
    """A collective over `axes`; `dim` is the one gathered, scattered or split.

    `source_dim` is AllToAll's other dim: the one whose shards come together.
    In SwapAxes, over two axes of one size, device (i, j) sends all to device (j, i).
    `root` and `shift` belong to the rooted kinds and to CollectivePermute (device r
    sends to r + shift).
    """

    name: str
    kind: CommunicationKind
    out: Buffer
    source: Buffer
    axes: tuple[str, ...]
    dim: int | None = None
    source_dim: int | None = None
    reducer: Reducer | None = None
    root: Index | None = None
    shift: Index | None = None


@_node
class Send:
    """Send `buffer` to the device at `peer` along `axis`."""

    buffer: Buffer
    axis: str
    peer: Index


@_node
class Recv:
    """Receive `buffer` from the device at `peer` along `axis`."""

    buffer: Buffer
    axis: str
    peer: Index


@_node
class StartCoalescing:
    """The sends and receives up to `EndCoalescing` are one communication."""


@_node
class EndCoalescing:
    """End of the group, which a `Wait` names."""

    name: str


@_node
class Wait:
    """The current stream waits for the communication of that name."""

    communication: str


# --- Streams ------------------------------------------------------------------ #


@_node
class Stream:
    """An ordered queue of work, by name or by an index: same index, same queue."""

    name: str = ""
    index: Index = Constant(0)


@_node
class GetCurrentStream:
    """Remember the current stream as `stream`."""

    stream: Stream


@_node
class SetCurrentStream:
    """What follows goes on `stream`."""

    stream: Stream


@_node
class Synchronize:
    """The current stream waits for what is on `stream`; the host does not."""

    stream: Stream


# --- Control ------------------------------------------------------------------ #


@_node
class For:
    """Run `body` with `index` = 0 .. extent - 1."""

    index: str
    extent: int
    body: tuple[Stmt, ...]


@_node
class If:
    """Run `then` where `predicate` (an expression, or a scalar buffer) holds."""

    predicate: Index | Buffer
    then: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...] = ()


Stmt: TypeAlias = (
    Allocate
    | Deallocate
    | Select
    | Set
    | Compute
    | Communicate
    | Send
    | Recv
    | StartCoalescing
    | EndCoalescing
    | Wait
    | GetCurrentStream
    | SetCurrentStream
    | Synchronize
    | For
    | If
)

# --- What the user asked for -------------------------------------------------- #


@_node
class StreamRequest:
    """`jhost.stream` on a buffer's dim, as it was written.

    What it leaves open (None) the settings of the function say; `"auto"` leaves it to
    jhost whatever they say.
    """

    buffer: str
    dim: int
    chunks: int | Literal["auto"] | None
    pipeline: PipelineKind | Literal["auto"] | None
    lines: tuple[str, ...]

    @property
    def where(self) -> str:
        return ", ".join(self.lines)


@_node
class StreamChoice:
    """What a request for a stream comes to: `choose_pipelines` makes one of each.

    A `pipeline` of None was neither asked for nor chosen: the value takes part in a
    stream that reaches it.  `chunks` of None are as many as the pipeline has unasked.
    The loops take turns on `streams` at most.  A pipeline that the user named stands
    even where it gains nothing: `by_name`.  `reason` is that of the choice, with the
    seconds that each candidate was `predicted` to take, or was `measured` to.
    """

    buffer: str
    dim: int
    chunks: int | None
    pipeline: PipelineKind | None
    lines: tuple[str, ...]
    by_name: bool = True
    streams: int | None = None
    reason: str = ""
    predicted: tuple[tuple[str, float], ...] = ()
    measured: tuple[tuple[str, float], ...] = ()

    @property
    def where(self) -> str:
        return ", ".join(self.lines)


@_node
class SerialMark:
    """`jhost.serial`: no stream reaches this buffer."""

    buffer: str


@_node
class ShardMark:
    """A sharding the user gave: mesh axes a dim, or None where jhost may choose."""

    buffer: str
    spec: tuple[tuple[str, ...] | None, ...]
    where: str


@_node
class BarrierMark:
    """A buffer that one barrier hands on, together with its other operands.

    None is handed on before all `operands` are there: what `jax.checkpoint` computes
    again is computed when its cotangent has come, and not kept until then.
    """

    buffer: str
    operands: tuple[str, ...]


Mark: TypeAlias = StreamRequest | StreamChoice | SerialMark | ShardMark | BarrierMark

# --- Program ------------------------------------------------------------------ #


@_node
class Note:
    """Something to know of a value, or of the user's line `where`, if there is one."""

    text: str
    where: str = ""

    def __str__(self) -> str:
        return self.text + (f" [{self.where}]" if self.where else "")


@_node
class LayoutReport:
    """A value that changes its layout, and why it had to or was chosen to.

    `bytes` is what each device receives; a later pass may find a cheaper way.
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


@_node
class StreamReport:
    """One stream: what was asked for, what was chosen, and why.

    `chunks` is 1 and `pipeline` "off" where it was not pipelined; `extent` is the
    number of steps that could be cut.  `predicted` has the seconds that the program
    would take with each choice that was weighed, the best first; of a stream that
    follows a `jhost.Tuning`, `measured` has those that it took, the chosen one first.
    `lines` are the user's, of all marks that make up the stream.
    """

    stream: str
    axis: int
    pipeline: PipelineKind
    chunks: int
    extent: int
    reason: str
    lines: tuple[str, ...]
    predicted: tuple[tuple[str, float], ...] = ()
    measured: tuple[tuple[str, float], ...] = ()

    @property
    def where(self) -> str:
        return ", ".join(self.lines)

    @property
    def text(self) -> str:
        how = f"{self.pipeline} pipeline" if self.chunks > 1 else "not pipelined"
        return f"{self.stream} on axis {self.axis}: {how}: {self.reason}"

    def __str__(self) -> str:
        return f"{self.text} [{self.where}]"


Remark: TypeAlias = Note | LayoutReport | StreamReport
"""What a pass says of its decisions, for `jhost.explain`."""


@_node
class Program:
    """A whole function on `mesh`: `params` in, `results` out.

    `marks` are what the user asked for and no pass has taken up yet.
    """

    name: str
    mesh: AbstractMesh
    params: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    body: tuple[Stmt, ...]
    marks: tuple[Mark, ...] = ()
    remarks: tuple[Remark, ...] = ()

    def __str__(self) -> str:
        from jhost.lowering.ir.printer import program_text

        return program_text(self)


def walk(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement of `body`, loops and branches before what they hold."""
    for stmt in body:
        yield stmt
        match stmt:
            case For(body=inner):
                yield from walk(inner)
            case If(then=then, otherwise=otherwise):
                yield from walk(then)
                yield from walk(otherwise)
            case _:
                pass
