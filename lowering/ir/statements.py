"""Host IR: the program of loops, streams, aliases, computations and communications.

A `Program` is what one device of the mesh runs; every device runs the same one, and
only index expressions differ by rank.  The nodes stand in the order one would explain
them; buffers, units and control flow have modules of their own.  They are nvFuser's
Host IR (its pull requests 4144, 4145, 4147, 4301 and 4387), with buffers in place of
tensor views and a jaxpr's equations in place of kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, TypeVar, cast

from jhost.lowering.ir.buffer import Buffer as Buffer, Dim as Dim, node as node
from jhost.lowering.ir.control_flow import (
    Cond as Cond,
    ControlFlow as ControlFlow,
    Scan as Scan,
    While as While,
)
from jhost.lowering.ir.index import Constant, Index
from jhost.lowering.ir.unit import Unit as Unit, UnitEqn as UnitEqn
from jhost.lowering.rules.reads import WindowReads
from jhost.lowering.rules.reducers import Reducer

PipelineKind: TypeAlias = Literal["off", "collective", "p2p"]
CommunicationKind: TypeAlias = Literal[
    "AllGather",
    "AllReduce",
    "ReduceScatter",
    "AllToAll",
    "CollectivePermute",
    "SwapAxes",
]


# --- Memory and aliases ------------------------------------------------------- #


@node
class Allocate:
    """Make `buffer` exist; its contents are undefined."""

    buffer: Buffer


@node
class Deallocate:
    """End `buffer`'s life; nothing reads it afterwards."""

    buffer: Buffer


@node
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


@node
class Set:
    """Copy `source` into `out`."""

    out: Buffer
    source: Buffer


@node
class Reshard:
    """Make `out` of `source`, which is laid out otherwise or partial.

    It has a place between the pass that lays values out and the one that makes
    communications of it.
    """

    out: Buffer
    source: Buffer


@node
class Neighbours:
    """Make `out` the window of `sources` that the `count` steps here read along `dim`.

    Devices along `axes` have a part of the dim each, and some of what `reads` says is
    in other devices' parts.  Of several sources each step reads one element of one, and
    some sources may be whole.  Like a `Reshard`, it is made communications.
    """

    out: Buffer
    sources: tuple[Buffer, ...]
    dim: int
    axes: tuple[str, ...]
    reads: tuple[WindowReads, ...]
    count: int


# --- Computation -------------------------------------------------------------- #


@node
class Chunk:
    """The part `[start : start + size]` of a loop's `extent` that a statement works on.

    With `groups` > 1 it is that part of each of as many equal stretches of the factor.
    Wherever it is, it starts and ends at multiples of `grain`.
    """

    start: Index
    size: Index
    extent: int
    groups: int = 1
    grain: int = 1


@node
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


@node
class Communicate:
    """A collective over `axes`; `dim` is the one gathered, scattered or split.

    `source_dim` is AllToAll's other dim: the one whose shards come together.
    In SwapAxes, over two axes of one size, device (i, j) sends all to device (j, i).
    `shift` belongs to CollectivePermute: device r sends to r + shift, modulo the number
    of devices.  A shift may depend on r, or on ranks along other axes, as long as no
    two devices send to one.
    """

    name: str
    kind: CommunicationKind
    out: Buffer
    source: Buffer
    axes: tuple[str, ...]
    dim: int | None = None
    source_dim: int | None = None
    reducer: Reducer | None = None
    # An expression, not JAX's pairs: one statement stands for all iterations.
    shift: Index | None = None


@node
class Wait:
    """The current stream waits for the communication of that name."""

    communication: str


# --- Streams ------------------------------------------------------------------ #


@node
class Stream:
    """An ordered queue of work, by name or by an index: same index, same queue."""

    name: str = ""
    # So one text stands for all streams of a loop, as `stream[i mod 4]`.
    index: Index = Constant(0)


@node
class GetCurrentStream:
    """Remember the current stream as `stream`."""

    stream: Stream


@node
class SetCurrentStream:
    """What follows goes on `stream`."""

    stream: Stream


@node
class Synchronize:
    """The current stream waits for the work on `stream`; the host does not."""

    stream: Stream


# --- Control ------------------------------------------------------------------ #


@node
class For:
    """Run `body` with `index` = 0 .. extent - 1.

    Where `NextStage` cuts the body into stages, `order` has all of them, each by its
    iteration and its number, in the order in which they are issued.  Without it they
    are issued iteration by iteration.
    """

    index: str
    extent: int
    body: tuple[Stmt, ...]
    order: tuple[tuple[int, int], ...] = ()


@node
class NextStage:
    """The border between two stages of a loop's body.

    Statements of other iterations may be issued between the statements before it and
    the statements behind it.
    """


Stmt: TypeAlias = (
    Allocate
    | Deallocate
    | Select
    | Set
    | Reshard
    | Neighbours
    | Compute
    | Communicate
    | Wait
    | GetCurrentStream
    | SetCurrentStream
    | Synchronize
    | For
    | NextStage
    | Scan
    | While
    | Cond
)


_Kind = TypeVar("_Kind", bound=Stmt)


def every(kind: type[_Kind], body: Iterable[Stmt]) -> list[_Kind]:
    """The statements of one kind among some, without those that loops hold."""
    body = [*body]
    # Passes ask this of all statements, so it calls nothing for each.
    own = [stmt for stmt, its in zip(body, map(type, body), strict=True) if its is kind]
    return cast("list[_Kind]", own)


def walk(body: tuple[Stmt, ...]) -> Sequence[Stmt]:
    """Every statement of `body`, loops before what they hold.

    The bodies of control flow are programs of their own: see `ir/bodies.py`.
    """
    if For not in map(type, body):  # the most frequent case, and passes ask often
        return body
    return [
        each
        for stmt in body
        for each in ((stmt, *walk(stmt.body)) if isinstance(stmt, For) else (stmt,))
    ]
