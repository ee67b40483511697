"""`python -m jhost bench`: an MLP block at a few sizes, plain, tuned, and its limit.

The limit is what each device multiplies, with nothing to wait for.  The repository's
`benchmarks/` measure more functions against more peers.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Sequence
from typing import Any

from jhost import errors
from jhost._commands.block import (
    MlpBlock,
    block_on,
    compute_only,
    count,
    devices_here,
    hosted,
    plain,
    sizes_here,
    writable_file,
)
from jhost._compare import beyond_tolerance
from jhost._timing import take_turns
from jhost._tune.tune import tune
from jhost._tune.tuner import CALLS, WARMUPS
from jhost._tuning_holds import environment_of
from jhost.lowering.cost.outcomes import NOT_PIPELINED

ON_ONE_DEVICE = "on one device"

PARTS = (4, 2, 1)
"""Each size has that part of the tokens of the demo's block."""


def add_command(commands: Any) -> None:
    """Adds `bench` to the commands of `python -m jhost`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="time an MLP block at a few sizes: jax.jit, jhost, and the matmuls alone",
        description="Times the MLP block of the demo at three sizes on the devices "
        "there are: with jax.jit, with jhost and the choice of jhost.tune, and the "
        "matmuls of each device alone, which are the lower limit. Exits with 1 if "
        "results disagree.",
    )
    for name, default, meaning in (
        ("devices", None, "how many devices to use"),
        ("rounds", 10, f"how often each has its turn, of {CALLS} calls"),
    ):
        text = f"{meaning} (default: {default or 'all there are'})"
        parser.add_argument(
            f"--{name}", type=count, default=default, metavar="N", help=text
        )
    parser.add_argument(
        "--tokens",
        type=count,
        nargs="+",
        metavar="N",
        help="rows of each size, multiples of the devices (default: three that fit)",
    )
    parser.add_argument(
        "--json", type=writable_file, metavar="FILE", help="write the figures there"
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size: median and least seconds of each way, and what jhost chose."""

    tokens: int
    hidden: int
    ffn: int
    dtype: str
    median: dict[str, float]
    minimum: dict[str, float]
    choice: str
    problems: tuple[str, ...]

    @property
    def hidden_share(self) -> float | None:
        """How much of the exposed communication jhost hides.

        None where nothing is pipelined, or less than a twentieth of the time is
        communication: that is noise.
        """
        if self.choice in (NOT_PIPELINED, ON_ONE_DEVICE):
            return None
        exposed = self.median["plain"] - self.median["compute"]
        gained = self.median["plain"] - self.median["jhost"]
        return gained / exposed if exposed > 0.05 * self.median["plain"] else None

    def __str__(self) -> str:
        share = self.hidden_share
        times = (1e3 * self.median[name] for name in ("plain", "jhost", "compute"))
        columns = "".join(f"{ms:11.3f}" for ms in times)
        hidden = "-" if share is None else "slower" if share < 0 else f"{share:.0%}"
        return f"{self.tokens:>8}{columns}{hidden:>10}   {self.choice}"


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        devices = devices_here(arguments.devices)
        most = sizes_here(devices)["tokens"]
        tokens: Sequence[int] = arguments.tokens or [most // part for part in PARTS]
        blocks = [block_on(devices, tokens=number) for number in tokens]
        # All sizes are lowered before any is timed, so that a bad one is refused at
        # once.
        for block in blocks:
            hosted(block).lower(*block.types())
    except (errors.OptionError, errors.DivisibilityError) as error:
        parser.error(str(error))
    here, size = environment_of(blocks[0].mesh), blocks[0]
    print(
        f"hidden {size.hidden}, ffn {size.ffn}, {size.dtype}, on {here.devices} x "
        f"{here.device_kind}, jhost {here.jhost}, JAX {here.jax}\n"
        "          median milliseconds a call          hidden\n"
        "  tokens      plain      jhost    compute      part   jhost is"
    )
    rows: list[Row] = []
    for block in blocks:
        rows.append(measured(block, arguments.rounds))
        # A size may take long: each row is shown as soon as it is known.
        print(rows[-1], flush=True)
    problems = [problem for row in rows for problem in row.problems]
    for problem in problems:
        print(f"THE RESULTS DISAGREE: {problem}")
    if here.platform == "cpu":
        print("(Devices of one CPU share its cores: nothing can overlap there.)")
    if arguments.json is not None:
        figures = {"environment": here, "rows": rows}
        text = json.dumps(figures, indent=2, default=dataclasses.asdict)
        arguments.json.write_text(text + "\n")
    return 1 if problems else 0


def measured(block: MlpBlock, rounds: int) -> Row:
    """The times of one block, each way in turns."""
    operands = block.random_arguments()
    # Without the cache: a benchmark has to measure what it says.
    tuning = tune(hosted(block), *operands, rounds=rounds, cache=False)
    by_jax, by_jhost = plain(block), hosted(block, tuning=tuning)
    compute, placed = compute_only(block)
    times = take_turns(
        {
            "plain": functools.partial(by_jax, *operands),
            "jhost": functools.partial(by_jhost, *operands),
            "compute": functools.partial(compute, *placed),
        },
        rounds=rounds,
        calls=CALLS,
        warmups=WARMUPS,
    )
    streams = tuning.programs[0].streams
    return Row(
        tokens=block.tokens,
        hidden=block.hidden,
        ffn=block.ffn,
        dtype=block.dtype,
        median={name: statistics.median(each) for name, each in times.items()},
        minimum={name: min(each) for name, each in times.items()},
        choice=streams[0].candidates[0].text if streams else ON_ONE_DEVICE,
        # Fast and wrong is no result.
        problems=tuple(beyond_tolerance(by_jhost(*operands), by_jax(*operands))),
    )
