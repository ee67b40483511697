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
from jhost.lowering.explanation import Explanation
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
    """Compiles a function like `jax.jit`, and hides its communication.

    The result is a JAX function: it can be differentiated, batched, and called inside
    other transforms.

    Args:
        f: the function.  It takes and returns pytrees of arrays of any shapes and
            dtypes.  Without `f` the result is a decorator.
        mesh: the devices.  By default jhost takes the mesh of the shardings, of
            `jax.set_mesh`, of the arguments, or of a sharding inside the function, in
            this order.  Without any mesh the function runs on one device.
        in_shardings: as for `jax.jit`: a pytree prefix of the positional arguments,
            with `PartitionSpec`, `NamedSharding`, or None if the argument's own
            sharding stays.
        out_shardings: the same for the results; None leaves the choice to jhost.
        static_argnums: as for `jax.jit`.
        static_argnames: as for `jax.jit`.
        donate_argnums: as for `jax.jit`.
        donate_argnames: as for `jax.jit`.
        keep_unused: as for `jax.jit`: whether the compiled function keeps arguments
            that no result depends on.
        inline: as for `jax.jit`.  It changes nothing: a program that calls a jhost
            function always lowers the function in place.
        chunks: the number of chunks for each mark that leaves it open, or `"auto"`.
            It is a wish: if a stream cannot have this number, jhost chooses
            as with `"auto"`, and `jhost.explain` says why.
        pipeline: `"collective"`, `"p2p"`, `"off"` or `"auto"`, for each mark that
            leaves it open.  It is a wish, too.  Permutes also move large sums over
            devices beside the work that follows, if a gain is predicted or this is
            `"p2p"`.
        streams: `"auto"` finds streams in a function without marks, if `pipeline` is
            `"auto"` and a loop is predicted to gain.  `"marked"` finds none.
        replication_limit: a number of bytes.  If all devices repeat an operation on
            whole values, and a device receives this many bytes or more for it, jhost
            warns with a `jhost.errors.ReplicationWarning`.
        compiler_options: XLA options for the executables of this function.  As for
            `jax.jit`, a function that is called in another program cannot have any.
        tuning: one or several results of `jhost.tune` for this function.  They decide
            what marks and settings leave open. jhost ignores a tuning that does not
            hold here, and warns.

    Returns:
        The compiled function, with the methods of a `jax.jit` function.  It takes and
        returns arrays of the same global shapes and dtypes as `f`.

    Raises:
        OptionError: unknown `pipeline` or `streams`, or a limit below 0.
        ChunksError: fewer than one chunk.
        ArgumentError: an argument has another type.
        NoMeshError, MeshMismatchError: in a call, there is no mesh for the shardings,
            or shardings or arguments have several meshes.

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
    # With options alone it is a decorator: `@jhost.jit(mesh=mesh)`.
    if f is None:
        return functools.partial(JitFunction, settings=settings)
    return JitFunction(f, settings=settings)


def explain(
    f: Callable[..., Any], *args: Any, detail: bool = False, **kwargs: Any
) -> Explanation:
    """Explains what jhost does with a function on these arguments, and why.

    Args:
        f: a jhost function, or a function that calls jhost functions or differentiates
            them.  It may be a whole training step, plain or under `jax.jit`.
        *args: arrays of the shapes and dtypes that `f` takes, or `jax.ShapeDtypeStruct`
            in their place.
        detail: True prints everything, and False prints one screen.
        **kwargs: likewise, of the shapes and dtypes that `f` takes.  If `f` has an
            argument `detail`, pass it by position.

    Returns:
        An explanation that prints as one screen.  It has the predicted time with and
        without jhost, the hidden and the exposed communication, and what to change
        first.  It also has the streams, the transfers with the work that hides them,
        and the layouts.  With `detail`, in notebooks and in the file of `save` it has
        everything, program by program.  If the function calls jhost functions,
        `programs` has an explanation of each of their programs, forward and backward.
        `bodies` has an explanation of each body of a loop.  The fields are for tools.

    Raises:
        ArgumentError: `f` is not a function, or it calls no jhost function.

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
    # A method is bound to its object, and the jhost function is inside.
    if isinstance(getattr(f, "__func__", f), JitFunction):
        f, args = as_jhost_function("explain", f, args)
        return f.lower(*args, **kwargs).explain(detail=detail)
    explanation = explain_around(f, args, kwargs)
    return dataclasses.replace(explanation, detailed=detail)


def check_kwargs(name: str, kwargs: Any) -> None:
    """Refuses all but a dict of keyword arguments, in the words of `jhost.<name>`."""
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
