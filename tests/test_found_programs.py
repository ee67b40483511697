"""Programs that `test_random_programs.py` once got wrong, each as it was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from tests.lowering.traced import interpreted

MakeMesh = Callable[[Sequence[int], Sequence[str]], Mesh]
Run = Callable[..., Any]

each_way = pytest.mark.parametrize(
    "run", [jhost.jit, interpreted], ids=["compiled", "interpreted"]
)


def check(
    function: Callable[..., Any],
    shapes: Sequence[tuple[int, ...]],
    run: Run,
    **settings: Any,
) -> None:
    args = [np.arange(np.prod(s), dtype=np.int32).reshape(s) - 5 for s in shapes]
    result = run(function, **settings)(*args)
    chex.assert_trees_all_equal(result, jax.jit(function)(*args))


@each_way
def test_a_result_is_no_alias_of_what_was_gathered(
    make_mesh: MakeMesh, run: Run
) -> None:
    """The gathered whole was freed with the result's memory in it."""
    mesh = make_mesh((2, 2), ("a", "b"))
    specs = {"in_shardings": P("b"), "out_shardings": P("a")}
    check(lambda x: x, [(2,)], run, mesh=mesh, **specs)


@each_way
def test_a_device_s_part_of_a_chunk_leaves_its_loop(
    make_mesh: MakeMesh, run: Run
) -> None:
    """The alias by rank and the alias of the result were one name."""
    mesh = make_mesh((4, 2), ("a", "b"))

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jhost.stream(x, 2, chunks=4)
        return y, x

    check(
        function,
        [(8, 5, 8)],
        run,
        mesh=mesh,
        in_shardings=P(("a", "b")),
        out_shardings=(P(("a", "b")), P("b")),
    )


@each_way
def test_a_mark_that_is_off_takes_no_other_with_it(run: Run) -> None:
    """Two marks that ask for nothing contradictory were one stream, and it was off."""

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        off = jhost.stream(x + 1, axis=0, pipeline="off")
        return off, jhost.stream(x - 1, axis=0, chunks=2)

    check(function, [(8, 2)], run)
    streams = jhost.explain(jhost.jit(function), jax.numpy.ones((8, 2))).streams
    assert sorted((s.pipeline, s.chunks) for s in streams) == [
        ("collective", 2),
        ("off", 1),
    ]


@each_way
def test_what_comes_is_waited_for_before_it_is_gathered_on(
    make_mesh: MakeMesh, run: Run
) -> None:
    """A wait for what was received early moved behind what sends it on."""
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def function(x: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        x = jhost.stream(x, axis=0)
        return x @ w, x + y

    rows = P("tp", "dp")
    specs = {"in_shardings": (rows, rows, P()), "out_shardings": P()}
    shapes = [(4, 4), (4, 4), (4, 8)]
    check(function, shapes, run, mesh=mesh, pipeline="p2p", **specs)


@each_way
@pytest.mark.parametrize("rows", [2, 6, 8])
def test_shards_are_padded_as_each_device_has_them(
    make_mesh: MakeMesh, run: Run, rows: int
) -> None:
    """What pads a shard took the size of the whole from those who read it."""
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def function(x: jax.Array) -> jax.Array:
        x = jhost.shard(jhost.stream(x, axis=0), P("tp", None, "dp"))
        return (x - x.max(2, keepdims=True)) * x.sum(2, keepdims=True)

    specs = {"in_shardings": P(None, "tp", "dp"), "out_shardings": P("tp", None, "dp")}
    check(function, [(rows, 2, 4)], run, mesh=mesh, pipeline="p2p", **specs)


@each_way
def test_wishes_are_those_that_were_settled(make_mesh: MakeMesh, run: Run) -> None:
    """Of two tries to lay values out, the one that lost left axes open to the other."""
    mesh = make_mesh((2, 2), ("dp", "tp"))
    batch, length, groups, heads = 2, 4, 2, 2

    def function(x: jax.Array, emb: jax.Array, wk: jax.Array, o: jax.Array) -> Any:
        x = x @ emb
        k = jhost.stream(x @ wk, axis=0)
        query = jax.numpy.ones((batch, length, groups, heads), x.dtype)
        s = jax.numpy.einsum("bqgd,bsd->bgqs", query, k)
        s = jhost.shard(s, P(None, "tp", None, "dp"))
        s = s - s.max(-1, keepdims=True)
        s = s * s.sum(-1, keepdims=True)
        h = jax.numpy.einsum("bgts,bsd->btgd", s, k)
        h = h.reshape(batch, length, groups * heads) @ o + x
        return jhost.shard(h @ emb, P("tp", None, "dp"))

    shapes = [(batch, length, 8), (8, 8), (8, heads), (groups * heads, 8)]
    specs = {"in_shardings": P()}
    check(function, shapes, run, mesh=mesh, pipeline="p2p", **specs)
