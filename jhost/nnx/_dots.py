"""Matmuls that say how their operands and their result are sharded, and stream.

Each is a `dot_general` for a flax layer that takes one, `nnx` or `linen`: the layer
stays what it is, and its matmul has the marks of a column- or a row-parallel layer.
Outside a jhost function the marks are the identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jhost._annotate import shard, stream

DotGeneral: TypeAlias = Callable[..., jax.Array]
"""As `jax.lax.dot_general`."""


@dataclasses.dataclass(frozen=True)
class ColumnParallelDot:
    """A matmul that takes whole tokens, and shards the features of its result.

    The last token dim is the sequence of `(batch, sequence, features)`.  If it is
    sharded, it is gathered in chunks, and each chunk is multiplied as it comes in.  It
    takes and returns the same as `lax.dot_general`, of any shapes and dtypes.

    Args:
        mesh_axis: the mesh axis that shards the kernel, along its first dim that is not
            contracted.
        sequence_parallel: whether the operand's last token dim is sharded over this
            axis.  If not, all devices have all tokens, and there is no stream.
        kernel: the sharding of the kernel if other axes shard it, too; None for this
            axis alone.
        dot_general: the function that multiplies.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> from jhost.nnx import ColumnParallelDot
        >>> layer = nnx.Linear(4, 8, dot_general=ColumnParallelDot(), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 6, 4))).shape
        (2, 6, 8)
    """

    mesh_axis: str = "tp"
    sequence_parallel: bool = True
    kernel: P | None = None
    dot_general: DotGeneral = lax.dot_general

    def __call__(
        self, x: jax.Array, kernel: jax.Array, dims: Any, **more: Any
    ) -> jax.Array:
        """Multiplies tokens by a kernel, as `lax.dot_general` does.

        Args:
            x: tokens, say of shape `(batch, sequence, features)`, of any dtype.
            kernel: weights, say of shape `(features, out_features)`, of any dtype.
            dims: as for `lax.dot_general`: the contracted dims of both operands, then
                the batch dims of both.
            **more: other arguments of `lax.dot_general`.

        Returns:
            The product, for the operands above of shape `(batch, sequence,
            out_features)`, of the dtype that `lax.dot_general` gives.
        """
        (contracted, of_kernel), (batch, batch_of_kernel) = dims
        tokens = _rest(x.ndim, (*contracted, *batch))
        if not tokens:
            return self.dot_general(x, kernel, dims, **more)
        column = _rest(kernel.ndim, (*of_kernel, *batch_of_kernel))[0]
        kernel = shard(kernel, self.kernel or _spec(kernel, {column: self.mesh_axis}))
        result = self.dot_general(x, kernel, dims, **more)
        last = len(batch) + len(tokens) - 1
        # Of the result, not of the tokens: these may be whole or sharded, and what the
        # result needs of them is gathered.
        result = shard(
            result, _spec(result, {last + 1: self.mesh_axis}, free=range(last))
        )
        return stream(result, last) if self.sequence_parallel else result


@dataclasses.dataclass(frozen=True)
class RowParallelDot:
    """A matmul whose contracted features are sharded, so its partial sums are reduced.

    It works in chunks of the last token dim: it multiplies the next chunk while the
    sums of a chunk are reduced, to the device that keeps it or to all devices.  It
    takes and returns the same as `lax.dot_general`, of any shapes and dtypes.

    Args:
        mesh_axis: the mesh axis that shards the first contracted dim.
        sequence_parallel: whether the result's last token dim is sharded over this axis
            (by reduce-scatters).  If not, all devices get all tokens (by all-reduces).
        kernel: the sharding of the kernel if other axes shard it, too; None for this
            axis alone.
        dot_general: the function that multiplies.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> from jhost.nnx import RowParallelDot
        >>> layer = nnx.Linear(8, 4, dot_general=RowParallelDot(), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 6, 8))).shape
        (2, 6, 4)
    """

    mesh_axis: str = "tp"
    sequence_parallel: bool = True
    kernel: P | None = None
    dot_general: DotGeneral = lax.dot_general

    def __call__(
        self, x: jax.Array, kernel: jax.Array, dims: Any, **more: Any
    ) -> jax.Array:
        """Multiplies tokens by a kernel, as `lax.dot_general` does.

        Args:
            x: tokens, say of shape `(batch, sequence, features)`, of any dtype.
            kernel: weights, say of shape `(features, out_features)`, of any dtype.
            dims: as for `lax.dot_general`: the contracted dims of both operands, then
                the batch dims of both.
            **more: other arguments of `lax.dot_general`.

        Returns:
            The product, for the operands above of shape `(batch, sequence,
            out_features)`, of the dtype that `lax.dot_general` gives.
        """
        (contracted, of_kernel), (batch, _) = dims
        tokens = _rest(x.ndim, (*contracted, *batch))
        if not tokens:
            return self.dot_general(x, kernel, dims, **more)
        rows = {of_kernel[0]: self.mesh_axis}
        kernel = shard(kernel, self.kernel or _spec(kernel, rows))
        free = [*tokens[:-1], *batch]
        x = shard(x, _spec(x, {contracted[0]: self.mesh_axis}, free=free))
        result = self.dot_general(x, kernel, dims, **more)
        last = len(batch) + len(tokens) - 1
        kept = {last: self.mesh_axis} if self.sequence_parallel else {}
        result = shard(result, _spec(result, kept, free=range(last)))
        return stream(result, last)


def _rest(ndim: int, taken: Sequence[int]) -> list[int]:
    return [dim for dim in range(ndim) if dim not in taken]


def _spec(x: jax.Array, sharded: dict[int, str], free: Sequence[int] = ()) -> P:
    """A spec with those dims sharded, the `free` ones open, and all others whole."""
    entries: list[Any] = [sharded.get(dim) for dim in range(x.ndim)]
    for dim in free:
        entries[dim] = P.UNCONSTRAINED
    return P(*entries)
