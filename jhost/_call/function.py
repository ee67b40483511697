"""What `jhost.jit` makes: a function, lowered once for each kind of arguments."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary

import jax

from jhost import errors
from jhost._call import shardings
from jhost._call.arguments import identity_of, name_of
from jhost._call.config import Call, Config, derived_params
from jhost._call.execute import executable_options
from jhost._call.explicit import result_types
from jhost._call.program import host_program
from jhost._call.residuals import settle_residuals
from jhost._call.settings import Options, Settings, check, check_names
from jhost._call.source import Key, Source, inside
from jhost._call.stages import Lowered
from jhost._jax import Traced, def_split, forget_traces, is_tracing, under_outer_trace
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
        self._source = Source(fun, settings)
        self._jitted: dict[Key, Any] = {}
        self._uncompared: dict[Key, Any] = {}
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
            CompilerOptionError: XLA refuses one of the `compiler_options`.
            ProcessMismatchError, ProcessTimeoutError: the processes of the mesh are not
                all about to run the same.
            UnsupportedError: a part of JAX that jhost does not take.
        """
        if axes := manual_axes():
            self._source.check_has_no_mesh(axes)
            return self._on_one_device(*args, **kwargs)
        leaves = self._source.leaves(args, kwargs)
        key = self._source.key(leaves)
        # Where others trace, and with `interpret`, this is one call of the primitive.
        if self._settings.interpret or under_outer_trace() or is_tracing(*leaves):
            config = dataclasses.replace(self._source.config(key), embedded=True)
            return self._bind(key, config, args, kwargs)
        try:  # no context manager: every call pays for what stands here
            jitted = self._jitted.get(key) or self._make_jitted(key, args, kwargs)
            return jitted(*args, **kwargs)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            self._source.explain_failure(error, key, args, kwargs)
            raise

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the function as `jax.jit`'s own `trace` does; for `jax.export`.

        Args:
            *args: arrays of the shapes and dtypes of a call, or `jax.ShapeDtypeStruct`
                in their place, and static arguments.
            **kwargs: likewise.

        Returns:
            JAX's own stage, whose `lower` is that of `jax.jit`.

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
            return self._jitted_alone(key, args, kwargs).trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lowers the function for arguments, or `jax.ShapeDtypeStruct` in their place.

        Args:
            *args: arrays of the shapes and dtypes of a call, or types that have both,
                and static arguments.
            **kwargs: likewise.

        Returns:
            The program, to be read, interpreted or compiled.

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
            traced = self._source.trace(key, args, kwargs)
            named = self._source.names_devices(key, args, kwargs)
            call_jaxpr = self._source.call_jaxpr(key, traced, named)
            config = self._identified(self._source.config(key), traced, args, kwargs)
            program = host_program(call_jaxpr, config)
            lowered = self._jitted_alone(key, args, kwargs).lower(*args, **kwargs)
        return Lowered(
            host_ir=program,
            _lowered=lowered,
            _config=config,
            _consts=traced.consts,
            _avals=tuple(call_jaxpr.out_avals),
        )

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
        for jitted in (*self._jitted.values(), *self._uncompared.values()):
            jitted.clear_cache()
        self._jitted.clear()
        self._uncompared.clear()
        forget_traces(self._fun)

    def __reduce__(self) -> str:
        """Pickled by its name, as a function is: devices do not outlive a process."""
        return self.__qualname__

    def with_options(self, **options: Unpack[Options]) -> JitFunction[P, R]:
        """This function with other arguments of `jhost.jit`.

        With another mesh, each `NamedSharding` keeps its spec.

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

    @functools.cached_property
    def _on_one_device(self) -> Callable[P, R]:
        """Where nothing is between devices, the function itself."""
        static = self._settings.static_argnums, self._settings.static_argnames
        return jax.jit(self._fun, static_argnums=static[0], static_argnames=static[1])

    def without_static(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments that what is compiled takes."""
        return self._source.static.without(args, kwargs)

    def _jitted_alone(self, key: Key, args: Any, kwargs: Any) -> Any:
        """What `lower` and `trace` use, which one of several processes may call."""
        if len(processes_of(key[0])) < 2:
            return self._jitted.get(key) or self._make_jitted(key, args, kwargs)
        # JAX must not find in its caches what has not been compared.
        return self._uncompared.get(key) or self._make_jitted(
            key, args, kwargs, compared=False
        )

    def _make_jitted(
        self, key: Key, args: Any, kwargs: Any, compared: bool = True
    ) -> Any:
        """JAX's own jit around the primitive: its dispatch, donation and caches."""
        shardings = {} if key[0] is None else self._source.named_shardings(key[0])
        named = self._source.names_devices(key, args, kwargs)
        call_jaxpr = self._source.call_jaxpr(
            key, self._source.trace(key, args, kwargs), named
        )
        config = dataclasses.replace(self._source.config(key), compared=compared)
        options = executable_options(host_program(call_jaxpr, config), config)

        @functools.wraps(self._fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._bind(key, config, args, kwargs, named)

        settings = self._settings
        jitted = self._jitted if compared else self._uncompared
        jitted[key] = jax.jit(
            call,
            static_argnums=settings.static_argnums,
            static_argnames=settings.static_argnames,
            donate_argnums=settings.donate_argnums,
            donate_argnames=settings.donate_argnames,
            compiler_options=options,
            **shardings,
        )
        return jitted[key]

    def as_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """What a call of the function with these arguments runs, and on what."""
        leaves = self._source.leaves(args, kwargs)
        key = self._source.key(leaves)
        with self._source.explained(key, args, kwargs):
            traced = self._source.trace(key, args, kwargs)
            call_jaxpr = self._source.call_jaxpr(key, traced)
        return Call(call_jaxpr, self._source.config(key), (*traced.consts, *leaves))

    def _bind(
        self, key: Key, config: Config, args: Any, kwargs: Any, named: bool = False
    ) -> R:
        """One call of the primitive, in whatever trace there is.

        `named`: what is around the call names the devices.
        """
        traced = self._source.trace(key, args, kwargs)
        config = self._identified(config, traced, args, kwargs)
        operands = [*traced.consts, *self._source.leaves(args, kwargs)]
        explicit = explicit_mesh(operands)
        call_jaxpr = self._source.call_jaxpr(key, traced, named or explicit is not None)
        call: Callable[..., Sequence[Any]] = functools.partial(
            jhost_p.bind, call_jaxpr=call_jaxpr, config=config
        )
        if inside.get() and explicit is None:  # the program around has it
            return cast(R, jax.tree.unflatten(traced.out_tree, call(*operands)))
        # Now, while the user's call is at hand: what JAX derives is lowered later.
        program = host_program(call_jaxpr, config)
        if explicit is not None:
            _, given = self._source.specs(traced)
            specs = result_types(traced, given, map(spec_of, program.results))
            call = with_types(call, explicit, specs)
        return cast(R, jax.tree.unflatten(traced.out_tree, call(*operands)))

    def _identified(
        self, config: Config, traced: Traced, args: Any, kwargs: Any
    ) -> Config:
        """With all that processes compare, where there are several."""
        if len(processes_of(config.mesh)) < 2:
            return config
        if traced.jaxpr not in self._identities:
            lines = identity_of(traced, self._source.static, args, kwargs)
            self._identities[traced.jaxpr] = lines
        identity = self._identities[traced.jaxpr]
        return dataclasses.replace(config, identity=identity)
