"""`jhost.stream`, `jhost.serial` and `jhost.shard`: what they take, mark and refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jhost import errors
from jhost._annotate import serial, shard, stream

X = jnp.arange(12.0).reshape(4, 3)


def params_of(function: Callable[..., Any], x: Any = X) -> dict[str, Any]:
    (eqn,) = jax.make_jaxpr(function)(x).eqns
    return eqn.params


@pytest.mark.parametrize(("axis", "dim"), [(0, 0), (1, 1), (-1, 1), (np.int64(-2), 0)])
def test_a_stream_counts_its_axis_from_the_front(axis: int, dim: int) -> None:
    assert params_of(lambda x: stream(x, axis))["axis"] == dim


def test_a_stream_says_how_it_is_cut() -> None:
    params = params_of(lambda x: stream(x, 0, chunks=4, pipeline="p2p"))
    assert params == {"axis": 0, "chunks": 4, "pipeline": "p2p"}
    assert params_of(lambda x: stream(x, 0, chunks="auto"))["chunks"] == "auto"
    assert params_of(lambda x: stream(x, 0)) == {
        "axis": 0,
        "chunks": None,
        "pipeline": None,
    }


def test_a_numpy_count_of_chunks_becomes_an_int() -> None:
    chunks: Any = np.int64(2)
    params = params_of(lambda x: stream(x, 0, chunks=chunks))
    assert type(params["chunks"]) is int


def test_an_empty_dim_is_one_chunk() -> None:
    assert stream(jnp.zeros((0, 3)), 0, chunks=1).shape == (0, 3)


@pytest.mark.parametrize(
    ("spec", "entries"),
    [
        (P("tp", None), (("tp",), ())),
        (P("tp"), (("tp",), ())),
        (P(None, ("dp", "tp")), ((), ("dp", "tp"))),
        (P(P.UNCONSTRAINED, "tp"), (None, ("tp",))),
        (P(), ((), ())),
    ],
)
def test_a_spec_gets_an_entry_for_each_dim(spec: P, entries: object) -> None:
    assert params_of(lambda x: shard(x, spec)) == {"spec": entries}


def test_a_named_sharding_gives_its_spec(
    make_mesh: Callable[[Sequence[int], Sequence[str]], Mesh],
) -> None:
    sharding = NamedSharding(make_mesh((2,), ("tp",)), P(None, "tp"))
    assert params_of(lambda x: shard(x, sharding)) == {"spec": ((), ("tp",))}


def test_no_spec_is_no_mark() -> None:
    assert jax.make_jaxpr(lambda x: shard(x, None))(X).eqns == []


@pytest.mark.parametrize(
    "x", [1.5, 2, True, np.ones(3), np.float32(2), jnp.ones((2, 2)), [1.0, 2.0]]
)
def test_what_is_like_an_array_becomes_an_array(x: Any) -> None:
    result = serial(x)
    assert isinstance(result, jax.Array)
    assert np.array_equal(result, x)


def test_a_python_scalar_stays_weakly_typed() -> None:
    assert (serial(2.0) * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("x", [{"w": X}, None, "text", object()])
def test_what_is_no_array_is_refused(x: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"jhost\.serial takes one array"):
        serial(x)


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_out_of_range_is_refused(axis: int) -> None:
    text = rf"axis {axis} is out of bounds .* dimension 2\. .*\(4, 3\); use -2 <= axis"
    with pytest.raises(errors.DimError, match=text):
        stream(X, axis)


def test_a_scalar_has_no_axis() -> None:
    with pytest.raises(errors.DimError, match=r"dimension 0\. x has shape \(\)\."):
        stream(1.0, 0)


@pytest.mark.parametrize("axis", [True, 0.0, None, (0, 1)])
def test_an_axis_that_is_no_int_is_refused(axis: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="one int as axis"):
        stream(X, axis)


@pytest.mark.parametrize("chunks", [0, -2])
def test_less_than_one_chunk_is_refused(chunks: int) -> None:
    with pytest.raises(
        errors.ChunksError, match=rf"chunks={chunks}, .* pipeline='off'"
    ):
        stream(X, 0, chunks=chunks)


def test_more_chunks_than_elements_are_refused() -> None:
    with pytest.raises(errors.ChunksError, match=r"\(4, 3\): 5 chunks .* at most 4"):
        stream(X, 0, chunks=5)


@pytest.mark.parametrize("chunks", [True, 2.0, "many"])
def test_chunks_of_another_type_are_refused(chunks: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=f"got {chunks!r}"):
        stream(X, 0, chunks=chunks)


@pytest.mark.parametrize("pipeline", ["ring", "", 1, ["p2p"]])
def test_an_unknown_pipeline_is_refused(pipeline: Any) -> None:
    with pytest.raises(errors.OptionError, match="'p2p', 'collective', 'auto', 'off'"):
        stream(X, 0, pipeline=pipeline)


def test_a_spec_longer_than_the_rank_is_refused() -> None:
    text = r"3 entries for an array of shape \(4, 3\) with 2 dims"
    with pytest.raises(errors.SpecRankError, match=text):
        shard(X, P(None, None, "tp"))


@pytest.mark.parametrize("spec", [P("tp", "tp"), P(("dp", "tp"), "tp")])
def test_an_axis_used_twice_is_refused(spec: P) -> None:
    with pytest.raises(errors.DuplicateAxisError, match=r"'tp' shards dims \[0, 1\]"):
        shard(X, spec)


@pytest.mark.parametrize("spec", ["tp", ("tp", None), X])
def test_a_spec_of_another_type_is_refused(spec: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="PartitionSpec, a Named"):
        shard(X, spec)


def test_an_entry_that_is_no_axis_name_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="entry 3 is no mesh axis"):
        shard(X, P(3))


def test_an_unreduced_spec_is_refused() -> None:
    with pytest.raises(errors.OptionError, match="unreduced"):
        shard(X, P("tp", unreduced=frozenset({"dp"})))


def test_a_bad_axis_is_refused_at_the_user_s_call() -> None:
    """Not later, when the function is compiled: the traceback shows the line."""

    def model(x: jax.Array) -> jax.Array:
        return stream(x, 7)

    with pytest.raises(errors.DimError) as caught:
        jax.make_jaxpr(model)(X)
    assert any(entry.name == "model" for entry in caught.traceback)
