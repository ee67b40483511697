"""Feed-forward blocks: columns, then rows, in one loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jhost.nnx._linear import ColumnParallelLinear, RowParallelLinear


class ParallelMLP(nnx.Module):
    """Two linear layers with an activation between, the hidden features sharded.

    Without jhost it is `down(activation(up(x)))` of two `nnx.Linear`, which draw their
    parameters in that order.  It takes and gives floats of shape
    `(..., sequence, features)`, and of the dtype that these give.

    Args:
        features: of what comes and goes.
        hidden_features: between the two.
        activation: of each hidden feature alone, of floats of shape
            `(..., sequence, hidden_features)`.
        mesh_axis: the mesh axis that shards the hidden features.
        sequence_parallel: what comes and goes has its sequence, the last dim but one,
            sharded over that axis; if not, every device has all of it.
        **options: those of both `nnx.Linear`, with `rngs`.

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
    """The gated feed-forward block of Llama, the hidden features sharded.

    Without jhost it is `down(silu(gate(x)) * up(x))` of three `nnx.Linear`, which draw
    their parameters in that order: gate, up, down.  Formula: Shazeer, "GLU Variants
    Improve Transformer", https://arxiv.org/abs/2002.05202, equation 6.  It takes and
    gives floats of shape `(..., sequence, features)`, and of the dtype that these give.

    Args:
        features: of what comes and goes.
        hidden_features: between.
        mesh_axis: the mesh axis that shards the hidden features.
        sequence_parallel: what comes and goes has its sequence, the last dim but one,
            sharded over that axis; if not, every device has all of it.
        use_bias: as for `nnx.Linear`.
        **options: the others of the three `nnx.Linear`, with `rngs`.

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
