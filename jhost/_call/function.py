"""What `jhost.jit` makes: a function, lowered once for each kind of arguments."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, Unpack

import jax

from jhost import errors
from jhost._call import shardings, stages
from jhost._call.arguments import name_of
from jhost._call.bind import bind
from jhost._call.config import derived_params
from jhost._call.execute import is_interpreting
from jhost._call.failures import explain_failure, explaining_failures
from jhost._call.given_shardings import CallKey
from jhost._call.jits import Jits
from jhost._call.residuals import lay_out_residuals
from jhost._call.settings import Options, Settings, check, check_names
from jhost._call.source import Source
from jhost._garbage import no_garbage_collection
from jhost._jax import (
    def_split,
    forget_traces,
    is_tracing,
    jit_is_disabled,
    under_outer_trace,
)
from jhost._primitives import jhost_p
from jhost.runtime.mesh import manual_axes

# Here and not beside the primitive, because that is below the passes, and these lay
# residuals out.
def_split(jhost_p, lay_out_residuals, derived_params)

P = ParamSpec("P")
R = TypeVar("R")


class JitFunction(Generic[P, R]):
    """A function compiled by jhost; made by `jhost.jit`.

    Call it like the plain function.  It has the methods of a `jax.jit` function:
    `trace`, `lower`, `eval_shape` and `clear_cache`.

    Attributes:
        __wrapped__: the plain function.
        __name__: the plain function's name, or a name for a callable without one.
        __qualname__: the name with the classes and functions around it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jhost
        >>> @jhost.jit
        ... def double(x):
        ...     return x * 2
        >>> double.__name__, jax.vmap(double)(jnp.ones(2)).tolist()
        ('double', [2.0, 2.0])
    """

    __name__: str
    __qualname__: str
    __wrapped__: Callable[P, R]

    def __init__(self, fun: Callable[P, R], *, settings: Settings) -> None:
        if not callable(fun):
            raise errors.ArgumentError(f"jhost.jit takes a function, but got {fun!r}.")
        self._fun = fun
        self._settings = settings
        self._name = name_of(fun)
        # For functions without anything between devices; and it refuses what JAX does.
        self._on_one_device = jax.jit(fun, **settings.for_jax)
        self._source = Source(fun, settings)
        self._jits = Jits(self._source)
        # Without its `__dict__`: attributes of a callable object would replace those
        # above.
        functools.update_wrapper(self, fun, updated=())
        self.__name__ = self._name  # not every callable has one
        self.__qualname__ = getattr(fun, "__qualname__", self._name)

    def __repr__(self) -> str:
        return (
            f"<jhost.jit: {', '.join(filter(None, (self._name, str(self._settings))))}>"
        )

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Makes it a method where it stands in a class, as Python's functions are."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the function, and compiles it first if these types are new.

        Args:
            *args: the plain function's arguments: trees of arrays of the global shapes
                and of the dtypes that it takes, and static ones.
            **kwargs: likewise.

        Returns:
            The results of the plain function, as arrays over the mesh, with its global
            shapes and its dtypes.

        Raises:
            DimError, SpecRankError, UnknownAxisError, DuplicateAxisError,
                DivisibilityError, OptionError: shardings do not fit the arguments or
                results.
            NoMeshError, MeshMismatchError: there is no mesh, or there are several.
            StreamConflictError, StreamDimError, PipelineError, ChunksError: jhost
                cannot follow a mark.
            CompilerOptionError: XLA refuses one of the `compiler_options`, or the
                function has some and the call is part of another program.
            ProcessMismatchError, ProcessTimeoutError: the processes of the mesh are
                about to run different programs, or one of them does not come.
            UnsupportedError: the function uses a part of JAX that jhost does not take.
        """
        if axes := manual_axes():
            self._source.given.check_has_no_mesh(axes)
            return self._on_one_device(*args, **kwargs)
        if jit_is_disabled() and not is_interpreting():
            return self._fun(*args, **kwargs)  # as `jax.jit` does
        leaves = self._source.leaves(args, kwargs)
        key = self._source.key(leaves)
        # Under another trace, and to be interpreted, this is one call of the primitive.
        if is_interpreting() or under_outer_trace() or is_tracing(*leaves):
            return bind(self._source, key, args, kwargs, embedded=True)
        try:  # no context manager: every call of the function would pay for it
            jitted = self._jits.compared.get(key) or self._jits.make(key, args, kwargs)
            return jitted(*args, **kwargs)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            explain_failure(self._source, error, key, args, kwargs)
            raise

    def trace(self, *args: Any, **kwargs: Any) -> stages.Traced:
        """Traces the function as a `jax.jit` function's `trace` does, for `jax.export`.

        Args:
            *args: arrays of the shapes and dtypes of a call, or `jax.ShapeDtypeStruct`
                in their place, and static arguments.
            **kwargs: likewise.

        Returns:
            The function's jaxpr, ready to be lowered: a `jax.stages.Traced`.

        Raises:
            JhostError: as for a call, but for errors that only a run shows.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: x + 1)
            >>> jax.export.export(f)(jnp.zeros(2)).call(jnp.zeros(2)).tolist()
            [1.0, 1.0]
        """
        key = self._source.key(self._source.leaves(args, kwargs))
        with explaining_failures(self._source, key, args, kwargs):
            return self._staged(key, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> stages.Lowered:
        """Lowers the function for arguments of these types.

        Args:
            *args: arrays of the shapes and dtypes of a call, or `jax.ShapeDtypeStruct`
                in their place, and static arguments.
            **kwargs: likewise.

        Returns:
            The program as a `jax.stages.Lowered`: you can read, interpret and compile
            it.

        Raises:
            JhostError: as for a call, but for errors that only a run shows.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: x + 1)
            >>> lowered = f.lower(jax.ShapeDtypeStruct((2,), jnp.float32))
            >>> lowered.compile()(jnp.zeros(2)).tolist()
            [1.0, 1.0]
        """
        key = self._source.key(self._source.leaves(args, kwargs))
        with explaining_failures(self._source, key, args, kwargs):
            # What the user's function makes while it is traced may well be garbage.
            self._source.trace(self._source.with_mesh(key, args, kwargs), args, kwargs)
            with no_garbage_collection():
                return self._staged(key, args, kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the types of the results, as `jax.eval_shape` does; runs nothing.

        Args:
            *args: arrays of the shapes and dtypes of a call, or `jax.ShapeDtypeStruct`
                in their place, and static arguments.
            **kwargs: likewise.

        Returns:
            A tree of `jax.ShapeDtypeStruct`, with the global shapes and the dtypes of
            the results of a call.

        Raises:
            JhostError: as for a call, but for errors that only a run shows.

        Example:
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> jhost.jit(lambda x: x @ x.T).eval_shape(jnp.ones((8, 2))).shape
            (8, 8)
        """
        key = self._source.key(self._source.leaves(args, kwargs))
        with explaining_failures(self._source, key, args, kwargs):
            return self._jits.to_lower(key, args, kwargs).eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets what was compiled for this function, as `jax.jit` functions do."""
        for jitted in self._every_jit:
            jitted.clear_cache()
        self._jits.clear()
        forget_traces(self._fun)

    def _cache_size(self) -> int:
        """How many kinds of calls are compiled, as `jax.jit` counts them; for tests."""
        return sum(jitted._cache_size() for jitted in self._every_jit)

    @property
    def _every_jit(self) -> Iterator[Any]:
        yield self._on_one_device
        yield from self._jits.all

    def __reduce__(self) -> str:
        """Pickled by its name, as a function is: devices do not outlive a process."""
        return self.__qualname__

    def with_options(self, **options: Unpack[Options]) -> JitFunction[P, R]:
        """Makes this function again with other arguments of `jhost.jit`.

        Args:
            **options: arguments of `jhost.jit` by name; the others stay as they are.
                With another mesh, each `NamedSharding` keeps its spec.

        Returns:
            The new function.  This one stays as it is.

        Raises:
            ArgumentError: `jhost.jit` has no such argument, or it has the wrong type.
            ChunksError, OptionError: an argument has a value that is not accepted.

        Example:
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: jhost.stream(x * 2, axis=0))
            >>> x = jnp.ones((8, 2))
            >>> jhost.explain(f.with_options(chunks=4), x).streams[0].chunks
            4
        """
        kept: Options = {}
        if "mesh" in options:
            # Over the old mesh they would contradict the new one.
            kept["in_shardings"] = shardings.specs(self._settings.in_shardings)
            kept["out_shardings"] = shardings.specs(self._settings.out_shardings)
        check_names(options)
        settings = dataclasses.replace(self._settings, **{**kept, **options})
        check(settings)
        return JitFunction(self._fun, settings=settings)

    # --- Calls ---------------------------------------------------------------- #

    @property
    def __jhost_source__(self) -> Source:
        """The function with its settings: for `tune`, `profile`, `testing`, `explain`.

        As `__jax_array__` it is between libraries' own modules, and no user's.
        """
        return self._source

    def _staged(self, key: CallKey, args: Any, kwargs: Any) -> stages.Traced:
        """JAX's stage, with what jhost makes of the function."""
        known = self._source.with_mesh(key, args, kwargs)
        traced = self._source.trace(known, args, kwargs)
        config = self._source.identified(
            self._source.config(known), traced, args, kwargs
        )
        leaves = self._source.leaves(args, kwargs)
        named = self._source.given.names_devices(known, leaves)
        program, call_jaxpr = self._source.program(known, traced, named)
        as_lowered = functools.partial(
            stages.Lowered,
            program=program,
            config=config,
            call_jaxpr=call_jaxpr,
            consts=traced.consts,
        )
        jitted = self._jits.to_lower(key, args, kwargs)
        return stages.Traced(jitted.trace(*args, **kwargs), as_lowered)
