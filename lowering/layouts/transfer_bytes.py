"""The cost of moving values: the bytes that each device receives.

Work has a cost in the same unit: the bytes that could move while it is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jhost._jax import itemsize
from jhost.lowering.ir.layout import Layout, Partial, used_axes
from jhost.lowering.ir.statements import Buffer
from jhost.lowering.layouts.hidden_dims import StreamedDim
from jhost.lowering.layouts.reshard import ReshardStep, plan_reshard, step_bytes


class TransferBytes(NamedTuple):
    """Bytes that a device receives; exposed bytes count before those that loops hide.

    Among equal bytes, fewer `communications` are better.
    """

    # A tuple is made and compared much quicker than a dataclass; solving does little
    # else.

    exposed: int = 0
    hidden: int = 0
    communications: int = 0

    def __add__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, other: TransferBytes
    ) -> TransferBytes:
        if not (other.exposed or other.hidden):
            return self  # the most frequent case
        return TransferBytes(
            self.exposed + other.exposed,
            self.hidden + other.hidden,
            self.communications + other.communications,
        )

    def __sub__(self, other: TransferBytes) -> TransferBytes:
        if other is NOTHING:
            return self
        return TransferBytes(
            self.exposed - other.exposed,
            self.hidden - other.hidden,
            self.communications - other.communications,
        )

    def __mul__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, times: int
    ) -> TransferBytes:
        if times == 1:
            return self
        return TransferBytes(
            self.exposed * times, self.hidden * times, self.communications * times
        )

    @property
    def all(self) -> int:
        return self.exposed + self.hidden


NOTHING = TransferBytes()

_FLOPS_PER_BYTE = 2048
"""The operations that a device does while it receives a byte.

An H100 does about 700 TFLOP/s in bfloat16, and receives 350 GB/s from its neighbours.
"""

FLOPS_PER_TOUCHED_BYTE = 208
"""The operations that it does while it reads or writes a byte of its memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutCost:
    """The bytes that move, and the work of each device."""

    moved: TransferBytes = NOTHING
    flops: int = 0

    @property
    def in_bytes(self) -> TransferBytes:
        """The bytes that move, plus the bytes that could move during the work."""
        # Work is never hidden, so its bytes count with the exposed ones.
        exposed = self.moved.exposed + self.flops // _FLOPS_PER_BYTE
        return TransferBytes(exposed, self.moved.hidden, self.moved.communications)

    def beats(self, other: LayoutCost) -> bool:
        """Whether it costs less.

        Less work may pay for more exposed bytes, but then hidden bytes count as well.
        """
        mine, others = self.in_bytes, other.in_bytes
        pays = self.moved < other.moved or mine.all < others.all
        return pays and mine < others


AS_IT_LIES = ("*",)
"""Asks for no layout of a dim: it may be sharded over any axes that are left."""


class ReshardCosts:
    """The costs of resharding the values of one program, which have global shapes.

    Values in `made_anywhere`, such as fills, do not move, because they are made again.
    A value of a body moves as often as the body `repeats`.
    """

    def __init__(
        self,
        buffers: Mapping[str, Buffer],
        mesh: Mapping[str, int],
        streamed: Mapping[str, StreamedDim],
        made_anywhere: Collection[str] = (),
        repeats: Mapping[str, int] | None = None,
    ) -> None:
        self.buffers = buffers
        self.mesh = mesh
        self.streamed = streamed
        self.made_anywhere = made_anywhere
        self.repeats = repeats or {}
        self.known: dict[tuple[str, Layout, Layout, Partial], TransferBytes] = {}
        self.of_kinds: dict[Hashable, TransferBytes] = {}

    def reshard(
        self, name: str, have: Layout, want: Layout, partial: Partial = ()
    ) -> TransferBytes:
        """The cost of bringing a value from one layout to another."""
        if AS_IT_LIES in want:
            want = _where_it_lies(have, want)
        # A partial sum in the wanted layout still has to be reduced.
        if (have == want or name in self.made_anywhere) and not partial:
            return NOTHING
        key = name, have, want, partial
        if key not in self.known:
            self.known[key] = self.count(name, have, want, partial)
        return self.known[key]

    def nearest(self, name: str, places: Sequence[Layout], want: Layout) -> Layout:
        """The layout among `places` from which it is cheapest to reach `want`.

        The first of equals.  Chunks of a streamed value come from where it rests,
        because the loop would have to keep any other copy whole.
        """
        if name in self.streamed or len(places) == 1:
            return places[0]
        return min(places, key=lambda have: self.reshard(name, have, want))

    def moves(self, name: str, rest: Layout, wanted: Sequence[Layout]) -> TransferBytes:
        """The cost of bringing a value to several layouts, one after another."""
        places, moved = [rest], NOTHING
        for want in wanted:
            have = self.nearest(name, places, want)
            moved += self.reshard(name, have, want)
            places.append(want)
        return moved

    def count(
        self, name: str, have: Layout, want: Layout, partial: Partial
    ) -> TransferBytes:
        buffer, streamed = self.buffers[name], self.streamed.get(name)
        size, times = itemsize(buffer.dtype), self.times(name)
        # Layers have many values alike, and so does an optimizer.
        kind = buffer.shape, size, streamed, times, have, want, partial
        if kind not in self.of_kinds:
            steps = plan_reshard(have, want, partial, self.mesh)
            moved = moved_by(steps, have, buffer, self.mesh, streamed)
            self.of_kinds[kind] = moved * times
        return self.of_kinds[kind]

    def times(self, name: str) -> int:
        """How often the program of a value runs."""
        return self.repeats.get(name, 1)


def _where_it_lies(have: Layout, want: Layout) -> Layout:
    taken = used_axes(want)
    left = [tuple(axis for axis in axes if axis not in taken) for axes in have]
    pairs = zip(left, want, strict=True)
    return tuple(here if axes == AS_IT_LIES else axes for here, axes in pairs)


def moved_by(
    steps: Iterable[ReshardStep],
    have: Layout,
    buffer: Buffer,
    mesh: Mapping[str, int],
    streamed: StreamedDim | None,
) -> TransferBytes:
    """The bytes that `steps` move of `buffer`, from layout `have` on."""
    moved = NOTHING
    for step in steps:
        # Each step begins where the one before it has left the value.
        size = step_bytes(step, have, buffer.shape, itemsize(buffer.dtype), mesh)
        hidden = streamed is not None and streamed.hides(step)
        moved += TransferBytes(0, size, 1) if hidden else TransferBytes(size, 0, 1)
        have = step.layout
    return moved
