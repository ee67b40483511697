"""One MLP block, and the devices that it runs on: what the commands show things by.

The block is a Llama layer's, sharded by tensor and sequence: gather the rows, multiply
up, gelu, multiply down, reduce-scatter.  It is one function, run by `jax.jit` and by
`jhost.jit`; under the first its stream mark is the identity.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jhost import errors
from jhost._annotate import stream
from jhost._api import JitFunction, jit
from jhost._tuning import Tuning
from jhost.runtime.devices import ask_for_cpu_devices

Function: TypeAlias = Callable[..., jax.Array]

CPU_DEVICES = 4
"""How many virtual devices the CPU is split into, where nobody said another number."""

Sizes: TypeAlias = dict[str, Any]

SMALL: Sizes = {"hidden": 256, "ffn": 1024, "tokens": 512, "dtype": "float32"}
LLAMA_8B: Sizes = {"hidden": 4096, "ffn": 14336, "tokens": 8192, "dtype": "bfloat16"}

IN_SPECS = (P("tp", None), P(None, "tp"), P("tp", None))
OUT_SPEC = P("tp", None)


def count(text: str) -> int:
    """A whole number above 0 out of a command's arguments."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def writable_file(text: str) -> pathlib.Path:
    """A file that can be made, out of a command's arguments: known before the work."""
    path = pathlib.Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is no file that can be written")
    return path


def devices_here(count: int | None) -> list[Any]:
    """Accelerators, or virtual devices of the CPU, which JAX makes when it starts.

    Raises:
        OptionError: there are fewer devices than asked for.
    """
    with contextlib.suppress(RuntimeError):  # JAX has started: they are made
        ask_for_cpu_devices(count or CPU_DEVICES)
    devices = jax.devices()
    if count is not None and count > len(devices):
        raise errors.OptionError(
            f"--devices {count} asks for more devices than the {len(devices)} "
            f"({devices[0].device_kind}) that there are. JAX_NUM_CPU_DEVICES={count} "
            "JAX_PLATFORMS=cpu makes as many of any CPU."
        )
    return devices[:count]


def sizes_here(devices: list[Any]) -> Sizes:
    """Sizes of a block that fit the devices."""
    return SMALL if devices[0].platform == "cpu" else LLAMA_8B


def block_on(devices: list[Any], **sizes: Any) -> MlpBlock:
    """A block over these devices, of these sizes, or else of those that fit them."""
    # Auto axes (Explicit is the default of JAX 0.10 to 0.12): jhost lays values out.
    mesh = jax.make_mesh((len(devices),), ("tp",), (AxisType.Auto,), devices=devices)
    return MlpBlock(mesh=mesh, **{**sizes_here(devices), **sizes})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlpBlock:
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
            # Results of about 1 keep relative errors of narrow floats alike at all
            # sizes.
            return x, up / math.sqrt(self.hidden), down / math.sqrt(self.ffn)

        return jax.jit(make, out_shardings=self.shardings())(jax.random.key(0))


def mlp(x: jax.Array, w_up: jax.Array, w_down: jax.Array, **asked: Any) -> jax.Array:
    """The block, for one device; its rows may be worked on in chunks, as `asked`."""
    h = jax.nn.gelu(x @ w_up)
    return stream(h @ w_down, axis=0, **asked)


def plain(block: MlpBlock) -> Function:
    """The block as JAX runs it: shardings, and XLA's own collectives."""
    out = NamedSharding(block.mesh, OUT_SPEC)
    return jax.jit(mlp, in_shardings=block.shardings(), out_shardings=out)


def hosted(
    block: MlpBlock, *, tuning: Tuning | None = None, **asked: Any
) -> JitFunction[..., jax.Array]:
    """The block as jhost runs it, with `chunks=` and `pipeline=` as `asked`."""
    # Asked of the mark: those of `jit` are wishes, and a command's are to be followed.
    function = functools.partial(mlp, **asked)
    specs: Any = {"in_shardings": IN_SPECS, "out_shardings": OUT_SPEC}
    return jit(function, mesh=block.mesh, tuning=tuning, **specs)


def compute_only(block: MlpBlock) -> tuple[Function, tuple[jax.Array, ...]]:
    """What each device multiplies, with all rows in place and no sum taken; arguments.

    No way to communicate makes the block faster than this.
    """
    count = block.mesh.size

    def part(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ w_up) @ w_down

    x, w_up, w_down = block.random_arguments()
    # All rows on each device, as they are once they are gathered.
    copies = jax.jit(
        lambda x: jnp.tile(x, (count, 1)), out_shardings=block.shardings()[0]
    )(x)
    whole = jax.shard_map(part, mesh=block.mesh, in_specs=IN_SPECS, out_specs=OUT_SPEC)
    return jax.jit(whole), (copies, w_up, w_down)
