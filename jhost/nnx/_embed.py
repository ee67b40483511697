"""An embedding and logits: each device has a part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jhost._annotate import serial, shard
from jhost.nnx._dots import ColumnParallelDot
from jhost.nnx._params import annotated, partition_spec


class ParallelEmbed(nnx.Embed):
    """`flax.nnx.Embed` with its features sharded over a mesh axis.

    Each device looks up its features of all tokens.  `attend` gives logits with the
    vocabulary sharded, like a `ColumnParallelLinear`.  It takes integers of shape
    `(..., sequence)`, and returns floats of shape `(..., sequence, features)` and of
    the dtype of `nnx.Embed`.

    Args:
        num_embeddings: as for `nnx.Embed`.
        features: as for `nnx.Embed`.
        mesh_axis: the mesh axis that shards features, and in `attend` the vocabulary.
        sequence_parallel: whether the result's sequence, the last dim of the tokens, is
            sharded over that axis.  If not, every device has the whole sequence.
        **options: arguments of `nnx.Embed`, with `rngs`.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import jhost.nnx
        >>> embed = jhost.nnx.ParallelEmbed(10, 4, rngs=nnx.Rngs(0))
        >>> x = embed(jnp.zeros((2, 6), int))
        >>> x.shape, embed.attend(x).shape
        ((2, 6, 4), (2, 6, 10))
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        mesh_axis: str = "tp",
        sequence_parallel: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, features, **options)
        self.embedding = annotated(self.embedding, (None, mesh_axis))
        spec = partition_spec(self.embedding)
        self.promote_dtype = ShardedTable(spec, self.promote_dtype)
        self.mesh_axis = mesh_axis
        self.sequence_parallel = sequence_parallel

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the embeddings of tokens.

        Args:
            inputs: integers of shape `(..., sequence)`.
            out_sharding: as for `nnx.Embed`.

        Returns:
            Floats of shape `(..., sequence, features)`, of `dtype` if it is given, and
            otherwise of the dtype of the table.
        """
        x = super().__call__(inputs, out_sharding)
        axis = self.mesh_axis if self.sequence_parallel else None
        free = [P.UNCONSTRAINED] * (x.ndim - 2)
        # The lookup is one step of its own: there is nothing to work on meanwhile.
        return serial(shard(x, P(*free, axis, None)))

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the logits of each token.

        Args:
            query: floats of shape `(..., sequence, features)`.
            out_sharding: as for `nnx.Embed`.

        Returns:
            Floats of shape `(..., sequence, num_embeddings)`, of `dtype` if it is
            given, and otherwise of the promoted dtype of `query` and the table.
        """
        query, embedding = self.promote_dtype(
            (query, self.embedding[...]), dtype=self.dtype
        )
        dims = ((query.ndim - 1,), (1,)), ((), ())
        # The table serves as the kernel, contracted along its features.
        dot = ColumnParallelDot(self.mesh_axis, self.sequence_parallel)
        return dot(query, embedding, dims, out_sharding=out_sharding)


@dataclasses.dataclass(frozen=True)
class ShardedTable:
    """An embedding's promotion of dtypes that also says how the table is sharded."""

    spec: P
    promote_dtype: Callable[..., Any]

    def __call__(self, arrays: Sequence[Any], **more: Any) -> tuple[Any, ...]:
        """The values that are promoted, the table last."""
        *others, table = self.promote_dtype(arrays, **more)
        return (*others, shard(table, self.spec))
