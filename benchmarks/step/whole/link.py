"""What a device receives in a second: of an all-gather among all of a run's devices."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

CALLS = 10


def gathered(devices: int, size: int) -> dict[str, Any]:
    """Gathers `size` bytes, of which each device has its part, `CALLS` times."""
    chosen: Any = np.array(jax.devices()[:devices])
    mesh = Mesh(chosen, ("all",), axis_types=(AxisType.Auto,))
    part = NamedSharding(mesh, P("all"))
    x = jax.jit(lambda: jnp.ones(size // 4, jnp.float32), out_shardings=part)()

    def gather(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "all", tiled=True)

    whole = jax.jit(
        jax.shard_map(
            gather, mesh=mesh, in_specs=P("all"), out_specs=P(), check_vma=False
        )
    )
    for _ in range(3):
        jax.block_until_ready(whole(x))
    start = time.perf_counter()
    jax.block_until_ready([whole(x) for _ in range(CALLS)][-1])
    seconds = (time.perf_counter() - start) / CALLS
    received = size * (devices - 1) / devices
    return {
        "all_gather_bytes": size,
        "ms": 1e3 * seconds,
        "received_gb_per_s": received / seconds / 1e9,
    }
