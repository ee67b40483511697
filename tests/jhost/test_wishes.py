"""`pipeline=` and `chunks=` of `jhost.jit` are wishes; those of a mark are strict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost import errors, testing
from tests import budget

MakeMesh: TypeAlias = Callable[[Sequence[int], Sequence[str]], Mesh]

OPERANDS: list[Any] = [
    np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 3 - 1
    for shape in ((16, 8), (8, 32), (32, 8))
]
X, UP, DOWN = OPERANDS
SPECS = (P("tp"), P(None, "tp"), P("tp"))


def step(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows of one stream are gathered and scattered; columns stay as they are."""
    rows = jhost.stream(jnp.maximum(x @ up, 0) @ down, axis=0)
    columns = jhost.stream(jhost.serial(rows) * 2, axis=1)
    return rows, columns


@pytest.fixture
def settings(make_mesh: MakeMesh) -> dict[str, Any]:
    mesh = make_mesh((4,), ("tp",))
    return {"mesh": mesh, "in_shardings": SPECS, "out_shardings": P("tp")}


def without_lines(explanation: Any) -> str:
    words = str(explanation).split("test_wishes.py:")
    return "test_wishes.py".join(
        [words[0], *(w.lstrip("0123456789") for w in words[1:])]
    )


def test_marks_that_can_follow_the_wish_do(
    settings: dict[str, Any], golden: Callable[..., None]
) -> None:
    f = jhost.jit(step, pipeline="p2p", **settings)
    explanation = jhost.explain(f, X, UP, DOWN)
    assert [s.pipeline for s in explanation.streams] == ["p2p", "off"]
    golden(without_lines(explanation))
    chex.assert_trees_all_equal(f(X, UP, DOWN), jax.jit(step)(X, UP, DOWN))


@pytest.mark.usefixtures("uncombined")
def test_what_cannot_follow_is_lowered_as_without_a_wish(
    settings: dict[str, Any],
) -> None:
    def rows(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.stream(jnp.sin(x), axis=0) + up.sum() + down.sum()

    wished = jhost.jit(rows, pipeline="p2p", **settings).lower(X, UP, DOWN)
    auto = jhost.jit(rows, **settings).lower(X, UP, DOWN)
    assert str(wished.host_ir) == str(auto.host_ir)
    (note,) = wished.explain().notes
    assert note.startswith("stream on axis 0 of `jnp.sin(x)` at test_wishes.py:")
    assert (
        'pipeline="p2p" of jhost.jit cannot be: no gather, reduce-scatter or '
        "all-to-all moves the dim; jhost chooses instead [test_wishes.py:"
    ) in note


@pytest.mark.parametrize(
    ("wish", "streams"),
    [
        # A device has four rows of sixteen, and eight columns.
        ({"chunks": 64}, [("off", 1), ("off", 1)]),
        ({"chunks": 8}, [("off", 1), ("collective", 8)]),
        ({"chunks": 3, "pipeline": "p2p"}, [("p2p", 4), ("collective", 3)]),
        ({"chunks": 16, "pipeline": "p2p"}, [("p2p", 16), ("off", 1)]),
        ({"chunks": 64, "pipeline": "collective"}, [("collective", 4)] * 2),
    ],
    ids=str,
)
def test_a_count_that_a_mark_cannot_have_is_left_to_jhost(
    settings: dict[str, Any], wish: Any, streams: list[tuple[str, int]]
) -> None:
    f = jhost.jit(step, **wish, **settings)
    explanation = jhost.explain(f, X, UP, DOWN)
    assert [(s.pipeline, s.chunks) for s in explanation.streams] == streams
    assert any("of jhost.jit cannot be: " in note for note in explanation.notes)


@pytest.mark.parametrize(
    ("mark", "function", "refusal"),
    [
        ({"pipeline": "p2p"}, {}, errors.PipelineError),
        ({"pipeline": "p2p"}, {"chunks": 4}, errors.PipelineError),
        ({"chunks": 8}, {}, errors.ChunksError),
        ({"chunks": 8}, {"pipeline": "collective"}, errors.ChunksError),
    ],
    ids=str,
)
def test_what_a_mark_says_itself_is_strict(
    settings: dict[str, Any], mark: Any, function: Any, refusal: type[Exception]
) -> None:
    def rows(x: jax.Array, *_: jax.Array) -> jax.Array:
        return jhost.stream(jnp.sin(x), axis=0, **mark)

    with pytest.raises(refusal, match=r"axis=0 at test_wishes\.py:"):
        jhost.jit(rows, **function, **settings).lower(X, UP, DOWN)


def test_a_mark_s_own_count_stays_where_the_wish_for_its_pipeline_cannot_be(
    settings: dict[str, Any],
) -> None:
    def rows(x: jax.Array, *_: jax.Array) -> jax.Array:
        return jhost.stream(jnp.sin(x), axis=0, chunks=2)

    f = jhost.jit(rows, pipeline="p2p", **settings)
    (stream,) = jhost.explain(f, X, UP, DOWN).streams
    assert (stream.pipeline, stream.chunks, stream.moves) == ("collective", 2, False)


def test_a_function_that_is_called_wishes_too(settings: dict[str, Any]) -> None:
    inner = jhost.jit(step, pipeline="p2p")
    f = jhost.jit(lambda x, up, down: inner(x, up, down), **settings)
    explanation = jhost.explain(f, X, UP, DOWN)
    assert [s.pipeline for s in explanation.streams] == ["p2p", "off"]
    assert 'axis 1 of result[1]: pipeline="p2p" of jhost.jit' in explanation.notes[0]


def scanned(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        rows, columns = step(x, up, down)
        return jnp.sign(rows) + columns, None

    return jax.lax.scan(layer, x, length=2)[0]


@budget.first_is_quick("fun", [step, scanned])
def test_wishes_hold_in_bodies_and_in_derivatives(
    settings: dict[str, Any], fun: Any
) -> None:
    f = jhost.jit(fun, pipeline="p2p", **settings)

    def loss(f: Any) -> Any:
        return lambda *args: sum(y.sum() for y in jax.tree.leaves(f(*args)))

    grad = jax.grad(loss(f), (0, 1, 2))
    chex.assert_trees_all_equal(
        grad(X, UP, DOWN), jax.grad(loss(jax.jit(fun)), (0, 1, 2))(X, UP, DOWN)
    )
    streams = jhost.explain(grad, X, UP, DOWN).streams
    assert {"p2p", "off"} == {stream.pipeline for stream in streams}


def test_a_comparison_asks_that_some_stream_has_the_pipeline(
    settings: dict[str, Any],
) -> None:
    f = jhost.jit(lambda x, up, down: step(x, up, down)[0], **settings)
    testing.assert_equals_plain(f, X, UP, DOWN, pipelines=["p2p"], gradients=False)
    columns = jhost.jit(lambda x: jhost.stream(jnp.sin(x), axis=1), chunks=4)
    with pytest.raises(errors.PipelineError, match="no stream of <lambda> can have"):
        testing.assert_equals_plain(
            columns, X, pipelines=["p2p"], meshes=[settings["mesh"]]
        )


def test_what_no_mark_says_is_no_wish_of_the_function(make_mesh: MakeMesh) -> None:
    """Two marks of one stream, which could never be left open again."""

    def f(x: jax.Array, up: jax.Array) -> jax.Array:
        y = jhost.stream(jhost.shard(x @ up, P(None, "tp")), 0, chunks=2)
        while len(y) > 1:
            y = jnp.maximum(y[:-1:2], y[1::2])
        return y

    def both(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.jvp(f, args, args)

    lowered = jhost.jit(both, mesh=make_mesh((2,), ("tp",)), in_shardings=SPECS[:2])
    with pytest.raises(errors.ChunksError, match="2 chunks"):
        lowered.lower(X, UP)
