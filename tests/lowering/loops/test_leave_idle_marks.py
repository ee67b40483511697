"""A mark that no loop comes of leaves no trace in the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.ir.remarks import StreamReport
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.pipeline import passes, run_passes
from jhost.testing import mesh_of
from tests import budget
from tests.lowering.traced import built, remarks

Mark: TypeAlias = Callable[[jax.Array], jax.Array]


def unmarked(x: jax.Array) -> jax.Array:
    return x


MARKS: Mapping[str, Mark] = {
    "a whole dim": lambda x: jhost.stream(x, axis=1),
    "off": lambda x: jhost.stream(x, axis=0, pipeline="off"),
    "one chunk": lambda x: jhost.stream(x, axis=1, chunks=1),
    "left open": lambda x: jhost.stream(x, axis=1, chunks="auto", pipeline="auto"),
}
MESHES: Mapping[str, dict[str, int]] = {
    "fsdp": {"fsdp": 2},
    "fsdp and one of tp": {"fsdp": 2, "tp": 1},
    "dp and fsdp": {"dp": 2, "fsdp": 2},
    "one device": {"tp": 1},
}


def gradients(mark: Mark, axes: Mapping[str, int]) -> Callable[..., Any]:
    """Of layers in a scan, and of one behind it, whose weights lie over fsdp.

    Each is cast where it is read, as a float32 master is.
    """
    batch = P(tuple(axis for axis in ("dp", "fsdp") if axis in axes), None, None)
    shards = P("fsdp" if "fsdp" in axes else None, "tp" if "tp" in axes else None)

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        h = mark(jnp.tanh(x) @ w.astype(x.dtype))
        return jhost.shard(mark(x + jnp.sin(h)), batch), None

    def loss(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x, v = jhost.shard(x, batch), jhost.shard(v, shards)
        w = jhost.shard(w, P(None, *shards))
        x, _ = lax.scan(jax.checkpoint(layer), x, w)
        return jnp.sum(mark(x @ v.astype(x.dtype)).astype(jnp.float32) ** 2)

    return jax.grad(loss, (1, 2))


def types(size: int) -> list[jax.ShapeDtypeStruct]:
    """Of tokens, which are more than what a weight has, and of the weights."""
    return [
        jax.ShapeDtypeStruct((16, size, size), jnp.bfloat16),
        jax.ShapeDtypeStruct((3, size, size), jnp.float32),
        jax.ShapeDtypeStruct((size, size), jnp.float32),
    ]


def on_h200s(mark: Mark, axes: dict[str, int]) -> Any:
    """The program where jhost has rates to choose by."""
    rates = rates_of("NVIDIA H200")
    sequence = passes(settings=StreamDefaults(), streams=4, rates=rates)
    fun = gradients(mark, axes)
    return run_passes(built(fun, *types(2048), **axes), sequence.all)


@budget.first_is_quick("axes", MESHES.values(), ids=MESHES.keys())
def test_marks_without_loops_leave_no_trace(axes: dict[str, int]) -> None:
    """Cheap values wait for loops, and weights came late where they had none."""
    plain = str(on_h200s(unmarked, axes))
    for name, mark in MARKS.items():
        program = on_h200s(mark, axes)
        assert str(program) == plain, name
        assert remarks(program, StreamReport), "it is said what became of the mark"


@pytest.mark.parametrize("name", ["fsdp and one of tp", "dp and fsdp"])
def test_xla_gets_the_same_text(name: str) -> None:
    axes = MESHES[name]
    mesh = mesh_of(axes)
    plain, *marked = (
        jhost.jit(gradients(mark, axes), mesh=mesh).lower(*types(8)).as_text()
        for mark in (unmarked, *MARKS.values())
    )
    assert all(text == plain for text in marked)


def test_settings_that_marks_cannot_follow_leave_none_either() -> None:
    axes = {"fsdp": 2}
    plain, marked = (
        jhost.jit(gradients(mark, axes), mesh=mesh_of(axes), pipeline="p2p")
        .lower(*types(8))
        .as_text()
        for mark in (unmarked, MARKS["a whole dim"])
    )
    assert marked == plain


def test_a_dim_that_moves_keeps_its_loop() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = jhost.shard(x, P("tp")), jhost.shard(w, P(None, "tp"))
        return jhost.stream(x @ w, axis=0, pipeline="p2p")

    f = jhost.jit(f, mesh=mesh_of({"tp": 2}))
    x, w = np.arange(16.0).reshape(4, 4), np.ones((4, 4))
    (report,) = jhost.explain(f, x, w).streams
    assert report.pipeline == "p2p"
