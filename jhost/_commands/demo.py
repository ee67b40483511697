"""`python -m jhost demo`: one MLP block, plain and through jhost, on what there is."""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
from collections.abc import Mapping
from typing import Any

import jax

from jhost import errors
from jhost._commands.block import (
    SMALL,
    MlpBlock,
    block_on,
    count,
    devices_here,
    hosted,
    plain,
    writable_file,
)
from jhost._compare import TOLERANCES, relative_errors
from jhost._timing import take_turns
from jhost._version import __version__

DTYPES = ("bfloat16", "float16", "float32")


def add_command(commands: Any) -> None:
    """Adds `demo` to the commands of `python -m jhost`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="run an MLP block with jax.jit and with jhost.jit; compare and time them",
        description="Runs an MLP block on the accelerators there are, or on four "
        "virtual devices of the CPU: once with jax.jit, and once with jhost.jit. "
        "Prints the Host IR, what was pipelined, and the times. Exits with 1 if the "
        "results disagree.",
    )
    for name, default, meaning in (
        ("hidden", None, "width of the model"),
        ("ffn", None, "width between the matmuls, a multiple of the devices"),
        ("tokens", None, "rows, a multiple of the devices"),
        ("devices", None, "how many devices to use"),
        ("chunks", 4, "chunks that a device's rows are worked on in"),
        ("repeats", 20, "how many calls of each to time"),
    ):
        text = f"{meaning} (default: {default or 'what fits this machine'})"
        parser.add_argument(
            f"--{name}", type=count, default=default, metavar="N", help=text
        )
    parser.add_argument("--dtype", choices=DTYPES, help="the dtype of all arrays")
    parser.add_argument(
        "--json", type=writable_file, metavar="FILE", help="write the figures there"
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        asked = {name: getattr(arguments, name) for name in SMALL}
        sizes = {name: size for name, size in asked.items() if size is not None}
        block = block_on(devices_here(arguments.devices), **sizes)
        # "auto" may decline, and then there is nothing to show.
        function = hosted(block, pipeline="collective", chunks=arguments.chunks)
        lowered = function.lower(*block.types())
    except (errors.OptionError, errors.DivisibilityError, errors.ChunksError) as error:
        parser.error(str(error))
    explanation = lowered.explain()
    print(f"{lowered.host_ir}\n\n{explanation}\n")

    # Random, because equal elements would hide a chunk in a wrong place.
    operands = block.random_arguments()
    functions = {"plain": plain(block), "jhost": function}
    results = [each(*operands) for each in functions.values()]
    (error,) = relative_errors(results[1], results[0])
    calls = {name: functools.partial(f, *operands) for name, f in functions.items()}
    figures = {
        "match": error <= TOLERANCES[block.dtype],  # not so if it is NaN
        "max_error": error,
        "tolerance": TOLERANCES[block.dtype],
        "loops": explanation.loops,
        "chunks": arguments.chunks,
        **_figures(block, take_turns(calls, rounds=arguments.repeats)),
    }
    print(_report(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if figures["match"] else 1


def _figures(block: MlpBlock, times: Mapping[str, list[float]]) -> dict[str, Any]:
    """The sizes, devices, versions and times of a run: enough to run it again."""
    device = block.mesh.devices.flat[0]
    return {
        **{f"{n}_ms": 1e3 * statistics.median(each) for n, each in times.items()},
        **{f"{name}_min_ms": 1e3 * min(each) for name, each in times.items()},
        **{name: getattr(block, name) for name in SMALL},
        "devices": block.mesh.size,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "versions": {
            "jhost": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
    }


def _report(figures: Mapping[str, Any]) -> str:
    said = "The results agree" if figures["match"] else "THE RESULTS DISAGREE"
    lines = [
        "tokens {tokens}, hidden {hidden}, ffn {ffn}, {dtype}, on {devices} x "
        "{device_kind}".format_map(figures),
        f"{said}: they differ by {figures['max_error']:.1e} of the largest value; the "
        f"tolerance is {figures['tolerance']:.0e}.",
        "milliseconds a call    minimum     median",
    ]
    for name in ("plain", "jhost"):
        least, median = figures[f"{name}_min_ms"], figures[f"{name}_ms"]
        lines.append(f"  {name:<15} {least:12.3f} {median:10.3f}")
    if figures["platform"] == "cpu":
        lines.append("(Devices of one CPU share its cores: nothing can overlap there.)")
    return "\n".join(lines)
