"""Which dims to pad where a sharding does not divide them, and to which sizes.

A dim is padded through every operation that carries it as a factor, so that nothing is
padded or cut between the first of them and the last.  These operations are the
*region*.  It ends where an operation needs the dim whole, and at parameters and
results, which keep the user's shapes.  It goes on in bodies of control flow.  In a
program of one device's shapes it also ends where a communication moves the dim: each
shard has padding at its end, and the whole would have it in between.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer
from jhost.lowering.padding.flat import OperandsOfBody, flat_operands
from jhost.lowering.padding.operands import Operands
from jhost.lowering.rules.dim_rule import Dims, factors_of

DimKey: TypeAlias = tuple[int, int] | tuple[str, int]
"""What is padded: a factor of the statement of that number, or a dim of a value whose
maker cannot be padded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PadRequest:
    """A dim of a value that has to come in equal parts for all devices along `axes`.

    The name of a value in a body begins with the path to that body.
    """

    buffer: str
    dim: int
    size: int
    axes: tuple[str, ...]
    devices: int
    where: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PaddedRegion:
    """How many times as large each key becomes.

    `operands` has the operands of all statements and crossings, and `body` says which
    are whose.  `requests` has the first request of all that belongs together, with the
    size of its dim afterwards.
    """

    operands: tuple[Operands | None, ...]
    body: OperandsOfBody
    ratios: Mapping[DimKey, Fraction]
    requests: Mapping[PadRequest, int]

    def shape(self, number: int, dims: Dims, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that statement `number` wants of a value of `shape`, or gives it"""
        return tuple(
            int(size * (1 if dim is None else self.ratio(number, dim.factor)))
            for dim, size in zip(dims, shape, strict=True)
        )

    def ratio(self, number: int, factor: int) -> Fraction:
        """How many times as many steps a factor has."""
        return self.ratios.get((number, factor), Fraction(1))


def plan_region(
    program: Program, requests: Sequence[PadRequest]
) -> PaddedRegion | None:
    """The region around the dims of `requests` that do not come in equal parts."""
    if all(request.size % request.devices == 0 for request in requests):
        return None  # as in most programs
    spread = _PaddingSpread(program, requests)
    spread.run()
    return spread.finish(requests)


class _PaddingSpread:
    """Spreads from the requests that do not divide until every border is reached."""

    def __init__(self, program: Program, requests: Sequence[PadRequest]) -> None:
        self.operands, self.body = flat_operands(program)
        self.buffers = {param.name: param for param in program.params}
        self.makers: dict[str, tuple[int, int]] = {}
        self.readers: dict[str, list[tuple[int, int]]] = {}
        for number, op in enumerate(self.operands):
            for position, buffer in enumerate(op.writes if op else ()):
                self.buffers[buffer.name] = buffer
                self.makers[buffer.name] = number, position
            for position, buffer in enumerate(op.reads if op else ()):
                self.readers.setdefault(buffer.name, []).append((number, position))
        self.uneven = [a for a in requests if a.size % a.devices]
        # A merged dim is longer by at most so many steps of its outer factor.
        self.most = max((request.devices for request in self.uneven), default=1)
        self.seeds = {(request.buffer, request.dim) for request in self.uneven}
        # Union-find: keys that are padded together have one leader.
        self.leaders: dict[DimKey, DimKey] = {}
        self.queue: deque[DimKey] = deque()

    def run(self) -> None:
        # Even requests start no region: a dim that divides stays as the user wrote it.
        for request in self.uneven:
            key = self.key(request.buffer, request.dim)
            if key is not None:
                self.join(key, key)
        while self.queue:
            key = self.queue.popleft()
            for other in self.neighbours(key):
                self.join(key, other)

    # --- Who is next to whom ---------------------------------------------------- #

    def neighbours(self, key: DimKey) -> Iterator[DimKey]:
        first, second = key
        if isinstance(first, str):
            yield from self.reading(first, second)
            return
        op = self.operands[first]
        assert op is not None
        for buffers, maps in ((op.reads, op.operands), (op.writes, op.results)):
            for buffer, dims in zip(buffers, maps, strict=True):
                for dim, mapped in enumerate(dims):
                    if mapped is not None and mapped.factor == second:
                        yield from self.around(buffer.name, dim)

    def around(self, name: str, dim: int) -> Iterator[DimKey]:
        """What else is padded with a dim of a value that the region has reached."""
        key = self.key(name, dim)
        if key is not None:
            yield key
            yield from self.reading(name, dim)

    def reading(self, name: str, dim: int) -> Iterator[DimKey]:
        for number, position in self.readers.get(name, ()):
            op = self.operands[number]
            mapped = op.operands[position][dim] if op else None
            if mapped is not None and self.admits(number, mapped.factor):
                yield number, mapped.factor

    def key(self, name: str, dim: int) -> DimKey | None:
        """The factor that a value is made of, or itself if it has to be padded."""
        if name in self.makers:
            number, position = self.makers[name]
            op = self.operands[number]
            mapped = op.results[position][dim] if op else None
            if mapped is not None and self.admits(number, mapped.factor):
                return number, mapped.factor
        # The user's sharding stands on it, but what makes it cannot be padded.
        is_seed = (name, dim) in self.seeds and can_be_padded(self.buffers[name])
        return (name, dim) if is_seed else None

    def admits(self, number: int, factor: int) -> bool:
        """Whether a statement can work on a longer factor."""
        op = self.operands[number]
        assert op is not None
        if factor in op.inner:
            return False  # each outer step would have padding at its end
        scales: list[int] = []
        lacking = followed = False
        for dims in (*op.operands, *op.results):
            scales += [d.scale for d in dims if d is not None and d.factor == factor]
        for dims in op.results:
            follows = factor in factors_of(dims)
            followed, lacking = followed or follows, lacking or not follows
        if lacking and (followed or op.reducers[factor] is None):
            return False  # a result that depends on all of it, or does beside others
        # Positions in the whole depend on its true size.
        if op.fixed or factor in op.counted:
            return False
        # A merged dim grows by whole steps of its outer factor.
        if max(scales, default=1) > 1 and op.steps[factor] < self.most:
            return False  # padding so few steps would more than double the values
        return all(map(can_be_padded, (*op.reads, *op.writes)))

    # --- What belongs together ---------------------------------------------------- #

    def join(self, key: DimKey, other: DimKey) -> None:
        for each in (key, other):
            if each not in self.leaders:
                self.leaders[each] = each
                self.queue.append(each)
        self.leaders[self.leader(other)] = self.leader(key)

    def leader(self, key: DimKey) -> DimKey:
        while self.leaders[key] != key:
            key = self.leaders[key]
        return key

    def steps(self, key: DimKey) -> int:
        first, second = key
        if isinstance(first, str):
            return self.buffers[first].shape[second]
        op = self.operands[first]
        assert op is not None
        return op.steps[second]

    def finish(self, requests: Sequence[PadRequest]) -> PaddedRegion:
        """Keys that belong together grow alike, until all requests are met."""
        steps: dict[DimKey, int] = {}
        devices: dict[DimKey, int] = {}
        for key in self.leaders:
            leader = self.leader(key)
            # A merged dim has fewer steps than elements: all grow by the same ratio.
            steps[leader] = math.gcd(steps.get(leader, 0), self.steps(key))
        reached = {
            request: self.key(request.buffer, request.dim) for request in requests
        }
        for request, key in reached.items():
            if key in self.leaders:
                leader = self.leader(key)
                # Even requests count here, or padding would make their dims uneven.
                devices[leader] = math.lcm(devices.get(leader, 1), request.devices)
        # Up to the next multiple that all requests in the group divide.
        grown = {
            leader: Fraction(-(-n // devices[leader]) * devices[leader], n)
            for leader, n in steps.items()
        }
        ratios = {key: grown[self.leader(key)] for key in self.leaders}
        told: dict[DimKey, PadRequest] = {}
        for request in self.uneven:
            key = reached[request]
            if key is not None:
                told.setdefault(self.leader(key), request)
        sizes = {
            request: int(request.size * grown[leader])
            for leader, request in told.items()
        }
        return PaddedRegion(self.operands, self.body, ratios, sizes)


def can_be_padded(buffer: Buffer) -> bool:
    """Whether there are elements to pad with: there is no random key to spare."""
    return not jnp.issubdtype(buffer.dtype, jax.dtypes.extended)
