"""Dim rules: how an equation's operand and result dims follow one another.

A rule names the *factors* of an equation: its independent indices in the einsum sense.
`mk,kn->mn` has m and n parallel and k reduced.  The rule maps each dim to a factor, or
to None where the dim must be whole.  Padding, layouts and streams all read this one
table.

The rules are in `elementwise.py`, `shape.py`, `contract.py`, `scaled.py`, `ragged.py`,
`along.py`, `index.py`, `gather.py`, `scatter.py`, `random.py`, `attention.py`,
`written_attention.py`, `partitioning.py` and `shard_map.py`.  Rules that read windows
of dims are in `rearrange.py`, `rotate.py`, `pooling.py` and `convolution.py`.  All are
written with `building.py` and `windows.py`, stand in `registry.py`, and `table.py`
imports them all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from jax.extend.core import JaxprEqn

from jhost.lowering.rules.reads import WindowReads
from jhost.lowering.rules.reducers import Reducer


@dataclasses.dataclass(frozen=True, slots=True)
class FactorDim:
    """A dim that follows `factor`; each step of the factor is `scale` elements of it.

    A reshape that merges `[a, b]` into `[a * b]` maps the merged dim to factor a with
    scale b.  Each step of a then has all steps of b, which the dim follows `inside`.
    With `reads`, the steps read windows of the dim.  A device then gets the elements
    that its steps read, and some of them come from other devices.
    """

    factor: int
    scale: int = 1
    reads: WindowReads | None = None
    inside: FactorDim | None = None

    @property
    def factors(self) -> tuple[int, ...]:
        """The factors that it follows, from the outermost."""
        return (self.factor, *(self.inside.factors if self.inside else ()))


Dims: TypeAlias = tuple[FactorDim | None, ...]


def factors_of(dims: Dims) -> set[int]:
    """The factors that some dim follows."""
    return {factor for dim in dims if dim is not None for factor in dim.factors}


def aligned(dims: Dims) -> Dims:
    """`dims`, with None where steps read windows: windows of two steps overlap."""
    return tuple(None if d is None or d.reads is not None else d for d in dims)


MOST_POSITIONS = np.iinfo(np.int32).max
"""The longest dim with positions that a rule can count.

JAX has ints of 64 bits only where the user sets `jax_enable_x64`.
"""


class Shard(Protocol):
    """Which part of each factor an equation works on, in a loop and on a device."""

    def size(self, factor: int) -> int:
        """The number of steps of `factor` here."""
        ...

    def positions(self, factor: int) -> Any:
        """The position in the whole of each step of `factor` here, in int32."""
        ...

    def starts(self, factor: int) -> Sequence[Any]:
        """Where the stretches of steps of `factor` here begin in the whole.

        They have one size.  Each start is an int or a traced scalar.
        """
        ...

    def grain(self, factor: int) -> int:
        """A number that divides the stretches' size, and where each of them begins."""
        ...

    def varies(self, factor: int) -> bool:
        """Whether devices work on different steps of `factor`."""
        ...

    def parts(self, factor: int) -> int:
        """The number of parts of this size, over devices and in a loop over chunks."""
        ...

    @property
    def zigzag(self) -> int:
        """The number of devices that have counted factors in zigzag order, or 1."""
        ...

    @property
    def accumulator(self) -> np.dtype | None:
        """The dtype that a sum must have because an accumulator goes on with it."""
        ...


Rebind: TypeAlias = Callable[[JaxprEqn, Sequence[Any], Shard], Sequence[Any]]
Combine: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def bind(eqn: JaxprEqn, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Bind `eqn`'s primitive to `args`, with some parameters changed."""
    # A sharding among the parameters is that of the whole result.  JAX would refuse it
    # for a part, where all mesh axes are manual.
    dropped = dict.fromkeys({"sharding", "out_sharding"} & eqn.params.keys())
    params = {**eqn.params, **dropped, **changed}
    outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def bind_same(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
    """The rebind of equations whose parameters carry no shapes."""
    del shard
    return bind(eqn, args)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWindow:
    """The factors of queries and keys, and which keys each query sees.

    A query sees `left` keys before its own position and `right` keys behind it; None
    is all of them.
    """

    queries: int
    keys: int
    left: int | None = None
    right: int | None = None

    @property
    def sees_all(self) -> bool:
        """Whether each query sees all keys."""
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        """Whether a query sees all keys up to its own position, and no other."""
        return self.left is None and self.right == 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinedReads:
    """Operands that are read one element at a step of a factor, along one dim.

    The result has these elements in the order of the steps.  So devices exchange
    pieces of all operands at once, and what each of them gets is its part of the
    result: `rebind` never runs on a part of the factor.  `reads` has pairs of an
    operand's number and the windows of it.  An operand may be read several times.
    """

    dim: int
    factor: int
    reads: tuple[tuple[int, WindowReads], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DimRule:
    """The factors of one equation.

    Attributes:
        sizes: for each factor, its number of steps in the whole.
        reducers: for each factor, what reduces it; None where it is parallel.  A
            reduced factor that some result follows is parallel in that result.
        operands: for each operand, the factor that each dim follows.
        results: the same for each result.
        rebind: runs the equation on the parts that a `Shard` names.
        counted: the factors whose positions in the whole `rebind` asks for.
        picked: the factors whose single steps are picked by indices.
        updates: the factors along which updates of one value are reduced.
        unsharded: the factors that loops may cut, but mesh axes may not.
        window: which queries see which keys, by position; None if all see all.
        combine: makes one result of two parts' results, for the reducer "softmax".
        opaque: whether the equation has no factors, so that all dims are whole.
        reason: why it is opaque or why dims are whole, if its primitive does not say.
        matmul: for a kernel that multiplies matrices inside, the batch, m, n and k of
            a product that is as much work.
        traffic: for such a kernel, the bytes that it moves between its products.
        choices: for such a kernel, how many branches it chooses when it runs.
        pinned: for each factor, the mesh axes that the equation itself names; it works
            on no others.
        joined: for an equation that only joins elements of its operands, which.
        windowed: the factors whose steps read windows of some operand.
        inner: the factors that some dim follows inside of another factor's steps.
        contracts: whether it multiplies and sums, because a reduced factor is in both
            first operands.  Such work takes long enough to hide a transfer.
        reduces: whether some factor is reduced, and each of its steps is work.
    """

    sizes: tuple[int, ...]
    reducers: tuple[Reducer | None, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    rebind: Rebind = bind_same
    counted: frozenset[int] = frozenset()
    picked: frozenset[int] = frozenset()
    updates: frozenset[int] = frozenset()
    unsharded: frozenset[int] = frozenset()
    window: AttentionWindow | None = None
    combine: Combine | None = None
    opaque: bool = False
    reason: str = ""
    matmul: Callable[[Shard], tuple[int, int, int, int]] | None = None
    traffic: Callable[[Shard], int] | None = None
    choices: Callable[[Shard], int] | None = None
    pinned: tuple[tuple[str, ...], ...] | None = None
    joined: JoinedReads | None = None
    windowed: frozenset[int] = dataclasses.field(init=False)
    inner: frozenset[int] = dataclasses.field(init=False)
    contracts: bool = dataclasses.field(init=False)
    reduces: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Found once: passes ask for these more often than for anything else.
        object.__setattr__(self, "windowed", frozenset(self._windowed()))
        object.__setattr__(self, "inner", frozenset(self._inner()))
        object.__setattr__(self, "contracts", self._contracts())
        object.__setattr__(self, "reduces", self._reduces())

    @property
    def is_closed(self) -> bool:
        """Whether the rule does not say how its results come from its operands."""
        # A `shard_map` has pinned factors: its specs are known, and its body is not.
        return self.opaque or self.pinned is not None

    @property
    def unstreamed(self) -> frozenset[int]:
        """The factors that no loop cuts, because a chunk would cost as much as all.

        Every chunk of a table is asked for every index, and every chunk of updates
        makes a value as large as the table.  Of inner steps a chunk has some in each
        outer step.
        """
        return self.picked | self.updates | self.inner

    def _windowed(self) -> Iterator[int]:
        for dims in self.operands:
            for dim in dims:
                if dim is not None and dim.reads is not None:
                    yield dim.factor

    def _inner(self) -> Iterator[int]:
        for dims in (*self.operands, *self.results):
            for dim in dims:
                if dim is not None and dim.inside is not None:
                    yield from dim.inside.factors

    def _reduces(self) -> bool:
        return any(r for f, r in enumerate(self.reducers) if f not in self.picked)

    def _contracts(self) -> bool:
        if self.matmul is not None:
            return True
        reduced = {f for f, reducer in enumerate(self.reducers) if reducer is not None}
        holders = [factors_of(dims) & reduced for dims in self.operands[:2]]
        return len(holders) == 2 and bool(set.intersection(*holders))


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal of a jaxpr."""
    # The type of a token has no shape.
    return tuple(atom.aval.shape) if hasattr(atom.aval, "shape") else ()


def part_shape(dims: Dims, shape: Sequence[int], shard: Shard) -> tuple[int, ...]:
    """The shape that `shard` leaves of a value of `shape` mapped by `dims`."""
    sizes = [
        size if dim is None else _part_size(dim, size, shard)
        for dim, size in zip(dims, shape, strict=True)
    ]
    return tuple(sizes)


def _part_size(dim: FactorDim, size: int, shard: Shard) -> int:
    steps = shard.size(dim.factor)
    if dim.reads is None:
        inside = dim.inside.factors if dim.inside else ()
        return steps * dim.scale // math.prod(map(shard.parts, inside))
    return size if shard.parts(dim.factor) == 1 else dim.reads.window(steps)
