"""The README's MLP over all devices, compared with `jax.jit` of the same function.

JAX_NUM_CPU_DEVICES=4 python examples/mlp.py --chunks 4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

import jhost


def mlp(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """A plain JAX function of global shapes.  jhost may work on its rows in chunks."""
    h = jax.nn.gelu(x @ w_up)
    return jhost.stream(h @ w_down, axis=0)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the MLP in `--chunks` chunks, and compares it with `jax.jit`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=128, help="for each device")
    arguments = parser.parse_args(argv)

    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("tp",), axis_types=(AxisType.Auto,))
    pipelined = jhost.jit(
        mlp,
        mesh=mesh,
        in_shardings=(P("tp", None), P(None, "tp"), P("tp", None)),
        out_shardings=P("tp", None),
        chunks=arguments.chunks,
        pipeline="collective",
    )

    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (arguments.rows * devices, 128))
    w_up = jax.random.normal(keys[1], (128, 512)) / 128**0.5
    w_down = jax.random.normal(keys[2], (512, 128)) / 512**0.5

    y = pipelined(x, w_up, w_down)
    # Without jhost the stream mark is the identity.  Float32 matmuls of some devices
    # round their operands to TensorFloat-32.
    np.testing.assert_allclose(y, jax.jit(mlp)(x, w_up, w_down), atol=2e-2)
    print(jhost.explain(pipelined, x, w_up, w_down))

    def loss(w_up: jax.Array) -> jax.Array:
        return jnp.mean(pipelined(x, w_up, w_down) ** 2)

    gradient = jax.jit(jax.grad(loss))(w_up)  # its loops are pipelined too
    print(
        f"gradient: {gradient.shape}, over {len(gradient.sharding.device_set)} devices"
    )


if __name__ == "__main__":
    main()
