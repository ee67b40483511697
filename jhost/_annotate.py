"""What a user writes on values: streams, places without streams, shardings.

Each function checks its arguments where it is called, and leaves a marker in the
jaxpr.  Outside a jhost function markers are the identity.
"""

from __future__ import annotations

import operator
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jhost import errors
from jhost._primitives import DimSpec, Spec, serial_p, shard_p, stream_p

Chunks: TypeAlias = int | Literal["auto"] | None
Pipeline: TypeAlias = Literal["p2p", "collective", "auto", "off"]
Streams: TypeAlias = Literal["auto", "marked"]


def stream(
    x: ArrayLike,
    axis: int,
    *,
    chunks: Chunks = None,
    pipeline: Pipeline | None = None,
) -> jax.Array:
    """Marks a dim of a value along which jhost may work in chunks.

    The value is unchanged.  The stream spreads from the value to its operands and its
    readers, as far as jhost can follow the dim.  Communication of one chunk then
    overlaps with computation of another.  Outside a jhost function this is the
    identity.

    Args:
        x: an array of any dtype, and of any shape with at least one dim.
        axis: the dim; negative ones count from the last.
        chunks: how many chunks, or `"auto"` for jhost's own choice.  None takes
            `chunks` of the jhost function that contains the mark.  A count that is not
            possible raises an error when the function is compiled.  All chunks but the
            last have one size, so there can be fewer chunks than asked; a
            `jhost.errors.StreamWarning` says so.
        pipeline: `"collective"` communicates a slice of every device's shard at a time.
            `"p2p"` sends each device's chunk to the device that works on it, or the
            result of a chunk to its owner.  `"off"` makes no loop.  `"auto"` chooses by
            predicted time.  None takes `pipeline` of the jhost function that contains
            the mark.

    Returns:
        `x`, as a `jax.Array` of the same shape and dtype.

    Raises:
        DimError: if `x` has no dim `axis`.
        ChunksError: if `chunks` is below 1, or above the size of the dim.
        OptionError: if `pipeline` is none of the four.
        ArgumentError: if an argument has another type.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> jhost.stream(jnp.ones((8, 2)), axis=0, chunks=4).shape
        (8, 2)
    """
    array = _as_array("stream", x)
    dim = _check_axis(axis, array.shape)
    count = _check_chunks(chunks, dim, array.shape)
    _check_pipeline(pipeline)
    return stream_p.bind(array, axis=dim, chunks=count, pipeline=pipeline)


def serial(x: ArrayLike) -> jax.Array:
    """Keeps streams from spreading through a value.

    The value is unchanged.  Outside a jhost function this is the identity.

    Args:
        x: an array of any shape and dtype.

    Returns:
        `x`, as a `jax.Array` of the same shape and dtype.

    Raises:
        ArgumentError: if `x` is not an array.

    Example:
        >>> import jhost
        >>> float(jhost.serial(2.0))
        2.0
    """
    return serial_p.bind(_as_array("serial", x))


def shard(x: ArrayLike, spec: PartitionSpec | NamedSharding | None) -> jax.Array:
    """Shards a value over the mesh of the jhost function that contains it.

    The value is unchanged.  Inside a jhost function it means the same as
    `jax.lax.with_sharding_constraint`.  Outside it is the identity.

    Args:
        x: an array of any shape and dtype.
        spec: an entry for each dim, as in `jax.jit`: the mesh axes that shard it, or
            None for a whole dim, or `P.UNCONSTRAINED` if jhost may choose.  Dims beyond
            the last entry are whole.  A `NamedSharding` stands for its spec.  None
            constrains no dim.

    Returns:
        `x`, as a `jax.Array` of the same shape and dtype.

    Raises:
        SpecRankError: if the spec has more entries than `x` has dims.
        DuplicateAxisError: if the spec uses a mesh axis twice.
        OptionError: if the spec asks for an unreduced value.
        ArgumentError: if an argument has another type.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> from jax.sharding import PartitionSpec as P
        >>> jhost.shard(jnp.ones((8, 2)), P("tp")).shape
        (8, 2)
    """
    array = _as_array("shard", x)
    if spec is None:
        return array
    return shard_p.bind(array, spec=_canonical_spec(spec, array.shape))


def _as_array(function: str, x: Any) -> jax.Array:
    # A tracer is one, too.
    if isinstance(x, jax.Array):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise errors.ArgumentError(
            f"jhost.{function} takes one array, but x is a {type(x).__name__}. For a "
            f"tree of arrays, use jax.tree.map(lambda x: jhost.{function}(x, ...), "
            "tree) on the leaves that need it."
        ) from error


def _check_axis(axis: Any, shape: tuple[int, ...]) -> int:
    """The dim that `axis` means, not negative."""
    # An integer of NumPy will do, too.  A tuple of dims is refused here.
    dim = as_int(axis)
    if dim is None:
        raise errors.ArgumentError(
            f"jhost.stream takes one int as axis, but got {axis!r}. A value can be "
            "streamed along one dim only."
        )
    if not -len(shape) <= dim < len(shape):
        raise errors.DimError(
            f"jhost.stream: axis {dim} is out of bounds for array of dimension "
            f"{len(shape)}. x has shape {shape}"
            + (f"; use {-len(shape)} <= axis < {len(shape)}." if shape else ".")
        )
    return dim % len(shape)


def as_int(value: Any) -> int | None:
    """Any integer but a bool, which is one by accident."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _check_chunks(chunks: Any, dim: int, shape: tuple[int, ...]) -> Chunks:
    if chunks is None or chunks == "auto":
        return chunks
    count = as_int(chunks)
    if count is None:
        raise errors.ArgumentError(
            f"jhost.stream takes an int, 'auto' or None as chunks, but got {chunks!r}."
        )
    if count < 1:
        raise errors.ChunksError(
            f"jhost.stream got chunks={chunks}, but needs at least 1. To turn the "
            "stream off, use pipeline='off'."
        )
    # A dim without elements has one chunk, and that is empty.
    if count > max(shape[dim], 1):
        raise errors.ChunksError(
            f"jhost.stream got chunks={chunks} for axis={dim} of x, whose shape is "
            f"{shape}: {chunks} chunks of at least 1 do not fit into {shape[dim]}. Use "
            f"at most {max(shape[dim], 1)} chunks, or 'auto'."
        )
    return count


def _check_pipeline(pipeline: Any) -> None:
    choices = get_args(Pipeline)
    if pipeline is not None and pipeline not in choices:
        raise errors.OptionError(
            f"jhost.stream got pipeline={pipeline!r}, but takes one of "
            f"{', '.join(map(repr, choices))} or None."
        )


def _canonical_spec(spec: Any, shape: tuple[int, ...]) -> Spec:
    """An entry for each dim of `shape`, each a tuple of mesh axes or None."""
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    if not isinstance(spec, PartitionSpec):
        raise errors.ArgumentError(
            "jhost.shard takes a jax.sharding.PartitionSpec, a NamedSharding or None "
            f"as spec, but got {spec!r}. Write P('tp', None)."
        )
    # JAX spells partial sums there, for explicit meshes.
    if spec.unreduced or spec.reduced:
        raise errors.OptionError(
            f"jhost.shard got spec={spec}, but a spec cannot ask for an unreduced "
            "value: jhost reduces where it sees fit. Give the reduced value's sharding."
        )
    if len(spec) > len(shape):
        raise errors.SpecRankError(
            f"jhost.shard got spec={spec} with {len(spec)} entries for an array of "
            f"shape {shape} with {len(shape)} dims. Give at most {len(shape)} entries; "
            "dims without an entry are whole."
        )
    entries = list(spec_entries(spec))
    _check_axes_are_distinct(entries, spec, shape)
    return (*entries, *[()] * (len(shape) - len(spec)))


def spec_entries(spec: PartitionSpec | NamedSharding) -> Spec:
    """The mesh axes of each entry of `spec`, which may have fewer than the dims."""
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    return tuple(_canonical_entry(entry, spec) for entry in spec)


def _canonical_entry(entry: Any, spec: PartitionSpec) -> DimSpec:
    # In a `PartitionSpec` None is whole.  In ours () is whole, and None is open.
    if entry is PartitionSpec.UNCONSTRAINED:
        return None
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    if not all(isinstance(name, str) for name in names):
        raise errors.ArgumentError(
            f"Got a spec {spec}, but its entry {entry!r} is no mesh axis. An "
            "entry is an axis name, a tuple of axis names, None, or P.UNCONSTRAINED."
        )
    return names


def _check_axes_are_distinct(
    entries: list[DimSpec], spec: PartitionSpec, shape: tuple[int, ...]
) -> None:
    used = [(axis, dim) for dim, entry in enumerate(entries) for axis in entry or ()]
    dims = {axis: [dim for other, dim in used if other == axis] for axis, _ in used}
    offenders = [f"{axis!r} shards dims {d}" for axis, d in dims.items() if len(d) > 1]
    if offenders:
        raise errors.DuplicateAxisError(
            f"jhost.shard got spec={spec} for an array of shape {shape}. It uses a "
            "mesh axis twice, but an axis can shard only one dim: leave the axis out "
            "of the other dims.",
            offenders,
        )
