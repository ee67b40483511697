"""The README's MLP in several processes, compared with one process.

python examples/multi_process.py --processes 4

This starts them on this machine, on CPUs.  `--platform cuda` gives each its own GPU.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jhost

SPECS = (P("tp", None), P(None, "tp"), P("tp", None))


def mlp(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """A plain JAX function of global shapes.  jhost may work on its rows in chunks."""
    h = jax.nn.relu(x @ w_up)
    return jhost.stream(h @ w_down, axis=0)


def run(process: int, arguments: argparse.Namespace) -> None:
    """Runs the MLP in a process, over all devices, and then by itself."""
    jhost.distributed.initialize(
        arguments.coordinator,
        arguments.processes,
        process,
        local_device_ids=None if arguments.platform == "cpu" else process,
        heartbeat_timeout_seconds=30,
    )
    mesh = jax.make_mesh((jax.device_count(),), ("tp",), axis_types=(AxisType.Auto,))
    f = jhost.jit(
        mlp, mesh=mesh, in_shardings=SPECS, out_shardings=SPECS[0], pipeline="p2p"
    )

    rows, width = arguments.rows * jax.device_count(), 4 * arguments.width
    shapes = (rows, arguments.width), (arguments.width, width), (width, arguments.width)
    random = np.random.default_rng(0)  # the same numbers in every process
    wholes = [random.standard_normal(s, np.float32) / s[0] ** 0.5 for s in shapes]
    # Each process makes the shards that its own devices hold.
    operands = [
        jax.make_array_from_callback(
            whole.shape, NamedSharding(mesh, spec), whole.__getitem__
        )
        for whole, spec in zip(wholes, SPECS, strict=True)
    ]
    if process == 0:
        print(jhost.explain(f, *operands))

    y = f(*operands)
    alone = np.asarray(jax.jit(mlp)(*map(jnp.asarray, wholes)))
    for shard in y.addressable_shards:
        np.testing.assert_allclose(shard.data, alone[shard.index], atol=2e-2)
    held = [shard.index[0] for shard in y.addressable_shards]
    print(f"process {process}: rows {held[0].start} to {held[-1].stop} are right")


def start(given: Sequence[str], arguments: argparse.Namespace) -> int:
    """Starts the processes, waits for them, and returns 0 if all ended well."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    devices = {"JAX_NUM_CPU_DEVICES": str(arguments.devices)}
    environment = os.environ | devices | {"JAX_PLATFORMS": arguments.platform}
    command = [sys.executable, __file__, *given, "--coordinator", coordinator]
    processes = [
        subprocess.Popen([*command, "--process", str(number)], env=environment)
        for number in range(arguments.processes)
    ]
    return max(abs(process.wait()) for process in processes)


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the processes.  Each of them runs this function again, with a number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="CPUs of each process")
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, default=128, help="for each device")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    given = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(given)
    if arguments.process is None:
        return start(given, arguments)
    run(arguments.process, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
