"""What no program of jhost's can hold: `jax.jit` compiles such a function whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jhost import errors
from jhost._jax import arg_names, cached_by_jaxpr, calls, is_array
from jhost._primitives import stream_p
from jhost.lowering.frontend.inline_calls import inline_calls
from jhost.lowering.frontend.unsupported import (
    exported_over_devices,
    walk,
    with_references,
)
from jhost.runtime.mesh import AnyMesh, auto_mesh

R = TypeVar("R")


@cached_by_jaxpr
def stays_whole(jaxpr: Any, has_mesh: bool) -> bool:
    """Whether a traced function is left to `jax.jit`, with its shardings.

    References are changed where they are, and an exported program over several devices
    is one of them all.  Not with a stream, which has to be followed, or be refused.
    """
    if not _may_stay(jaxpr) or calls(jaxpr, stream_p):
        return False
    flat = inline_calls(jaxpr)
    if not all(map(is_array, flat.invars)) or with_references(flat.eqns):
        return True
    return has_mesh and bool(exported_over_devices(flat.eqns))


def _may_stay(jaxpr: Any) -> bool:
    """Whether such a thing stands in it, be it in a body whose business it is."""
    eqns = list(walk(jaxpr.eqns))
    if not all(map(is_array, jaxpr.jaxpr.invars)) or with_references(eqns):
        return True
    return any(eqn.primitive.name == "call_exported" for eqn in eqns)


def exports_over_devices(jaxpr: Any) -> bool:
    """Whether JAX has to know the devices of a function that stays whole.

    References are where they are, and say so themselves.
    """
    return bool(exported_over_devices(jaxpr.eqns))


def over_devices(fun: Callable[..., R], mesh: AnyMesh) -> Callable[..., R]:
    """A function that `jax.jit` compiles for all devices of a mesh, as jhost does.

    JAX looks for them in the shardings inside.
    """

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> R:
        args, kwargs = jax.tree.map(functools.partial(_anywhere, mesh), (args, kwargs))
        return fun(*args, **kwargs)

    return call


def _anywhere(mesh: AnyMesh, value: Any) -> Any:
    """An array, wherever it is on the mesh."""
    if not isinstance(value, jax.Array):
        return value
    free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * value.ndim)
    return jax.lax.with_sharding_constraint(value, NamedSharding(auto_mesh(mesh), free))


def check_takes_arrays(name: str, jaxpr: Any) -> None:
    """Refuses references among the operands of a program.

    Raises:
        UnsupportedError: there are some.
    """
    names = arg_names(jaxpr) or ("",) * len(jaxpr.jaxpr.invars)
    pairs = zip(names, jaxpr.jaxpr.invars, strict=True)
    found = [
        f"{given or 'one that it closes over'}: {var.aval}"
        for given, var in pairs
        if not is_array(var)
    ]
    if found:
        raise errors.UnsupportedError(
            f"jhost.jit of {name} cannot take references (jax.new_ref) into its "
            "program, with a stream or to be shown: they are changed where they are. "
            "Give it what they hold, ref[...], and write to them what it returns.",
            found,
        )
