"""`jhost tune module:function --shape ...`: `jhost.tune` from a shell."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jhost import errors
from jhost._commands.block import count, writable_file
from jhost._commands.explain import page_file
from jhost._commands.function import add_function, arrays, given_to_run
from jhost._tune.tune import tune


def add_command(commands: Any) -> None:
    """Adds `tune` to the commands of `jhost`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="measure which pipelines suit a function's streams best",
        description=(
            "Runs jhost.tune on a jhost function, on the devices of this host. "
            "Prints what was measured and chosen, and stores it in the user's cache "
            "folder, where jhost.tune finds it again."
        ),
    )
    add_function(parser)
    parser.add_argument(
        "--gradients",
        action="store_true",
        help="also tune the programs of jax.grad with respect to all float arguments",
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=10,
        metavar="N",
        help="how often each candidate is timed",
    )
    parser.add_argument(
        "--no-cache", action="store_true", help="measure again, and keep nothing"
    )
    parser.add_argument(
        "--json",
        type=writable_file,
        metavar="FILE",
        help="write the tuning, for jhost.Tuning.from_json",
    )
    parser.add_argument(
        "--save", type=page_file, metavar="FILE.html", help="write it as a page as well"
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    function, args, options = given_to_run(parser, arguments)
    try:
        found = tune(
            function.with_options(**options),
            *arrays(args),
            gradients=arguments.gradients,
            rounds=arguments.rounds,
            cache=not arguments.no_cache,
        )
    except (errors.JhostError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(found)
    if arguments.json:
        arguments.json.write_text(found.to_json())
    if arguments.save:
        found.save(arguments.save)
    return 0
