"""An MLP in eight bits: only narrow values and their scales move.

JAX_NUM_CPU_DEVICES=4 python examples/fp8.py

With `--product blocks` JAX quantizes both operands, 32 values for each scale (MXFP8).
On CPUs that needs a JAX newer than 0.10.  With `--product rows` this file does it, with
a scale for each row of one operand and each column of the other.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from measure import difference, milliseconds

import jhost

Product: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]

ROWS, COLUMNS = P("tp"), P(None, "tp")
NARROW = jnp.float8_e4m3fn


def by_blocks(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` by `jax.nn.scaled_dot_general`, also in its gradients."""
    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    return jax.nn.scaled_dot_general(
        x,
        w,
        (((1,), (0,)), ((), ())),
        preferred_element_type=x.dtype,
        configs=[config] * 3,  # of both operands, and of the result's gradient
    )


def by_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` with a scale for each row of x and each column of w."""

    def narrowed(values: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
        largest = jnp.max(jnp.abs(values), axis, keepdims=True)
        scale = largest / float(jnp.finfo(NARROW).max)
        return (values / scale).astype(NARROW), scale

    (narrow_x, of_rows), (narrow_w, of_columns) = narrowed(x, 1), narrowed(w, 0)
    product = jax.lax.dot(narrow_x, narrow_w, preferred_element_type=x.dtype)
    return product * of_rows * of_columns


PRODUCTS: dict[str, Product] = {"blocks": by_blocks, "rows": by_rows}


def mlp(
    product: Product, x: jax.Array, w_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    """Works on each chunk of rows when it arrives."""
    h = jax.nn.gelu(product(x, w_up))
    return jhost.stream(product(h, w_down), axis=0)


def main(argv: Sequence[str] | None = None) -> jhost.Explanation:
    """Compares the MLP with `jax.jit`, and returns its explanation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--product", choices=PRODUCTS, default="rows")
    parser.add_argument("--pipeline", choices=["p2p", "collective"], default="p2p")
    parser.add_argument("--large", action="store_true", help="Llama-3 8B's, for GPUs")
    arguments = parser.parse_args(argv)
    rows, width, hidden = (2048, 4096, 14336) if arguments.large else (16, 64, 128)

    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("tp",), axis_types=(AxisType.Auto,))
    specs = ROWS, COLUMNS, ROWS
    shapes = (
        (rows * devices, width),
        (width, hidden * devices),
        (hidden * devices, width),
    )
    keys = jax.random.split(jax.random.key(0), 3)
    operands = [
        jax.device_put(
            jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5,
            NamedSharding(mesh, spec),
        )
        for key, shape, spec in zip(keys, shapes, specs, strict=True)
    ]
    function = functools.partial(mlp, PRODUCTS[arguments.product])
    pipelined = jhost.jit(
        function,
        mesh=mesh,
        in_shardings=specs,
        out_shardings=ROWS,
        pipeline=arguments.pipeline,
        chunks=devices,
    )
    explanation = jhost.explain(pipelined, *operands)
    print(explanation)
    off = difference(pipelined(*operands), jax.jit(function)(*operands))
    print(f"the results of `jax.jit` differ by {off:.0e}")
    moved = sum(row.bytes for row in explanation.communications)
    wide = 2 * 2 * rows * width * (devices - 1)  # gathered, and summed
    print(f"each device receives {moved:,} bytes; all in bfloat16 would be {wide:,}")
    print(f"{milliseconds(pipelined, *operands):.2f} ms")
    return explanation


if __name__ == "__main__":
    main()
