"""Chains of one operation, on all devices at once, each waiting for the one before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhost.lowering.ir.statements import CommunicationKind
from jhost.runtime.compiler_options import accepted, overlap_options

AXIS = "devices"

Step: TypeAlias = Callable[..., jax.Array]
"""One operation on a device's part: its result has the shape of its first operand."""

Call: TypeAlias = Callable[[], Any]


def chained(step: Step, times: int) -> Step:
    """`step` of its own result, so many times, none fused with the next."""

    def chain(x: jax.Array, *others: jax.Array) -> jax.Array:
        for _ in range(times):
            x = lax.optimization_barrier(step(x, *others))
        return x

    return chain


def compiled(
    mesh: Mesh,
    f: Callable[..., Any],
    operands: Sequence[jax.Array],
    more: Mapping[str, Any] | None = None,
) -> Call:
    """A call of `f` on each device's part, compiled as a program with loops is.

    `more` are options of XLA beside those, as far as it takes them.
    """
    parts = PartitionSpec(AXIS)
    on_devices = jax.shard_map(
        f, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False
    )
    options = overlap_options(mesh) | accepted(mesh, more or {})
    program = jax.jit(on_devices, compiler_options=options)
    return functools.partial(program.lower(*operands).compile(), *operands)


def operand(mesh: Mesh, shape: Sequence[int], dtype: Any, scale: float) -> jax.Array:
    """Normal random numbers, an array of that shape on each device."""
    rows, *others = shape
    whole = (mesh.size * rows, *others)
    make = jax.jit(
        lambda: scale * jax.random.normal(jax.random.key(0), whole, dtype),
        out_shardings=NamedSharding(mesh, PartitionSpec(AXIS)),
    )
    return make()


def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def touch(x: jax.Array) -> jax.Array:
    """Reads and writes each element."""
    return x + jnp.ones((), x.dtype)


def normalize(x: jax.Array) -> jax.Array:
    """Reads rows and writes them, as fusions of real programs do: with a reduction.

    An H200 moves 3.6 TB/s in it, and 4.3 where elements are touched one by one.
    """
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(square + jnp.float32(1e-6))).astype(x.dtype)


def communicate(kind: CommunicationKind, devices: int) -> Step:
    """One communication of a device's part, among `devices` of them."""

    def step(x: jax.Array) -> jax.Array:
        match kind:
            case "CollectivePermute":
                ring = [(n, (n + 1) % devices) for n in range(devices)]
                return lax.ppermute(x, AXIS, ring)
            case "AllGather":
                gathered = lax.all_gather(x, AXIS, tiled=True)
                return lax.slice_in_dim(gathered, 0, x.shape[0])
            case "ReduceScatter":
                return jnp.tile(lax.psum_scatter(x, AXIS, tiled=True), devices)
            case "AllReduce":
                return lax.psum(x, AXIS)
            case _:
                raise AssertionError(f"no chain of {kind}")

    return step
