"""`jhost profile module:function --shape ...`: `jhost.profile` from a shell."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jhost import errors
from jhost._commands.block import writable_file
from jhost._commands.function import add_function, arrays, given_to_run
from jhost._profile import profile


def add_command(commands: Any) -> None:
    """Adds `profile` to the commands of `jhost`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "profile",
        help=(
            "run a function a few times, and say how much of its communication is "
            "hidden"
        ),
        description=(
            "Runs jhost.profile on a jhost function, on the devices of this host. "
            "Prints what ran, how long it took, and how much communication was "
            "exposed."
        ),
    )
    add_function(parser)
    parser.add_argument(
        "--save",
        type=writable_file,
        metavar="FILE",
        help="write the report: .html, .png, .svg, or .json for Perfetto",
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    function, args, options = given_to_run(parser, arguments)
    try:
        report = profile(function.with_options(**options), *arrays(args))
        # First of all: if the file cannot be written, the calls were not in vain.
        print(report)
        if arguments.save:
            report.save(arguments.save)
    except (errors.JhostError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
