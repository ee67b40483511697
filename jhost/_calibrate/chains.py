"""Chains of one operation, on all devices at once, each waiting for the one before.

They run behind a matmul as long as the host needs to launch them all.  What follows the
matmul is then what the devices take, and not what the host does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhost.lowering.ir.statements import CommunicationKind
from jhost.runtime.accepted_options import accepted
from jhost.runtime.compiler_options import overlap_options

AXIS = "devices"

OneOperation: TypeAlias = Callable[..., jax.Array]
"""One operation on a device's part: its result has the shape of its first operand."""

OperationChain: TypeAlias = Callable[..., Any]
"""As many operations as its first argument says, of a device's parts."""

ChainCall: TypeAlias = Callable[[], Any]


def chained(step: OneOperation) -> OperationChain:
    """`step` of its own result, again and again, none fused with the next."""

    def chain(times: int, x: jax.Array, *others: jax.Array) -> jax.Array:
        for _ in range(times):
            x = lax.optimization_barrier(step(x, *others))
        return x

    return chain


def beside(step: OneOperation, other: OneOperation) -> OperationChain:
    """`step` and `other` at the same time, both ending before the next.

    Of `step` and another in chains of their own, XLA starts one `step` at a time that
    it hides, and runs the others alone.
    """

    def chain(times: int, x: jax.Array, y: jax.Array, *others: jax.Array) -> Any:
        for _ in range(times):
            x, y = lax.optimization_barrier((x, y))
            x, y = lax.optimization_barrier((step(x), other(y, *others)))
        return x, y

    return chain


def behind_matmul(chain: OperationChain, times: int) -> Callable[..., Any]:
    """So many operations, after a matmul of the first operand with itself."""

    def behind(matrix: jax.Array, *operands: jax.Array) -> Any:
        product = multiply(matrix, matrix)
        # The product is a result, or XLA would leave it out.
        product, operands = lax.optimization_barrier((product, operands))
        return chain(times, *operands), product

    return behind


def compiled(
    mesh: Mesh,
    f: Callable[..., Any],
    operands: Sequence[jax.Array],
    more: Mapping[str, Any] | None = None,
) -> ChainCall:
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
    # Made where it belongs: the whole may not fit one device.
    make = jax.jit(
        lambda: scale * jax.random.normal(jax.random.key(0), whole, dtype),
        out_shardings=NamedSharding(mesh, PartitionSpec(AXIS)),
    )
    return make()


def small(mesh: Mesh) -> jax.Array:
    """An array that takes a kernel no time."""
    return operand(mesh, (8, 128), jnp.float32, 1.0)


def square(mesh: Mesh, side: int) -> jax.Array:
    """A matrix on each device, whose products are no larger than itself."""
    return operand(mesh, (side, side), jnp.bfloat16, side**-0.5)


def row(mesh: Mesh, held: int) -> jax.Array:
    """An array with so many bytes on each device."""
    return operand(mesh, (held // 2,), jnp.bfloat16, 1.0)


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


def communicate(kind: CommunicationKind, devices: int) -> OneOperation:
    """One communication of a device's part, among `devices` of them."""

    def step(x: jax.Array) -> jax.Array:
        match kind:
            case "CollectivePermute":
                # A ring, as pipelines send: each link has one transfer each way.
                ring = [(n, (n + 1) % devices) for n in range(devices)]
                return lax.ppermute(x, AXIS, ring)
            case "AllGather":
                return _after(x, lax.all_gather(x, AXIS, tiled=True))
            case "ReduceScatter":
                return _after(x, lax.psum_scatter(x, AXIS, tiled=True))
            case "AllReduce":
                return lax.psum(x, AXIS)
            case _:
                raise AssertionError(f"no chain of {kind}")

    return step


def _after(x: jax.Array, received: jax.Array) -> jax.Array:
    """`x` when `received` is there: one element of it is written, in place.

    Its negative, as XLA copies the element itself on a stream of its own.
    """
    return lax.dynamic_update_slice(x, -received[-1:], (0,))
