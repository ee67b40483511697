"""What one of several processes runs, and prints; `test_processes.py` reads it.

run_in_processes.py SCENARIO,... PORT COUNT NUMBER

The first scenario initializes, if any does; the others follow, with a line before each.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jhost
from jhost import errors
from jhost.runtime import agreement

ROW, COLUMN = P("tp"), P(None, "tp")
SPECS = (ROW, COLUMN, ROW)
BLOCK = (16, 8), (8, 16), (16, 8)


def initialize(port: str, count: str, number: str, **more: Any) -> None:
    address = f"localhost:{port}"
    jhost.distributed.initialize(address, int(count), int(number), **more)


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def symmetric_buffers(*process: str) -> None:
    initialize(*process, symmetric_buffers=True)
    assert jax.device_count()
    say(scenario="symmetric_buffers")
    say(flags=os.environ["XLA_FLAGS"])


def briefly_alive(*process: str) -> None:
    """To the others, once nothing is heard of it."""
    initialize(*process, heartbeat_timeout_seconds=10)


def impatient() -> None:
    agreement.set_timeout(2)


def is_last() -> bool:
    return jax.process_index() == jax.process_count() - 1


def mesh_of(devices: list[Any]) -> Mesh:
    return jax.make_mesh(
        (len(devices),), ("tp",), axis_types=(AxisType.Auto,), devices=devices
    )


def hybrid_mesh() -> Mesh:
    """Two ways of data, and tensors over the other devices, if need be of others."""
    axes = {"dp": 2, "tp": jax.device_count() // 2}
    return jhost.distributed.make_mesh(axes, within=())


def placed(mesh: Mesh, shape: tuple[int, ...], spec: P, seed: int) -> jax.Array:
    """Small integers, so that sums in any order are exact."""
    whole = np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(shape, sharding, whole.__getitem__)


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream(jax.nn.relu(x @ up) @ down, axis=0)


def blocks_on(where: list[Any] | Mesh, **how: Any) -> partial[jax.Array]:
    """`block` on some devices, to be called without arguments."""
    mesh = where if isinstance(where, Mesh) else mesh_of(where)
    how = {"pipeline": "p2p", "in_shardings": SPECS, "out_shardings": ROW, **how}
    operands = [placed(mesh, *pair, seed=0) for pair in zip(BLOCK, SPECS, strict=True)]
    return partial(jhost.jit(block, mesh=mesh, **how), *operands)


# --- The patterns of docs/patterns.md ---------------------------------------------- #


class Pattern(NamedTuple):
    fun: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    out: P


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return jhost.stream(x @ w, 0)


def bias_and_activation(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return jhost.stream(jnp.maximum(x @ w + b, 0), 0)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream((jnp.maximum(x @ gate, 0) * (x @ up)) @ down, 0)


def weight_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
    return jhost.stream(x, 0).T @ dy


def on_the_right(w: jax.Array, x: jax.Array) -> jax.Array:
    return w @ jhost.stream(x, 1)


def experts(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    there = jhost.shard(x, P(None, "tp"))
    h = jnp.maximum(jnp.einsum("tek,ekf->tef", there, up), 0)
    return jhost.stream(jnp.einsum("tef,efk->tek", h, down), 0, pipeline="collective")


def layers(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    def layer(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.minimum(block(h, up, down), 3), None

    return jax.lax.scan(layer, x, length=2)[0]


PATTERNS = {
    "all-gather, matmul": Pattern(matmul, BLOCK[:2], (ROW, COLUMN), COLUMN),
    "matmul, all-gather": Pattern(matmul, ((16, 8), (8, 4)), (ROW, P()), P()),
    "matmul, reduce-scatter": Pattern(matmul, BLOCK[1:], (COLUMN, ROW), ROW),
    "matmul, all-reduce": Pattern(matmul, BLOCK[1:], (COLUMN, ROW), P()),
    "bias": Pattern(
        bias_and_activation, (*BLOCK[:2], (16,)), (ROW, COLUMN, ROW), COLUMN
    ),
    "block": Pattern(block, BLOCK, SPECS, ROW),
    "swiglu": Pattern(swiglu, (BLOCK[0], *BLOCK[1:2] * 2, BLOCK[2]),
                      (ROW, COLUMN, COLUMN, ROW), ROW),
    "contracted": Pattern(weight_gradient, ((16, 8), (16, 8)), (ROW, COLUMN), COLUMN),
    "on the right": Pattern(on_the_right, BLOCK[:2], (ROW, COLUMN), ROW),
    "experts": Pattern(
        experts, ((16, 8, 4), (8, 4, 8), (8, 8, 4)), (ROW, ROW, ROW), ROW
    ),
    "layers": Pattern(layers, BLOCK, SPECS, ROW),
}  # fmt: skip


# The others' gradients are like theirs.
DIFFERENTIATED = "block", "swiglu", "contracted", "experts", "layers"


def pattern_runs(devices: list[Any]) -> Iterator[tuple[str, Any]]:
    """Each pattern by a pipeline, each second one by the other; gradients in a jit."""
    mesh = mesh_of(devices)
    for name, pipeline in zip(PATTERNS, itertools.cycle(("p2p", "collective"))):
        for what, result in runs(name, pipeline, mesh):
            yield f"{name}, {what}", result


def runs(name: str, pipeline: str, mesh: Mesh) -> Iterator[tuple[str, Any]]:
    pattern = PATTERNS[name]
    how: dict[str, Any] = {"pipeline": pipeline, "mesh": mesh}
    f = jhost.jit(
        pattern.fun, in_shardings=pattern.specs, out_shardings=pattern.out, **how
    )
    pairs = zip(pattern.shapes, pattern.specs, strict=True)
    operands = [placed(mesh, *pair, seed=n) for n, pair in enumerate(pairs)]
    numbers = tuple(range(len(operands)))
    yield "value", f(*operands)
    if name in DIFFERENTIATED:
        yield (
            "gradients",
            jax.jit(jax.grad(lambda *xs: f(*xs).sum(), numbers))(*operands),
        )


def digests(tree: Any) -> dict[str, str]:
    """Of each part of each array that is on a device of this process."""
    return {
        f"{number} {part.index}": hashlib.sha256(np.asarray(part.data)).hexdigest()
        for number, array in enumerate(jax.tree.leaves(tree))
        for part in array.addressable_shards
    }


def patterns() -> None:
    for what, result in pattern_runs(jax.devices()):
        say(**{what: digests(result)})


HYBRID_SPECS = P(("dp", "tp")), P("dp", "tp"), P("tp", "dp")


def hybrid_runs(mesh: Mesh) -> Iterator[tuple[str, Any]]:
    """A block and a scan of them, weights over all devices, and their gradients."""
    rows, *_ = HYBRID_SPECS
    how: dict[str, Any] = {"mesh": mesh, "pipeline": "p2p", "out_shardings": rows}
    pairs = enumerate(zip(BLOCK, HYBRID_SPECS, strict=True))
    operands = [placed(mesh, *pair, seed=n) for n, pair in pairs]
    for fun in (block, layers):
        f = jhost.jit(fun, in_shardings=HYBRID_SPECS, **how)
        yield f"{fun.__name__}, value", f(*operands)
        gradients = jax.jit(jax.grad(lambda *xs, f=f: f(*xs).sum(), (0, 1, 2)))
        yield f"{fun.__name__}, gradients", gradients(*operands)


def hybrid() -> None:
    for what, result in hybrid_runs(hybrid_mesh()):
        say(**{what: digests(result)})


# --- What goes wrong ---------------------------------------------------------------- #


def loop() -> None:
    """For ever, until somebody dies."""
    f = blocks_on(hybrid_mesh())
    while True:
        jax.block_until_ready(f())
        say(ran=True)
        time.sleep(0.1)  # who waits for the others' end takes no time


def caught(f: Callable[[], Any]) -> None:
    try:
        jax.block_until_ready(f())
        say(error=None)
    except errors.JhostError as error:
        say(error=type(error).__name__, text=str(error))


def another_statement() -> None:
    """The last process has another activation."""

    def mine(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        activation = jnp.tanh if is_last() else jnp.sin
        return jhost.stream(activation(x @ up) @ down, axis=0)

    mesh = hybrid_mesh()
    operands = [placed(mesh, *pair, seed=0) for pair in zip(BLOCK, SPECS, strict=True)]
    f = jhost.jit(mine, mesh=mesh, in_shardings=SPECS, pipeline="p2p")
    caught(partial(f, *operands))
    caught(partial(jax.jit(f), *operands))
    caught(partial(jax.grad(lambda *xs: f(*xs).sum()), *operands))
    caught(lambda: f.lower(*operands).compile()(*operands))
    # It was an error like any other: what follows works.
    caught(blocks_on(mesh))


def differences() -> None:
    """Programs that differ in one way after another; the next is right again."""
    another_parameter(is_first=jax.process_index() == 0)
    another_executable(is_last())


def another_parameter(is_first: bool) -> None:
    """A difference that the printed program does not show, then one of options."""
    precision = jax.lax.Precision.HIGHEST if is_first else None

    def mine(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.matmul(x, x, precision=precision), 0)

    mesh = mesh_of(jax.devices())
    x = placed(mesh, (16, 16), ROW, seed=0)
    how: dict[str, Any] = {"mesh": mesh, "in_shardings": ROW, "pipeline": "p2p"}
    caught(partial(jhost.jit(mine, **how), x))
    options = {"xla_cpu_enable_fast_math": is_first}
    caught(blocks_on(jax.devices(), compiler_options=options))
    # Dumps are for one process to ask for.
    dump = {"xla_dump_to": "/dev/null"} if is_first else {}
    caught(blocks_on(jax.devices(), compiler_options=dump))


def another_executable(is_last: bool) -> None:
    """One Host IR program, and what the processes say around it differs."""
    mesh = mesh_of(jax.devices())
    factor = np.full(16, 3 if is_last else 2, np.float32)

    def mine(x: jax.Array, tag: object = None) -> jax.Array:
        return jhost.stream(jnp.sin(x @ x), 0)

    def closing(x: jax.Array) -> jax.Array:
        return jhost.stream((x * factor) @ x, 0)

    how: dict[str, Any] = {"mesh": mesh, "pipeline": "p2p", "in_shardings": ROW}
    x = placed(mesh, (16, 16), ROW, seed=0)
    donating = jhost.jit(mine, **how, donate_argnums=0 if is_last else None)
    caught(partial(donating, x))
    caught(partial(jhost.jit(closing, **how), x))
    caught(partial(jax.jit(jhost.jit(closing, **how)), x))
    # An object says where it is, which is no difference.
    for tag in (is_last, object()):
        caught(partial(jhost.jit(mine, **how, static_argnums=1), x, tag))


def another_order() -> None:
    pipelines = ("p2p", "collective")
    for pipeline in pipelines if jax.process_index() == 0 else pipelines[::-1]:
        caught(blocks_on(jax.devices(), pipeline=pipeline))


def absent() -> None:
    """The last process runs nothing; the others wait for it, and give up."""
    f = blocks_on(jax.devices(), pipeline="collective")
    if not is_last():
        caught(f)


def page(*_: str) -> None:
    """Examples of docs/errors.md, each with what stands before all of them."""
    preamble, *examples = json.load(sys.stdin)
    for example in examples:
        # The two examples of an error may be of one program.
        agreement._meetings.agreed.clear()  # pyright: ignore[reportPrivateUsage]
        namespace: dict[str, Any] = {}
        exec(preamble, namespace)
        caught(partial(exec, example, namespace))


def twice() -> None:
    caught(partial(initialize, "localhost:1", "2", "0"))


# --- What they measure -------------------------------------------------------------- #


def calibrates(port: str, count: str, number: str) -> None:
    """Together, by the command; then each goes by it."""
    from jhost import __main__
    from jhost._calibrate import between, calibrate, measure, timer
    from jhost._calibration_holds import rates_here
    from jhost.runtime.devices import devices_of

    measure.SIZES = between.SIZES = (1 << 19, 1 << 20)
    timer._LONG = 4  # pyright: ignore[reportPrivateUsage]
    calibrate._ON_CPU["budget"] = 0.002  # pyright: ignore[reportPrivateUsage]
    address = f"localhost:{port}"
    __main__.main(["calibrate", "--process", address, count, number])
    rates = rates_here(devices_of(mesh_of(jax.devices())))
    assert rates is not None
    link = rates.link("AllGather", ["tp"])
    say(bandwidth=link.bandwidth, latency=link.latency, taken=link.taken)


# --- How often processes meet ----------------------------------------------------- #


def met() -> int:
    return sum(agreement._meetings.counts.values())  # pyright: ignore


def meetings() -> None:
    """Only to compare what is about to run and was not compared before."""
    f, again = blocks_on(jax.devices()), blocks_on(jax.devices())
    seen: dict[str, int] = {}
    if jax.process_index() == 0:  # alone
        function: Any = f.func
        print(jhost.explain(function, *f.args), file=sys.stderr)
        function.lower(*f.args).compile().as_text()
        function.trace(*f.args)
    seen["explained, lowered, compiled and traced"] = met()
    jax.block_until_ready([f() for _ in range(3)])
    seen["called"] = met()
    jax.block_until_ready(again())
    jax.clear_caches() if jax.process_index() == 0 else None
    jax.block_until_ready(f())
    seen["compiled twice"] = met()
    half = jax.process_count() // 2
    inner = [d for d in jax.devices() if d.process_index < half]
    if jax.process_index() < half:
        jax.block_until_ready(blocks_on(inner)())
    seen["called on half of the devices"] = met()
    say(**seen)


def on_their_own() -> None:
    before = met()
    jax.block_until_ready(blocks_on(jax.local_devices())())
    say(met=met() - before)


def main(scenarios: str, *process: str) -> None:
    first, *others = scenarios.split(",")
    globals()[first](*process)
    for name in others:
        say(scenario=name)
        globals()[name]()


if __name__ == "__main__":
    main(*sys.argv[1:])
