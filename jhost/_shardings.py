"""Shardings as the user gives them, or as the arguments have them, made specs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jhost import errors
from jhost._annotate import spec_entries
from jhost._primitives import Spec
from jhost.lowering.specs import Problem, check_axes, check_spec, raise_problems
from jhost.runtime.mesh import AnyMesh, mesh_text, same_mesh


def is_sharding(x: Any) -> bool:
    """Whether `x` is a leaf of a tree of shardings; None is one too."""
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


def leaves(shardings: Any) -> list[Any]:
    """The leaves of a tree of shardings."""
    return jax.tree.leaves(shardings, is_leaf=is_sharding)


def named(mesh: AnyMesh, shardings: Any, what: str) -> Any:
    """A tree of shardings with `NamedSharding`s over `mesh` in place of specs.

    Raises:
        UnknownAxisError, DuplicateAxisError: specs that no array could have on `mesh`.
    """
    given = jax.tree_util.tree_leaves_with_path(shardings, is_leaf=is_sharding)
    offenders = [
        (what + jax.tree_util.keystr(path), problem)
        for path, sharding in given
        if sharding is not None
        for problem in check_axes(spec_entries(sharding), dict(mesh.shape))
    ]
    raise_problems(what, offenders)

    def one(sharding: Any) -> Any:
        if isinstance(sharding, NamedSharding):
            sharding = sharding.spec
        return None if sharding is None else NamedSharding(mesh, sharding)

    return jax.tree.map(one, shardings, is_leaf=is_sharding)


def spread(prefix: Any, tree: Any) -> list[Spec | None]:
    """The spec of each leaf of `tree`, of which `prefix` is a tree prefix."""
    if isinstance(prefix, list):
        prefix = tuple(cast(list[Any], prefix))
    # By number, because None is a leaf of `prefix`, but not of `tree`.
    given, structure = jax.tree.flatten(prefix, is_leaf=is_sharding)
    numbers = jax.tree.unflatten(structure, range(len(given)))
    specs = [None if sharding is None else spec_entries(sharding) for sharding in given]
    return [
        specs[number] for number in jax.tree.leaves(jax.tree.broadcast(numbers, tree))
    ]


def own(leaf: Any) -> NamedSharding | None:
    """The sharding of an argument over some mesh, if it has one."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def own_spec(sharding: NamedSharding | None, mesh: AnyMesh) -> Spec | None:
    """How an argument with that sharding is laid out over `mesh`, if it is.

    Raises:
        MeshMismatchError: it is laid out over another mesh.
    """
    if sharding is None or not any(sharding.spec):
        return None
    if not same_mesh(sharding.mesh, mesh):
        raise errors.MeshMismatchError(
            "An argument is sharded over another mesh. Move it with jax.device_put(x, "
            "NamedSharding(mesh, spec)), or give jhost.jit its mesh.",
            [
                f"an argument has {sharding.spec} over {mesh_text(sharding.mesh)}",
                f"the function runs on {mesh_text(mesh)}",
            ],
        )
    return spec_entries(sharding)


def problems(
    names: Sequence[str],
    specs: Sequence[Spec | None],
    avals: Iterable[Any],
    mesh: AnyMesh,
) -> list[tuple[str, Problem]]:
    """What is wrong with the specs of these values, with the values' names."""
    return [
        (f"{name} of shape {aval.shape}", problem)
        for name, spec, aval in zip(names, specs, avals, strict=True)
        if spec is not None
        for problem in check_spec(spec, aval.shape, dict(mesh.shape))
    ]


def padded(
    specs: Iterable[Spec | None], avals: Iterable[Any]
) -> tuple[Spec | None, ...]:
    """Each spec with an entry for every dim."""
    return tuple(
        spec if spec is None else (*spec, *[()] * (len(aval.shape) - len(spec)))
        for spec, aval in zip(specs, avals, strict=True)
    )
