"""What one of several processes runs: `jhost.tune`, and what all have to agree on."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
from jax.sharding import AxisType, PartitionSpec as P

import jhost

SPECS = (P("tp"), P(None, "tp"), P("tp", None))


def block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jhost.stream(jax.nn.relu(x @ w) @ v, axis=0)


def main(port: str, count: str, number: str, folder: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", int(count), int(number))
    mesh = jax.make_mesh((jax.device_count(),), ("tp",), axis_types=(AxisType.Auto,))
    f = jhost.jit(block, mesh=mesh, in_shardings=SPECS, out_shardings=P("tp"))
    arguments = jax.jit(
        lambda key: tuple(
            jax.random.normal(k, shape)
            for k, shape in zip(
                jax.random.split(key, 3), ((16, 8), (8, 16), (16, 8)), strict=True
            )
        ),
        out_shardings=tuple(jax.NamedSharding(mesh, spec) for spec in SPECS),
    )(jax.random.key(0))
    for turn in range(2):  # the second is read from the disk of process 0
        tuning = jhost.tune(f, *arguments, rounds=2, progress=False)
        Path(folder, f"tuning-{turn}-of-{number}").write_text(tuning.to_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
