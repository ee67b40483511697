"""What `jhost.jit` makes: a function, lowered once for each kind of arguments."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary, proxy

import jax

from jhost import errors
from jhost._call import shardings, stages
from jhost._call.arguments import identity_of, name_of
from jhost._call.config import Config, derived_params
from jhost._call.execute import (
    check_has_no_options,
    executable_options,
    is_interpreting,
)
from jhost._call.explicit import result_types
from jhost._call.program import host_program
from jhost._call.residuals import settle_residuals
from jhost._call.settings import Options, Settings, check, check_names
from jhost._call.source import CallKey, Source, inside
from jhost._call.whole import for_devices, note
from jhost._jax import (
    TracedCall,
    def_split,
    forget_traces,
    is_linearized,
    is_tracing,
    jit_is_disabled,
    under_outer_trace,
)
from jhost._primitives import jhost_p
from jhost.lowering.emit.program import spec_of
from jhost.runtime.agreement import processes_of
from jhost.runtime.mesh import explicit_mesh, manual_axes, with_types

def_split(jhost_p, settle_residuals, derived_params)

P = ParamSpec("P")
R = TypeVar("R")


class JitFunction(Generic[P, R]):
    """A function compiled by jhost; made by `jhost.jit`.

    Call it as the plain function.  Like what `jax.jit` makes, it has `trace`, `lower`,
    `eval_shape` and `clear_cache`.

    Attributes:
        __wrapped__: the plain function.
        __name__: the plain function's name, or a name for a callable without one.
        __qualname__: the same with the classes and functions around it.
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
        # For where nothing is between devices; and it refuses what JAX does.
        self._on_one_device = jax.jit(
            fun,
            compiler_options=dict(settings.compiler_options or {}),
            **settings.of_arguments,
        )
        self._source = Source(fun, settings)
        self._jitted: dict[CallKey, Any] = {}
        self._uncompared: dict[CallKey, Any] = {}
        self._identities: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
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
        """Runs the function; compiles it first where these types are new.

        Args:
            *args: the plain function's arguments: trees of arrays of the global shapes
                and of the dtypes that it takes, and static ones.
            **kwargs: likewise.

        Returns:
            What the plain function returns, as arrays over the mesh, of its global
            shapes and of its dtypes.

        Raises:
            DimError, SpecRankError, UnknownAxisError, DuplicateAxisError,
                DivisibilityError, OptionError: shardings that do not fit the arguments
                or results.
            NoMeshError, MeshMismatchError: there is no mesh, or there are several.
            StreamConflictError, StreamDimError, PipelineError, ChunksError: marks that
                cannot be followed.
            CompilerOptionError: XLA refuses one of the `compiler_options`, or there are
                some, and the call is part of another program.
            ProcessMismatchError, ProcessTimeoutError: the processes of the mesh are not
                all about to run the same.
            UnsupportedError: a part of JAX that jhost does not take.
        """
        if axes := manual_axes():
            self._source.check_has_no_mesh(axes)
            return self._on_one_device(*args, **kwargs)
        if jit_is_disabled() and not is_interpreting():
            return self._fun(*args, **kwargs)  # as `jax.jit` does
        leaves = self._source.leaves(args, kwargs)
        key = self._source.key(leaves)
        # Where others trace, and to be interpreted, this is one call of the primitive.
        if is_interpreting() or under_outer_trace() or is_tracing(*leaves):
            return self._bind(key, args, kwargs, embedded=True)
        try:  # no context manager: every call pays for what stands here
            jitted = self._jitted.get(key) or self._make_jitted(key, args, kwargs)
            return jitted(*args, **kwargs)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            self._source.explain_failure(error, key, args, kwargs)
            raise

    def trace(self, *args: Any, **kwargs: Any) -> stages.Traced:
        """Traces the function as `jax.jit`'s own `trace` does; for `jax.export`.

        Args:
            *args: arrays of the shapes and dtypes of a call, or `jax.ShapeDtypeStruct`
                in their place, and static arguments.
            **kwargs: likewise.

        Returns:
            The function's jaxpr, ready to be lowered: a `jax.stages.Traced`.

        Raises:
            JhostError: whatever a call would, but for what is seen when it runs.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: x + 1)
            >>> jax.export.export(f)(jnp.zeros(2)).call(jnp.zeros(2)).tolist()
            [1.0, 1.0]
        """
        key = self._source.key(self._source.leaves(args, kwargs))
        with self._source.explained(key, args, kwargs):
            return self._staged(key, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> stages.Lowered:
        """Lowers the function for arguments, or `jax.ShapeDtypeStruct` in their place.

        Args:
            *args: arrays of the shapes and dtypes of a call, or types that have both,
                and static arguments.
            **kwargs: likewise.

        Returns:
            The program, to be read, interpreted or compiled: a `jax.stages.Lowered`.

        Raises:
            JhostError: whatever a call would, but for what is seen when it runs.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: x + 1)
            >>> lowered = f.lower(jax.ShapeDtypeStruct((2,), jnp.float32))
            >>> lowered.compile()(jnp.zeros(2)).tolist()
            [1.0, 1.0]
        """
        key = self._source.key(self._source.leaves(args, kwargs))
        with self._source.explained(key, args, kwargs):
            return self._staged(key, args, kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The types of the results, as `jax.eval_shape` gives them; runs nothing.

        Args:
            *args: arrays of the shapes and dtypes of a call, or `jax.ShapeDtypeStruct`
                in their place, and static arguments.
            **kwargs: likewise.

        Returns:
            A tree of `jax.ShapeDtypeStruct`, with the global shapes and the dtypes of
            what a call returns.

        Raises:
            JhostError: whatever a call would, but for what is seen when it runs.

        Example:
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> jhost.jit(lambda x: x @ x.T).eval_shape(jnp.ones((8, 2))).shape
            (8, 8)
        """
        key = self._source.key(self._source.leaves(args, kwargs))
        with self._source.explained(key, args, kwargs):
            return self._jitted_alone(key, args, kwargs).eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets what was compiled for this function, as that of `jax.jit` does."""
        for jitted in self._every_jitted:
            jitted.clear_cache()
        self._jitted.clear()
        self._uncompared.clear()
        forget_traces(self._fun)

    def _cache_size(self) -> int:
        """How many kinds of calls it knows, as that of `jax.jit` says; for tests."""
        return sum(jitted._cache_size() for jitted in self._every_jitted)

    @property
    def _every_jitted(self) -> Iterator[Any]:
        yield from (self._on_one_device, *self._jitted.values())
        yield from self._uncompared.values()

    def __reduce__(self) -> str:
        """Pickled by its name, as a function is: devices do not outlive a process."""
        return self.__qualname__

    def with_options(self, **options: Unpack[Options]) -> JitFunction[P, R]:
        """This function with other arguments of `jhost.jit`.

        Args:
            **options: arguments of `jhost.jit` by name; the others stay as they are.
                With another mesh, each `NamedSharding` keeps its spec.

        Returns:
            A function of its own, which compiles anew: this one stays as it is.

        Raises:
            ArgumentError: `jhost.jit` has no such argument, or takes no such value.
            ChunksError, OptionError: values that no function could be compiled with.

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
        settled = self._source.settled(key, args, kwargs)
        traced = self._source.trace(settled, args, kwargs)
        config = self._identified(self._source.config(settled), traced, args, kwargs)
        named = self._source.names_devices(settled, args, kwargs)
        program, call_jaxpr = self._source.program(settled, traced, named)
        as_lowered = functools.partial(
            stages.Lowered,
            program=program,
            config=config,
            call_jaxpr=call_jaxpr,
            consts=traced.consts,
        )
        jitted = self._jitted_alone(key, args, kwargs)
        return stages.Traced(jitted.trace(*args, **kwargs), as_lowered)

    def _jitted_alone(self, key: CallKey, args: Any, kwargs: Any) -> Any:
        """What `lower` and `trace` use, which one of several processes may call."""
        settled = self._source.settled(key, args, kwargs)
        if len(processes_of(settled[0])) < 2:
            return self._jitted.get(key) or self._make_jitted(key, args, kwargs)
        # JAX must not find in its caches what has not been compared.
        return self._uncompared.get(key) or self._make_jitted(
            key, args, kwargs, compared=False
        )

    def _make_jitted(
        self, key: CallKey, args: Any, kwargs: Any, compared: bool = True
    ) -> Any:
        """JAX's own jit around the primitive: its dispatch, donation and caches."""
        settled = self._source.settled(key, args, kwargs)
        shardings = self._source.named_shardings(settled[0])
        named = self._source.names_devices(settled, args, kwargs)
        traced = self._source.trace(settled, args, kwargs)
        config = dataclasses.replace(self._source.config(settled), compared=compared)
        program, _ = self._source.program(settled, traced, named)

        # `self` keeps what is made here.  Were that a cycle, arrays that the function
        # closes over would wait for the garbage collector.
        owner = proxy(self)

        @functools.wraps(self._fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not under_outer_trace():  # `jax.debug_nans` looks for what made a NaN
                return owner._fun(*args, **kwargs)
            return owner._bind(key, args, kwargs, named=named, compared=compared)

        jitted = self._jitted if compared else self._uncompared
        jitted[key] = jax.jit(
            call,
            compiler_options=executable_options(program, config),
            **self._settings.of_arguments,
            **shardings,
        )
        return jitted[key]

    def _bind(
        self,
        key: CallKey,
        args: Any,
        kwargs: Any,
        *,
        named: bool = False,
        embedded: bool = False,
        compared: bool = True,
    ) -> R:
        """One call of the primitive, in whatever trace there is.

        `named`: what is around the call names the devices.
        """
        key = self._source.settled(key, args, kwargs)
        traced = self._source.trace(key, args, kwargs)
        if whole := self._source.left_whole(key, traced):
            note(whole, self._source.config(key))
            fun = for_devices(self._fun, traced.jaxpr, key[0])
            if embedded:  # the program around has no shardings of this function
                fun = jax.jit(
                    fun,
                    compiler_options=dict(self._settings.compiler_options or {}),
                    **self._settings.of_arguments,
                    **self._source.named_shardings(key[0]),
                )
            return fun(*args, **kwargs)
        config = dataclasses.replace(
            self._source.config(key), embedded=embedded, compared=compared
        )
        config = self._identified(config, traced, args, kwargs)
        operands = [*traced.consts, *self._source.leaves(args, kwargs)]
        explicit = explicit_mesh(operands)
        call_jaxpr = self._source.call_jaxpr(key, traced, named or explicit is not None)
        in_program = inside.get() and explicit is None  # the one around has it
        # What a gradient runs is lowered then, and refused for the same.
        split = is_linearized(operands) and explicit is None and not config.tunings
        config = dataclasses.replace(config, unchecked=split and not in_program)
        call: Callable[..., Sequence[Any]] = functools.partial(
            jhost_p.bind, call_jaxpr=call_jaxpr, config=config
        )
        if inside.get():  # it is inlined, and nobody lowers it by itself
            check_has_no_options(config)
        if in_program or config.unchecked:
            return cast(R, jax.tree.unflatten(traced.out_tree, call(*operands)))
        # Now, while the user's call is at hand: what JAX derives is lowered later.
        program = host_program(call_jaxpr, config)
        if explicit is not None:
            _, given = self._source.specs(traced)
            specs = result_types(traced, given, map(spec_of, program.results))
            call = with_types(call, explicit, specs)
        return cast(R, jax.tree.unflatten(traced.out_tree, call(*operands)))

    def _identified(
        self, config: Config, traced: TracedCall, args: Any, kwargs: Any
    ) -> Config:
        """With all that processes compare, where there are several."""
        if len(processes_of(config.mesh)) < 2:
            return config
        if traced.jaxpr not in self._identities:
            lines = identity_of(traced, self._source.static, args, kwargs)
            self._identities[traced.jaxpr] = lines
        identity = self._identities[traced.jaxpr]
        return dataclasses.replace(config, identity=identity)
