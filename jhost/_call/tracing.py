"""The jaxpr of a user's function, for arguments and the mesh that it runs on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import AbstractMesh, get_abstract_mesh

from jhost import errors
from jhost._call.arguments import types_of
from jhost._call.explicit import typed, typed_mesh, without_types
from jhost._call.given_shardings import GivenShardings
from jhost._call.settings import Settings
from jhost._jax import TracedCall, static_arguments, trace
from jhost.runtime.mesh import AnyMesh, automatic_axes, explicit_axes, mesh_texts

inside = ContextVar("inside", default=False)
"""Whether a jhost function is being traced: those that it calls become part of it."""


@contextmanager
def _being_traced() -> Generator[None]:
    token = inside.set(True)
    try:
        yield
    finally:
        inside.reset(token)


class Tracing:
    """Traces a function; `static` knows which of its arguments are static."""

    def __init__(
        self, fun: Callable[..., Any], settings: Settings, given: GivenShardings
    ) -> None:
        self.fun, self.settings, self.given = fun, settings, given
        self.name = given.name
        self.static = static_arguments(
            fun, settings.static_argnums, settings.static_argnames
        )

    def trace(
        self, over: AnyMesh | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TracedCall:
        """The function's jaxpr, on types without shardings, as jhost decides these.

        On a mesh with explicit axes it is first traced with JAX's sharding types.  They
        refuse some functions that jhost can run, and these are traced without them.
        """
        mesh = typed_mesh(over)
        if mesh is None:
            with self._other_types_explained(over, args, kwargs):
                return self._automatic(args, kwargs)
        try:
            return self._typed(mesh, args, kwargs)
        except Exception:
            with contextlib.suppress(Exception):
                return self._automatic(args, kwargs)
            raise  # the function asks for types, and fails without them too

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
                f"Types in {self.name} name explicit axes of the mesh of jax.set_mesh, "
                f"but the function runs on another mesh. Use one mesh with explicit "
                f"axes for both.",
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
        # On a mesh whose axes are explicit JAX would take each type without a sharding
        # for a replicated one.
        with automatic_axes():
            return self._traced(args, kwargs, types)

    def _typed(self, mesh: AbstractMesh, args: Any, kwargs: Any) -> TracedCall:
        arguments = self.static.without(args, kwargs)
        leaves, tree = jax.tree.flatten(arguments)
        given = self.given.in_specs(*arguments)
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
        with _being_traced():
            return trace(
                self.fun,
                [a if i in nums else next(positional) for i, a in enumerate(args)],
                {**kwargs, **types[1]},
                static_argnums=self.settings.static_argnums,
                static_argnames=self.settings.static_argnames,
                donate_argnums=self.settings.donate_argnums,
                donate_argnames=self.settings.donate_argnames,
            )
