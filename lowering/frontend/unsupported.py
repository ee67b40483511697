"""The equations of a function that no Host IR program can hold, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
from jax.extend.core import JaxprEqn, Var, jaxprs_in_params
from jax.sharding import AbstractMesh, NamedSharding

from jhost import errors
from jhost._annotate import spec_entries
from jhost._jax import NO_LINE, ShardMap, is_array, shard_map_of, source_line
from jhost.lowering.frontend.control_flow import has_programs
from jhost.lowering.ir.layout import spec_text
from jhost.lowering.rules.dim_rule import shape_of
from jhost.lowering.rules.partition_checks import broken_promise
from jhost.lowering.rules.table import rule_of


def check_supported(
    name: str,
    mesh: Mapping[str, int],
    params: Mapping[str, Var],
    eqns: Sequence[JaxprEqn],
) -> None:
    """Refuse what cannot be part of a program, all at once.

    Raises:
        UnsupportedError: a reference, a size that is not known, or, where there is a
            mesh, an exported program over several devices, or a `shard_map` in the body
            of another equation.
        MeshMismatchError: a `shard_map` over another mesh.
        UnknownAxisError: a sharding in the body of a `shard_map`, of an axis that the
            body is manual over.
        OperandsError: a `custom_partitioning` whose shards are not as it says.
    """
    found = left_to_jit(params, eqns, bool(mesh))
    found += [f"{n}: {_SYMBOLIC}" for n, var in params.items() if _is_symbolic(var)]
    if mesh:
        found += _shard_maps_in_bodies(eqns)
        found += [f"{_SUMS}, at {source_line(e)}" for e in _mapped(eqns) if _sums(e)]
    if found:
        raise errors.UnsupportedError(
            f"jhost.jit of {name} cannot take this into its program. Leave it to "
            "jax.jit, around the jhost function.",
            list(dict.fromkeys(found)),
        )
    if mesh:
        _check_meshes(name, mesh, eqns)
        _check_shardings_in_bodies(name, eqns)
        _check_partitions(name, mesh, eqns)


def left_to_jit(
    params: Mapping[str, Var], eqns: Sequence[JaxprEqn], has_mesh: bool
) -> list[str]:
    """What only `jax.jit` can compile, as part of the whole function, in words."""
    found = [f"{n}: {_REFERENCE}" for n, var in params.items() if not is_array(var)]
    found += [f"{_REFERENCE}, at {source_line(eqn)}" for eqn in with_references(eqns)]
    return [*dict.fromkeys(found + (_exported(eqns) if has_mesh else []))]


_REFERENCE = "a reference (jax.new_ref), which is changed where it is"
_SUMS = "jax.shard_map, whose specs name axes of sums (unreduced, reduced)"


_SYMBOLIC = "a size that is a symbol; chunks and shards are counted while lowering"


def _is_symbolic(var: Var) -> bool:
    return any(map(jax.export.is_symbolic_dim, shape_of(var)))


def with_references(eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
    """The equations with references, less those in bodies, whose business they are."""
    return [e for e in eqns if not all(map(is_array, (*e.invars, *e.outvars)))]


def exported_over_devices(eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
    """The calls of exported programs that run over several devices, also in bodies."""
    # A program of jhost's runs on each device by itself, and XLA (of JAX 0.12) ends the
    # process where it finds the other kind in there.
    calls = (eqn for eqn in walk(eqns) if eqn.primitive.name == "call_exported")
    return [eqn for eqn in calls if eqn.params["exported"].nr_devices > 1]


def _exported(eqns: Sequence[JaxprEqn]) -> list[str]:
    return [
        f"{eqn.params['exported'].fun_name}, exported for "
        f"{eqn.params['exported'].nr_devices} devices, at {source_line(eqn)}"
        for eqn in exported_over_devices(eqns)
    ]


# --- jax.shard_map ---------------------------------------------------------------- #


def _mapped(eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
    return [eqn for eqn in eqns if eqn.primitive.name == "shard_map"]


def _sums(eqn: JaxprEqn) -> bool:
    return shard_map_of(eqn).summed


def _shard_maps_in_bodies(eqns: Iterable[JaxprEqn]) -> list[str]:
    """Those that no program has as an equation of its own, in words."""
    return [
        f"jax.shard_map in the body of a {eqn.primitive.name}, which stays one "
        f"equation, at {_line(inner, eqn)}"
        for eqn in eqns
        if not has_programs(eqn)
        for body in jaxprs_in_params(eqn.params)
        for inner in _mapped(walk(body.eqns))
    ]


def _line(inner: JaxprEqn, outer: JaxprEqn) -> str:
    """The user's line of an equation in another."""
    # Of what a call of JAX's was given as its body there is no line but the call's.
    line = source_line(inner)
    return source_line(outer) if line == NO_LINE else line


def walk(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """All equations, with those of what they hold."""
    for eqn in eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from walk(inner.eqns)


def _check_meshes(name: str, mesh: Mapping[str, int], eqns: Iterable[JaxprEqn]) -> None:
    # Axes in another order number the devices otherwise.
    others = [
        f"{_mesh_text(there)} at {source_line(eqn)}"
        for eqn in _mapped(eqns)
        if list((there := shard_map_of(eqn).mesh.shape).items()) != list(mesh.items())
    ]
    if others:
        raise errors.MeshMismatchError(
            f"A jax.shard_map inside {name} is over another mesh than the function's. "
            "Give it the function's mesh, or leave it to jax.jit, around the jhost "
            "function.",
            [*others, f"the function's: {_mesh_text(mesh)}"],
        )


def _check_shardings_in_bodies(name: str, eqns: Iterable[JaxprEqn]) -> None:
    """Refuses what JAX refuses as it lowers a body: each device has its part there."""
    wrong = [
        f"{problem} of {_mesh_text(mapped.mesh.shape)}, at {_line(inner, eqn)}"
        for eqn in _mapped(eqns)
        for mapped in (shard_map_of(eqn),)
        for inner in walk(mapped.body.eqns)
        if (problem := _of_manual_axes(inner, mapped))
    ]
    if wrong:
        raise errors.UnknownAxisError(
            f"A with_sharding_constraint in the body of a jax.shard_map inside {name} "
            "names axes that are manual there, which is not allowed: each device "
            "already has its own shard along them. Use only the other axes.",
            list(dict.fromkeys(wrong)),
        )


def _of_manual_axes(eqn: JaxprEqn, mapped: ShardMap) -> str | None:
    """The error of a sharding in the body of a `shard_map` that names a manual axis."""
    sharding = eqn.params.get("sharding")
    constrains = eqn.primitive.name == "sharding_constraint"
    if not constrains or not isinstance(sharding, NamedSharding):
        return None
    spec = spec_entries(sharding)
    manual = tuple(axis for axis in mapped.mesh.axis_names if axis in mapped.manual)
    if not mapped.manual.isdisjoint(axis for axes in spec for axis in axes or ()):
        return f"pspec {spec_text(spec)} contains a manual axes {manual}"
    if None in spec and len(manual) == len(mapped.mesh.axis_names):
        return f"pspec {spec_text(spec)} leaves a dim free to no automatic axis"
    return None


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return f"mesh({', '.join(f'{axis}={size}' for axis, size in mesh.items())})"


# --- custom_partitioning ---------------------------------------------------------- #


def _check_partitions(
    name: str, mesh: Mapping[str, int], eqns: Iterable[JaxprEqn]
) -> None:
    devices = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    wrong = [
        f"{broken} at {source_line(eqn)}"
        for eqn in eqns
        if eqn.primitive.name == "custom_partitioning" and rule_of(eqn).opaque
        if eqn.params["partition"] and (broken := broken_promise(eqn, devices))
    ]
    if wrong:
        raise errors.OperandsError(
            f"Mismatch in result shapes. The `partition` of a custom_partitioning in "
            f"{name} says how results are sharded, and gives the function that makes "
            "their shards. That function makes shards of other shapes.",
            wrong,
        )
