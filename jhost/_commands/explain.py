"""`jhost explain module:function --shape ...`: `jhost.explain` from a shell.

It needs no accelerator: devices that are missing are virtual ones of the CPU, or, where
JAX has started with fewer, an abstract mesh.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from jhost import errors
from jhost._call.around import calls_in, explain_around
from jhost._call.bind import call_of
from jhost._call.explained import explained
from jhost._call.function import JitFunction
from jhost._call.program import host_program
from jhost._call.whole import left_whole
from jhost._commands.block import writable_file
from jhost._commands.function import add_function, given_function
from jhost._page import PAGE
from jhost.lowering.cost.rates import known_kinds
from jhost.lowering.explanation import Explanation
from jhost.runtime.devices import assumed


def add_command(commands: Any) -> None:
    """Adds `explain` to the commands of `python -m jhost`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="explain what jhost does with a function, for arguments of given shapes",
        description=(
            "Prints jhost.explain of a jhost function, or of a function that calls "
            "jhost functions: the predicted time, the hidden and the exposed "
            "communication, the choice for each stream with its reason, and the "
            "transfers. It runs nothing, and needs no accelerator."
        ),
    )
    add_function(parser)
    parser.add_argument(
        "--device",
        type=_kind,
        action=_Kind,
        metavar="KIND",
        help=(
            "predict for GPUs of this kind, such as H200, also if they are not here; "
            "'list' prints the names"
        ),
    )
    parser.add_argument(
        "--detail",
        action="store_true",
        help="print everything, program by program",
    )
    parser.add_argument(
        "--host-ir", action="store_true", help="also print the program itself"
    )
    parser.add_argument(
        "--save",
        type=page_file,
        metavar="FILE.html",
        help="also write the explanation as a page",
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _kinds() -> list[str]:
    """The kinds of GPUs that there are rates for."""
    return [kind for kind in known_kinds() if kind != "cpu"]


def _kind(text: str) -> str:
    """The kind of GPU that a text such as `H200` means, or `list`."""
    if text == "list":
        return text
    found = [kind for kind in _kinds() if text.lower() in kind.lower()]
    if text in found or len(found) == 1:
        return text if text in found else found[0]
    which = "several kinds have it in their names" if found else "no kind has that name"
    raise argparse.ArgumentTypeError(
        f"{text!r}: {which}; there are {', '.join(found or _kinds())}"
    )


class _Kind(argparse.Action):
    """Keeps a kind, or lists all of them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        # While arguments are parsed, so that no function has to be named.
        if values == "list":
            print(*_kinds(), sep="\n")
            parser.exit()
        setattr(namespace, self.dest, values)


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    function, args, options = given_function(parser, arguments, runs=False)
    there = assumed(arguments.device) if arguments.device else contextlib.nullcontext()
    try:
        with there:
            explanation, programs = _explained(
                function, args, options, arguments.host_ir
            )
    # What a function refuses for these shapes is an answer: no traceback of jhost.
    except (errors.JhostError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    explanation = dataclasses.replace(explanation, detailed=arguments.detail)
    print(*programs, explanation, sep="\n\n")
    if arguments.save:
        explanation.save(arguments.save)
    return 0


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
        # A function that `jax.jit` compiles as a whole has reasons, and no program.
        program = left_whole(jaxpr, config) or host_program(jaxpr, config)
        return explained(program, config, jaxpr), [program] if host_ir else []
    explanation = explain_around(function, args, {})
    calls = calls_in(function, args, {}) if host_ir else []
    # Layers that are called one by one may have one program: it is printed once.
    return explanation, list(dict.fromkeys(str(call.program()) for call in calls))
