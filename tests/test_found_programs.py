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

MakeMesh = Callable[[Sequence[int], Sequence[str]], Mesh]


def check(
    function: Callable[..., Any],
    shapes: Sequence[tuple[int, ...]],
    interpret: bool,
    **settings: Any,
) -> None:
    args = [np.arange(np.prod(s), dtype=np.int32).reshape(s) - 5 for s in shapes]
    result = jhost.jit(function, interpret=interpret, **settings)(*args)
    chex.assert_trees_all_equal(result, jax.jit(function)(*args))


@pytest.mark.parametrize("interpret", [False, True])
def test_a_result_is_no_alias_of_what_was_gathered(
    make_mesh: MakeMesh, interpret: bool
) -> None:
    """The gathered whole was freed with the result's memory in it."""
    mesh = make_mesh((2, 2), ("a", "b"))
    specs = {"in_shardings": P("b"), "out_shardings": P("a")}
    check(lambda x: x, [(2,)], interpret, mesh=mesh, **specs)


@pytest.mark.parametrize("interpret", [False, True])
def test_a_device_s_part_of_a_chunk_leaves_its_loop(
    make_mesh: MakeMesh, interpret: bool
) -> None:
    """The alias by rank and the alias of the result were one name."""
    mesh = make_mesh((4, 2), ("a", "b"))

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jhost.stream(x, 2, chunks=4)
        return y, x

    check(
        function,
        [(8, 5, 8)],
        interpret,
        mesh=mesh,
        in_shardings=P(("a", "b")),
        out_shardings=(P(("a", "b")), P("b")),
    )


@pytest.mark.parametrize("interpret", [False, True])
def test_a_mark_that_is_off_takes_no_other_with_it(interpret: bool) -> None:
    """Two marks that ask for nothing contradictory were one stream, and it was off."""

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        off = jhost.stream(x + 1, axis=0, pipeline="off")
        return off, jhost.stream(x - 1, axis=0, chunks=2)

    check(function, [(8, 2)], interpret)
    streams = jhost.explain(jhost.jit(function), jax.numpy.ones((8, 2))).streams
    assert sorted((s.pipeline, s.chunks) for s in streams) == [
        ("collective", 2),
        ("off", 1),
    ]
