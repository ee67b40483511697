"""`jax.shard_map` as programs want it: all axes manual, operands of any size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax import lax
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
)


def shard_map(
    on_device: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    in_specs: Sequence[PartitionSpec],
    out_specs: Any,
) -> Callable[..., Any]:
    """`on_device` on what each device has of the operands; on one device, as it is.

    XLA (of JAX 0.10 to 0.12) takes operands of size 0 for constants, and refuses a call
    that has no others.  There is nothing to hand over, so they are made inside.
    """
    if not mesh.axis_names:
        return on_device

    def call(*args: Any) -> Any:
        sized = [x.size > 0 for x in args]
        shards = [NamedSharding(mesh, spec).shard_shape for spec in in_specs]
        shapes = [shard(x.shape) for shard, x in zip(shards, args, strict=True)]

        def with_empty(*given: Any) -> Any:
            rest = iter(given)
            return on_device(
                *(
                    next(rest) if there else lax.empty(shape, x.dtype)
                    for there, shape, x in zip(sized, shapes, args, strict=True)
                )
            )

        mapped = jax.shard_map(
            with_empty,
            mesh=mesh,
            in_specs=tuple(itertools.compress(in_specs, sized)),
            out_specs=out_specs,
            # The passes know what varies; JAX's types for it would want casts.
            check_vma=False,
        )
        with _inside(mesh):
            return mapped(*itertools.compress(args, sized))

    return call


def _inside(mesh: Mesh | AbstractMesh) -> AbstractContextManager[Any]:
    """A context in which `jax.shard_map` takes `mesh`: it refuses another context's."""
    context = get_abstract_mesh()
    if context.empty or context.shape_tuple == mesh.shape_tuple:
        return nullcontext()
    own = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    return jax.sharding.use_abstract_mesh(own)
