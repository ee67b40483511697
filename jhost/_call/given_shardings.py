"""The meshes and shardings that a user gave `jhost.jit` for a function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, Sharding

from jhost import errors
from jhost._call import shardings
from jhost._call.explicit import wanted_specs
from jhost._call.settings import Settings
from jhost._jax import TracedCall, arg_names, result_paths
from jhost._primitives import Spec
from jhost.lowering.frontend.specs import raise_problems
from jhost.runtime.mesh import (
    AnyMesh,
    auto_mesh,
    automatic_axes,
    explicit_axes,
    explicit_mesh,
    resolve_mesh,
)

CallKey: TypeAlias = tuple[AnyMesh | None, tuple[Sharding | None, ...] | None]
"""A mesh, and the arguments' own shardings, where they count.

The mesh is what `jhost.jit` and `jax.set_mesh` say; in a key that is settled, it is
the one that the function runs on.
"""


class GivenShardings:
    """The values of `mesh=`, `in_shardings=` and `out_shardings=`, and their checks.

    Attributes:
        all: the shardings in them, of any argument or result.
        asks_arguments: whether some arguments have none, so that their own count.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.mesh = settings.mesh
        self.ins, self.outs = settings.in_shardings, settings.out_shardings
        given = shardings.leaves((self.ins, self.outs))
        self.all = [sharding for sharding in given if sharding is not None]
        self.asks_arguments = None in shardings.leaves(self.ins)

    def over(self, mesh: AnyMesh | None) -> AnyMesh | None:
        """The given mesh, or that of the shardings; refused if they contradict it."""
        return resolve_mesh(mesh, self.all)

    @functools.cached_property
    def fixed_mesh(self) -> AnyMesh | None:
        """The mesh, where it does not depend on `jax.set_mesh`."""
        has_mesh = any(hasattr(sharding, "mesh") for sharding in self.all)
        # Specs by themselves may be for any mesh, and that is only known when the
        # function is called.
        if self.mesh is None and not has_mesh:
            return None
        return self.over(self.mesh)

    def check_has_no_mesh(self, axes: Sequence[str]) -> None:
        """Refuses a call in a body over mesh axes, unless all is left to the body."""
        if self.mesh is not None or any(map(shardings.names_axes, self.all)):
            raise errors.UnsupportedError(
                f"{self.name} has a mesh or shardings, and is called in the body of a "
                f"jax.shard_map or jax.pmap over {', '.join(axes)}, where each device "
                f"already works on its own shard. Call it outside, or give jhost.jit "
                f"neither mesh nor shardings: it then works on the shard."
            )

    def named(self, mesh: AnyMesh | None) -> dict[str, Any]:
        """The shardings that were given, for JAX's own jit; none without a mesh."""
        if mesh is None:
            return {}
        trees = {"in_shardings": self.ins, "out_shardings": self.outs}
        problems = [
            problem
            for name, tree in trees.items()
            for problem in shardings.axis_problems(name, tree, mesh)
        ]
        raise_problems(f"jhost.jit of {self.name}", problems)
        return {
            name: shardings.named(tree, mesh)
            for name, tree in trees.items()
            if tree is not None
        }

    def names_devices(self, key: CallKey, leaves: Sequence[Any]) -> bool:
        """Whether JAX's jit is told of a mesh with explicit axes.

        Its shardings tell it, or the arguments' shardings do, or `jax.set_mesh`.
        """
        if key[0] is None or not explicit_axes(key[0]):
            return False
        typed = any(
            isinstance(sharding, NamedSharding) and explicit_axes(sharding.mesh)
            for sharding in map(shardings.own, leaves)
        )
        given = (self.ins, self.outs) != (None, None)
        return typed or given or explicit_mesh(()) is not None

    # --- As marks ------------------------------------------------------------- #

    def marked(self, traced: TracedCall, key: CallKey, named: bool) -> Any:
        """A traced jaxpr with the shardings of its operands and results as marks.

        Where devices are `named` around it, by a mesh with explicit axes, the marks
        must not name them: theirs are automatic, and JAX wants one mesh throughout.
        """
        ins, outs = self.specs(traced)  # refuses what is no prefix, without a mesh too
        # Arrays that are closed over come before the arguments, and have no shardings
        # here.
        (mesh, own), jaxpr, count = key, traced.jaxpr, len(traced.consts)
        if mesh is None:
            return jaxpr
        names, in_avals = arg_names(jaxpr)[count:], jaxpr.in_avals[count:]
        if own is not None:
            free = [spec is None for spec in ins]
            theirs = shardings.own_specs(names, own, free, mesh)
            ins = [o if i is None else i for i, o in zip(ins, theirs, strict=True)]
        problems = [
            *shardings.problems(names, ins, in_avals, mesh),
            *shardings.problems(result_paths(jaxpr), outs, jaxpr.out_avals, mesh),
        ]
        raise_problems(f"jhost.jit of {self.name}", problems)
        outs = wanted_specs(traced, outs, mesh)
        in_specs = (*[None] * count, *shardings.padded(ins, in_avals))
        with automatic_axes():
            out_specs = shardings.padded(outs, jaxpr.out_avals)
            over = auto_mesh(mesh)
            over = over.abstract_mesh if named else over
            return shardings.annotate(jaxpr, over, in_specs, out_specs)

    def specs(self, traced: TracedCall) -> tuple[list[Spec | None], list[Spec | None]]:
        """What the user gave for each argument and each result."""
        # As for `jax.jit`, in_shardings are a prefix of the positional arguments.
        args, kwargs = _with_some_leaves(traced.in_tree)
        results = _with_some_leaves(traced.out_tree)
        outs = shardings.spread(self.outs, results, f"out_shardings of {self.name}")
        return self.in_specs(args, kwargs), outs

    def in_specs(self, args: Any, kwargs: Any) -> list[Spec | None]:
        """What the user gave for each leaf of the arguments."""
        if kwargs and self.ins is not None:
            raise errors.OptionError(
                f"jhost.jit of {self.name} does not support kwargs when in_shardings "
                f"is specified, as jax.jit does not. Give {', '.join(kwargs)} by "
                "position."
            )
        given = shardings.spread(self.ins, args, f"in_shardings of {self.name}")
        return given + shardings.spread(None, kwargs)


def _with_some_leaves(tree: Any) -> Any:
    """A tree of objects, which classes take in place of arrays, as they do JAX's."""
    return jax.tree.unflatten(tree, [object()] * tree.num_leaves)
