"""Shardings of the user and of arguments, turned into specs, and specs into marks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jhost import errors
from jhost._annotate import spec_entries
from jhost._jax import (
    cached,
    cached_by_jaxpr,
    close,
    evaluate,
    is_tracing,
    mesh_of_tracer,
    without_dead_code,
)
from jhost._primitives import Spec
from jhost.lowering.frontend.specs import SpecProblem, check_axes, check_spec
from jhost.lowering.ir.layout import spec_text
from jhost.runtime.mesh import AnyMesh, mesh_text, same_mesh


def is_sharding(x: Any) -> bool:
    """Whether `x` is a leaf of a tree of shardings; None is one too."""
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


def names_axes(sharding: PartitionSpec | NamedSharding) -> bool:
    """Whether a sharding needs a mesh."""
    return isinstance(sharding, NamedSharding) or any(sharding)


def leaves(shardings: Any) -> list[Any]:
    """The leaves of a tree of shardings."""
    return jax.tree.leaves(shardings, is_leaf=is_sharding)


def leaves_with_path(shardings: Any) -> list[tuple[str, Any]]:
    """The leaves with their places in the tree, as `[0]['w']`."""
    pairs = jax.tree_util.tree_leaves_with_path(shardings, is_leaf=is_sharding)
    return [(jax.tree_util.keystr(path), sharding) for path, sharding in pairs]


def axis_problems(
    what: str, shardings: Any, mesh: AnyMesh
) -> list[tuple[str, SpecProblem]]:
    """Why no array can have these specs on `mesh`, with their places in the tree."""
    return [
        (what + path, problem)
        for path, sharding in leaves_with_path(shardings)
        if sharding is not None
        for problem in check_axes(spec_entries(sharding), dict(mesh.shape))
    ]


def named(shardings: Any, mesh: AnyMesh) -> Any:
    """A tree of shardings with `NamedSharding`s over `mesh` in place of specs."""

    def one(sharding: Any) -> Any:
        if isinstance(sharding, NamedSharding):
            sharding = sharding.spec
        return None if sharding is None else NamedSharding(mesh, sharding)

    return jax.tree.map(one, shardings, is_leaf=is_sharding)


def specs(shardings: Any) -> Any:
    """A tree of shardings with specs alone, which any mesh may have."""

    def one(sharding: Any) -> Any:
        return sharding.spec if isinstance(sharding, NamedSharding) else sharding

    return jax.tree.map(one, shardings, is_leaf=is_sharding)


def spread(prefix: Any, tree: Any, what: str = "") -> list[Spec | None]:
    """The spec of each leaf of `tree`, from its tree prefix `prefix`.

    Raises:
        OptionError: `prefix` is no prefix of `tree`; the message names it by `what`.
    """
    # Positional arguments are a tuple, and `jax.jit` takes a list of shardings for
    # them.
    if isinstance(prefix, list) and isinstance(tree, tuple):
        prefix = tuple(cast(list[Any], prefix))
    if offenders := list(_mismatches(prefix, tree, what.partition(" ")[0])):
        raise errors.OptionError(
            f"{what} must be a tree prefix of the values that they shard, as for "
            f"jax.jit.",
            offenders,
        )
    given, structure = jax.tree.flatten(prefix, is_leaf=is_sharding)
    specs = [None if sharding is None else spec_entries(sharding) for sharding in given]
    parts = zip(specs, structure.flatten_up_to(tree), strict=True)
    return [spec for spec, part in parts for _ in jax.tree.leaves(part)]


def _mismatches(prefix: Any, tree: Any, path: str) -> Iterator[str]:
    """The places at which `prefix` has other children than `tree`."""
    # A sharding, or None, holds for all that is below it.
    if is_sharding(prefix):
        return
    mine, theirs = _children(prefix), _children(tree)
    if mine.keys() != theirs.keys() or type(prefix) is not type(tree):
        theirs_text = _kind(tree, theirs)
        yield f"{path} is {_kind(prefix, mine)}, but it is for {theirs_text}"
        return
    for key, child in mine.items():
        yield from _mismatches(child, theirs[key], path + key)


def _children(node: Any) -> dict[str, Any]:
    """What a node of a tree holds, by key; a leaf holds nothing."""
    # One level at a time: an error names the first node where the trees part.
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    return {jax.tree_util.keystr(path): child for path, child in pairs if path}


def _kind(node: Any, children: Mapping[str, Any]) -> str:
    if not children and jax.tree_util.all_leaves([node]):
        return "one array"
    return f"a {type(node).__name__} of {', '.join(children) or 'nothing'}"


def own(leaf: Any) -> Sharding | None:
    """The sharding of an argument that may not be moved: over a mesh, or on a device.

    A tracer has at most a mesh, and not a layout over it.  Specs are returned without
    Nones at the end, as the results of programs have them.
    """
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        # P('x', None) and P('x') are one layout but not equal.  A training step would
        # be compiled once more for its own result.
        return _shortened(sharding) if spec and spec[-1] is None else sharding
    if sharding is not None:
        # JAX moves an uncommitted array to where it is needed.
        return sharding if getattr(leaf, "committed", True) else None
    mesh = mesh_of_tracer(leaf) if is_tracing(leaf) else None
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


@cached(1024)
def _shortened(sharding: NamedSharding) -> NamedSharding:
    """The same sharding without Nones behind the last axis of its spec."""
    partitions = list(sharding.spec)
    while partitions and partitions[-1] is None:
        partitions.pop()
    return sharding.update(spec=sharding.spec.update(partitions=tuple(partitions)))


def is_spread(sharding: Sharding | None) -> TypeGuard[NamedSharding]:
    """Whether an array with that sharding is split over a mesh."""
    return isinstance(sharding, NamedSharding) and any(sharding.spec)


def own_specs(
    names: Sequence[str],
    shardings: Sequence[Sharding | None],
    wanted: Sequence[bool],
    mesh: AnyMesh,
) -> list[Spec | None]:
    """How arguments are laid out over `mesh`, where that is wanted and they are.

    Raises:
        MeshMismatchError: some are laid out over other meshes.
    """
    sharded = [
        sharding if asked and is_spread(sharding) else None
        for sharding, asked in zip(shardings, wanted, strict=True)
    ]
    offenders = [
        f"{name} has {sharding.spec} over {mesh_text(sharding.mesh, mesh.size)}"
        for name, sharding in zip(names, sharded, strict=True)
        if sharding is not None and not same_mesh(sharding.mesh, mesh)
    ]
    if offenders:
        raise errors.MeshMismatchError(
            f"Arguments are sharded over other meshes than the function's, "
            f"{mesh_text(mesh, mesh.size)}. Move them with jax.device_put(x, "
            "NamedSharding(mesh, spec)), or give jhost.jit their mesh.",
            offenders,
        )
    return [
        None if sharding is None else spec_entries(sharding) for sharding in sharded
    ]


def misplaced(
    names: Sequence[str],
    arrays: Sequence[Any],
    specs: Sequence[Spec | None],
    mesh: Mesh,
) -> list[str]:
    """The committed arrays whose shardings differ from their specs, in words."""
    return [
        f"{name} of shape {array.shape}: {spec_text(spec)} is asked for, and the array "
        f"has "
        f"{getattr(array.sharding, 'spec', array.sharding)}"
        for name, array, spec in zip(names, arrays, specs, strict=True)
        if spec is not None and isinstance(array, jax.Array) and array.committed
        if not array.sharding.is_equivalent_to(
            NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec))),
            array.ndim,
        )
    ]


def problems(
    names: Sequence[str],
    specs: Sequence[Spec | None],
    avals: Iterable[Any],
    mesh: AnyMesh,
) -> list[tuple[str, SpecProblem]]:
    """Why specs do not fit these values, with the values' names."""
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


@cached_by_jaxpr
def annotate(
    jaxpr: Any,
    mesh: AnyMesh,
    in_specs: tuple[Spec | None, ...],
    out_specs: tuple[Spec | None, ...],
) -> Any:
    """`jaxpr` with the shardings of its operands and results as constraints in it.

    Every operand and result gets one, which may leave all dims free: JAX looks for the
    devices of a program in the shardings inside, and would compile one without any for
    one device.
    """

    def annotated(*args: Any) -> list[Any]:
        return _constrain(
            evaluate(jaxpr, _constrain(args, mesh, in_specs)), mesh, out_specs
        )

    closed_jaxpr = jax.make_jaxpr(annotated)(*jaxpr.in_avals)
    # The user's names, not those of the function above.
    named = close(closed_jaxpr.jaxpr.replace(debug_info=jaxpr.jaxpr.debug_info))
    return without_dead_code(named)


def _constrain(
    values: Sequence[Any], mesh: AnyMesh, specs: Sequence[Spec | None]
) -> list[Any]:
    # A spec of None would mean replicated; this leaves the dim to XLA.
    free = PartitionSpec.UNCONSTRAINED
    constrained: list[Any] = []
    for value, spec in zip(values, specs, strict=True):
        entries = (
            [free] * jnp.ndim(value)
            if spec is None
            else [axes or None for axes in spec]
        )
        sharding = NamedSharding(mesh, PartitionSpec(*entries))
        constrained.append(jax.lax.with_sharding_constraint(value, sharding))
    return constrained
