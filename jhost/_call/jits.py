"""JAX's own jits of a function's programs: its dispatch, donation and caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

from jhost._call.bind import bind
from jhost._call.execute import executable_options
from jhost._call.given_shardings import CallKey
from jhost._call.source import Source
from jhost._jax import under_outer_trace
from jhost.runtime.agreement import processes_of


class Jits:
    """One jit for each mesh, and shardings of arguments, that a function is called on.

    Attributes:
        compared: those that run a program once all processes are about to run it.
        alone: those that one of several processes may lower by itself.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.compared: dict[CallKey, Any] = {}
        self.alone: dict[CallKey, Any] = {}

    @property
    def all(self) -> Iterator[Any]:
        yield from self.compared.values()
        yield from self.alone.values()

    def clear(self) -> None:
        self.compared.clear()
        self.alone.clear()

    def to_lower(self, key: CallKey, args: Any, kwargs: Any) -> Any:
        """What `lower` and `trace` use."""
        mesh, _ = self._source.with_mesh(key, args, kwargs)
        # JAX must not find a program in its caches that processes have not compared.
        compared = len(processes_of(mesh)) < 2
        found = (self.compared if compared else self.alone).get(key)
        return found or self.make(key, args, kwargs, compared=compared)

    def make(self, key: CallKey, args: Any, kwargs: Any, compared: bool = True) -> Any:
        """A jit around the call primitive, by the program of these arguments."""
        source, settings = self._source, self._source.settings
        known = source.with_mesh(key, args, kwargs)
        shardings = source.given.named(known[0])
        named = source.given.names_devices(known, source.leaves(args, kwargs))
        traced = source.trace(known, args, kwargs)
        config = dataclasses.replace(source.config(known), compared=compared)
        program, _ = source.program(known, traced, named)

        # It refers to the source, and the source to no jit.  In a cycle, arrays that
        # the function closes over would wait for the garbage collector.
        @functools.wraps(source.fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not under_outer_trace():  # `jax.debug_nans` looks for what made a NaN
                return source.fun(*args, **kwargs)
            return bind(source, key, args, kwargs, named=named, compared=compared)

        jits = self.compared if compared else self.alone
        jits[key] = jax.jit(
            call,
            compiler_options=executable_options(program, config),
            **settings.of_arguments,
            **shardings,
        )
        return jits[key]
