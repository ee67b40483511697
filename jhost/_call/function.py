"""What `jhost.jit` makes: a function, lowered once for each kind of arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary

import jax
from jax.sharding import AbstractMesh, NamedSharding

from jhost import errors
from jhost._call import shardings
from jhost._call.arguments import by_name, identity_of, name_of, types_of
from jhost._call.execute import executable_options
from jhost._call.explicit import (
    result_types,
    typed,
    typed_mesh,
    wanted_specs,
    without_types,
)
from jhost._call.program import (
    Call,
    Config,
    annotate,
    derived_params,
    host_program,
)
from jhost._call.residuals import settle_residuals
from jhost._call.settings import Options, Settings, check, check_names
from jhost._call.stages import Lowered
from jhost._jax import (
    Traced,
    arg_names,
    def_split,
    is_tracing,
    result_paths,
    static_arguments,
    trace,
    under_outer_trace,
)
from jhost._primitives import Spec, jhost_p
from jhost.lowering.emit.program import spec_of
from jhost.lowering.frontend.specs import raise_problems
from jhost.runtime.agreement import processes_of
from jhost.runtime.compiler_options import explain_refusal
from jhost.runtime.mesh import (
    AnyMesh,
    auto_mesh,
    automatic_axes,
    explicit_axes,
    explicit_mesh,
    foreign_arrays,
    manual_axes,
    mesh_text,
    resolve_mesh,
    with_types,
)

def_split(jhost_p, settle_residuals, derived_params)

P = ParamSpec("P")
R = TypeVar("R")

Key: TypeAlias = tuple[AnyMesh | None, tuple[NamedSharding | None, ...] | None]
"""A mesh, and the arguments' own shardings, where they count."""


_inside = ContextVar("_inside", default=False)
"""Whether a jhost function is being traced: those that it calls become part of it."""


@contextmanager
def _tracing() -> Generator[None]:
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


class JitFunction(Generic[P, R]):
    """A function compiled by jhost; made by `jhost.jit`."""

    __name__: str
    __wrapped__: Callable[P, R]

    def __init__(self, fun: Callable[P, R], *, settings: Settings) -> None:
        if not callable(fun):
            raise errors.ArgumentError(f"jhost.jit takes a function, but got {fun!r}.")
        self._fun = fun
        self._settings = settings
        self._name = name_of(fun)
        self._static = static_arguments(
            fun, settings.static_argnums, settings.static_argnames
        )
        given = shardings.leaves((settings.in_shardings, settings.out_shardings))
        self._given = [sharding for sharding in given if sharding is not None]
        self._asks_arguments = None in shardings.leaves(settings.in_shardings)
        self._jitted: dict[Key, Any] = {}
        self._uncompared: dict[Key, Any] = {}
        self._identities: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
        functools.update_wrapper(self, fun, updated=())
        self.__name__ = self._name  # not every callable has one

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
            *args: the plain function's arguments: trees of arrays of global shapes, and
                static ones.
            **kwargs: likewise.

        Returns:
            What the plain function returns, as arrays over the mesh.

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
            self._check_has_no_mesh(axes)
            return self._on_one_device(*args, **kwargs)
        leaves = self._leaves(args, kwargs)
        key = self._key(leaves)
        # Where others trace, and with `interpret`, this is one call of the primitive.
        if self._settings.interpret or under_outer_trace() or is_tracing(*leaves):
            config = dataclasses.replace(self._config(key), embedded=True)
            return self._bind(key, config, args, kwargs)
        try:  # no context manager: every call pays for what stands here
            jitted = self._jitted.get(key) or self._make_jitted(key, args, kwargs)
            return jitted(*args, **kwargs)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            self._explain_failure(error, key, args, kwargs)
            raise

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the function as `jax.jit`'s own `trace` does; for `jax.export`.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: x + 1)
            >>> jax.export.export(f)(jnp.zeros(2)).call(jnp.zeros(2)).tolist()
            [1.0, 1.0]
        """
        key = self._key(self._leaves(args, kwargs))
        with self._explained(key, args, kwargs):
            return self._jitted_alone(key, args, kwargs).trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lowers the function for arguments, or `jax.ShapeDtypeStruct` in their place.

        Args:
            *args: as for a call; types with a shape and a dtype may stand for arrays.
            **kwargs: likewise.

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
        key = self._key(self._leaves(args, kwargs))
        with self._explained(key, args, kwargs):
            traced = self._trace(key, args, kwargs)
            named = self._names_devices(key, args, kwargs)
            call_jaxpr = self._call_jaxpr(key, traced, named)
            config = self._identified(self._config(key), traced, args, kwargs)
            program = host_program(call_jaxpr, config)
            lowered = self._jitted_alone(key, args, kwargs).lower(*args, **kwargs)
        return Lowered(
            host_ir=program,
            _lowered=lowered,
            _config=config,
            _consts=traced.consts,
            _avals=tuple(call_jaxpr.out_avals),
        )

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

    # --- Which program -------------------------------------------------------- #

    def _key(self, leaves: Sequence[Any]) -> Key:
        mesh = self._fixed_mesh or resolve_mesh(None, self._given)
        if mesh is None or not self._asks_arguments:
            return mesh, None
        return mesh, tuple(map(shardings.own, leaves))

    def _check_has_no_mesh(self, axes: Sequence[str]) -> None:
        if self._settings.mesh is not None or any(
            map(shardings.names_axes, self._given)
        ):
            raise errors.UnsupportedError(
                f"{self._name} has a mesh or shardings, and is called in the body of a "
                f"jax.shard_map or jax.pmap over {', '.join(axes)}, which is one "
                "device's part already. Call it outside; or give jhost.jit neither, "
                "and it works on the part as it is."
            )

    @functools.cached_property
    def _on_one_device(self) -> Callable[P, R]:
        """Where nothing is between devices, the function itself."""
        static = self._settings.static_argnums, self._settings.static_argnames
        return jax.jit(self._fun, static_argnums=static[0], static_argnames=static[1])

    @functools.cached_property
    def _fixed_mesh(self) -> AnyMesh | None:
        """The mesh, where it does not depend on `jax.set_mesh`."""
        has_mesh = any(hasattr(sharding, "mesh") for sharding in self._given)
        if self._settings.mesh is None and not has_mesh:
            return None
        return resolve_mesh(self._settings.mesh, self._given)

    def without_static(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments that what is compiled takes."""
        return self._static.without(args, kwargs)

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of the arguments that are not static, in order."""
        return jax.tree.leaves(self.without_static(args, kwargs))

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
        shardings = {} if key[0] is None else self._named_shardings(key[0])
        named = self._names_devices(key, args, kwargs)
        call_jaxpr = self._call_jaxpr(key, self._trace(key, args, kwargs), named)
        config = dataclasses.replace(self._config(key), compared=compared)
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

    def _names_devices(self, key: Key, args: Any, kwargs: Any) -> bool:
        """Whether JAX's jit is told of a mesh with explicit axes.

        Its shardings tell it, or those of the arguments, or `jax.set_mesh`.
        """
        if key[0] is None or not explicit_axes(key[0]):
            return False
        own = map(shardings.own, self._leaves(args, kwargs))
        typed = any(sharding and explicit_axes(sharding.mesh) for sharding in own)
        given = (self._settings.in_shardings, self._settings.out_shardings)
        return typed or given != (None, None) or explicit_mesh(()) is not None

    def _named_shardings(self, mesh: AnyMesh) -> dict[str, Any]:
        """The shardings that were given, for JAX's own jit."""
        names = ("in_shardings", "out_shardings")
        trees = {name: getattr(self._settings, name) for name in names}
        problems = [
            problem
            for name, tree in trees.items()
            for problem in shardings.axis_problems(name, tree, mesh)
        ]
        raise_problems(f"jhost.jit of {self._name}", problems)
        return {
            name: shardings.named(tree, mesh)
            for name, tree in trees.items()
            if tree is not None
        }

    def _config(self, key: Key) -> Config:
        settings = self._settings
        return Config(
            name=self._name,
            mesh=None if key[0] is None else auto_mesh(key[0]),
            chunks=settings.chunks or "auto",
            pipeline=settings.pipeline,
            streams=settings.streams,
            interpret=settings.interpret,
            replication_limit=settings.replication_limit,
            compiler_options=tuple((settings.compiler_options or {}).items()),
            tunings=settings.tunings,
        )

    # --- Tracing -------------------------------------------------------------- #

    def as_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """What a call of the function with these arguments runs, and on what."""
        leaves = self._leaves(args, kwargs)
        key = self._key(leaves)
        with self._explained(key, args, kwargs):
            traced = self._trace(key, args, kwargs)
            call_jaxpr = self._call_jaxpr(key, traced)
        return Call(call_jaxpr, self._config(key), (*traced.consts, *leaves))

    def _bind(
        self, key: Key, config: Config, args: Any, kwargs: Any, named: bool = False
    ) -> R:
        """One call of the primitive, in whatever trace there is.

        `named`: what is around the call names the devices.
        """
        traced = self._trace(key, args, kwargs)
        config = self._identified(config, traced, args, kwargs)
        operands = [*traced.consts, *self._leaves(args, kwargs)]
        explicit = explicit_mesh(operands)
        call_jaxpr = self._call_jaxpr(key, traced, named or explicit is not None)
        call: Callable[..., Sequence[Any]] = functools.partial(
            jhost_p.bind, call_jaxpr=call_jaxpr, config=config
        )
        if _inside.get() and explicit is None:  # the program around has it
            return cast(R, jax.tree.unflatten(traced.out_tree, call(*operands)))
        # Now, while the user's call is at hand: what JAX derives is lowered later.
        program = host_program(call_jaxpr, config)
        if explicit is not None:
            _, given = self._specs(traced)
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
            lines = identity_of(traced, self._static, args, kwargs)
            self._identities[traced.jaxpr] = lines
        identity = self._identities[traced.jaxpr]
        return dataclasses.replace(config, identity=identity)

    def _trace(
        self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Traced:
        """The function's jaxpr on types without shardings: they are jhost's business.

        On a mesh with explicit axes JAX's types hold while it is traced.  jhost takes
        more than they do: where they refuse a function, it is traced without.
        """
        mesh = typed_mesh(key[0])
        if mesh is None:
            return self._automatic(args, kwargs)
        try:
            return self._typed(mesh, args, kwargs)
        except Exception:
            with contextlib.suppress(Exception):
                return self._automatic(args, kwargs)
            raise  # what asks for types in vain without them means those

    def _automatic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
        types = types_of(self._static.without(args, kwargs))
        with automatic_axes():
            return self._traced(args, kwargs, types)

    def _typed(self, mesh: AbstractMesh, args: Any, kwargs: Any) -> Traced:
        arguments = self._static.without(args, kwargs)
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
    ) -> Traced:
        """The function's jaxpr on `types` in place of arguments that are not static."""
        nums, positional = self._static.positions(len(args)), iter(types[0])
        with _tracing():
            return trace(
                self._fun,
                [a if i in nums else next(positional) for i, a in enumerate(args)],
                {**kwargs, **types[1]},
                static_argnums=self._settings.static_argnums,
                static_argnames=self._settings.static_argnames,
                donate_argnums=self._settings.donate_argnums,
                donate_argnames=self._settings.donate_argnames,
            )

    def _call_jaxpr(self, key: Key, traced: Traced, named: bool = False) -> Any:
        """The traced jaxpr with the shardings of operands and results as marks.

        Where devices are `named` around it, by a mesh with explicit axes, the marks
        must not name them: theirs are automatic, and JAX wants one mesh throughout.
        """
        mesh, own = key
        if mesh is None:
            return traced.jaxpr
        count, jaxpr = len(traced.consts), traced.jaxpr
        ins, outs = self._specs(traced)
        if own is not None:
            free = [spec is None for spec in ins]
            theirs = shardings.own_specs(arg_names(jaxpr)[count:], own, free, mesh)
            ins = [o if i is None else i for i, o in zip(ins, theirs, strict=True)]
        in_avals = jaxpr.in_avals[count:]
        problems = [
            *shardings.problems(arg_names(jaxpr)[count:], ins, in_avals, mesh),
            *shardings.problems(result_paths(jaxpr), outs, jaxpr.out_avals, mesh),
        ]
        raise_problems(f"jhost.jit of {self._name}", problems)
        outs = wanted_specs(traced, outs, mesh)
        in_specs = (*[None] * count, *shardings.padded(ins, in_avals))
        with automatic_axes():
            out_specs = shardings.padded(outs, jaxpr.out_avals)
            marked = auto_mesh(mesh)
            marked = marked.abstract_mesh if named else marked
            return annotate(jaxpr, marked, in_specs, out_specs)

    def _specs(self, traced: Traced) -> tuple[list[Spec | None], list[Spec | None]]:
        """What the user gave for each argument and each result."""
        numbers = range(traced.in_tree.num_leaves)
        # As for `jax.jit`, in_shardings are a prefix of the positional arguments.
        args, kwargs = jax.tree.unflatten(traced.in_tree, numbers)
        results = jax.tree.unflatten(traced.out_tree, range(traced.out_tree.num_leaves))
        ins = self._in_specs(args, kwargs)
        outs = self._settings.out_shardings
        return ins, shardings.spread(outs, results, f"out_shardings of {self._name}")

    def _in_specs(self, args: Any, kwargs: Any) -> list[Spec | None]:
        """What the user gave for each leaf of the arguments."""
        prefix = self._settings.in_shardings
        if kwargs and prefix is not None:
            raise errors.OptionError(
                f"jhost.jit of {self._name} does not support kwargs when in_shardings "
                f"is specified, as jax.jit does not. Give {', '.join(kwargs)} by "
                "position."
            )
        given = shardings.spread(prefix, args, f"in_shardings of {self._name}")
        return given + shardings.spread(None, kwargs)

    # --- When something is wrong ---------------------------------------------- #

    @contextmanager
    def _explained(
        self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Generator[None]:
        try:
            yield
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            self._explain_failure(error, key, args, kwargs)
            raise

    def _explain_failure(
        self, error: Exception, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise jhost's own error where it can say more than JAX's did."""
        if isinstance(error, errors.JhostError):
            return
        mesh, leaves = key[0], by_name(self._fun, args, kwargs)
        if mesh is not None and (offenders := foreign_arrays(leaves, mesh)):
            raise errors.MeshMismatchError(
                f"{self._name} runs on {mesh_text(mesh)}, but got arrays from "
                "elsewhere. Move them with jax.device_put(x, NamedSharding(mesh, "
                "spec)), or give jhost.jit their mesh.",
                offenders,
            ) from error
        explain_refusal(error, self._name, self._settings.compiler_options or {})
        try:
            traced = self._trace(key, args, kwargs)
            self._call_jaxpr(key, traced)  # names what does not fit
            self._check_layouts(key, traced, self._leaves(args, kwargs))
        except (errors.JhostError, TypeError) as problem:  # TypeError: arguments miss
            raise problem from error
        except Exception:
            return  # the call itself is wrong, and JAX's own words say how

    def _check_layouts(self, key: Key, traced: Traced, leaves: Sequence[Any]) -> None:
        """Raises an error if arrays lie otherwise than `in_shardings` say."""
        if not isinstance(key[0], jax.sharding.Mesh):
            return
        names = arg_names(traced.jaxpr)[len(traced.consts) :]
        ins, _ = self._specs(traced)
        if offenders := shardings.misplaced(names, leaves, ins, key[0]):
            raise errors.OptionError(
                f"in_shardings of {self._name} say otherwise than its arguments lie, "
                "and nothing is moved unasked, as by jax.jit. Move them with "
                "jax.device_put(x, NamedSharding(mesh, spec)), or give None, and they "
                "are taken as they lie.",
                offenders,
            )
