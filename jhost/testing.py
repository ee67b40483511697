"""Checks of functions that jhost compiles: right, pipelined, and moving no more.

jhost's own tests use them.  They need chex: `pip install 'chex>=0.1.92'`; the fixture
and marker for devices are in `jhost.pytest_plugin`.
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
from jhost.lowering.explain import Explanation, explain_program
from jhost.lowering.ir.program import Program

Axes: TypeAlias = Mapping[str, int]

PIPELINES: tuple[Pipeline, ...] = ("auto", "off", "collective", "p2p")


def mesh_of(axes: Axes) -> Mesh:
    """A mesh of the first devices with these axes and sizes, all of them automatic.

    Raises:
        ArgumentError: `axes` is no dict of names and sizes.
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
    """Two trees of arrays have equal types, and values as close as can be asked.

    Args:
        given: arrays of any shapes and dtypes, or numbers, as computed.
        wanted: arrays or numbers of the same shapes and dtypes, as they should be.
        tolerance: how far values may lie apart, as a part of the largest one of the
            array; 0 for not at all.  By default what suits the dtype: 1e-4 for float32,
            2e-2 for bfloat16, not at all for integers.

    Raises:
        AssertionError: they do not.
        ArgumentError, OptionError: a leaf is no array, or the tolerance no number of at
            least 0.

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
    """A jhost function gives what its plain function gives, however it is pipelined.

    Args:
        f: a function made by `jhost.jit`.
        *args: its arguments, arrays of the shapes and dtypes that it takes.  On several
            meshes these are arrays that are on none.
        kwargs: its keyword arguments, likewise.
        gradients: compare the gradients by all float arrays among the arguments, too.
        tolerance: as for `assert_close`.  Integers as floats are computed exactly, if
            no sum leaves their range, and 0 can be asked.
        pipelines: as for `jhost.jit`, one after another; marks that name theirs keep
            it.  By default all that are possible.
        meshes: meshes, or the sizes of their axes by name, one after another.  By
            default the function's own.

    Raises:
        AssertionError: they differ; the text has every case that does.
        ArgumentError: `f` is no jhost function, or `pipelines` or `meshes` are empty.
        PipelineError: no stream can have a pipeline in `pipelines`.
        ArgumentError, OptionError: an argument of another type, or `pipelines` or
            `meshes` without any.

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
        raise AssertionError(f"{f.__name__} is not as the plain function:\n{lines}")


def _as_mesh(mesh: Mesh | Axes) -> Mesh:
    return mesh if isinstance(mesh, Mesh) else mesh_of(mesh)


# --- Pipelines ---------------------------------------------------------------------- #


def programs(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Program]:
    """The Host IR of every call of a jhost function in what JAX makes of `fun`.

    Args:
        fun: a jhost function, or a function around some: `jax.grad(loss)`, say.
        *args: its arguments, arrays of the shapes and dtypes that it takes, or
            `jax.ShapeDtypeStruct` in their place.
        **kwargs: likewise.

    Returns:
        The programs that jhost makes, in order; of a gradient, those of the forward
        and of the backward.

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
    """Every stream is pipelined and moves something, in each program that jhost makes.

    That is each that is marked or, where nothing is, each that jhost finds.

    A loop over chunks in which nothing moves between devices, as on one device, can
    save memory, but hides nothing.

    Args:
        fun: a jhost function, or a function around some: `jax.grad(loss)`, say.
        *args: its arguments, arrays of the shapes and dtypes that it takes, or
            `jax.ShapeDtypeStruct` in their place.
        **kwargs: likewise.

    Raises:
        AssertionError: some are not, or there are none; the text has the reason of
            each, as `jhost.explain` gives it.

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
    """What jhost makes of a function has these loops and communications.

    All programs count together: for a gradient, the forward's and the backward's.

    Args:
        fun: a jhost function, or a function around some: `jax.grad(loss)`, say.
        *args: its arguments, arrays of the shapes and dtypes that it takes, or
            `jax.ShapeDtypeStruct` in their place.
        loops: how many loops over chunks there are; None for any number.
        communications: each communication by kind and mesh axes, in any order, as
            `"AllGather over tp"`; one in a loop counts once.  None for any.
        kwargs: its keyword arguments, of the shapes and dtypes that it takes.

    Raises:
        AssertionError: it has others; the text says which are missing, which are too
            many, and has the explanation.
        ArgumentError: an argument of another type.

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
