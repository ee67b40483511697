"""A user's function with its settings: which mesh, which jaxpr, and what is wrong."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, NamedSharding, Sharding, get_abstract_mesh

from jhost import errors
from jhost._call import shardings
from jhost._call.arguments import by_name, name_of, types_of
from jhost._call.config import Call, Config
from jhost._call.execute import is_interpreting
from jhost._call.explicit import typed, typed_mesh, wanted_specs, without_types
from jhost._call.meshes import brought_mesh, check_context, inside_mesh
from jhost._call.program import host_program
from jhost._call.settings import Settings
from jhost._call.whole import Whole, check_takes_arrays, left_whole
from jhost._jax import (
    TracedCall,
    arg_names,
    result_paths,
    static_arguments,
    trace,
)
from jhost._primitives import Spec
from jhost.lowering.frontend.specs import raise_problems
from jhost.lowering.ir.program import Program
from jhost.runtime.compiler_options import explain_refusal
from jhost.runtime.mesh import (
    AnyMesh,
    auto_mesh,
    automatic_axes,
    context_mesh,
    explicit_axes,
    explicit_mesh,
    foreign_arrays,
    mesh_text,
    mesh_texts,
    resolve_mesh,
)

CallKey: TypeAlias = tuple[AnyMesh | None, tuple[Sharding | None, ...] | None]
"""A mesh, and the arguments' own shardings, where they count.

The mesh is what `jhost.jit` and `jax.set_mesh` say; in a key that is settled, it is
the one that the function runs on.
"""


inside = ContextVar("inside", default=False)
"""Whether a jhost function is being traced: those that it calls become part of it."""


@contextmanager
def _tracing() -> Generator[None]:
    token = inside.set(True)
    try:
        yield
    finally:
        inside.reset(token)


class Source:
    """A function and the settings of `jhost.jit`, from which its programs come."""

    def __init__(self, fun: Callable[..., Any], settings: Settings) -> None:
        self.fun = fun
        self.settings = settings
        self.name = name_of(fun)
        self.static = static_arguments(
            fun, settings.static_argnums, settings.static_argnames
        )
        given = shardings.leaves((settings.in_shardings, settings.out_shardings))
        self._given = [sharding for sharding in given if sharding is not None]
        self._asks_arguments = None in shardings.leaves(settings.in_shardings)

    # --- Which program -------------------------------------------------------- #

    def key(self, leaves: Sequence[Any]) -> CallKey:
        """What a call on these leaves depends on, beside their types."""
        fixed = self._fixed_mesh
        if fixed is not None and not self._asks_arguments:
            return fixed, None
        return fixed or context_mesh(), tuple(map(shardings.own, leaves))

    def settled(
        self, key: CallKey, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallKey:
        """The key with the mesh that the call runs on.

        Where `jhost.jit` has none, the arguments bring theirs, or what is inside has.

        Raises:
            MeshMismatchError: arguments lie over several meshes.
            NoMeshError: shardings name mesh axes, and there is no mesh.
        """
        mesh, own = key
        if self._fixed_mesh is not None or own is None:
            return key
        if mesh is None:
            mesh = brought_mesh(self.name, self._named(own, args, kwargs))
        if mesh is None:
            mesh = inside_mesh(self.trace(key, args, kwargs), any(own))
        return resolve_mesh(mesh, self._given), own

    def _named(
        self, own: Sequence[Sharding | None], args: Any, kwargs: Any
    ) -> list[tuple[str, Sharding | None]]:
        """The leaves' own shardings with the names of the leaves."""
        names = {id(x): name for name, x in by_name(self.fun, args, kwargs).items()}
        leaves = self.leaves(args, kwargs)
        pairs = zip(leaves, own, strict=True)
        return [(names.get(id(leaf), "an argument"), there) for leaf, there in pairs]

    def check_has_no_mesh(self, axes: Sequence[str]) -> None:
        """Refuses a call in a body over mesh axes, unless all is left to the body."""
        if self.settings.mesh is not None or any(
            map(shardings.names_axes, self._given)
        ):
            raise errors.UnsupportedError(
                f"{self.name} has a mesh or shardings, and is called in the body of a "
                f"jax.shard_map or jax.pmap over {', '.join(axes)}, which is one "
                "device's part already. Call it outside; or give jhost.jit neither, "
                "and it works on the part as it is."
            )

    @functools.cached_property
    def _fixed_mesh(self) -> AnyMesh | None:
        """The mesh, where it does not depend on `jax.set_mesh`."""
        has_mesh = any(hasattr(sharding, "mesh") for sharding in self._given)
        if self.settings.mesh is None and not has_mesh:
            return None
        return resolve_mesh(self.settings.mesh, self._given)

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of the arguments that are not static, in order."""
        return jax.tree.leaves(self.static.without(args, kwargs))

    def names_devices(self, key: CallKey, args: Any, kwargs: Any) -> bool:
        """Whether JAX's jit is told of a mesh with explicit axes.

        Its shardings tell it, or those of the arguments, or `jax.set_mesh`.
        """
        if key[0] is None or not explicit_axes(key[0]):
            return False
        own = map(shardings.own, self.leaves(args, kwargs))
        typed = any(
            isinstance(sharding, NamedSharding) and explicit_axes(sharding.mesh)
            for sharding in own
        )
        given = (self.settings.in_shardings, self.settings.out_shardings)
        return typed or given != (None, None) or explicit_mesh(()) is not None

    def named_shardings(self, mesh: AnyMesh | None) -> dict[str, Any]:
        """The shardings that were given, for JAX's own jit; none without a mesh."""
        if mesh is None:
            return {}
        names = ("in_shardings", "out_shardings")
        trees = {name: getattr(self.settings, name) for name in names}
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

    def config(self, key: CallKey) -> Config:
        """What holds for the program of a key."""
        settings = self.settings
        return Config(
            name=self.name,
            mesh=None if key[0] is None else auto_mesh(key[0]),
            chunks=settings.chunks or "auto",
            pipeline=settings.pipeline,
            replication_limit=settings.replication_limit,
            compiler_options=tuple((settings.compiler_options or {}).items()),
            tunings=settings.tunings,
        )

    # --- Tracing -------------------------------------------------------------- #

    def trace(
        self, key: CallKey, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TracedCall:
        """The function's jaxpr on types without shardings: they are jhost's business.

        On a mesh with explicit axes JAX's types hold while it is traced.  jhost takes
        more than they do: where they refuse a function, it is traced without.
        """
        mesh = typed_mesh(key[0])
        if mesh is None:
            with self._other_types_explained(key[0], args, kwargs):
                return self._automatic(args, kwargs)
        try:
            return self._typed(mesh, args, kwargs)
        except Exception:
            with contextlib.suppress(Exception):
                return self._automatic(args, kwargs)
            raise  # what asks for types in vain without them means those

    @contextmanager
    def _other_types_explained(
        self, mesh: AnyMesh | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Generator[None]:
        """Says so if a function fails because it means types over another mesh.

        Raises:
            MeshMismatchError: with types over the mesh of the context it can be traced.
        """
        try:
            yield
        except ValueError as error:
            context = get_abstract_mesh()
            if mesh is None or not explicit_axes(context):
                raise
            if not self._is_typed_over(context, args, kwargs):
                raise
            theirs, own = mesh_texts(context, mesh)
            raise errors.MeshMismatchError(
                f"Types in {self.name} are of the axes of jax.set_mesh, which are "
                "explicit, and it runs on another mesh. Let both be one mesh, with "
                "explicit axes.",
                [f"of jax.set_mesh: {theirs}", f"the function's: {own}"],
            ) from error

    def _is_typed_over(self, mesh: AbstractMesh, args: Any, kwargs: Any) -> bool:
        """Whether JAX takes the function with types over a mesh."""
        try:
            self._typed(mesh, args, kwargs)
        except Exception:
            return False
        return True

    def _automatic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedCall:
        types = types_of(self.static.without(args, kwargs))
        with automatic_axes():
            return self._traced(args, kwargs, types)

    def _typed(self, mesh: AbstractMesh, args: Any, kwargs: Any) -> TracedCall:
        arguments = self.static.without(args, kwargs)
        leaves, tree = jax.tree.flatten(arguments)
        given = self._in_specs(*arguments)
        types = typed(jax.tree.leaves(types_of(arguments)), leaves, given, mesh)
        with jax.sharding.use_abstract_mesh(mesh):
            traced = self._traced(args, kwargs, jax.tree.unflatten(tree, types))
        return without_types(traced)

    def _traced(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        types: tuple[Sequence[Any], Mapping[str, Any]],
    ) -> TracedCall:
        """The function's jaxpr on `types` in place of arguments that are not static."""
        nums, positional = self.static.positions(len(args)), iter(types[0])
        with _tracing():
            return trace(
                self.fun,
                [a if i in nums else next(positional) for i, a in enumerate(args)],
                {**kwargs, **types[1]},
                static_argnums=self.settings.static_argnums,
                static_argnames=self.settings.static_argnames,
                donate_argnums=self.settings.donate_argnums,
                donate_argnames=self.settings.donate_argnames,
            )

    def program(
        self, key: CallKey, traced: TracedCall, named: bool = False
    ) -> tuple[Program | Whole, Any]:
        """What jhost makes of the function, and the jaxpr that it makes it of."""
        if whole := self.left_whole(key, traced):
            return whole, traced.jaxpr
        call_jaxpr = self.call_jaxpr(key, traced, named)
        return host_program(call_jaxpr, self.config(key)), call_jaxpr

    def left_whole(self, key: CallKey, traced: TracedCall) -> Whole | None:
        """Whether `jax.jit` is to compile the function as it is, and why."""
        return None if is_interpreting() else left_whole(traced.jaxpr, self.config(key))

    def call_jaxpr(self, key: CallKey, traced: TracedCall, named: bool = False) -> Any:
        """The traced jaxpr with the shardings of operands and results as marks.

        Where devices are `named` around it, by a mesh with explicit axes, the marks
        must not name them: theirs are automatic, and JAX wants one mesh throughout.
        """
        mesh, own = key
        ins, outs = self.specs(traced)  # refuses what is no prefix, without a mesh too
        check_takes_arrays(self.name, traced.jaxpr)
        if mesh is None:
            return traced.jaxpr
        count, jaxpr = len(traced.consts), traced.jaxpr
        if own is not None:
            free = [spec is None for spec in ins]
            theirs = shardings.own_specs(arg_names(jaxpr)[count:], own, free, mesh)
            ins = [o if i is None else i for i, o in zip(ins, theirs, strict=True)]
        in_avals = jaxpr.in_avals[count:]
        problems = [
            *shardings.problems(arg_names(jaxpr)[count:], ins, in_avals, mesh),
            *shardings.problems(result_paths(jaxpr), outs, jaxpr.out_avals, mesh),
        ]
        raise_problems(f"jhost.jit of {self.name}", problems)
        outs = wanted_specs(traced, outs, mesh)
        in_specs = (*[None] * count, *shardings.padded(ins, in_avals))
        with automatic_axes():
            out_specs = shardings.padded(outs, jaxpr.out_avals)
            marked = auto_mesh(mesh)
            marked = marked.abstract_mesh if named else marked
            return shardings.annotate(jaxpr, marked, in_specs, out_specs)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """What a call of the function with these arguments runs, and on what."""
        leaves = self.leaves(args, kwargs)
        key = self.key(leaves)
        with self.explained(key, args, kwargs):
            key = self.settled(key, args, kwargs)
            traced = self.trace(key, args, kwargs)
            whole = self.left_whole(key, traced)
            call_jaxpr = traced.jaxpr if whole else self.call_jaxpr(key, traced)
        return Call(call_jaxpr, self.config(key), (*traced.consts, *leaves))

    def specs(self, traced: TracedCall) -> tuple[list[Spec | None], list[Spec | None]]:
        """What the user gave for each argument and each result."""
        # As for `jax.jit`, in_shardings are a prefix of the positional arguments.
        args, kwargs = _with_some_leaves(traced.in_tree)
        results = _with_some_leaves(traced.out_tree)
        ins = self._in_specs(args, kwargs)
        outs = self.settings.out_shardings
        return ins, shardings.spread(outs, results, f"out_shardings of {self.name}")

    def _in_specs(self, args: Any, kwargs: Any) -> list[Spec | None]:
        """What the user gave for each leaf of the arguments."""
        prefix = self.settings.in_shardings
        if kwargs and prefix is not None:
            raise errors.OptionError(
                f"jhost.jit of {self.name} does not support kwargs when in_shardings "
                f"is specified, as jax.jit does not. Give {', '.join(kwargs)} by "
                "position."
            )
        given = shardings.spread(prefix, args, f"in_shardings of {self.name}")
        return given + shardings.spread(None, kwargs)

    # --- When something is wrong ---------------------------------------------- #

    @contextmanager
    def explained(
        self, key: CallKey, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Generator[None]:
        """As `explain_failure`, for what is done in the block."""
        try:
            yield
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            self.explain_failure(error, key, args, kwargs)
            raise

    def explain_failure(
        self,
        error: Exception,
        key: CallKey,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Raise jhost's own error where it can say more than JAX's did."""
        if isinstance(error, errors.JhostError):
            return
        try:
            mesh, _ = self.settled(key, args, kwargs)
        except errors.JhostError as problem:
            raise problem from error
        except Exception:
            mesh = key[0]  # what is wrong is in the function
        key, leaves = (mesh, key[1]), by_name(self.fun, args, kwargs)
        if mesh is not None and (offenders := foreign_arrays(leaves, mesh)):
            raise errors.MeshMismatchError(
                f"{self.name} runs on {mesh_text(mesh)}, but got arrays from "
                "elsewhere. Move them with jax.device_put(x, NamedSharding(mesh, "
                "spec)), or give jhost.jit their mesh.",
                offenders,
            ) from error
        explain_refusal(error, self.name, self.settings.compiler_options or {})
        try:
            check_context(self.name, mesh)
            traced = self.trace(key, args, kwargs)
            self.call_jaxpr(key, traced)  # names what does not fit
            self._check_has_devices(key, self.leaves(args, kwargs))
            self._check_layouts(key, traced, self.leaves(args, kwargs))
        except (errors.JhostError, TypeError) as problem:  # TypeError: arguments miss
            raise problem from error
        except Exception:
            return  # the call itself is wrong, and JAX's own words say how

    def _check_has_devices(self, key: CallKey, leaves: Sequence[Any]) -> None:
        """Raises an error if neither the mesh nor the arguments name the devices."""
        if not isinstance(key[0], AbstractMesh):
            return
        # As for `jax.jit`, shardings over an abstract mesh are for no arrays.
        if self._given or not any(map(shardings.own, leaves)):
            raise errors.NoMeshError(
                f"{self.name} would run on {mesh_text(key[0])}, an abstract mesh, "
                "which has no devices. Call it under jax.set_mesh(...) of one that has."
            )

    def _check_layouts(
        self, key: CallKey, traced: TracedCall, leaves: Sequence[Any]
    ) -> None:
        """Raises an error if arrays lie otherwise than `in_shardings` say."""
        if not isinstance(key[0], jax.sharding.Mesh):
            return
        names = arg_names(traced.jaxpr)[len(traced.consts) :]
        ins, _ = self.specs(traced)
        if offenders := shardings.misplaced(names, leaves, ins, key[0]):
            raise errors.OptionError(
                f"in_shardings of {self.name} say otherwise than its arguments lie, "
                "and nothing is moved unasked, as by jax.jit. Move them with "
                "jax.device_put(x, NamedSharding(mesh, spec)), or give None, and they "
                "are taken as they lie.",
                offenders,
            )


def _with_some_leaves(tree: Any) -> Any:
    """A tree of objects, which classes take in place of arrays, as they do JAX's."""
    return jax.tree.unflatten(tree, [object()] * tree.num_leaves)
