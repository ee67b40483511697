"""`python -m jhost calibrate`: measures this machine's devices, for predictions."""

from __future__ import annotations

import argparse
from typing import Any

from jhost._calibrate.calibrate import calibrate
from jhost._commands.block import devices_here, writable_file
from jhost._jax import process_number
from jhost.distributed import initialize


def add_command(commands: Any) -> None:
    """Adds `calibrate` to the commands of `python -m jhost`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "calibrate",
        help="measure these devices, so that jhost predicts well on them",
        description="Measures matmuls, memory, launches, permutes and collectives on "
        "the devices of this host, in one to two minutes. Prints the measured rates "
        "beside the rates that jhost ships, and keeps the measured ones in the user's "
        "cache folder. pipeline='auto' uses them from then on. Nothing else should run "
        "on the devices meanwhile.",
    )
    parser.add_argument(
        "--no-keep", action="store_true", help="print the rates, and keep nothing"
    )
    parser.add_argument(
        "--json", type=writable_file, metavar="FILE", help="write what was measured"
    )
    parser.add_argument(
        "--process",
        nargs=3,
        metavar=("ADDRESS", "COUNT", "NUMBER"),
        help="for a job of several processes, with one command for each: the host and "
        "port of process 0, the number of processes, and the number of this process; "
        "the command then also measures the network between them",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.process is not None:
        # Before anything asks JAX for devices.
        address, count, number = arguments.process
        initialize(address, int(count), int(number))
    devices = devices_here(None)
    if devices[0].platform == "cpu":
        print("Devices of one CPU share its cores: nothing can overlap there.")
    found = calibrate(keep=not arguments.no_keep)
    # All have the same rates: process 0 says them.
    if process_number() == 0:
        print(found)
    if arguments.json is not None:
        arguments.json.write_text(found.to_json())
    return 0
