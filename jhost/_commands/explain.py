"""`python -m jhost explain module:function --shape ...`: `jhost.explain` from a shell.

It needs no accelerator: devices that are missing are virtual ones of the CPU, or, where
JAX has started with fewer, an abstract mesh.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from jhost import errors
from jhost._annotate import Pipeline
from jhost._call.around import calls_in, explain_around
from jhost._call.bind import call_of
from jhost._call.function import JitFunction
from jhost._call.program import host_program
from jhost._call.stages import explained
from jhost._call.whole import left_whole
from jhost._commands.block import count, writable_file
from jhost._commands.modules import NotThereError, loaded, made
from jhost._page import PAGE
from jhost.lowering.cost.rates import known_kinds
from jhost.lowering.explain import Explanation
from jhost.runtime.devices import ask_for_cpu_devices, assumed
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


def add_command(commands: Any) -> None:
    """Adds `explain` to the commands of `python -m jhost`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="say what jhost makes of a function on arguments of given shapes",
        description="Prints what jhost.explain says of a function that jhost.jit made, "
        "or that calls some, program by program: the streams, what was chosen for each "
        "and why, and the communications. "
        "Nothing is run, and no accelerator is needed.",
    )
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
        help="a function of nothing that returns the arguments, as a tuple of trees "
        "of arrays or jax.ShapeDtypeStructs",
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
        help="the pipeline to ask for, as jhost.jit's (default: the function's)",
    )
    parser.add_argument(
        "--chunks",
        type=_chunks,
        metavar="N",
        help="the chunk count to ask for, or auto, as jhost.jit's (default: the "
        "function's)",
    )
    parser.add_argument(
        "--device",
        choices=[kind for kind in known_kinds() if kind != "cpu"],
        metavar="KIND",
        help="predict for GPUs of that kind, which need not be here, such as "
        "'NVIDIA H200'",
    )
    parser.add_argument(
        "--devices",
        type=count,
        metavar="N",
        help=f"how many there are (default: {DEVICES}, or what --mesh needs)",
    )
    parser.add_argument(
        "--host-ir", action="store_true", help="print the program itself as well"
    )
    parser.add_argument(
        "--save",
        type=page_file,
        metavar="FILE.html",
        help="write the explanation as a page as well",
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


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
    return text if text == "auto" else count(text)


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
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
    if options and not isinstance(function, JitFunction):
        names = " or ".join(f"--{name}" for name in options)
        parser.error(f"{arguments.function} is no jhost function, which {names} is for")
    there = assumed(arguments.device) if arguments.device else contextlib.nullcontext()
    try:
        with there:
            explanation, programs = _explained(
                function, args, options, arguments.host_ir
            )
    except (errors.JhostError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(*programs, explanation, sep="\n\n")
    if arguments.save:
        explanation.save(arguments.save)
    return 0


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


def page_file(text: str) -> pathlib.Path:
    """A file for a page, out of a command's arguments."""
    path = writable_file(text)
    if path.suffix.lower() != PAGE:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in {PAGE}")
    return path


def _explained(
    function: Any, args: Sequence[Any], options: Any, host_ir: bool
) -> tuple[Explanation, list[Any]]:
    """The explanation, and the programs if they are asked for."""
    if isinstance(function, JitFunction):
        source = function.with_options(**options).__jhost_source__
        jaxpr, config, _ = call_of(source, tuple(args), {})
        program = left_whole(jaxpr, config) or host_program(jaxpr, config)
        return explained(program, config), [program] if host_ir else []
    explanation = explain_around(function, args, {})
    calls = calls_in(function, args, {}) if host_ir else []
    return explanation, list(dict.fromkeys(str(call.program()) for call in calls))


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
