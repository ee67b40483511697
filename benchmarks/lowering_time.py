"""How long it takes to lower a gradient, by the number of layers, against `jax.jit`.

    python benchmarks/lowering_time.py [--layers 50,100,200] [--json FILE]

Layers of a matmul and a tanh, written one after another, without marks.  Lowering is
what the host does before XLA compiles: tracing, differentiating, jhost's passes, and
the text for XLA.  A time is the processor's, of the fastest of a few runs, each with
empty caches; it should grow as the number of layers does.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

import jhost

Lowerable: TypeAlias = Any


def loss(x: jax.Array, *weights: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def arms(layers: int) -> dict[str, Callable[[], Lowerable]]:
    """What makes a function to lower, of `loss` and so many weights."""
    numbers = tuple(range(1, layers + 1))
    sizes = (1, len(jax.devices()))
    mesh = jax.make_mesh(sizes, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    weights = [P(None, "tp") if n % 2 else P("tp") for n in numbers]
    specs: dict[str, Any] = {"mesh": mesh, "in_shardings": (P("dp"), *weights)}
    return {
        "jax.jit": lambda: jax.jit(jax.grad(loss, numbers)),
        "jhost, one device": lambda: jhost.jit(jax.grad(loss, numbers)),
        "jhost, jax.grad inside": lambda: jhost.jit(jax.grad(loss, numbers), **specs),
        "jhost, jax.grad around": lambda: jax.jit(
            jax.grad(jhost.jit(loss, **specs), numbers)
        ),
    }


def seconds(make: Callable[[], Lowerable], layers: int, runs: int) -> float:
    """Processor time of lowering, of the fastest run."""
    types = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * (layers + 1)
    times: list[float] = []
    for _ in range(runs):
        jax.clear_caches()
        start = time.process_time()
        make().lower(*types)
        times.append(time.process_time() - start)
    return min(times)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every arm at every size, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", default="50,100,200,400")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    counts = [int(count) for count in arguments.layers.split(",")]
    rows = {
        name: [seconds(arms(n)[name], n, arguments.runs) for n in counts]
        for name in arms(1)
    }
    heads = "".join(f"{count:>8}" for count in counts)
    print(f"{'seconds to lower, by layers':28}{heads}")
    for name, times in rows.items():
        print(f"{name:28}" + "".join(f"{each:8.2f}" for each in times))
    if arguments.json is not None:
        figures = {
            "layers": counts,
            "seconds": rows,
            "runs": arguments.runs,
            "versions": {"jhost": jhost.__version__, "jax": jax.__version__},
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
