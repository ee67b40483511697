"""The meshes that arguments lie over, and that a function names inside.

A function that was given none takes its mesh from there; JAX's `jit` takes its devices
from the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, Sharding

from jhost import errors
from jhost._call.shardings import is_spread
from jhost._jax import NO_LINE, TracedCall, calls, shard_map_of, source_line
from jhost.runtime.mesh import (
    AnyMesh,
    context_mesh,
    mesh_text,
    mesh_texts,
    same_mesh,
)


def brought_mesh(
    name: str, arguments: Iterable[tuple[str, Sharding | None]]
) -> AnyMesh | None:
    """The mesh over which arguments lie, if they lie over one.

    Arrays in parts count before those that are whole on each device, which may lie over
    any mesh of the same devices, as for `jax.jit`.

    Raises:
        MeshMismatchError: they lie over different meshes.
    """
    named = [(n, s) for n, s in arguments if isinstance(s, NamedSharding)]
    over = [(n, s) for n, s in named if is_spread(s)] or named
    meshes = sorted(
        (sharding.mesh for _, sharding in over),
        key=lambda mesh: not isinstance(mesh, Mesh),  # one that has devices, if any
    )
    for other in meshes:
        if not same_mesh(meshes[0], other):
            raise _several_meshes(name, over, mesh_texts(meshes[0], other))
    return meshes[0] if meshes else None


def _several_meshes(
    name: str, over: Sequence[tuple[str, NamedSharding]], texts: tuple[str, str]
) -> errors.MeshMismatchError:
    most = max(sharding.mesh.size for _, sharding in over)
    return errors.MeshMismatchError(
        f"{name} runs on one mesh, but its arguments lie over several: {texts[0]}, and "
        f"{texts[1]}. Move them to one with jax.device_put(x, NamedSharding(mesh, "
        "spec)).",
        [
            f"{argument} has {sharding.spec} over {mesh_text(sharding.mesh, most)}"
            for argument, sharding in over
        ],
    )


def inside_mesh(traced: TracedCall, on_one_device: bool) -> AnyMesh | None:
    """The mesh that a function names, or the mesh of the arrays that it closes over.

    Those do not count for a call with arguments committed to `on_one_device`: for XLA
    they are constants, which any device has.
    """
    for mesh, _ in meshes_in(traced.jaxpr):
        return mesh
    if on_one_device:
        return None
    held = (getattr(const, "sharding", None) for const in traced.consts)
    return next((s.mesh for s in held if isinstance(s, NamedSharding)), None)


def meshes_in(jaxpr: Any, around: str = NO_LINE) -> Iterator[tuple[AnyMesh, str]]:
    """Each mesh that something inside is over, with its line or that of the call."""
    for eqn in jaxpr.eqns:
        mesh, line = _mesh_of(eqn), source_line(eqn)
        line = around if line == NO_LINE else line
        if mesh is not None and not mesh.empty:
            yield mesh, line
        if not _ends_search(eqn):
            for inner in jaxprs_in_params(eqn.params):
                yield from meshes_in(inner, line)


def _ends_search(eqn: JaxprEqn) -> bool:
    """Whether the meshes inside of an equation need not be compared.

    The axes inside a `shard_map` are manual.  A jhost function with a mesh has compared
    what is inside of it already.
    """
    compared = eqn.primitive.name == "jhost" and isinstance(_mesh_of(eqn), Mesh)
    return compared or eqn.primitive.name == "shard_map"


def _mesh_of(eqn: JaxprEqn) -> AnyMesh | None:
    match eqn.primitive.name:
        case "shard_map":
            mapped = shard_map_of(eqn)
            # JAX allows one in another's body, but a program on a mesh cannot have it.
            return None if calls(mapped.body, eqn.primitive) else mapped.mesh
        case "sharding_constraint" | "reshard":
            sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
            return sharding.mesh if isinstance(sharding, NamedSharding) else None
        case "jhost":
            return eqn.params["config"].mesh
        case _:
            return None


def check_context(name: str, mesh: AnyMesh | None) -> None:
    """Refuses a call under `jax.set_mesh` of other devices, as `jax.jit` does.

    Raises:
        MeshMismatchError: the mesh that is set is not of the devices of `mesh`.
    """
    context = context_mesh()
    if not isinstance(mesh, Mesh) or not isinstance(context, Mesh):
        return
    if list(context.devices.flat) != list(mesh.devices.flat):
        raise errors.MeshMismatchError(
            f"{name} is called under jax.set_mesh of other devices than its own, or in "
            "another order. Call it outside of that, or set a mesh of its devices.",
            mesh_texts(context, mesh),
        )


def check_devices(name: str, jaxpr: Any, mesh: AnyMesh | None) -> None:
    """Refuses what is inside and over the same axes, but over other devices.

    Programs know the axes of a mesh and no devices, so that this is looked at before.

    Raises:
        MeshMismatchError: a sharding, a `shard_map` or a jhost function over the same
            axes, of other devices.
    """
    if not isinstance(mesh, Mesh):
        return
    others = [
        f"{mesh_text(there)} at {where}"
        for there, where in meshes_in(jaxpr)
        if there.shape == mesh.shape and not same_mesh(there, mesh)
    ]
    if others:
        raise errors.MeshMismatchError(
            f"A sharding, a jax.shard_map or a jhost function inside {name} is over "
            f"the axes of {name}, but over other devices, or in another order. Give it "
            f"the mesh of {name}.",
            [*dict.fromkeys(others), f"the function's: {mesh_text(mesh)}"],
        )
