"""The mesh that a jhost function runs on: from arguments, arrays or the context."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
)

from jhost import errors

AnyMesh = Mesh | AbstractMesh


def resolve_mesh(mesh: AnyMesh | None, shardings: Iterable[Any]) -> AnyMesh | None:
    """The given mesh, or the mesh of the shardings, or the mesh of `jax.set_mesh`.

    Raises:
        MeshMismatchError: two shardings with different meshes.
        NoMeshError: a sharding names mesh axes, and there is no mesh.
    """
    shardings = list(shardings)
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            if mesh is not None and not same_mesh(mesh, sharding.mesh):
                raise errors.MeshMismatchError(
                    "One jhost function runs on one mesh. Give the same mesh in every "
                    "sharding, and in mesh=.",
                    mesh_texts(mesh, sharding.mesh),
                )
            mesh = sharding.mesh if mesh is None else mesh
    if mesh is None:
        mesh = context_mesh()
    if mesh is None:
        named = [s for s in shardings if isinstance(s, PartitionSpec) and any(s)]
        if named:
            raise errors.NoMeshError(
                "Shardings name mesh axes, but no mesh is known. Give jhost.jit one "
                "(mesh=...), use NamedShardings, call the function with arrays that "
                "are sharded already, or call it under jax.set_mesh(...).",
                list(dict.fromkeys(map(repr, named))),
            )
    return mesh


def context_mesh() -> AnyMesh | None:
    """The mesh that `jax.set_mesh` has set, if any.

    It is abstract while tracing, and under `jax.sharding.use_abstract_mesh`.
    """
    abstract = get_abstract_mesh()
    if abstract.empty:
        return None
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # JAX returns the concrete mesh only outside of a trace
        return abstract
    return abstract if concrete.empty else concrete


def manual_axes() -> tuple[str, ...]:
    """The mesh axes of the `jax.shard_map` or `jax.pmap` around the current trace."""
    return get_abstract_mesh().manual_axes


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """`mesh` with automatic axes: inside, jhost decides the layouts."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == types:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return mesh.update(axis_types=types)


def explicit_mesh(values: Iterable[Any]) -> AbstractMesh | None:
    """The mesh with explicit axes in the types of the values or the context, if any."""
    meshes = [get_abstract_mesh()]
    meshes += [jax.typeof(value).sharding.mesh for value in values]
    for mesh in meshes:
        if explicit_axes(mesh):
            return mesh
    return None


def explicit_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """The axes of `mesh` that are explicit: types name them."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Explicit)


def with_types(
    call: Callable[..., Sequence[Any]],
    mesh: AbstractMesh,
    specs: Iterable[PartitionSpec],
) -> Callable[..., Sequence[Any]]:
    """`call`, which works without sharding types, with results that have them."""
    axes = explicit_axes(mesh)
    types = tuple(NamedSharding(mesh, spec_over(axes, spec)) for spec in specs)

    def untyped(*args: Any) -> tuple[Any, ...]:
        return tuple(call(*args))

    typed = jax.sharding.auto_axes(untyped, axes=axes, out_sharding=types)
    return cast(Callable[..., Sequence[Any]], typed)


def spec_over(axes: Collection[str], spec: PartitionSpec) -> PartitionSpec:
    """`spec` with only these axes, because types may name no others."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return PartitionSpec(*(tuple(a for a in e if a in axes) or None for e in entries))


def automatic(value: Any) -> Any:
    """An array on the same mesh with automatic axes, so its type has no sharding."""
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return value
    mesh = auto_mesh(sharding.mesh)
    return jax.device_put(value, NamedSharding(mesh, sharding.spec))


@contextmanager
def automatic_axes() -> Generator[None]:
    """Inside, types have no shardings: `jax.sharding.auto_axes` for tracing."""
    context = get_abstract_mesh()
    if AxisType.Explicit not in context.axis_types:
        yield
        return
    automatic = context.update(axis_types=(AxisType.Auto,) * len(context.axis_names))
    with jax.sharding.use_abstract_mesh(automatic):
        yield


def abstract(mesh: AnyMesh | None) -> AbstractMesh:
    """The names and sizes of axes, which is all that lowering knows of a mesh."""
    if mesh is None:
        return AbstractMesh((), ())
    names = tuple(mesh.axis_names)
    types = (AxisType.Auto,) * len(names)
    return AbstractMesh(tuple(mesh.shape[n] for n in names), names, axis_types=types)


def same_mesh(mesh: AnyMesh, other: AnyMesh) -> bool:
    """Whether two meshes have the same axes and, where both say, the same devices."""
    if tuple(mesh.shape.items()) != tuple(other.shape.items()):
        return False
    if isinstance(mesh, Mesh) and isinstance(other, Mesh):
        return bool(np.array_equal(mesh.devices, other.devices))
    return True


def foreign_arrays(values: Mapping[str, Any], mesh: AnyMesh) -> list[str]:
    """The committed arrays that lie on other devices than `mesh`, in words."""
    if not isinstance(mesh, Mesh):
        return []
    here = set(mesh.devices.flat)
    offenders: list[str] = []
    for name, value in values.items():
        if isinstance(value, jax.Array) and value.committed:
            there = value.sharding.device_set
            if there != here:
                offenders.append(
                    f"{name} of shape {value.shape} is on "
                    f"{devices_text(sorted(there, key=lambda device: device.id))}"
                )
    return offenders


def devices_text(devices: Iterable[Any], most: int = 8) -> str:
    """The ids of devices in their order, at most the first `most`."""
    ids = [device.id for device in devices]
    shown = ", ".join(map(str, ids[:most])) + (", ..." if len(ids) > most else "")
    return f"device{'s' if len(ids) > 1 else ''} {shown}"


def mesh_text(mesh: AnyMesh, most: int = 8) -> str:
    """`mesh` with its axes, and the first `most` of its devices where it has them."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    if isinstance(mesh, Mesh):
        return f"mesh({axes}) on {devices_text(mesh.devices.flat, most)}"
    return f"mesh({axes})"


def mesh_texts(mesh: AnyMesh, other: AnyMesh) -> tuple[str, str]:
    """Two meshes in words; with all devices if the words were equal otherwise."""
    texts = mesh_text(mesh), mesh_text(other)
    if texts[0] != texts[1]:
        return texts
    return mesh_text(mesh, mesh.size), mesh_text(other, other.size)
