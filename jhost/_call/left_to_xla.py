"""A call whose program XLA partitions, with the user's shardings as its constraints."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from jhost._jax import constraint, with_each_eqn
from jhost._primitives import DimSpec, jhost_p, shard_p
from jhost.runtime.mesh import AnyMesh, auto_mesh


def for_xla(call_jaxpr: Any, mesh: AnyMesh) -> Any:
    """The jaxpr of a call with JAX's constraints instead of jhost's markers.

    Jhost functions that it calls are left to XLA as well.
    """
    return with_each_eqn(call_jaxpr, partial(_for_xla, auto_mesh(mesh)))


def _for_xla(mesh: AnyMesh, eqn: JaxprEqn) -> JaxprEqn | None:
    if eqn.primitive is shard_p:
        spec = PartitionSpec(*map(_entry, eqn.params["spec"]))
        sharding = NamedSharding(mesh, spec)
        return constraint(eqn.invars[0], eqn.outvars[0], sharding, eqn)
    if eqn.primitive is jhost_p:
        config = dataclasses.replace(eqn.params["config"], left_to_xla=True)
        inner = for_xla(eqn.params["call_jaxpr"], mesh)
        return eqn.replace(params={"call_jaxpr": inner, "config": config})
    return None


def _entry(axes: DimSpec) -> Any:
    return PartitionSpec.UNCONSTRAINED if axes is None else axes or None
