"""A function of the user's on a command line, with the types of its arguments."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from jhost._annotate import Pipeline
from jhost._call.function import JitFunction
from jhost._commands.block import count
from jhost._commands.modules import NotThereError, loaded, made
from jhost.runtime.devices import ask_for_cpu_devices
from jhost.runtime.mesh import AnyMesh

DEVICES = 8
"""How many devices the CPU is split into for a module that makes its own mesh."""

_SHORT = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u32": "uint32",
}


def add_function(parser: argparse.ArgumentParser) -> None:
    """Adds the function, and what says its arguments, mesh and settings."""
    parser.add_argument(
        "function", metavar="MODULE:NAME", help="such as mymodel.layers:mlp"
    )
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--shape",
        nargs="+",
        type=array_type,
        default=[],
        metavar="SHAPE",
        help="the type of each argument, such as 8192x4096:bf16 (float32 without "
        "a dtype; :i32 is a scalar)",
    )
    given.add_argument(
        "--arguments",
        metavar="MODULE:NAME",
        help=(
            "a function without parameters that returns the arguments: a tuple of "
            "trees of arrays or jax.ShapeDtypeStructs"
        ),
    )
    parser.add_argument(
        "--mesh",
        type=axes,
        metavar="AXES",
        help="such as dp=2,tp=4 (default: the function's own)",
    )
    parser.add_argument(
        "--pipeline",
        choices=get_args(Pipeline),
        help="pipeline= of jhost.jit (default: the function's own)",
    )
    parser.add_argument(
        "--chunks",
        type=_chunks,
        metavar="N",
        help="chunks= of jhost.jit, a number or auto (default: the function's own)",
    )
    parser.add_argument(
        "--devices",
        type=count,
        metavar="N",
        help=f"how many devices there are (default: {DEVICES}, or what --mesh needs)",
    )


class Given(NamedTuple):
    """What a command line says: a function, its arguments, and settings for it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]


def given_function(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, *, runs: bool
) -> Given:
    """The function and its arguments; ends the process where there are none.

    If it `runs`, the devices of `--mesh` have to be there.
    """
    # Before the module is imported: JAX makes the devices of a CPU when it starts.
    needed = math.prod((arguments.mesh or {}).values())
    with contextlib.suppress(RuntimeError):  # JAX has started: there are what there are
        ask_for_cpu_devices(arguments.devices or max(needed, DEVICES))
    try:
        function = loaded(arguments.function)
        args = _arguments(arguments)
    except NotThereError as error:
        parser.error(str(error))
    if not callable(function):
        parser.error(f"{arguments.function} is no function")
    options = _options(arguments)
    # A plain function may call several jhost functions, each with its own settings.
    if options and not isinstance(function, JitFunction):
        names = " and ".join(f"--{name}" for name in options)
        parser.error(f"{arguments.function} is no jhost function: leave out {names}")
    if not args and (names := _required(function)):
        parser.error(
            f"{arguments.function} takes {', '.join(names)}: give the type of each by "
            "--shape, such as --shape 8192x4096:bf16 4096x14336:bf16, or a function "
            "that returns them by --arguments MODULE:NAME"
        )
    if runs and isinstance(options.get("mesh"), AbstractMesh):
        parser.error(
            f"--mesh needs {needed} devices, and there are {jax.device_count()}; "
            f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={needed} makes them of any CPU"
        )
    return Given(function, args, options)


def given_to_run(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> tuple[JitFunction[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The same, for a command that runs a function that jhost.jit made."""
    function, args, options = given_function(parser, arguments, runs=True)
    if not isinstance(function, JitFunction):
        parser.error(f"{arguments.function} is not made by jhost.jit")
    return function, args, options


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a call has to have."""
    try:
        params = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin says nothing
        return []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [p.name for p in params if p.kind in kinds and p.default is p.empty]


def arrays(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments as arrays: random floats, and zeros of other dtypes, for types."""
    leaves, tree = jax.tree.flatten(tuple(args))
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    made = [_array(leaf, key) for leaf, key in zip(leaves, keys, strict=False)]
    return jax.tree.unflatten(tree, made)


def _array(leaf: Any, key: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        # Integers may be indices, and 0 is one of every array.
        return jnp.zeros(leaf.shape, leaf.dtype)
    # Drawn, because GPUs take less power for equal elements than in real work.
    return jax.random.normal(key, leaf.shape).astype(leaf.dtype)


def array_type(text: str) -> jax.ShapeDtypeStruct:
    """The type that a text such as `8192x4096:bf16` means."""
    match = re.fullmatch(r"((?:\d+(?:x\d+)*)?)(?::(\w+))?", text)
    if match is None or not text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape; write 8192x4096 or 8192x4096:bf16"
        )
    sizes, name = match[1], match[2] or "f32"
    shape = tuple(map(int, sizes.split("x"))) if sizes else ()
    try:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(_SHORT.get(name, name)))
    except TypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} has an unknown dtype {name!r}; the short ones are "
            f"{', '.join(_SHORT)}"
        ) from None


def axes(text: str) -> dict[str, int]:
    """The sizes that a text such as `dp=2,tp=4` gives to mesh axes."""
    pairs = [re.fullmatch(r"(\w+)=([1-9]\d*)", pair) for pair in text.split(",")]
    found = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if len(found) != len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; write dp=2,tp=4")
    return found


def _chunks(text: str) -> int | str:
    # As it is: `jhost.jit` has the word too.
    return text if text == "auto" else count(text)


def _arguments(arguments: argparse.Namespace) -> tuple[Any, ...]:
    """The arguments of the function, by their shapes or from a module."""
    if arguments.arguments is None:
        return tuple(arguments.shape)
    found = made(arguments.arguments)
    if not isinstance(found, tuple | list):
        raise NotThereError(
            f"{arguments.arguments} is no tuple of arguments, and no function that "
            f"returns one, but gave {type(found).__name__}"
        )
    return tuple(found)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if arguments.mesh is not None:
        options["mesh"] = _mesh(arguments.mesh)
    if arguments.pipeline is not None:
        options["pipeline"] = arguments.pipeline
    if arguments.chunks is not None:
        options["chunks"] = arguments.chunks
    return options


def _mesh(sizes: Mapping[str, int]) -> AnyMesh:
    """A mesh of devices, or an abstract one where they are too few."""
    shape, types = tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
    if math.prod(shape) > jax.device_count():
        return AbstractMesh(shape, tuple(sizes), axis_types=types)
    mesh: Mesh = jax.make_mesh(shape, tuple(sizes), axis_types=types)
    return mesh
