"""Feed-forward blocks: columns, then rows, in one loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jhost.nnx._linear import ColumnParallelLinear, RowParallelLinear


class ParallelMLP(nnx.Module):
    """Two linear layers with an activation between, and sharded hidden features.

    Without jhost it is `down(activation(up(x)))` with two `nnx.Linear`.  It draws the
    parameters of `up` first, then those of `down`.  It takes and returns floats of
    shape `(..., sequence, features)`, in the dtype of `nnx.Linear`.

    Args:
        features: the features of operand and result.
        hidden_features: the features between the two layers.
        activation: an elementwise function of floats of shape `(..., sequence,
            hidden_features)`.
        mesh_axis: the mesh axis that shards the hidden features.
        sequence_parallel: whether the sequence, the last dim but one, is sharded over
            that axis in operand and result.  If not, every device has the whole
            sequence.
        **options: arguments of both `nnx.Linear`, with `rngs`.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import jhost.nnx
        >>> mlp = jhost.nnx.ParallelMLP(4, 16, rngs=nnx.Rngs(0))
        >>> mlp(jnp.ones((2, 6, 4))).shape
        (2, 6, 4)
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
        mesh_axis: str = "tp",
        sequence_parallel: bool = True,
        **options: Any,
    ) -> None:
        options |= {"mesh_axis": mesh_axis, "sequence_parallel": sequence_parallel}
        # Columns and then rows: the hidden features never move.  In this order, because
        # `rngs` counts what it draws.
        self.up = ColumnParallelLinear(features, hidden_features, **options)
        self.down = RowParallelLinear(hidden_features, features, **options)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Runs the block.

        Args:
            x: floats of shape `(..., sequence, features)`.

        Returns:
            Floats of the same shape, of the dtype that `nnx.Linear` gives.
        """
        return self.down(self.activation(self.up(x)))


class ParallelSwiGLU(nnx.Module):
    """The gated feed-forward block of Llama, with sharded hidden features.

    Without jhost it is `down(silu(gate(x)) * up(x))` with three `nnx.Linear`.  It draws
    the parameters of `gate` first, then those of `up`, then those of `down`.  Formula:
    Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202,
    equation 6.  It takes and returns floats of shape `(..., sequence, features)`, in
    the dtype of `nnx.Linear`.

    Args:
        features: the features of operand and result.
        hidden_features: the hidden features.
        mesh_axis: the mesh axis that shards the hidden features.
        sequence_parallel: whether the sequence, the last dim but one, is sharded over
            that axis in operand and result.  If not, every device has the whole
            sequence.
        use_bias: as for `nnx.Linear`.
        **options: other arguments of the three `nnx.Linear`, with `rngs`.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import jhost.nnx
        >>> mlp = jhost.nnx.ParallelSwiGLU(4, 16, rngs=nnx.Rngs(0))
        >>> mlp(jnp.ones((2, 6, 4))).shape
        (2, 6, 4)
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        mesh_axis: str = "tp",
        sequence_parallel: bool = True,
        use_bias: bool = False,
        **options: Any,
    ) -> None:
        options |= {"mesh_axis": mesh_axis, "sequence_parallel": sequence_parallel}
        options |= {"use_bias": use_bias}
        # Two weights, not one that is twice as wide: of that one a device would have
        # columns of `gate` or of `up`, and not the matching ones of both.
        self.gate = ColumnParallelLinear(features, hidden_features, **options)
        self.up = ColumnParallelLinear(features, hidden_features, **options)
        self.down = RowParallelLinear(hidden_features, features, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Runs the block.

        Args:
            x: floats of shape `(..., sequence, features)`.

        Returns:
            Floats of the same shape, of the dtype that `nnx.Linear` gives.
        """
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
