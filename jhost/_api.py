"""`jhost.jit`, the decorator, and `jhost.explain`."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, cast, overload

from jhost import errors
from jhost._annotate import Chunks, Pipeline, Streams
from jhost._call.around import explain_around
from jhost._call.function import JitFunction
from jhost._call.settings import Options, Settings, check
from jhost._jax import ArgNames, ArgNums, Inline
from jhost._tuning import Tuning
from jhost.lowering.explain import Explanation
from jhost.runtime.mesh import AnyMesh

P = ParamSpec("P")
R = TypeVar("R")


@overload
def jit(f: Callable[P, R], /, **options: Unpack[Options]) -> JitFunction[P, R]: ...


@overload
def jit(
    f: None = None, /, **options: Unpack[Options]
) -> Callable[[Callable[P, R]], JitFunction[P, R]]: ...


def jit(
    f: Callable[..., Any] | None = None,
    /,
    *,
    mesh: AnyMesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: ArgNums = None,
    static_argnames: ArgNames = None,
    donate_argnums: ArgNums = None,
    donate_argnames: ArgNames = None,
    keep_unused: bool = False,
    inline: Inline = False,
    chunks: Chunks = "auto",
    pipeline: Pipeline = "auto",
    streams: Streams = "auto",
    replication_limit: int = 1 << 20,
    compiler_options: Mapping[str, Any] | None = None,
    tuning: Tuning | Sequence[Tuning] | None = None,
) -> Any:
    """Compiles a function as `jax.jit` does, with streams marked or found pipelined.

    The result is a JAX function: it can be differentiated, batched, and called inside
    other transforms.

    Args:
        f: the function, from and to any pytrees of arrays, of any shapes and dtypes.
            Without it, a decorator is returned.
        mesh: the devices; by default the shardings' mesh, or that of `jax.set_mesh`, or
            the one over which the arguments lie, or else one that a sharding inside
            names.  Without any, the function runs on one device.
        in_shardings: as for `jax.jit`: a pytree prefix of the positional arguments, of
            `PartitionSpec`, `NamedSharding`, or None to take it from the argument.
        out_shardings: the same for the results; None leaves the choice to jhost.
        static_argnums: as for `jax.jit`.
        static_argnames: as for `jax.jit`.
        donate_argnums: as for `jax.jit`.
        donate_argnames: as for `jax.jit`.
        keep_unused: as for `jax.jit`: whether arguments that nothing depends on are
            still arguments of what is compiled.
        inline: as for `jax.jit`.  In a program around it a jhost function is lowered in
            place, with or without.
        chunks: how many chunks a stream is cut into, or `"auto"`, where the mark itself
            does not say.  A wish: where a stream cannot have as many, jhost chooses as
            by `"auto"`, and `jhost.explain` says why.
        pipeline: `"collective"`, `"p2p"`, `"off"` or `"auto"`, likewise.  Large sums
            over devices with work behind them go beside it, by permutes, where that is
            predicted to gain, or with `"p2p"` of the whole function.
        streams: `"auto"` finds streams in a function without marks, where a loop is
            predicted to gain and `pipeline` is `"auto"`.  `"marked"` finds none.
        replication_limit: the bytes that a device may receive for an operation that
            all devices repeat, on values that were spread over them, without a
            `jhost.errors.ReplicationWarning`.
        compiler_options: XLA options for this function's executables.  As for
            `jax.jit`, a function that is called in another program can have none.
        tuning: what `jhost.tune` measured of this function, once or on several
            arguments; it decides what marks and settings leave open.  One that does
            not hold here is ignored with a warning.

    Returns:
        The compiled function, with `lower` as `jax.jit`'s has.  It takes and gives
        arrays of the global shapes and of the dtypes that `f` does.

    Raises:
        OptionError: a pipeline or streams that there are not, or a limit below 0.
        ChunksError: fewer than one chunk.
        ArgumentError: an argument of another type.
        NoMeshError, MeshMismatchError: when it is called, if the shardings name axes of
            no mesh, or of several, or if arguments lie over several.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> @jhost.jit
        ... def f(x):
        ...     return jhost.stream(jnp.sin(x) * 2, axis=0, chunks=4)
        >>> f(jnp.zeros((8, 2))).shape
        (8, 2)
    """
    settings = Settings(
        mesh=mesh,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        keep_unused=keep_unused,
        inline=inline,
        chunks=chunks,
        pipeline=pipeline,
        streams=streams,
        replication_limit=replication_limit,
        compiler_options=compiler_options,
        tuning=tuning,
    )
    check(settings)
    if f is None:
        return functools.partial(JitFunction, settings=settings)
    return JitFunction(f, settings=settings)


def explain(
    f: Callable[..., Any], *args: Any, detail: bool = False, **kwargs: Any
) -> Explanation:
    """What jhost makes of a function on these arguments, and why.

    Args:
        f: a function made by `jhost.jit`, or one that calls some, differentiated or
            not: a training step, say, plain or under `jax.jit`.
        *args: arrays of the shapes and dtypes that `f` takes, or `jax.ShapeDtypeStruct`
            in their place.
        detail: whether it prints all that it has, and not a screen of it.
        **kwargs: likewise, of the shapes and dtypes that `f` takes; a `detail` of the
            function's own goes by position.

    Returns:
        What prints as a screen: the predicted time with and without jhost, what is
        hidden and what is not, what to change first, the streams, the transfers with
        what hides them, and the layouts.  With `detail`, in notebooks and by `save`
        there is all of it, program by program.  If the function calls jhost functions,
        `programs` has an explanation of each program that jhost makes in it, forward
        and backward.  `bodies` has those of loops' bodies.  Fields are for tools.

    Raises:
        ArgumentError: `f` is no function, or calls no jhost function.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jhost
        >>> f = jhost.jit(lambda x: jhost.stream(x * 2, axis=0, chunks=2))
        >>> print(jhost.explain(f, jnp.ones((4, 2))).streams[0].chunks)
        2
        >>> step = jax.jit(jax.grad(lambda x: jnp.sum(f(jnp.sin(x)) ** 2)))
        >>> [each.name for each in jhost.explain(step, jnp.ones((4, 2))).programs]
        ['<lambda> (forward)', '<lambda> (backward)']
    """
    if not callable(f):
        raise errors.ArgumentError(f"jhost.explain takes a function, but got {f!r}.")
    if isinstance(getattr(f, "__func__", f), JitFunction):
        f, args = as_jhost_function("explain", f, args)
        return f.lower(*args, **kwargs).explain(detail=detail)
    explanation = explain_around(f, args, kwargs)
    return dataclasses.replace(explanation, detailed=detail)


def check_kwargs(name: str, kwargs: Any) -> None:
    """Refuses what is no dict of keyword arguments, in the words of `jhost.<name>`."""
    if kwargs is None:
        return
    if not isinstance(kwargs, Mapping) or not all(
        isinstance(key, str) for key in cast(Mapping[Any, Any], kwargs)
    ):
        raise errors.ArgumentError(
            f"jhost.{name} takes a dict of keyword arguments as kwargs, but got "
            f"{kwargs!r}."
        )


def as_jhost_function(
    name: str, f: Any, args: Sequence[Any]
) -> tuple[JitFunction[..., Any], tuple[Any, ...]]:
    """What `jhost.jit` has made, alone or as a method, and what it is called with.

    Anything else is refused in the words of `jhost.<name>`.
    """
    if isinstance(f, types.MethodType):
        f, args = f.__func__, (f.__self__, *args)
    if not isinstance(f, JitFunction):
        raise errors.ArgumentError(
            f"jhost.{name} takes a function made by jhost.jit, but got {f!r}. "
            "Decorate it first."
        )
    return cast("JitFunction[..., Any]", f), tuple(args)
