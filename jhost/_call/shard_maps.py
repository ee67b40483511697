"""The devices of a `jax.shard_map` inside a jhost function are the function's.

Programs know the axes of a mesh and no devices, so that this is looked at before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import JaxprEqn, jaxprs_in_params
from jax.sharding import Mesh

from jhost import errors
from jhost._jax import shard_map_of, source_line
from jhost.runtime.mesh import AnyMesh, mesh_text, same_mesh


def check_devices(name: str, jaxpr: Any, mesh: AnyMesh | None) -> None:
    """Refuse what would run on other devices than it says.

    Raises:
        MeshMismatchError: a `shard_map` over the same axes, of other devices.
    """
    if not isinstance(mesh, Mesh):
        return
    others = [
        f"{mesh_text(there)} at {source_line(eqn)}"
        for eqn in _shard_maps(jaxpr)
        if (there := shard_map_of(eqn).mesh).shape == mesh.shape
        and not same_mesh(there, mesh)
    ]
    if others:
        raise errors.MeshMismatchError(
            f"A jax.shard_map inside {name} is over the function's axes, but over "
            "other devices, or in another order. Give it the function's mesh.",
            [*dict.fromkeys(others), f"the function's: {mesh_text(mesh)}"],
        )


def _shard_maps(jaxpr: Any) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _shard_maps(inner)
