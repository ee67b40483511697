"""Host IR: the program of loops, streams, aliases, computations and communications.

A `Program` is what one device of the mesh runs; every device runs the same one, and
only index expressions differ by rank.  The nodes stand in the order one would explain
them.  They are nvFuser's Host IR (its pull requests 4144, 4145, 4147, 4301 and 4387),
with buffers in place of tensor views and a jaxpr's equations in place of kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, dataclass_transform

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jhost.lowering.ir.index import Constant, Index
from jhost.lowering.rules.dim_rule import DimRule
from jhost.lowering.rules.reads import WindowReads
from jhost.lowering.rules.reducers import Reducer

# A body is a program, and a program has statements: only types go both ways.
if TYPE_CHECKING:
    from jhost.lowering.ir.program import Program

PipelineKind: TypeAlias = Literal["off", "collective", "p2p"]
CommunicationKind: TypeAlias = Literal[
    "AllGather",
    "AllReduce",
    "ReduceScatter",
    "AllToAll",
    "CollectivePermute",
    "SwapAxes",
]

_T = TypeVar("_T")


# pyright does not follow a decorator that is `dataclass(...)` under another name.
@dataclass_transform(frozen_default=True, kw_only_default=True)
def node(cls: type[_T]) -> type[_T]:
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


# --- Buffers ------------------------------------------------------------------ #


@node
class Dim:
    """How one dim of a buffer is spread: over mesh axes (major first) and in chunks."""

    axes: tuple[str, ...] = ()
    stream: str | None = None


@node
class Buffer:
    """Memory on one device, or an alias of a part of it; `shape` is the local one.

    `partial` lists the mesh axes over which the buffer still has to be reduced, each
    with its reducer.  `memory_space` is a `jax.memory.Space`: the host's for what a
    policy of `jax.checkpoint` offloads.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    dims: tuple[Dim, ...]
    partial: tuple[tuple[str, Reducer], ...] = ()
    memory_space: Any = jax.memory.Space.Device


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
class UnitEqn:
    """One equation and how its factors are spread over the mesh and the loop.

    `axes` has the mesh axes of each factor of `rule`; `stream` is the factor that the
    enclosing loop works on in chunks.  `accumulators` has an entry for each result: the
    dtype in which its chunks are added up if it lacks this factor (float32 for a sum of
    bfloat16), and None if it has the factor.  The factors that `rule` counts stand in
    zigzag order over `zigzag` devices (see `ir/zigzag.py`), if those are more than one.
    """

    eqn: JaxprEqn
    rule: DimRule
    axes: tuple[tuple[str, ...], ...]
    stream: int | None = None
    accumulators: tuple[np.dtype | None, ...] = ()
    zigzag: int = 1


@node
class Unit:
    """Equations that run together (nvFuser's HostUnit).

    `pads` says that it hands a value of the user's on, padded.
    `derived` has facts that were found out about its equations (`ir/derived.py`).
    """

    name: str
    eqns: tuple[UnitEqn, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Var, ...]
    pads: bool = False
    derived: dict[object, Any] = dataclasses.field(
        default_factory=dict[object, Any], init=False, compare=False, repr=False
    )

    def named(self, name: str) -> Unit:
        """The same equations under another name, with all that is known of them."""
        unit = dataclasses.replace(self, name=name)
        # Shared: a fact that is found for one of them later holds for both.
        object.__setattr__(unit, "derived", self.derived)
        return unit


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


# --- Control flow of the user's ----------------------------------------------- #


@node
class Scan:
    """Run `body` `length` times (`lax.scan`).

    The body takes the `consts`, the carried values, and a slice of each of `xs`.  It
    gives the carried values, and a slice of each of `ys`.  Carried values begin as
    `carry`, and end as `carried`.  `xs` and `ys` have a leading dim that the body's
    values lack.
    """

    body: Program
    consts: tuple[Buffer, ...]
    carry: tuple[Buffer, ...]
    xs: tuple[Buffer, ...]
    carried: tuple[Buffer, ...]
    ys: tuple[Buffer, ...]
    length: int
    reverse: bool = False
    unroll: int = 1
    where: str = ""

    @property
    def ins(self) -> tuple[Buffer, ...]:
        """What stands for each param of the body."""
        return (*self.consts, *self.carry, *self.xs)

    @property
    def outs(self) -> tuple[Buffer, ...]:
        """What stands for each result of the body."""
        return (*self.carried, *self.ys)

    @property
    def bodies(self) -> tuple[Program, ...]:
        return (self.body,)


@node
class While:
    """Run `body` as long as `condition` gives true (`lax.while_loop`).

    The condition takes `condition_consts` and the carried values.  The body takes the
    `consts` and the carried values, and gives the carried values.  They begin as
    `carry`, and end as `carried`.
    """

    condition: Program
    body: Program
    condition_consts: tuple[Buffer, ...]
    consts: tuple[Buffer, ...]
    carry: tuple[Buffer, ...]
    carried: tuple[Buffer, ...]
    where: str = ""

    @property
    def ins(self) -> tuple[Buffer, ...]:
        return (*self.condition_consts, *self.consts, *self.carry)

    @property
    def outs(self) -> tuple[Buffer, ...]:
        return self.carried

    @property
    def bodies(self) -> tuple[Program, ...]:
        return self.condition, self.body


@node
class Cond:
    """Run one of `branches`, by `index`, on `operands` (`lax.switch`)."""

    index: Buffer
    branches: tuple[Program, ...]
    operands: tuple[Buffer, ...]
    outs: tuple[Buffer, ...]
    where: str = ""

    @property
    def ins(self) -> tuple[Buffer, ...]:
        return (self.index, *self.operands)

    @property
    def bodies(self) -> tuple[Program, ...]:
        return self.branches


ControlFlow: TypeAlias = Scan | While | Cond

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
