"""Linear layers: each device has some of the columns, or some of the rows."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jhost.nnx._dots import ColumnParallelDot, RowParallelDot
from jhost.nnx._params import annotate


class ColumnParallelLinear(nnx.Linear):
    """`flax.nnx.Linear` with its output features sharded over a mesh axis.

    The operand's sequence, its last dim but one, may be sharded over the same axis.  It
    is then gathered in chunks, and the matmul works on each chunk as it comes in.  It
    takes floats of shape `(..., sequence, in_features)`, and returns floats of shape
    `(..., sequence, out_features)` and of the dtype of `nnx.Linear`.

    Args:
        in_features: as for `nnx.Linear`.
        out_features: likewise.
        mesh_axis: the mesh axis that shards columns, unless you give the kernel a
            sharding.
        sequence_parallel: whether the operand's sequence is sharded over that axis.  If
            not, every device has the whole sequence.
        **options: arguments of `nnx.Linear`, with `rngs`.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import jhost.nnx
        >>> layer = jhost.nnx.ColumnParallelLinear(4, 8, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 6, 4))).shape
        (2, 6, 8)
        >>> layer.kernel.out_sharding
        (None, 'tp')
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh_axis: str = "tp",
        sequence_parallel: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        make_column_parallel(self, mesh_axis, sequence_parallel)


class RowParallelLinear(nnx.Linear):
    """`flax.nnx.Linear` with its input features sharded over a mesh axis.

    Each device has one term of each sum.  The devices add up the terms in chunks of the
    sequence, the last dim but one, while the matmul works on other chunks.  It takes
    floats of shape `(..., sequence, in_features)`, and returns floats of shape `(...,
    sequence, out_features)` and of the dtype of `nnx.Linear`.

    Args:
        in_features: as for `nnx.Linear`.
        out_features: likewise.
        mesh_axis: the mesh axis that shards rows, unless you give the kernel a
            sharding.
        sequence_parallel: whether the result's sequence is sharded over that axis.  If
            not, every device has the whole sequence.
        **options: arguments of `nnx.Linear`, with `rngs`.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import jhost.nnx
        >>> layer = jhost.nnx.RowParallelLinear(8, 4, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 6, 8))).shape
        (2, 6, 4)
        >>> layer.kernel.out_sharding
        ('tp', None)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh_axis: str = "tp",
        sequence_parallel: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        make_row_parallel(self, mesh_axis, sequence_parallel)


def make_column_parallel(layer: Any, mesh_axis: str, sequence_parallel: bool) -> None:
    """Shards the output features of an `nnx.Linear` or `nnx.LinearGeneral`."""
    # An `nnx.LinearGeneral` with several output features, such as heads and their size,
    # has the first of them sharded.
    columns = (mesh_axis, *[None] * (layer.kernel.ndim - 2))
    kernel = annotate(layer, kernel=(None, *columns), bias=columns)
    mark_columns(layer, mesh_axis, sequence_parallel, kernel)


def mark_columns(
    layer: Any, mesh_axis: str, sequence_parallel: bool, kernel: P | None = None
) -> None:
    """Marks in the layer's own `dot_general`."""
    # Around the layer's own: it may be the user's, such as one of FP8.
    layer.dot_general = ColumnParallelDot(
        mesh_axis, sequence_parallel, kernel, layer.dot_general or lax.dot_general
    )


def make_row_parallel(layer: Any, mesh_axis: str, sequence_parallel: bool) -> None:
    """Shards the input features of an `nnx.Linear` or `nnx.LinearGeneral`."""
    # The bias stays whole: it is added once, to the sum of all terms.
    rows = (mesh_axis, *[None] * (layer.kernel.ndim - 1))
    layer.dot_general = RowParallelDot(
        mesh_axis,
        sequence_parallel,
        annotate(layer, kernel=rows),
        layer.dot_general or lax.dot_general,
    )
