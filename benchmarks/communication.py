"""How the cases communicate: the same layer functions, under different hands.

A layer function says what it computes from gathered rows, which products are summed
over the devices, and what goes to experts; one of these classes says how.  `Whole` sees
global arrays, the others one device's part inside `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from benchmarks import stages
from benchmarks.kernels import kernels
from benchmarks.ring_attention import gathered, ring

AXIS = "tp"
"""The mesh axis of every benchmark."""

Rows = Callable[[jax.Array], jax.Array]


class Communication(Protocol):
    """What layer functions ask for."""

    def gather(self, x: jax.Array, rows: Rows, *, ends: bool = False) -> jax.Array:
        """`rows` of x with the rows of all devices; `ends`: what follows mixes rows."""
        ...

    def scatter(self, h: jax.Array, w: jax.Array) -> jax.Array:
        """h @ w, summed over the devices, each of which keeps its rows."""
        ...

    def reduce(self, h: jax.Array, w: jax.Array) -> jax.Array:
        """h @ w, summed over the devices, for all of them."""
        ...


class Exchanging(Communication, Protocol):
    """What cases of experts and of long sequences need besides."""

    def exchange(self, x: jax.Array, work: Rows) -> jax.Array:
        """`work` of x, whose dim 0 is sharded, where dim 1 is; and back from there."""
        ...

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, attention: str
    ) -> jax.Array:
        """Causal attention, `[rows, heads, size]`, to the rows of all devices."""
        ...

    def stages(
        self, work: stages.Work, weights: Any, xs: jax.Array, delay: bool
    ) -> jax.Array:
        """What comes of microbatches that go through the stages of a pipeline."""
        ...


class Whole:
    """Global arrays: whoever partitions the program also communicates."""

    def gather(self, x: jax.Array, rows: Rows, *, ends: bool = False) -> jax.Array:
        return rows(x)

    def scatter(self, h: jax.Array, w: jax.Array) -> jax.Array:
        return h @ w

    def reduce(self, h: jax.Array, w: jax.Array) -> jax.Array:
        return h @ w

    def exchange(self, x: jax.Array, work: Rows) -> jax.Array:
        return work(x)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, attention: str
    ) -> jax.Array:
        return _attention(q, k, v, attention, causal=True)

    def stages(
        self, work: stages.Work, weights: Any, xs: jax.Array, delay: bool
    ) -> jax.Array:
        return stages.rolled(work, weights, xs, delay, self.placed)

    def placed(self, x: jax.Array, dim: int) -> jax.Array:
        return x


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, attention: str, causal: bool
) -> jax.Array:
    chosen: Any = attention or "xla"
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, implementation=chosen
    )


class Unmarked(Whole):
    """Global arrays with constraints where a layer has any, and no mark."""

    def placed(self, x: jax.Array, dim: int) -> jax.Array:
        return jhost.shard(x, P(*(None,) * dim, AXIS))


class Streamed(Unmarked):
    """The same with jhost's marks: rows may be worked on in chunks."""

    def gather(self, x: jax.Array, rows: Rows, *, ends: bool = False) -> jax.Array:
        return jhost.stream(rows(x), axis=0) if ends else rows(x)

    def scatter(self, h: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(h @ w, axis=0)

    def reduce(self, h: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(h @ w, axis=0)

    def exchange(self, x: jax.Array, work: Rows) -> jax.Array:
        return jhost.stream(work(x), axis=0)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, attention: str
    ) -> jax.Array:
        return super().attend(q, jhost.stream(k, axis=0), v, attention)


class Collectives:
    """One collective, one matmul: what everybody writes first."""

    def gather(self, x: jax.Array, rows: Rows, *, ends: bool = False) -> jax.Array:
        return rows(lax.all_gather(x, AXIS, tiled=True))

    def scatter(self, h: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum_scatter(h @ w, AXIS, tiled=True)

    def reduce(self, h: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum(h @ w, AXIS)

    def exchange(self, x: jax.Array, work: Rows) -> jax.Array:
        there = lax.all_to_all(x, AXIS, split_axis=1, concat_axis=0, tiled=True)
        back = work(there)
        return lax.all_to_all(back, AXIS, split_axis=0, concat_axis=1, tiled=True)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, attention: str
    ) -> jax.Array:
        return gathered(kernels(attention), AXIS)(q, k, v)

    def stages(
        self, work: stages.Work, weights: Any, xs: jax.Array, delay: bool
    ) -> jax.Array:
        return stages.by_hand(work, weights, xs, delay, AXIS)


@dataclasses.dataclass(frozen=True)
class Around(Collectives):
    """Keys and values go around a ring, in order of position or in zigzag order."""

    zigzag: bool

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, attention: str
    ) -> jax.Array:
        return ring(kernels(attention), AXIS, self.zigzag)(q, k, v)


class Ring:
    """Chunks handed round a ring by `ppermute` in an unrolled loop.

    The idea of the collective matmuls in JAX's documentation of `shard_map`.
    """

    def gather(self, x: jax.Array, rows: Rows, *, ends: bool = False) -> jax.Array:
        size, rank, count = lax.axis_size(AXIS), lax.axis_index(AXIS), x.shape[0]
        result = None
        for step in range(size):
            part = rows(x)
            if result is None:
                result = jnp.zeros((size * count, *part.shape[1:]), part.dtype)
            start = (rank + step) % size * count
            result = lax.dynamic_update_slice_in_dim(result, part, start, 0)
            if step < size - 1:
                x = _rotate(x, -1)
        assert result is not None
        return result

    def scatter(self, h: jax.Array, w: jax.Array) -> jax.Array:
        size, rank = lax.axis_size(AXIS), lax.axis_index(AXIS)
        count = h.shape[0] // size
        total = None
        for step in range(size):
            start = (rank - 1 - step) % size * count
            part = lax.dynamic_slice_in_dim(h, start, count, 0) @ w
            total = part if total is None else _rotate(total, 1) + part
        assert total is not None
        return total

    def reduce(self, h: jax.Array, w: jax.Array) -> jax.Array:
        return lax.all_gather(self.scatter(h, w), AXIS, tiled=True)

    def exchange(self, x: jax.Array, work: Rows) -> jax.Array:
        raise NotImplementedError("the documentation has no all-to-all")

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, attention: str
    ) -> jax.Array:
        raise NotImplementedError("the documentation has no attention")

    def stages(
        self, work: stages.Work, weights: Any, xs: jax.Array, delay: bool
    ) -> jax.Array:
        raise NotImplementedError("the documentation has no pipeline of stages")


def _rotate(x: jax.Array, shift: int) -> jax.Array:
    size = lax.axis_size(AXIS)
    return lax.ppermute(
        x, AXIS, [(device, (device + shift) % size) for device in range(size)]
    )


@dataclasses.dataclass(frozen=True)
class InPlace:
    """No communication: what comes is in place, sums stay partial.

    `keep_rows` keeps a device's own rows of a product, for what is computed next.
    """

    placed: jax.Array | None
    keep_rows: bool

    def gather(self, x: jax.Array, rows: Rows, *, ends: bool = False) -> jax.Array:
        assert self.placed is not None
        # Tied to x, so that nothing below starts before x is there.
        placed, _ = lax.optimization_barrier((self.placed, x))
        return rows(placed)

    def exchange(self, x: jax.Array, work: Rows) -> jax.Array:
        return self.gather(x, work)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, attention: str
    ) -> jax.Array:
        """As much as each device has to do where all have as much.

        Its own keys for all queries, and those of the others for half of them: the same
        array stands for keys and values of others.
        """
        assert self.placed is not None
        half = len(q) // 2
        own = _attention(q, k, v, attention, causal=True)
        others = self.placed, self.placed
        late = _attention(q[half:], *others, attention, causal=False)
        return own + jnp.pad(late, ((half, 0), (0, 0), (0, 0)))

    def stages(
        self, work: stages.Work, weights: Any, xs: jax.Array, delay: bool
    ) -> jax.Array:
        return stages.alone(work, weights, xs, delay, AXIS)

    def scatter(self, h: jax.Array, w: jax.Array) -> jax.Array:
        product = h @ w
        if not self.keep_rows:
            return product
        # Behind a barrier, so that the product is computed whole.
        count = product.shape[0] // lax.axis_size(AXIS)
        return lax.slice_in_dim(lax.optimization_barrier(product), 0, count)

    def reduce(self, h: jax.Array, w: jax.Array) -> jax.Array:
        return h @ w


@dataclasses.dataclass
class Recorder:
    """Global arrays; notes the whole array that each communication moves."""

    moved: list[tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=list)

    def gather(self, x: jax.Array, rows: Rows, *, ends: bool = False) -> jax.Array:
        self.moved.append(("gather", x.shape))
        return rows(x)

    def scatter(self, h: jax.Array, w: jax.Array) -> jax.Array:
        product = h @ w
        self.moved.append(("scatter", product.shape))
        return product

    def reduce(self, h: jax.Array, w: jax.Array) -> jax.Array:
        product = h @ w
        self.moved.append(("reduce", product.shape))
        return product

    def exchange(self, x: jax.Array, work: Rows) -> jax.Array:
        self.moved.append(("exchange", x.shape))
        back = work(x)
        self.moved.append(("exchange", back.shape))
        return back

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, attention: str
    ) -> jax.Array:
        self.moved += [("gather", k.shape), ("gather", v.shape)]
        return q

    def stages(
        self, work: stages.Work, weights: Any, xs: jax.Array, delay: bool
    ) -> jax.Array:
        count = jax.tree.leaves(weights)[0].shape[0]
        ticks = stages.ticks_of(len(xs), count, delay)
        self.moved += [("send", xs.shape[1:])] * ticks
        self.moved.append(("scatter", xs.shape))
        return xs
