"""How long it takes to lower a gradient, by the number of layers, against `jax.jit`.

    python benchmarks/lowering_time.py [--layers 50,100,200] [--json FILE]
    python benchmarks/lowering_time.py --steps [--mesh fsdp=2,tp=2]

Layers of a matmul and a tanh, written one after another, without marks.  Lowering is
what the host does before XLA compiles: tracing, differentiating, jhost's passes, and
the text for XLA.  A time is the processor's, of the fastest of a few runs, each with
empty caches; it should grow as the number of layers does.

With `--steps` they are steps of Llama 8B's width with marks that jhost chooses
pipelines for, for GPUs that need not be there: the target says what XLA knows of one.
The table has three more numbers.  XLA compiles the lowered program once: that time
includes its assembler's.  The process has had so much memory by then.  And a lowering
makes so many million Python calls, on any machine.  This takes JAX's plugin for CUDA
13, and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 where there is no GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import math
import os
import pathlib
import pstats
import resource
import runpy
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, PartitionSpec as P

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


# --- Whole steps for GPUs that need not be there ------------------------------------ #

ROOT = pathlib.Path(__file__).parents[1]
WIDTHS = {"width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 32000}
SIZES = {**WIDTHS, "sequence": 2048, "batch": 4, "microbatches": 2}
AXES = ("dp", "fsdp", "tp")

Jit: TypeAlias = Callable[..., Any]
Step: TypeAlias = tuple[Lowerable, tuple[Any, ...]]
"""What has `lower`, and the types of its arguments."""

Make: TypeAlias = Callable[[dict[str, Any], Jit, str, int], Step]
"""Makes a step of the script of the Llama, for a mesh and so many layers."""


def gpus(target: pathlib.Path, text: str) -> Mesh:
    """A mesh of the GPUs that `target` describes; `text` is like "fsdp=2,tp=2"."""
    named = dict(each.split("=") for each in text.split(","))
    sizes = [int(named.get(axis, 1)) for axis in AXES]
    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=target.read_text(),
        topology=f"1x1x{math.prod(sizes)}",
    )
    devices = np.array(found.devices).reshape(sizes)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def in_a_scan(llama: dict[str, Any], jit: Jit, mesh: str, layers: int) -> Step:
    """A training step of `examples/llama.py`: its layers are in a scan."""
    return trained(llama, jit, llama["Config"](**SIZES, mesh=mesh, layers=layers))


def trained(llama: dict[str, Any], jit: Jit, config: Any) -> Step:
    """The training step of `examples/llama.py` for a `Config` of that script."""
    specs = llama["specs_of"](config)
    step = jit(
        functools.partial(llama["train_step"], config),
        in_shardings=(specs, llama["MICROBATCHES"]),
        out_shardings=(specs, P()),
        donate_argnums=0,
    )
    state = jax.eval_shape(functools.partial(llama["first_state"], config))
    tokens = (config.microbatches, config.batch // config.microbatches)
    shape = (*tokens, config.sequence + 1)
    return step, (state, jax.ShapeDtypeStruct(shape, np.int32))


def written_out(llama: dict[str, Any], jit: Jit, mesh: str, layers: int) -> Step:
    """The gradients of its layers, one after another."""
    config = llama["Config"](**SIZES, mesh=mesh, layers=1)
    kinds = jax.eval_shape(functools.partial(llama["first_state"], config)).params
    specs = {name: P(*spec[1:]) for name, spec in llama["PARAMS"]["layers"].items()}
    weights = {
        name: jax.ShapeDtypeStruct(kind.shape[1:], jnp.bfloat16)
        for name, kind in kinds["layers"].items()
    }

    def squares(x: jax.Array, weights: Sequence[Any]) -> jax.Array:
        for w in weights:
            normal = llama["rms_norm"](x, w["attention_norm"])
            x = x + llama["attention"](config, normal, w)
            x = x + llama["swiglu"](llama["rms_norm"](x, w["mlp_norm"]), w)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    given = (llama["TOKENS"], [specs] * layers)
    step = jit(jax.grad(squares, (0, 1)), in_shardings=given, out_shardings=given)
    x = (config.batch, config.sequence, config.width)
    return step, (jax.ShapeDtypeStruct(x, jnp.bfloat16), [weights] * layers)


STEPS: dict[str, tuple[Make, int]] = {
    "a training step, 4 layers in a scan": (in_a_scan, 4),
    "gradients of 24 layers written out": (written_out, 24),
}


def step_figures(name: str, on: str, mesh: Mesh, runs: int) -> dict[str, float]:
    """Processor time to lower a step `on` a mesh, and to compile it; memory in MB."""
    llama = runpy.run_path(str(ROOT / "examples" / "llama.py"))
    figures: dict[str, float] = {}
    jhosted = functools.partial(jhost.jit, mesh=mesh)
    jits: dict[str, Jit] = {"jax.jit": jax.jit, "jhost": jhosted}
    lowered: Any = None
    for who, jit in jits.items():
        times: list[float] = []
        for _ in range(runs):
            lower = lowering(name, llama, jit, on, mesh)
            start = time.process_time()
            lowered = lower()
            times.append(time.process_time() - start)
        figures[who] = min(times)
        figures[f"{who}, MB"] = peak_megabytes()
    lower = lowering(name, llama, jhosted, on, mesh)
    with cProfile.Profile() as profile:
        lower()
    figures["Mcalls"] = vars(pstats.Stats(profile))["total_calls"] / 1e6
    start = with_children()
    lowered.compile()
    figures["XLA"] = with_children() - start
    return figures


def with_children() -> float:
    """Processor time of this process, and of those that it ran, as XLA's assembler."""
    times = os.times()
    return sum((times.user, times.system, times.children_user, times.children_system))


def lowering(
    name: str, llama: dict[str, Any], jit: Jit, on: str, mesh: Mesh
) -> Callable[[], Any]:
    """What lowers a step with empty caches."""
    jax.clear_caches()
    make, layers = STEPS[name]
    step, types = make(llama, jit, on, layers)

    def lower() -> Any:
        with jax.set_mesh(mesh):
            return step.lower(*types)

    return lower


def peak_megabytes() -> float:
    """The most memory that the process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def print_steps(rows: dict[str, dict[str, float]]) -> None:
    """A row a step, and of what XLA takes the share that lowering does."""
    heads = [*next(iter(rows.values())), "share"]
    print(f"{'seconds of a processor':36}" + "".join(f"{h:>13}" for h in heads))
    for name, row in rows.items():
        cells = [*row.values(), row["jhost"] / row["XLA"]]
        print(f"{name:36}" + "".join(f"{each:13.2f}" for each in cells))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every arm at every size, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", default="50,100,200,400")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--steps", action="store_true", help="whole steps for GPUs")
    parser.add_argument("--mesh", default="tp=2", help="of the GPUs of --steps")
    target = ROOT / "tests" / "targets" / "h200.pbtxt"
    parser.add_argument("--target", type=pathlib.Path, default=target, metavar="FILE")
    arguments = parser.parse_args(argv)
    if arguments.steps:
        on, runs = arguments.mesh, arguments.runs
        mesh = gpus(arguments.target, on)
        print_steps({name: step_figures(name, on, mesh, runs) for name in STEPS})
        return
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
