"""The shardings of a layer's parameters, as flax's own metadata."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jhost import errors

AxisByDim: TypeAlias = tuple[str | None, ...]
"""The mesh axis of each dim, as in flax's `out_sharding`."""


def annotate(layer: Any, *, kernel: AxisByDim, bias: AxisByDim = ()) -> P:
    """Shards a layer's parameters that have no sharding yet; gives its kernel's."""
    layer.kernel = annotated(layer.kernel, kernel)
    if layer.bias is not None:
        layer.bias = annotated(layer.bias, bias)
    return partition_spec(layer.kernel)


def annotated(param: Any, sharding: AxisByDim) -> Any:
    """`param` with that sharding as its metadata, unless it has one."""
    metadata = param.get_metadata()
    if metadata.get("out_sharding") or not any(sharding):
        return param
    # A new param, because flax shards the values of new ones.  It refuses to make one
    # where it knows no mesh, though `jhost.jit` will know it soon enough.
    if not metadata.get("mesh") and _mesh().empty:
        metadata = {**metadata, "eager_sharding": False}
    return type(param)(param[...], **{**metadata, "out_sharding": sharding})


def partition_spec(param: Any) -> P:
    """What flax makes of a parameter's metadata, by its rules for logical axes too."""
    return nnx.get_partition_spec(param).get_value()


def axis_size(mesh_axis: str) -> int:
    """The size of an axis of the mesh under which a layer is made; 1 without one."""
    return _mesh().shape.get(mesh_axis, 1)


def check_divides(what: str, count: int, mesh_axis: str) -> None:
    """Raises unless each device gets as many of them as the others."""
    size = axis_size(mesh_axis)
    if count % size:
        raise errors.DivisibilityError(
            f"{what} is {count}, and the mesh axis {mesh_axis!r}, over which they are "
            f"sharded, has size {size}, which does not divide it: {count} = "
            f"{count // size} * {size} + {count % size}. Take a multiple of {size}, or "
            f"a mesh whose {mesh_axis!r} divides {count}, such as "
            f"{math.gcd(count, size)}."
        )


def _mesh() -> Any:
    return jax.sharding.get_abstract_mesh()
