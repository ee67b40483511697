"""Tracing on a mesh with explicit axes: what types say of the user's function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, get_abstract_mesh

from jhost._annotate import spec_entries
from jhost._jax import TracedCall, cached_by_jaxpr, is_type, untyped
from jhost._primitives import Spec
from jhost.runtime.mesh import (
    AnyMesh,
    automatic_axes,
    explicit_axes,
    same_mesh,
    spec_over,
)


def typed_mesh(mesh: AnyMesh | None) -> AbstractMesh | None:
    """The mesh that types in a function on `mesh` speak of, if they do."""
    context = get_abstract_mesh()
    if mesh is None or not explicit_axes(mesh if context.empty else context):
        return None
    if context.empty:
        return mesh.abstract_mesh
    return context if same_mesh(mesh, context) else None


def typed(
    types: Sequence[Any],
    leaves: Sequence[Any],
    given: Sequence[Spec | None],
    mesh: AbstractMesh,
) -> list[Any]:
    """The `types` of arguments with the shardings they are given, or have."""
    return [
        _typed(kind, _own(leaf, mesh) if spec is None else _spec(spec), mesh)
        for kind, leaf, spec in zip(types, leaves, given, strict=True)
    ]


def _typed(kind: Any, spec: PartitionSpec, mesh: AbstractMesh) -> Any:
    if not is_type(kind):  # a number of Python's, or a reference
        return kind
    sharding = NamedSharding(mesh, spec_over(explicit_axes(mesh), spec))
    return kind.update(sharding=sharding)


def _spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in spec))


def _own(leaf: Any, mesh: AbstractMesh) -> PartitionSpec:
    """What the type of an argument says, where it speaks of this mesh."""
    known = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    sharding = getattr(known, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not explicit_axes(sharding.mesh):
        return PartitionSpec()
    return sharding.spec if same_mesh(sharding.mesh, mesh) else PartitionSpec()


def without_types(traced: TracedCall) -> TracedCall:
    """`traced` without types in its jaxpr; the specs of its results stand beside it."""
    with automatic_axes():
        jaxpr = _without_types(traced.jaxpr, get_abstract_mesh())
    outs: list[Any] = list(traced.jaxpr.out_avals)
    specs = tuple(aval.sharding.spec for aval in outs)
    return dataclasses.replace(traced, jaxpr=jaxpr, out_types=specs)


# Cached, because caches go by identity: a new jaxpr, even an equal one, is lowered
# again.
_without_types = cached_by_jaxpr(untyped)


def wanted_specs(
    traced: TracedCall, given: Sequence[Spec | None], mesh: AnyMesh
) -> list[Spec | None]:
    """The specs of results: those `given`, or else what their types say."""
    if traced.out_types is None:
        return list(given)
    # Where some axes are automatic, jhost may choose what no type speaks of.
    free = None if len(explicit_axes(mesh)) < len(mesh.axis_names) else ()
    return [
        tuple(axes or free for axes in spec_entries(kind)) if spec is None else spec
        for spec, kind in zip(given, traced.out_types, strict=True)
    ]


def result_types(
    traced: TracedCall, given: Sequence[Spec | None], laid_out: Iterable[PartitionSpec]
) -> list[PartitionSpec]:
    """What types say of results: JAX's own words, or else how they are `laid_out`."""
    known = traced.out_types or [None] * len(given)
    return [
        there if kind is None or spec is not None else kind
        for kind, spec, there in zip(known, given, laid_out, strict=True)
    ]
