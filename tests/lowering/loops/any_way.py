"""All ways to make a loop of a block with windows, for property tests to draw from."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jhost.errors import ChunksError, JhostError
from tests import finding, sums
from tests.lowering.on_mesh import exact, on_streams, tp

INS = P("tp"), P(None, "tp"), P(None, "tp"), P("tp")
"""Rows, a product's weights by columns, taps, and a product's weights by rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How a block is compiled, and on how many devices.

    Attributes:
        uneven: how many rows the block does not get.
        queues: the streams that iterations take turns on.
        derived: whether gradients are asked for.
        whole: whether each device gets all rows of the result.
        place: where sums over the chunks stand.
        pieces: the chunks of a device, or None where nobody says it.
        found: whether jhost has to find the streams.
    """

    devices: int
    uneven: int
    queues: int
    derived: bool
    whole: bool
    place: Any
    pieces: int | None
    checkpointed: bool
    found: bool

    @property
    def mark(self) -> dict[str, Any]:
        """The arguments of the block's mark."""
        chunks = self.pieces and self.pieces * self.devices
        return {} if self.found else {"chunks": chunks, "pipeline": "p2p"}

    def check(
        self,
        block: Callable[..., jax.Array],
        gradients: Callable[[Callable[..., jax.Array]], Callable[..., Any]],
        *args: jax.Array,
        refused: tuple[type[JhostError], ...] = (),
    ) -> None:
        """All is exact, unless a mark is refused."""
        refused = (*refused, ChunksError) if self.pieces else refused
        block = jax.checkpoint(block) if self.checkpointed else block

        def cut(x: jax.Array, *weights: jax.Array) -> jax.Array:
            y = block(x[: len(x) - self.uneven], *weights)
            return jnp.pad(y, ((0, -len(y) % self.devices), (0, 0)))

        f = gradients(cut) if self.derived else cut
        outs = INS if self.derived else P() if self.whole else P("tp")
        searched = finding.everywhere() if self.found else contextlib.nullcontext()
        with on_streams(self.queues), sums.standing(self.place), searched:
            try:
                exact(f, *args, **tp(self.devices, INS, outs))
            except refused:
                assert not self.found


ways = st.builds(
    Way,
    devices=st.sampled_from([2, 3, 4]),
    uneven=st.integers(0, 1),
    queues=st.integers(1, 3),
    derived=st.booleans(),
    whole=st.booleans(),
    place=st.sampled_from(["in chunks", "whole", "beside transfers"]),
    pieces=st.sampled_from([None, 1, 2, 3]),
    checkpointed=st.booleans(),
    found=st.booleans(),
)
