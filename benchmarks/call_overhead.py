"""What a call of a jhost function costs the host, against `jax.jit` of the same.

    python benchmarks/call_overhead.py [--json FILE]

Small functions on one device and on all of them; the two take turns.  A block's time
is that of its calls until each returns; the devices finish between blocks.  Devices
that are parts of the CPU compute on the cores that make the calls, so there it is the
processor time of the calling thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jhost

LIMIT_US = 30.0
"""How much more a call may cost."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One function, compiled twice, with the arguments of its calls."""

    name: str
    plain: Callable[..., Any]
    jhost: Callable[..., Any]
    arguments: tuple[Any, ...]


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y


def increment(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: leaf + 1 for name, leaf in tree.items()}


def cases() -> list[Case]:
    """Two arrays, and a tree of twenty; mesh and shardings given, or the arguments'."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))
    spec = P("x")
    sharding = NamedSharding(mesh, spec)
    x = jnp.ones((devices.size, 8))
    there = jax.device_put(x, sharding)
    tree = {f"leaf{number}": there for number in range(20)}
    given: dict[str, Any] = {"in_shardings": (spec, spec), "out_shardings": spec}
    named: dict[str, Any] = {
        "in_shardings": (sharding, sharding),
        "out_shardings": sharding,
    }
    return [
        Case("one device", jax.jit(add), jhost.jit(add), (x, x)),
        Case(
            f"{devices.size} devices, shardings given",
            jax.jit(add, **named),
            jhost.jit(add, mesh=mesh, **given),
            (there, there),
        ),
        Case(
            f"{devices.size} devices, shardings of the arguments",
            jax.jit(add),
            jhost.jit(add, mesh=mesh),
            (there, there),
        ),
        Case(
            f"{devices.size} devices, a tree of twenty",
            jax.jit(increment),
            jhost.jit(increment, mesh=mesh),
            (tree,),
        ),
        Case(
            f"{devices.size} devices, a tree of twenty, no mesh=",
            jax.jit(increment),
            jhost.jit(increment),
            (tree,),
        ),
    ]


def block_us(f: Callable[..., Any], arguments: Sequence[Any], calls: int) -> float:
    """Microseconds a call, of `calls` calls that nobody waits for."""
    on_cpu = jax.default_backend() == "cpu"
    clock = time.thread_time if on_cpu else time.perf_counter
    result, start = None, clock()
    for _ in range(calls):
        result = f(*arguments)
    elapsed = clock() - start
    jax.block_until_ready(result)
    return 1e6 * elapsed / calls


def measure(case: Case, blocks: int, calls: int) -> dict[str, Any]:
    """Minimum and median over blocks of both, and whether the limit is kept."""
    functions = {"plain": case.plain, "jhost": case.jhost}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for f in functions.values():
        jax.block_until_ready(f(*case.arguments))  # compiled before the first block
    for _ in range(blocks):
        for name, f in functions.items():
            times[name].append(block_us(f, case.arguments, calls))
    minimum = {name: min(each) for name, each in times.items()}
    median = {name: statistics.median(each) for name, each in times.items()}
    more = minimum["jhost"] - minimum["plain"]
    return {
        "case": case.name,
        "minimum_us": minimum,
        "median_us": median,
        "more_us": more,
        "within_limit": more <= LIMIT_US,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every case, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--calls", type=int, default=100, help="calls in a block")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    rows = [measure(case, arguments.blocks, arguments.calls) for case in cases()]
    print(f"{'microseconds a call, minimum (median)':42} {'jax.jit':>15} {'jhost':>15}")
    for row in rows:
        least, median = row["minimum_us"], row["median_us"]
        both = [f"{least[n]:.1f} ({median[n]:.1f})" for n in ("plain", "jhost")]
        verdict = "pass" if row["within_limit"] else "FAIL"
        print(
            f"{row['case']:42} {both[0]:>15} {both[1]:>15} "
            f"{row['more_us']:+6.1f} {verdict}"
        )
    print(f"pass: at most {LIMIT_US:.0f} us more, by the minimum")
    if arguments.json is not None:
        figures = {
            "rows": rows,
            "limit_us": LIMIT_US,
            "blocks": arguments.blocks,
            "calls": arguments.calls,
            "device_kind": jax.devices()[0].device_kind,
            "versions": {"jhost": jhost.__version__, "jax": jax.__version__},
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
