"""`jhost.jit`: the decorator, and JAX's ahead-of-time words for it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, cast, get_args, overload

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jhost import errors
from jhost._annotate import Chunks, Pipeline, as_int, spec_entries
from jhost._jax import Names, Nums, Traced, arg_names, is_tracing, result_paths
from jhost._jax import trace as trace_function
from jhost._jax import under_outer_trace
from jhost._primitives import Spec, jhost_p
from jhost._program import Config, annotate, host_program
from jhost.lowering.explain import Explanation, explain_program
from jhost.lowering.ir import Program
from jhost.lowering.specs import Problem, check_spec, raise_problems
from jhost.runtime import dump
from jhost.runtime.mesh import (
    AnyMesh,
    abstract,
    foreign_arrays,
    mesh_text,
    resolve_mesh,
    same_mesh,
)

P = ParamSpec("P")
R = TypeVar("R")

ArgSpecs: TypeAlias = tuple[Spec | None, ...]
"""What the arguments' own shardings say, a spec a leaf."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The arguments of `jhost.jit`, as given."""

    mesh: AnyMesh | None
    in_shardings: Any
    out_shardings: Any
    static_argnums: Nums
    static_argnames: Names
    donate_argnums: Nums
    donate_argnames: Names
    chunks: Chunks
    pipeline: Pipeline
    streams: int
    interpret: bool
    compiler_options: Mapping[str, Any] | None


@overload
def jit(f: Callable[P, R], /, **settings: Any) -> JitFunction[P, R]: ...


@overload
def jit(
    f: None = None, /, **settings: Any
) -> Callable[[Callable[P, R]], JitFunction[P, R]]: ...


def jit(
    f: Callable[..., Any] | None = None,
    /,
    *,
    mesh: AnyMesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: Nums = None,
    static_argnames: Names = None,
    donate_argnums: Nums = None,
    donate_argnames: Names = None,
    chunks: Chunks = "auto",
    pipeline: Pipeline = "auto",
    streams: int = 4,
    interpret: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles a function as `jax.jit` does, with the streams marked in it pipelined.

    The result is a JAX function: it can be differentiated, batched, and called inside
    other transforms.

    Args:
        f: the function, of any pytrees of arrays.  Without it, a decorator is returned.
        mesh: the devices; by default the shardings' mesh, or that of `jax.set_mesh`.
            Without any, the function runs on one device.
        in_shardings: as for `jax.jit`: a pytree prefix of the positional arguments, of
            `PartitionSpec`, `NamedSharding`, or None to take it from the argument.
        out_shardings: the same for the results; None leaves the choice to jhost.
        static_argnums: as for `jax.jit`.
        static_argnames: as for `jax.jit`.
        donate_argnums: as for `jax.jit`.
        donate_argnames: as for `jax.jit`.
        chunks: how many chunks a stream is cut into, or `"auto"`, where the mark itself
            does not say.
        pipeline: `"collective"`, `"p2p"`, `"off"` or `"auto"`, likewise.
        streams: how many streams the iterations of a loop take turns on.
        interpret: run the Host IR statement by statement, for debugging.
        compiler_options: XLA options for this function's executables.

    Returns:
        The compiled function, with `lower` as `jax.jit`'s has.

    Raises:
        OptionError: a pipeline that there is not, or fewer than one stream.
        ChunksError: fewer than one chunk.
        ArgumentError: an argument of another type.
        NoMeshError, MeshMismatchError: when it is called, if the shardings name axes of
            no mesh, or of several.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> @jhost.jit
        ... def f(x):
        ...     return jhost.stream(jnp.sin(x) * 2, axis=0, chunks=4)
        >>> f(jnp.zeros((8, 2))).shape
        (8, 2)
    """
    settings = _Settings(
        mesh=mesh,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        chunks=chunks,
        pipeline=pipeline,
        streams=streams,
        interpret=interpret,
        compiler_options=compiler_options,
    )
    _check_settings(settings)
    if f is None:
        return functools.partial(JitFunction, settings=settings)
    return JitFunction(f, settings=settings)


def explain(f: JitFunction[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What jhost makes of a function on these arguments, and why.

    Args:
        f: a function made by `jhost.jit`.
        *args: arrays, or `jax.ShapeDtypeStruct`s in their place.
        **kwargs: likewise.

    Returns:
        The streams with the pipeline and chunk count of each and the reason, the
        communications with their bytes, and what was not pipelined.  Prints well; its
        fields are for tools.

    Raises:
        ArgumentError: `f` is not a jhost function.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> f = jhost.jit(lambda x: jhost.stream(x * 2, axis=0, chunks=2))
        >>> print(jhost.explain(f, jnp.ones((4, 2))).streams[0].chunks)
        2
    """
    if not isinstance(f, JitFunction):
        raise errors.ArgumentError(
            f"jhost.explain takes a function made by jhost.jit, but got {f!r}. Decorate "
            "it first."
        )
    return f.lower(*args, **kwargs).explain()


class JitFunction(Generic[P, R]):
    """A function compiled by jhost; made by `jhost.jit`."""

    def __init__(self, fun: Callable[P, R], *, settings: _Settings) -> None:
        if not callable(fun):
            raise errors.ArgumentError(f"jhost.jit takes a function, but got {fun!r}.")
        self._fun = fun
        self._settings = settings
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._static = _static_arguments(fun, settings)
        shardings = jax.tree.leaves(
            (settings.in_shardings, settings.out_shardings), is_leaf=_is_sharding
        )
        self._shardings = [s for s in shardings if s is not None]
        given = jax.tree.leaves(settings.in_shardings, is_leaf=_is_sharding)
        self._asks_arguments = None in given
        self._jitted: dict[tuple[AnyMesh | None, ArgSpecs | None], Any] = {}
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the function; compiles it first where these types are new."""
        leaves = jax.tree.leaves((args, kwargs))
        key = self._key(args, kwargs)
        if (
            self._settings.interpret
            or is_tracing(*leaves)
            or (under_outer_trace())
        ):
            return self._bind(key, args, kwargs)
        try:
            return self._jitted_for(key)(*args, **kwargs)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, errors.JhostError):
                self._explain_failure(error, key, args, kwargs)
            raise

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lowers the function for these arguments, which `ShapeDtypeStruct`s may stand for.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: x + 1)
            >>> lowered = f.lower(jax.ShapeDtypeStruct((2,), jnp.float32))
            >>> lowered.compile()(jnp.zeros(2)).tolist()
            [1.0, 1.0]
        """
        key = self._key(args, kwargs)
        try:
            call_jaxpr = self._call_jaxpr(key, self._trace(args, kwargs))
            program = host_program(call_jaxpr, self._config(key[0]))
            jax_lowered = self._jitted_for(key).lower(*args, **kwargs)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, errors.JhostError):
                self._explain_failure(error, key, args, kwargs)
            raise
        return Lowered(host_ir=program, _lowered=jax_lowered)

    # --- Which program -------------------------------------------------------- #

    def _key(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[AnyMesh | None, ArgSpecs | None]:
        """The mesh, and what the arguments say of their layouts where that counts."""
        mesh = resolve_mesh(self._settings.mesh, self._shardings)
        if mesh is None or not self._asks_arguments:
            return mesh, None
        leaves = jax.tree.leaves(self._dynamic(args, kwargs))
        return mesh, tuple(_own_spec(leaf, mesh) for leaf in leaves)

    def _dynamic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The arguments without the static ones."""
        nums, names = self._static
        return (
            tuple(arg for number, arg in enumerate(args) if number not in nums),
            {name: arg for name, arg in kwargs.items() if name not in names},
        )

    def _jitted_for(self, key: tuple[AnyMesh | None, ArgSpecs | None]) -> Any:
        if key not in self._jitted:
            self._jitted[key] = self._make_jitted(key)
        return self._jitted[key]

    def _make_jitted(self, key: tuple[AnyMesh | None, ArgSpecs | None]) -> Any:
        mesh, settings = key[0], self._settings

        @functools.wraps(self._fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._bind(key, args, kwargs)

        shardings: dict[str, Any] = {}
        for name in ("in_shardings", "out_shardings"):
            given = getattr(settings, name)
            if mesh is not None and given is not None:
                shardings[name] = jax.tree.map(
                    functools.partial(_named, mesh), given, is_leaf=_is_sharding
                )
        options = {**(settings.compiler_options or {}), **dump.compiler_options()}
        return jax.jit(
            call,
            static_argnums=settings.static_argnums,
            static_argnames=settings.static_argnames,
            donate_argnums=settings.donate_argnums,
            donate_argnames=settings.donate_argnames,
            compiler_options=options or None,
            **shardings,
        )

    def _config(self, mesh: AnyMesh | None) -> Config:
        settings = self._settings
        return Config(
            name=self._name,
            mesh=mesh,
            chunks=settings.chunks or "auto",
            pipeline=settings.pipeline,
            streams=settings.streams,
            interpret=settings.interpret,
            compiler_options=tuple((settings.compiler_options or {}).items()),
        )

    # --- Tracing -------------------------------------------------------------- #

    def _bind(
        self, key: tuple[AnyMesh | None, ArgSpecs | None], args: Any, kwargs: Any
    ) -> R:
        """One call of the primitive, in whatever trace there is."""
        traced = self._trace(args, kwargs)
        call_jaxpr = self._call_jaxpr(key, traced)
        leaves = jax.tree.leaves(self._dynamic(args, kwargs))
        config = self._config(key[0])
        outs = jhost_p.bind(
            *traced.consts, *leaves, call_jaxpr=call_jaxpr, config=config
        )
        return cast(R, jax.tree.unflatten(traced.out_tree, outs))

    def _trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
        """The function's jaxpr on shapes alone: shardings are jhost's business."""
        nums, names = self._static
        shapes = [a if i in nums else _shapes(a) for i, a in enumerate(args)]
        kwshapes = {n: a if n in names else _shapes(a) for n, a in kwargs.items()}
        return trace_function(
            self._fun,
            shapes,
            kwshapes,
            static_argnums=self._settings.static_argnums,
            static_argnames=self._settings.static_argnames,
        )

    def _call_jaxpr(
        self, key: tuple[AnyMesh | None, ArgSpecs | None], traced: Traced
    ) -> Any:
        """The traced jaxpr with the shardings of operands and results as marks."""
        mesh, own = key
        if mesh is None:
            return traced.jaxpr
        names = arg_names(traced.jaxpr)
        count = len(traced.consts)
        ins = self._specs("in_shardings", traced.in_tree)
        if own is not None:
            ins = [o if i is None else i for i, o in zip(ins, own, strict=True)]
        outs = self._specs("out_shardings", traced.out_tree)
        problems = [
            *_problems(names[count:], ins, traced.jaxpr.in_avals[count:], mesh),
            *_problems(result_paths(traced.jaxpr), outs, traced.jaxpr.out_avals, mesh),
        ]
        raise_problems(f"jhost.jit of {self._name}", problems)
        in_specs = (
            *(None,) * count,
            *_padded(ins, traced.jaxpr.in_avals[count:]),
        )
        out_specs = _padded(outs, traced.jaxpr.out_avals)
        return annotate(traced.jaxpr, in_specs, out_specs)

    def _specs(self, name: str, tree: Any) -> list[Spec | None]:
        """The user's shardings of the leaves of `tree`; None where there is none."""
        prefix = getattr(self._settings, name)
        if name == "in_shardings":
            # As for `jax.jit`, a prefix of the positional arguments.
            args, kwargs = jax.tree.unflatten(tree, range(tree.num_leaves))
            full: Any = args
            rest = [None] * len(jax.tree.leaves(kwargs))
        else:
            full, rest = jax.tree.unflatten(tree, range(tree.num_leaves)), []
        if isinstance(prefix, list):
            prefix = tuple(cast(list[Any], prefix))
        spread = jax.tree.broadcast(prefix, full, is_leaf=_is_sharding)
        leaves = jax.tree.leaves(spread, is_leaf=_is_sharding)
        return [None if leaf is None else spec_entries(leaf) for leaf in leaves] + rest

    # --- When something is wrong ---------------------------------------------- #

    def _explain_failure(
        self,
        error: Exception,
        key: tuple[AnyMesh | None, ArgSpecs | None],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Raise jhost's own error where it can say more than JAX's did."""
        mesh = key[0]
        named = jax.tree.leaves_with_path(_by_name(self._fun, args, kwargs))
        names = [_path_text(path) for path, _ in named]
        if offenders := foreign_arrays(names, [leaf for _, leaf in named], mesh):
            assert mesh is not None
            raise errors.MeshMismatchError(
                f"{self._name} runs on {mesh_text(mesh)}, but got arrays from elsewhere. "
                "Move them with jax.device_put(x, NamedSharding(mesh, spec)), or give "
                "jhost.jit their mesh.",
                offenders,
            ) from error
        self._call_jaxpr(key, self._trace(args, kwargs))
        if "compile option" in str(error) and self._settings.compiler_options:
            raise errors.CompilerOptionError(
                f"XLA refuses an option of {self._name}: {error}. Options are XLA's "
                "DebugOptions fields, as for jax.jit; another version or backend may "
                "not have this one.",
                [f"{k}={v!r}" for k, v in self._settings.compiler_options.items()],
            ) from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A function lowered for some types; `host_ir` is its program."""

    host_ir: Program
    _lowered: jax.stages.Lowered

    def as_text(self, dialect: str = "host_ir") -> str:
        """The program as text.

        Args:
            dialect: `"host_ir"`, or what `jax.stages.Lowered.as_text` takes
                (`"stablehlo"`, `"hlo"`).
        """
        if dialect == "host_ir":
            return str(self.host_ir)
        return self._lowered.as_text(dialect)

    def explain(self) -> Explanation:
        """What was pipelined, how and why; `jhost.explain` says more of it."""
        return explain_program(self.host_ir)

    def compile(self) -> Compiled:
        """Compiles the program for its devices."""
        return Compiled(host_ir=self.host_ir, _compiled=self._lowered.compile())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled function; call it with arrays of the types it was lowered for."""

    host_ir: Program
    _compiled: jax.stages.Compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the executable."""
        return self._compiled(*args, **kwargs)

    def as_text(self) -> str:
        """XLA's scheduled module (HLO)."""
        return self._compiled.as_text() or ""

    def memory_analysis(self) -> Any:
        """As `jax.stages.Compiled.memory_analysis`."""
        return self._compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """As `jax.stages.Compiled.cost_analysis`."""
        return self._compiled.cost_analysis()

    def explain(self) -> Explanation:
        """What was pipelined, how and why."""
        return explain_program(self.host_ir)


# --- Arguments ---------------------------------------------------------------- #


def _check_settings(settings: _Settings) -> None:
    if settings.chunks not in (None, "auto"):
        count = as_int(settings.chunks)
        if count is None:
            raise errors.ArgumentError(
                f"jhost.jit takes an int or 'auto' as chunks, but got {settings.chunks!r}."
            )
        if count < 1:
            raise errors.ChunksError(
                f"jhost.jit got chunks={count}, but needs at least 1. To turn streams "
                "off, use pipeline='off'."
            )
    if settings.pipeline not in get_args(Pipeline):
        raise errors.OptionError(
            f"jhost.jit got pipeline={settings.pipeline!r}, which is none of "
            f"{', '.join(map(repr, get_args(Pipeline)))}."
        )
    streams = as_int(settings.streams)
    if streams is None or streams < 1:
        raise errors.OptionError(
            f"jhost.jit got streams={settings.streams!r}, but needs an int of at least 1."
        )


def _static_arguments(
    fun: Callable[..., Any], settings: _Settings
) -> tuple[frozenset[int], frozenset[str]]:
    """The static arguments by position and by name, each inferred from the other."""
    nums = _as_tuple(settings.static_argnums)
    names = _as_tuple(settings.static_argnames)
    try:
        parameters = list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):  # a builtin; JAX infers nothing there either
        parameters = []
    nums = tuple(n % len(parameters) if parameters else n for n in nums)
    if not names:
        names = tuple(parameters[n] for n in nums if n < len(parameters))
    if not nums:
        nums = tuple(parameters.index(name) for name in names if name in parameters)
    return frozenset(nums), frozenset(names)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)


def _by_name(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments by the function's own names for them."""
    try:
        return dict(inspect.signature(fun).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}


def _path_text(path: Sequence[Any]) -> str:
    return f"{path[0].key}{jax.tree_util.keystr(tuple(path[1:]))}"


def _shapes(tree: Any) -> Any:
    """`tree` with arrays replaced by their types alone."""

    def shape(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
        weak = getattr(aval, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)

    return jax.tree.map(shape, tree)


# --- Shardings ---------------------------------------------------------------- #


def _is_sharding(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


def _named(mesh: AnyMesh, sharding: Any) -> Any:
    if isinstance(sharding, NamedSharding):
        sharding = sharding.spec
    return sharding if sharding is None else NamedSharding(mesh, sharding)


def _own_spec(leaf: Any, mesh: AnyMesh) -> Spec | None:
    """How an argument is laid out over `mesh`, if it is."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not any(sharding.spec):
        return None
    if not same_mesh(sharding.mesh, mesh):
        raise errors.MeshMismatchError(
            "An argument is sharded over another mesh. Move it with jax.device_put(x, "
            "NamedSharding(mesh, spec)), or give jhost.jit its mesh.",
            [f"an array of shape {leaf.shape} on {mesh_text(sharding.mesh)}"]
            + [f"the function runs on {mesh_text(mesh)}"],
        )
    return spec_entries(sharding)


def _problems(
    names: Sequence[str],
    specs: Sequence[Spec | None],
    avals: Iterable[Any],
    mesh: AnyMesh,
) -> list[tuple[str, Problem]]:
    sizes = dict(abstract(mesh).shape)
    return [
        (f"{name} of shape {aval.shape}", problem)
        for name, spec, aval in zip(names, specs, avals, strict=True)
        if spec is not None
        for problem in check_spec(spec, aval.shape, sizes)
    ]


def _padded(specs: Sequence[Spec | None], avals: Iterable[Any]) -> tuple[Spec | None, ...]:
    """Each spec with an entry for every dim."""
    return tuple(
        spec if spec is None else (*spec, *[()] * (len(aval.shape) - len(spec)))
        for spec, aval in zip(specs, avals, strict=True)
    )
