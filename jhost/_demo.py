"""`python -m jhost demo`: one MLP block, plain and through jhost, on what there is.

The block is a Llama layer's, sharded by tensor and sequence: gather the rows, multiply
up, gelu, multiply down, reduce-scatter.  It is one function, run by `jax.jit` and by
`jhost.jit`; under the first its stream mark is the identity.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jhost
from jhost import errors
from jhost.runtime.devices import ask_for_cpu_devices

Function: TypeAlias = Callable[..., jax.Array]

CPU_DEVICES = 4
"""How many virtual devices the CPU is split into, where nobody said another number."""

Sizes: TypeAlias = dict[str, Any]

SMALL: Sizes = {"hidden": 256, "ffn": 1024, "tokens": 512, "dtype": "float32"}
LLAMA_8B: Sizes = {"hidden": 4096, "ffn": 14336, "tokens": 8192, "dtype": "bfloat16"}

TOLERANCES = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
"""How far results may lie apart, as a part of the largest: chunks are summed in another
order, and accelerators may round float32 operands of a matmul to TensorFloat-32."""

IN_SPECS = (P("tp", None), P(None, "tp"), P("tp", None))
OUT_SPEC = P("tp", None)


def add_command(commands: Any) -> None:
    """Adds `demo` to the commands of `python -m jhost`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="run an MLP block plain and through jhost; compare and time them",
        description="Runs an MLP block on the accelerators there are, or on four "
        "virtual devices of the CPU: once by jax.jit, once by jhost.jit. Prints the "
        "Host IR, what was pipelined, and the times; exits with 1 if they disagree.",
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
            f"--{name}", type=_count, default=default, metavar="N", help=text
        )
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), help="of all arrays")
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write the figures there"
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The sizes of one MLP block, and the devices that it runs on."""

    mesh: Mesh
    hidden: int
    ffn: int
    tokens: int
    dtype: str

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """The types of `mlp`'s arguments."""
        up, down = (self.hidden, self.ffn), (self.ffn, self.hidden)
        shapes = ((self.tokens, self.hidden), up, down)
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in shapes]

    def shardings(self) -> tuple[NamedSharding, ...]:
        """The shardings of `mlp`'s arguments."""
        return tuple(NamedSharding(self.mesh, spec) for spec in IN_SPECS)

    def random_arguments(self) -> tuple[jax.Array, ...]:
        """Arguments of `mlp`, made where they belong; its results are about 1."""

        def make(key: jax.Array) -> tuple[jax.Array, ...]:
            keys, types = jax.random.split(key, 3), self.types()
            pairs = zip(keys, types, strict=True)
            x, up, down = (jax.random.normal(k, t.shape, t.dtype) for k, t in pairs)
            return x, up / math.sqrt(self.hidden), down / math.sqrt(self.ffn)

        return jax.jit(make, out_shardings=self.shardings())(jax.random.key(0))


def block_here(arguments: argparse.Namespace) -> Block:
    """The block that was asked for, or one that fits this machine.

    Raises:
        OptionError: there are fewer devices than asked for.
    """
    devices = _devices(arguments.devices)
    sizes = SMALL if devices[0].platform == "cpu" else LLAMA_8B
    asked = {name: getattr(arguments, name) or sizes[name] for name in sizes}
    mesh = jax.make_mesh((len(devices),), ("tp",), (AxisType.Auto,), devices=devices)
    return Block(mesh=mesh, **asked)


def _devices(count: int | None) -> list[Any]:
    """Accelerators, or virtual devices of the CPU, which JAX makes when it starts."""
    with contextlib.suppress(RuntimeError):  # JAX has started: they are made
        ask_for_cpu_devices(count or CPU_DEVICES)
    devices = jax.devices()
    if count is not None and count > len(devices):
        raise errors.OptionError(
            f"--devices {count} asks for more devices than the {len(devices)} "
            f"({devices[0].device_kind}) that there are."
        )
    return devices[:count]


def mlp(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """The block, for one device; its rows may be worked on in chunks."""
    h = jax.nn.gelu(x @ w_up)
    return jhost.stream(h @ w_down, axis=0)


def plain(block: Block) -> Function:
    """The block as JAX runs it: shardings, and XLA's own collectives."""
    out = NamedSharding(block.mesh, OUT_SPEC)
    return jax.jit(mlp, in_shardings=block.shardings(), out_shardings=out)


def pipelined(block: Block, chunks: int) -> jhost.JitFunction[..., jax.Array]:
    """The block as jhost runs it, in as many chunks as asked for."""
    return jhost.jit(
        mlp,
        mesh=block.mesh,
        in_shardings=IN_SPECS,
        out_shardings=OUT_SPEC,
        chunks=chunks,
        pipeline="collective",  # "auto" may decline, and then there is nothing to show
    )


def max_error(result: jax.Array, expected: jax.Array) -> float:
    """The largest difference, as a part of the largest value."""
    one, other = result.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.max(jnp.abs(one - other)) / jnp.max(jnp.abs(other)))


def times_ms(
    functions: Mapping[str, Function], arguments: tuple[jax.Array, ...], repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of each call; the functions take turns, so that drift hits all."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        block = block_here(arguments)
        function = pipelined(block, arguments.chunks)
        lowered = function.lower(*block.types())
    except (errors.OptionError, errors.DivisibilityError, errors.ChunksError) as error:
        parser.error(str(error))
    explanation = lowered.explain()
    print(f"{lowered.as_text()}\n\n{explanation}\n")

    operands = block.random_arguments()
    functions = {"plain": plain(block), "jhost": function}
    error = max_error(function(*operands), functions["plain"](*operands))
    figures = {
        "match": error <= TOLERANCES[block.dtype],  # not so if it is NaN
        "max_error": error,
        "tolerance": TOLERANCES[block.dtype],
        "loops": explanation.loops,
        "chunks": arguments.chunks,
        **_figures(block, times_ms(functions, operands, arguments.repeats)),
    }
    print(_report(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if figures["match"] else 1


def _figures(block: Block, times: Mapping[str, list[float]]) -> dict[str, Any]:
    """What was run on what, enough to run it again, and how long it took."""
    device = block.mesh.devices.flat[0]
    return {
        **{f"{name}_ms": statistics.median(each) for name, each in times.items()},
        **{f"{name}_min_ms": min(each) for name, each in times.items()},
        **{name: getattr(block, name) for name in SMALL},
        "devices": block.mesh.size,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "versions": {
            "jhost": jhost.__version__,
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
