"""What one of several processes runs: a pipelined block, equal to the plain one."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jhost

SPECS = (P("tp"), P(None, "tp"), P("tp", None))


def block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jhost.stream(jax.nn.relu(x @ w) @ v, axis=0)


def is_right(result: jax.Array, wanted: np.ndarray) -> bool:
    """On the devices of this process."""
    parts = result.addressable_shards
    return all((np.asarray(part.data) == wanted[part.index]).all() for part in parts)


def main(port: str, count: str, number: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", int(count), int(number))
    mesh = jax.make_mesh((jax.device_count(),), ("tp",), axis_types=(AxisType.Auto,))
    random = np.random.default_rng(0)
    arrays = [
        random.integers(-3, 4, shape).astype(np.float32)
        for shape in ((16, 8), (8, 16), (16, 8))
    ]
    x, w, v = arrays
    hidden = np.maximum(x @ w, 0)
    gradient = ((np.ones((16, 8)) @ v.T) * (hidden > 0)) @ w.T

    def place(array: np.ndarray, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    operands = [place(*pair) for pair in zip(arrays, SPECS, strict=True)]
    for pipeline in ("p2p", "collective", "off"):
        settings: dict[str, Any] = {"pipeline": pipeline, "mesh": mesh}
        f = jhost.jit(block, in_shardings=SPECS, out_shardings=P("tp"), **settings)
        loss = jax.grad(lambda *xs, f=f: f(*xs).sum())
        right = is_right(f(*operands), hidden @ v), is_right(loss(*operands), gradient)
        print(f"{pipeline}: {right}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
