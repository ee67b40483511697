"""Checks for tests: results are right, streams are pipelined, nothing else moves.

jhost's own tests use these checks.  They need chex: `pip install 'chex>=0.1.92'`.  The
fixture and the marker for devices are in `jhost.pytest_plugin`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, Mesh

from jhost import errors
from jhost._annotate import Pipeline
from jhost._api import JitFunction, as_jhost_function, check_kwargs
from jhost._call.around import InnerCall, calls_in
from jhost._call.bind import call_of
from jhost._testing.arguments import (
    check_axes,
    check_gradients,
    check_program,
    check_several,
    check_tolerance,
)
from jhost._testing.values import Case, compare
from jhost.lowering.explain import explain_program
from jhost.lowering.explanation import Explanation
from jhost.lowering.ir.program import Program

Axes: TypeAlias = Mapping[str, int]

PIPELINES: tuple[Pipeline, ...] = ("auto", "off", "collective", "p2p")


def mesh_of(axes: Axes) -> Mesh:
    """Makes a mesh of the first devices with these axes and sizes; all are automatic.

    Args:
        axes: the size of each axis, by its name, the outermost first.

    Returns:
        The mesh.

    Raises:
        ArgumentError: `axes` is not a dict of names and sizes.
        OptionError: a size is below 1, or there are fewer devices.

    Example:
        >>> mesh_of({"tp": 1}).shape["tp"]
        1
    """
    check_axes(axes)
    sizes = tuple(axes.values())
    if math.prod(sizes) > jax.device_count():
        raise errors.OptionError(
            f"A mesh {dict(axes)} needs more than the {jax.device_count()} "
            f"{jax.default_backend()} devices that there are. jhost.pytest_plugin "
            "makes virtual ones of the CPU; outside of pytest, set "
            f"JAX_NUM_CPU_DEVICES={math.prod(sizes)}."
        )
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, tuple(axes), axis_types=types)


# --- Values ----------------------------------------------------------------------- #


def assert_close(given: Any, wanted: Any, *, tolerance: float | None = None) -> None:
    """Checks that two trees of arrays have equal types, and values that are close.

    Args:
        given: the computed arrays or numbers, of any shapes and dtypes.
        wanted: the expected arrays or numbers, of the same shapes and dtypes.
        tolerance: the largest allowed difference, divided by the largest value of the
            array; 0 for equality.  The default depends on the dtype: 1e-4 for float32,
            2e-2 for bfloat16, equality for integers.

    Raises:
        AssertionError: types or values differ.
        ArgumentError, OptionError: a leaf is not an array, or the tolerance is not a
            number of at least 0.

    Example:
        >>> import jax.numpy as jnp
        >>> assert_close({"x": jnp.ones(2)}, {"x": jnp.ones(2) + 1e-6})
        >>> assert_close(jnp.ones(2), jnp.ones(2) + 1e-6, tolerance=0)
        Traceback (most recent call last):
        ...
        AssertionError: the result: they differ by 9.5e-07 of the largest value; ...
    """
    check_tolerance("assert_close", tolerance)
    compare(given, wanted, tolerance)


def assert_equals_plain(
    f: JitFunction[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    gradients: bool = True,
    tolerance: float | None = None,
    pipelines: Sequence[Pipeline] | None = None,
    meshes: Sequence[Mesh | Axes] | None = None,
) -> None:
    """Checks that a jhost function equals its plain function in each pipeline.

    Args:
        f: a function made by `jhost.jit`.
        *args: arrays of the shapes and dtypes that `f` takes.  With several meshes they
            must not be on a mesh yet.
        kwargs: its keyword arguments, likewise.
        gradients: also compare the gradients with respect to all float arguments.
        tolerance: as for `assert_close`.  Floats with integer values are exact as long
            as sums stay in their range, so 0 is possible with them.
        pipelines: the values of `pipeline` for `jhost.jit` to be checked, by default
            all that are possible.  Marks that name a pipeline keep it.
        meshes: the meshes to be checked, also as dicts of axis names and sizes; by
            default the function's own mesh.

    Raises:
        AssertionError: results differ.  The text has every case that differs.
        ArgumentError: `f` is not a jhost function, or `pipelines` or `meshes` are
            empty.
        PipelineError: no stream can have one of the `pipelines`.
        ArgumentError, OptionError: an argument has another type or an unknown value.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> f = jhost.jit(lambda x: jhost.stream(jnp.sin(x), axis=0))
        >>> assert_equals_plain(f, jnp.ones((8, 2)), meshes=[{"tp": 1}])
    """
    name = "testing.assert_equals_plain"
    f, args = as_jhost_function(name, f, args)
    check_kwargs(name, kwargs)
    check_tolerance("assert_equals_plain", tolerance)
    check_several(pipelines=pipelines, meshes=meshes)
    check_gradients(gradients)
    problems: list[str] = []
    for mesh in meshes or [None]:
        # The arguments are needed again.
        there = f.with_options(donate_argnums=None, donate_argnames=None)
        there = there if mesh is None else there.with_options(mesh=_as_mesh(mesh))
        case = Case(there, args, kwargs or {}, gradients)
        for pipeline in pipelines or PIPELINES:
            try:
                problems += case.problems(pipeline, tolerance)
            except (errors.PipelineError, errors.ChunksError):
                if pipelines is not None:
                    raise
    if problems:
        lines = "\n".join(f"  * {problem}" for problem in problems)
        raise AssertionError(f"{f.__name__} differs from the plain function:\n{lines}")


def _as_mesh(mesh: Mesh | Axes) -> Mesh:
    return mesh if isinstance(mesh, Mesh) else mesh_of(mesh)


# --- Pipelines ---------------------------------------------------------------------- #


def programs(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Program]:
    """Returns the Host IR program of every call of a jhost function in `fun`.

    Args:
        fun: a jhost function, or a function that calls some, such as `jax.grad(loss)`.
        *args: its arguments, arrays of the shapes and dtypes that it takes, or
            `jax.ShapeDtypeStruct` in their place.
        **kwargs: likewise.

    Returns:
        The programs in order.  A gradient has a program of the forward and a program of
        the backward.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> f = jhost.jit(lambda x: jhost.stream(jnp.sin(x), axis=0, chunks=2))
        >>> len(programs(jax.grad(lambda x: f(x).sum()), jnp.ones(4)))
        2
    """
    return [call.program() for call in _calls(fun, args, kwargs)]


def _calls(fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[InnerCall]:
    if not callable(fun):
        raise errors.ArgumentError(f"jhost.testing takes a function, but got {fun!r}.")
    if isinstance(fun, JitFunction):
        call = call_of(fun.__jhost_source__, args, kwargs)
        return [InnerCall(call.call_jaxpr, call.config)]
    return calls_in(fun, args, kwargs)


def _explanations(
    fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Explanation]:
    return [
        dataclasses.replace(explain_program(call.program()), name=call.config.title)
        for call in _calls(fun, args, kwargs)
    ]


def assert_pipelined(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Checks that every stream is pipelined, and that something moves in its loop.

    These are the marked streams or, in a function without marks, the streams that jhost
    finds.  The check looks at each program that jhost makes.  If nothing moves between
    devices in a loop over chunks, as on one device, the loop may save memory, but it
    hides nothing.

    Args:
        fun: a jhost function, or a function that calls some, such as `jax.grad(loss)`.
        *args: its arguments, arrays of the shapes and dtypes that it takes, or
            `jax.ShapeDtypeStruct` in their place.
        **kwargs: likewise.

    Raises:
        AssertionError: a stream is not pipelined, or moves nothing, or there is no
            stream.  The text has the reason for each, as in `jhost.explain`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> f = jhost.jit(lambda x: jhost.stream(jnp.sin(x), axis=0, chunks=2))
        >>> assert_pipelined(f, jnp.ones(4))  # on one device
        Traceback (most recent call last):
        ...
        AssertionError: These streams hide nothing:
          * ..., as asked; nothing moves in this loop: it hides nothing [...]
    """
    explanations = _explanations(fun, args, kwargs)
    streams = [(each.name, stream) for each in explanations for stream in each.streams]
    left = [(name, stream) for name, stream in streams if not stream.hides]
    if left:
        reasons = "\n".join(f"  * {name}, {stream}" for name, stream in left)
        raise AssertionError(f"These streams hide nothing:\n{reasons}")
    if not streams:
        said = "\n".join(map(str, explanations)) or "no jhost function is called"
        raise AssertionError(f"There are no streams to pipeline.\n{said}")


def assert_program(
    fun: Callable[..., Any],
    *args: Any,
    loops: int | None = None,
    communications: Iterable[str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Checks that jhost's programs have these loops and communications.

    All programs count together.  A gradient has a program of the forward and a program
    of the backward.

    Args:
        fun: a jhost function, or a function that calls some, such as `jax.grad(loss)`.
        *args: its arguments, arrays of the shapes and dtypes that it takes, or
            `jax.ShapeDtypeStruct` in their place.
        loops: the number of loops over chunks; None allows any number.
        communications: the kind and mesh axes of each communication, such as
            `"AllGather over tp"`, in any order.  A communication in a loop counts once.
            None allows any.
        kwargs: its keyword arguments, of the shapes and dtypes that it takes.

    Raises:
        AssertionError: the programs have other loops or communications.  The text lists
            those that are missing and those that are too many, with the explanation.
        ArgumentError: an argument has another type.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> f = jhost.jit(lambda x: jhost.stream(jnp.sin(x), axis=0, chunks=2))
        >>> assert_program(f, jnp.ones(4), loops=1, communications=[])
    """
    check_kwargs("testing.assert_program", kwargs)
    check_program(loops, communications)
    explanations = _explanations(fun, args, kwargs or {})
    problems: list[str] = []
    found = sum(each.loops for each in explanations)
    if loops not in (None, found):
        problems.append(f"expected {loops} loops, got {found}")
    if communications is not None:
        wanted = Counter(communications)
        given = Counter(
            f"{row.kind} over {','.join(row.axes)}"
            for each in explanations
            for row in each.communications
        )
        problems += [f"missing: {text}" for text in (wanted - given).elements()]
        problems += [f"too much: {text}" for text in (given - wanted).elements()]
    if problems:
        raise AssertionError("\n".join([*problems, *map(str, explanations)]))
