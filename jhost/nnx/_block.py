"""A transformer block: two pipelined loops around attention."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jhost._annotate import shard
from jhost.nnx._attention import ParallelAttention
from jhost.nnx._mlp import ParallelSwiGLU


class TransformerBlock(nnx.Module):
    """The block of Llama: causal attention and a gated MLP, each after a norm.

    Between attention and MLP, and between blocks, each device has a part of the
    sequence.  Under `jhost.jit` one loop gathers the sequence for queries, keys and
    values.  After attention another loop projects, reduces, adds, normalizes, gathers
    for the MLP and reduces again.  It takes and returns floats of shape `(...,
    sequence, features)`.  The result has the promoted dtype of the operand and `dtype`,
    or of the operand and the parameters if `dtype` is None.

    Args:
        features: the features of operand and result.
        num_heads: the number of heads, a multiple of the size of the mesh axis.
        hidden_features: the hidden features of the MLP.
        num_kv_heads: the number of heads of keys and values; None for `num_heads`.
        rope_theta: as for `ParallelAttention`.
        attention: other options of `ParallelAttention`.
        epsilon: the number that the norms add to the mean square.
        mesh_axis: the mesh axis that shards heads, hidden features and the sequence.
        sequence_parallel: whether the sequence is sharded.
        rngs: as everywhere in flax.
        **options: `dtype` and `param_dtype` of norms, attention and MLP.

    Raises:
        DivisibilityError: the mesh axis does not divide the heads.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import jhost.nnx
        >>> block = jhost.nnx.TransformerBlock(8, 4, 16, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((2, 6, 8))).shape
        (2, 6, 8)
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        hidden_features: int,
        *,
        num_kv_heads: int | None = None,
        rope_theta: float | None = None,
        attention: dict[str, Any] | None = None,
        epsilon: float = 1e-5,
        mesh_axis: str = "tp",
        sequence_parallel: bool = True,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        options |= {"rngs": rngs}
        spread: Any = {"mesh_axis": mesh_axis, "sequence_parallel": sequence_parallel}
        self.attention_norm = nnx.RMSNorm(features, epsilon=epsilon, **options)
        self.attention = ParallelAttention(
            num_heads,
            features,
            num_kv_heads=num_kv_heads,
            rope_theta=rope_theta,
            # As Llama has none; `attention=` may ask for them.
            **{"use_bias": False, **options, **(attention or {})},
            **spread,
        )
        self.mlp_norm = nnx.RMSNorm(features, epsilon=epsilon, **options)
        self.mlp = ParallelSwiGLU(features, hidden_features, **options, **spread)
        self.mesh_axis = mesh_axis
        self.sequence_parallel = sequence_parallel

    def __call__(self, x: jax.Array) -> jax.Array:
        """Runs the block.

        Args:
            x: floats of shape `(..., sequence, features)`.

        Returns:
            Floats of the same shape, of the promoted dtype of `x` and `dtype`, or of
            `x` and the parameters if `dtype` is None.
        """
        if self.sequence_parallel:
            # The sum goes on sharded, so each device normalizes its part.  Batch dims
            # lie as the program around has them.
            free = [P.UNCONSTRAINED] * (x.ndim - 2)
            x = shard(x, P(*free, self.mesh_axis, None))
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.mlp(self.mlp_norm(x))
