"""Attention of which each device has some heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jhost import errors
from jhost._annotate import serial, shard
from jhost.nnx._linear import make_column_parallel, make_row_parallel, mark_columns
from jhost.nnx._params import axis_size, check_divides


class ParallelAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with its heads sharded over a mesh axis.

    The projections are pipelined: the sequence is gathered in chunks for queries, keys
    and values, and the sums of the result are reduced in chunks.  Attention itself
    works on whole sequences.  Each device has its own heads.

    If the mesh axis does not divide the key and value heads, every device has all
    kernels of keys and values, and computes the heads that its query heads use.  The
    mesh is the mesh of `jax.set_mesh` when the layer is made.

    It takes floats of shape `(..., sequence, in_features)`, and optionally a mask of
    shape `(..., heads, queries, keys)`, where heads may be 1.  It returns floats of
    shape `(..., sequence, out_features)` and of the dtype of flax's layer.

    Args:
        num_heads: as for `nnx.MultiHeadAttention`; a multiple of the size of the mesh
            axis.
        in_features: as for `nnx.MultiHeadAttention`.
        mesh_axis: the mesh axis that shards the heads.
        sequence_parallel: whether the sequence, the last dim but one, is sharded over
            that axis in operand and result.  If not, every device has the whole
            sequence.
        rope_theta: the base frequency with which flax's `RoPE` rotates queries and keys
            by their positions (from flax 0.12.9); None rotates nothing.
        decode: as for `nnx.MultiHeadAttention`.
        **options: other arguments of `nnx.MultiHeadAttention`, with `rngs`.

    Raises:
        DivisibilityError: the mesh axis does not divide the heads.
        OptionError: `rope_theta` with an `attention_fn`, or with an older flax.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import jhost.nnx
        >>> layer = jhost.nnx.ParallelAttention(4, 8, num_kv_heads=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 6, 8)), is_causal=True).shape
        (2, 6, 8)
        >>> layer.query.kernel.out_sharding
        (None, 'tp', None)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        mesh_axis: str = "tp",
        sequence_parallel: bool = True,
        rope_theta: float | None = None,
        decode: bool = False,
        **options: Any,
    ) -> None:
        check_divides("The number of attention heads", num_heads, mesh_axis)
        if rope_theta is not None:
            _check_rotates(rope_theta, options)
            options |= {"attention_fn": RotatedAttention(rope_theta)}
        super().__init__(num_heads, in_features, decode=decode, **options)
        self.attention_fn = WholeSequences(self.attention_fn)
        make_column_parallel(self.query, mesh_axis, sequence_parallel)
        copies = _copies(self.num_kv_heads, axis_size(mesh_axis))
        for layer in (self.key, self.value):
            if copies > 1:
                _copy_heads(layer, copies)
                mark_columns(layer, mesh_axis, sequence_parallel)
            else:
                make_column_parallel(layer, mesh_axis, sequence_parallel)
        make_row_parallel(self.out, mesh_axis, sequence_parallel)


@dataclasses.dataclass(frozen=True)
class RotatedAttention:
    """flax's attention with rotary positions; equal to others of that frequency.

    So that all layers of a model are alike, and one program does for them.
    """

    theta: float

    def __call__(self, *args: Any, **more: Any) -> jax.Array:
        """As `nnx.dot_product_attention`."""
        rope: Any = nnx.RoPE(self.theta)
        return nnx.dot_product_attention_with_rope(*args, rope=rope, **more)


@dataclasses.dataclass(frozen=True)
class WholeSequences:
    """Attention that no stream goes through: a query needs the keys of all chunks."""

    attend: Callable[..., jax.Array]

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **more: Any
    ) -> jax.Array:
        """As `nnx.dot_product_attention`."""
        return serial(self.attend(serial(query), serial(key), serial(value), **more))


@dataclasses.dataclass(frozen=True)
class CopiedHeads:
    """A layer's promotion of dtypes that also copies each head of its parameters."""

    copies: int
    promote_dtype: Callable[..., Any]

    def __call__(self, arrays: Sequence[Any], **more: Any) -> tuple[Any, ...]:
        """Takes tokens, a kernel `(features, heads, head)` and a bias or None."""
        # flax calls this before it multiplies.  So heads are copied in the program, and
        # parameters stay as flax made them.
        inputs, kernel, bias = self.promote_dtype(arrays, **more)
        return inputs, self.copied(kernel), None if bias is None else self.copied(bias)

    def copied(self, x: jax.Array) -> jax.Array:
        """The heads of a parameter that is on every device."""
        return jnp.repeat(shard(x, P()), self.copies, axis=-2)


def _copies(heads: int, size: int) -> int:
    """How often each head is there, so that `size` devices have as many each."""
    return math.lcm(heads, size) // heads


def _copy_heads(layer: Any, copies: int) -> None:
    heads, head = layer.out_features
    layer.promote_dtype = CopiedHeads(copies, layer.promote_dtype)
    layer.out_features = (heads * copies, head)  # what the bias is shaped by


def _check_rotates(theta: float, options: dict[str, Any]) -> None:
    if "attention_fn" in options:
        raise errors.OptionError(
            "jhost.nnx.ParallelAttention got both rope_theta and attention_fn. Leave "
            "rope_theta out, and have attention_fn rotate queries and keys."
        )
    if not hasattr(nnx, "RoPE"):
        raise errors.OptionError(
            f"jhost.nnx.ParallelAttention got rope_theta={theta}, but flax "
            f"{flax.__version__} has no nnx.RoPE. Install flax>=0.12.9 (which needs "
            "Python 3.12 and JAX 0.11.1), or give an attention_fn that rotates."
        )
