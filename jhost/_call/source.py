"""A user's function with its settings: the key of a call, and its programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.sharding import Sharding

from jhost._annotate import as_int
from jhost._call import shardings
from jhost._call.arguments import by_name, identity_of, name_of
from jhost._call.config import Config
from jhost._call.execute import is_interpreting
from jhost._call.given_shardings import CallKey, GivenShardings
from jhost._call.meshes import brought_mesh, inside_mesh
from jhost._call.once_a_line import warn_of_unread
from jhost._call.program import host_program
from jhost._call.settings import Settings
from jhost._call.tracing import Tracing
from jhost._call.whole import Whole, check_takes_arrays, left_whole
from jhost._jax import TracedCall
from jhost.lowering.ir.program import Program
from jhost.runtime.agreement import processes_of
from jhost.runtime.mesh import auto_mesh, context_mesh


class Source:
    """A function and the settings of `jhost.jit`, from which its programs come."""

    def __init__(self, fun: Callable[..., Any], settings: Settings) -> None:
        self.fun = fun
        self.settings = settings
        self.name = name_of(fun)
        self.given = GivenShardings(self.name, settings)
        self._tracing = Tracing(fun, settings, self.given)
        self.static = self._tracing.static
        self._identities: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()

    # --- What a call depends on ------------------------------------------------ #

    def key(self, leaves: Sequence[Any]) -> CallKey:
        """Everything but types that a call on these leaves depends on."""
        fixed = self.given.fixed_mesh
        # If the user gives a sharding for each argument, the arguments' own ones do not
        # matter.
        if fixed is not None and not self.given.asks_arguments:
            return fixed, None
        return fixed or context_mesh(), tuple(map(shardings.own, leaves))

    def with_mesh(
        self, key: CallKey, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallKey:
        """The key with the mesh that the call runs on.

        If `jhost.jit` was given no mesh, it is that of the arguments, or one that the
        function names inside.

        Raises:
            MeshMismatchError: arguments lie over several meshes.
            NoMeshError: shardings name mesh axes, and there is no mesh.
        """
        mesh, own = key
        if self.given.fixed_mesh is not None or own is None:
            return key
        if mesh is None:
            mesh = brought_mesh(self.name, self._named(own, args, kwargs))
        if mesh is None:
            mesh = inside_mesh(self.trace(key, args, kwargs), any(own))
        return self.given.over(mesh), own

    def _named(
        self, own: Sequence[Sharding | None], args: Any, kwargs: Any
    ) -> list[tuple[str, Sharding | None]]:
        """The leaves' own shardings with the names of the leaves."""
        names = {id(x): name for name, x in by_name(self.fun, args, kwargs).items()}
        leaves = self.leaves(args, kwargs)
        pairs = zip(leaves, own, strict=True)
        return [(names.get(id(leaf), "an argument"), there) for leaf, there in pairs]

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of the arguments that are not static, in order."""
        return jax.tree.leaves(self.static.without(args, kwargs))

    def config(self, key: CallKey) -> Config:
        """What holds for the program of a key."""
        settings = self.settings
        return Config(
            name=self.name,
            mesh=None if key[0] is None else auto_mesh(key[0]),
            chunks=as_int(settings.chunks) or "auto",
            pipeline=settings.pipeline,
            finds=settings.streams == "auto",
            replication_limit=settings.replication_limit,
            compiler_options=tuple((settings.compiler_options or {}).items()),
            tunings=settings.tunings,
        )

    def identified(
        self, config: Config, traced: TracedCall, args: Any, kwargs: Any
    ) -> Config:
        """With all that processes compare, where there are several."""
        if len(processes_of(config.mesh)) < 2:
            return config
        if traced.jaxpr not in self._identities:
            lines = identity_of(traced, self.static, args, kwargs)
            self._identities[traced.jaxpr] = lines
        identity = self._identities[traced.jaxpr]
        return dataclasses.replace(config, identity=identity)

    # --- What is made of it ---------------------------------------------------- #

    def trace(
        self, key: CallKey, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TracedCall:
        """The function's jaxpr, on types without shardings."""
        return self._tracing.trace(key[0], args, kwargs)

    def program(
        self, key: CallKey, traced: TracedCall, named: bool = False
    ) -> tuple[Program | Whole, Any]:
        """The function's Host IR program, and the jaxpr that it comes from."""
        if whole := self.left_whole(key, traced):
            return whole, traced.jaxpr
        call_jaxpr = self.call_jaxpr(key, traced, named)
        return host_program(call_jaxpr, self.config(key)), call_jaxpr

    def left_whole(self, key: CallKey, traced: TracedCall) -> Whole | None:
        """Whether `jax.jit` is to compile the function as it is, and why."""
        # Only a program can be run statement by statement.
        return None if is_interpreting() else left_whole(traced.jaxpr, self.config(key))

    def call_jaxpr(self, key: CallKey, traced: TracedCall, named: bool = False) -> Any:
        """The traced jaxpr with its marks; `named`, see `GivenShardings.marked`."""
        check_takes_arrays(self.name, traced.jaxpr)
        call_jaxpr = self.given.marked(traced, key, named)
        warn_of_unread(self.name, traced.jaxpr, call_jaxpr)
        return call_jaxpr
