"""`jhost COMMAND`, or `python -m jhost COMMAND`: what jhost does from a shell."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from jhost._commands import bench, calibrate, demo, doctor, explain, profile, tune
from jhost._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit status: 0 if all went well, 1 if the command found something wrong, or
        if the reader of its output is gone, as in `jhost explain ... | head`.
        Bad arguments end the process with 2, as always with `argparse`.
    """
    parser = argparse.ArgumentParser(
        prog="jhost",
        description="Hides the communication of sharded JAX programs behind work.",
    )
    parser.add_argument("--version", action="version", version=f"jhost {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (demo, doctor, calibrate, explain, tune, profile, bench):
        command.add_command(commands)
    arguments = parser.parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would print the error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
