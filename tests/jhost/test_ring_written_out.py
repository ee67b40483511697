"""`jhost.dot_product_attention` over keys that are sharded: a loop each way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import jhost
from tests import finding
from tests.jhost import plain_attention
from tests.jhost.derived import programs, vjp
from tests.lowering.on_mesh import on
from tests.lowering.traced import by_statements

ROWS, SP4 = P(None, "sp"), {"sp": 4}
BATCH, HEADS, SHARED, SIZE = 2, 4, 2, 8


@pytest.fixture(autouse=True)
def float64() -> Any:
    """So that an error is not taken for rounding."""
    with jax.enable_x64(True):
        yield


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def operands(queries: int, keys: int, batch: int = BATCH) -> list[jax.Array]:
    """Queries, keys, values, and a cotangent."""
    shapes = (queries, HEADS), (keys, SHARED), (keys, SHARED), (queries, HEADS)
    return [
        jax.device_put(array(batch, *shape, SIZE, seed=seed))
        for seed, shape in enumerate(shapes)
    ]


def attention(**how: Any) -> Callable[..., jax.Array]:
    """Of queries, keys and values, and of arrays that mask them."""

    def attend(q: Any, k: Any, v: Any, more: dict[str, Any]) -> jax.Array:
        k = jhost.stream(k, axis=1)
        return jhost.dot_product_attention(q, k, v, **how, **more)

    return attend


def plain(**how: Any) -> Callable[..., jax.Array]:
    def attend(q: Any, k: Any, v: Any, more: dict[str, Any]) -> jax.Array:
        return plain_attention.attention(q, k, v, **how, **more)

    return attend


def ring(how: dict[str, Any], axes: Any = SP4, rows: Any = ROWS, **options: Any) -> Any:
    """Attention on a mesh, with no options that an outer `jax.jit` would miss."""
    ins = options.pop("ins", (rows, rows, rows, options.pop("more", P())))
    outs = options.pop("out", rows)
    options = {"compiler_options": None, "pipeline": "p2p", **options}
    return jhost.jit(attention(**how), **on(axes, ins, outs, **options))


def both_ways(f: Callable[..., jax.Array], pushed: bool = True) -> Callable[..., Any]:
    """The value, gradients, and tangents if wanted; of what masks a bias has them."""

    def every(q: Any, k: Any, v: Any, cotangent: Any, more: dict[str, Any]) -> Any:
        bias = {name: x for name, x in more.items() if name == "bias"}

        def of(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
            return f(q, k, v, {**more, **bias})

        args = q, k, v, bias
        value, pull = jax.vjp(of, *args)
        if not pushed:
            return value, pull(cotangent)
        return value, pull(cotangent), jax.jvp(of, args, jax.tree.map(jnp.cos, args))[1]

    return every


def seen(how: Any, more: dict[str, Any], q: Any, k: Any) -> dict[str, np.ndarray]:
    """A bias as it is, and all that masks as one mask."""
    as_they_are = {"bias", "mask"} & more.keys()
    kept = {name: more[name] for name in as_they_are}
    masks = {name: x for name, x in more.items() if name not in as_they_are}
    sizes = q.shape[0], q.shape[1], k.shape[1]
    visible = plain_attention.visible(*sizes, **how, **masks)
    return kept | {"mask": visible & kept.get("mask", True)}


PLAIN = jax.jit(both_ways(plain()))


def assert_as_plain(
    f: Any, how: dict[str, Any], more: dict[str, Any], *args: Any, pushed: bool = True
) -> None:
    """The plain function is one program for all masks of a size."""
    found = jax.jit(both_ways(f, pushed))(*args, more)
    wanted = PLAIN(*args, seen(how, more, args[0], args[1]))[: len(found)]
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    chex.assert_trees_all_close(found, wanted, atol=1e-12, rtol=0)


SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (BATCH, 16)))
MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "window": ({"local_window_size": (5, 3)}, {}),
    "packed": (
        {"is_causal": True},
        {"query_segment_ids": SEGMENTS, "key_value_segment_ids": SEGMENTS},
    ),
    "lengths": (
        {"is_causal": True},
        {"key_value_seq_lengths": np.array([5, 16], np.int32)},
    ),
    "no key": (
        {},
        {
            "query_seq_lengths": np.array([3, 16], np.int32),
            "key_value_seq_lengths": np.array([0, 9], np.int32),
        },
    ),
    "bias": ({"is_causal": True}, {"bias": array(1, HEADS, 16, 16, seed=7)}),
    "mask": ({}, {"mask": array(BATCH, 1, 16, 16, seed=8) > -1}),
}


@pytest.mark.parametrize(
    ("mask", "pipeline", "devices", "chunks"),
    [
        *((mask, "p2p", 4, 4) for mask in ("window", "packed", "no key", "bias")),
        pytest.param("all", "p2p", 4, 4, marks=pytest.mark.slow),
        pytest.param("mask", "p2p", 4, 4, marks=pytest.mark.slow),
        pytest.param("packed", "p2p", 2, 4, marks=pytest.mark.slow),  # in pieces
        ("causal", "collective", 4, 2),
        ("lengths", "off", 4, "auto"),
    ],
)
def test_keys_go_around_and_gradients_come_back(
    mask: str, pipeline: Any, devices: int, chunks: Any
) -> None:
    how, more = MASKS[mask]
    f = ring(how, {"sp": devices}, pipeline=pipeline, chunks=chunks)
    args = operands(16, 16)
    # What masks is asked in the same place each way: of tangents in three programs.
    pushed = mask in ("causal", "bias") or (mask, devices) == ("packed", 4)
    assert_as_plain(f, how, more, *args, pushed=pushed)
    explanation = jhost.explain(lambda *args: jax.vjp(f, *args), *args[:3], more)
    assert explanation.loops == (pipeline != "off")
    if pipeline == "p2p":
        kinds = {row.kind for row in explanation.communications}
        assert kinds == {"CollectivePermute"}


def test_keys_go_around_where_nobody_marked_them() -> None:
    def unmarked(q: Any, k: Any, v: Any) -> jax.Array:
        return jhost.dot_product_attention(q, k, v, is_causal=True)

    args = operands(16, 16)[:3]
    with finding.everywhere():
        f = jhost.jit(unmarked, **on(SP4, (ROWS, ROWS, ROWS), ROWS))
        assert jhost.explain(f, *args).loops == 1
        found = f(*args)
    wanted = jax.jit(plain(is_causal=True))(*args, {})
    chex.assert_trees_all_close(found, wanted, atol=1e-12, rtol=0)


def test_packed_sequences_say_whose_they_are_as_keys_go_around() -> None:
    """Segments move with the keys, in zigzag order, and nothing is gathered."""
    how, more = MASKS["packed"]
    f, (q, k, v, _) = ring(how, more=ROWS), operands(16, 16)
    explanation = jhost.explain(f, q, k, v, more)
    moved = {row.value for row in explanation.communications if "chunks" in str(row)}
    assert moved == {"k", "v", "more['key_value_segment_ids']"}
    (note,) = map(str, explanation.notes)
    assert "in zigzag order, so each device has 1/4 of the work" in note


def test_no_device_has_the_scores_of_all_keys() -> None:
    """Nor all keys: each way all that is as long as they are is what a device gives."""
    tokens = 48
    how, more = MASKS["packed"]
    more = {name: np.zeros((BATCH, tokens), np.int32) for name in more}
    f, args = ring(how, more=ROWS), operands(tokens, tokens)

    def step(q: Any, k: Any, v: Any, cotangent: Any, more: Any) -> Any:
        y, pull = jax.vjp(lambda *args: f(*args, more), q, k, v)
        return y, pull(cotangent)

    for program in programs(step, *args, more):
        assert not re.search(rf"[\[ ]{tokens}[@~,\]]", str(program))
    text = jax.jit(step).lower(*args, more).compile().as_text()
    assert text is not None
    shapes = set(re.findall(r"\b\w+\[([\d,]+)\]", text))
    sizes = {tuple(map(int, shape.split(","))) for shape in shapes}
    assert not [shape for shape in sizes if tokens in shape]
    part = tokens // 4
    most = max(map(math.prod, sizes))
    assert most == BATCH * HEADS * part * part  # the scores of a chunk


def test_heads_over_one_axis_and_keys_around_another() -> None:
    how, spec = {"is_causal": True}, P(None, "sp", "tp")
    f, args = ring(how, {"sp": 2, "tp": 2}, spec), operands(8, 8)
    assert_as_plain(f, how, {}, *args)
    rows = jhost.explain(f, *args[:3], {}).communications
    assert {(row.kind, row.axes) for row in rows} == {("CollectivePermute", ("sp",))}


@pytest.mark.parametrize(
    "pipeline", [pytest.param("off", marks=pytest.mark.slow), "collective"]
)
def test_many_keys_and_few_queries_that_every_device_has(pipeline: Any) -> None:
    how, args = {"local_window_size": (9, 30)}, operands(3, 16)
    f = ring(how, ins=(P(), ROWS, ROWS, P()), out=P(), pipeline=pipeline)
    assert_as_plain(f, how, {}, *args)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(5, 5), (4, 6), pytest.param(6, 4, marks=pytest.mark.slow)],
)
def test_sequences_of_other_lengths(queries: int, keys: int) -> None:
    """Of which the last is padded where two devices do not divide it."""
    how, args = {"is_causal": True}, operands(queries, keys)
    rows, pipeline = (P(), "off") if queries % 2 else (ROWS, "p2p")
    f = ring(how, {"sp": 2}, rows, pipeline=pipeline, chunks=2)
    assert_as_plain(f, how, {}, *args, pushed=queries != 6)


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (8, 0), (0, 8)])
def test_empty_sequences(queries: int, keys: int) -> None:
    how, args = {"is_causal": True}, operands(queries, keys)
    every = both_ways(ring(how))(*args, {})
    assert not any(map(np.any, jax.tree.leaves(every)))
    chex.assert_trees_all_equal_shapes(every[1][:3], tuple(args[:3]))


@pytest.mark.parametrize(
    ("window", "steps", "computed"),
    [
        ((0, 0), 1, False),
        ((5, 0), 2, False),
        ((0, 3), 1, True),
        ((4, 4), 2, False),
        ((9, 9), 6, True),
        ((0, 31), 7, False),
    ],
)
def test_a_window_reaches_the_nearest_devices_alone(
    window: tuple[int, int], steps: int, computed: bool
) -> None:
    """Each of eight devices has 4 keys; a loop has one step at least."""
    how, args = {"local_window_size": window}, operands(32, 32, batch=1)
    f = ring(how, {"sp": 8})
    if computed:
        assert_as_plain(f, how, {}, *args)
    keys = jhost.explain(f, *args[:3], {}).communications[0]
    assert (keys.kind, keys.value) == ("CollectivePermute", "k")
    assert keys.bytes == steps * args[1].nbytes // 8


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(False, marks=pytest.mark.slow, id="kept"),
        pytest.param(True, id="checkpoint"),
    ],
)
def test_in_a_scan_over_layers(again: bool) -> None:
    def layers(attend: Any) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], -1, SIZE), [2, 3], axis=2)
            return x + attend(q, k, v, {}).reshape(x.shape), None

        layer = jax.checkpoint(layer) if again else layer
        return lambda x, w: jax.lax.scan(layer, x, w)[0]

    x, w = array(2, 16, 2 * SIZE), array(2, 2 * SIZE, 4 * SIZE, seed=1) / 8
    f = jhost.jit(
        layers(attention(is_causal=True)),
        **on(SP4, (ROWS, P()), ROWS, pipeline="p2p", compiler_options=None),
    )

    def gradients(f: Any) -> Any:
        return jax.jit(jax.grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1)))(x, w)

    wanted = gradients(layers(plain(is_causal=True)))
    chex.assert_trees_all_close(gradients(f), wanted, rtol=1e-10)
    assert jhost.explain(f, x, w).loops == 1


def test_rows_of_whole_sequences_go_through_a_block_in_one_loop() -> None:
    def block(attend: Any) -> Any:
        def of(x: Any, into: Any, out: Any) -> Any:
            y = (x @ into).reshape(*x.shape[:2], -1, 4, SIZE)  # two queries, key, value
            q = y[:, :, :, :2].reshape(*x.shape[:2], -1, SIZE)
            found = attend(q, y[:, :, :, 2], y[:, :, :, 3], is_causal=True)
            return jhost.stream(found.reshape(*x.shape[:2], -1) @ out, 0)

        return of

    x, into = array(8, 6, 16), array(16, 4 * 4 * SIZE, seed=1)
    out = array(4 * 2 * SIZE, 16, seed=2)
    specs = P("tp"), P(None, "tp"), P("tp")
    options: dict[str, Any] = {"pipeline": "p2p", "compiler_options": None}
    f = jhost.jit(
        block(jhost.dot_product_attention), **on({"tp": 4}, specs, P("tp"), **options)
    )
    found, wanted = (
        jax.jit(vjp(g))(np.ones(x.shape), x, into, out)
        for g in (f, block(plain_attention.attention))
    )
    chex.assert_trees_all_close(found, wanted, rtol=1e-10)
    explanation = jhost.explain(f, x, into, out)
    assert explanation.loops == 1
    assert all(moved.chunks > 1 for moved in explanation.communications)


@pytest.mark.slow
def test_batched_and_of_second_order() -> None:
    """Of which the second derivative is written out, and not a loop."""
    how, args = {"is_causal": True}, operands(8, 8, batch=1)
    stacked = [jnp.stack([x, x / 2]) for x in args]

    def second(f: Any) -> Any:
        def gradient(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
            return jax.vjp(lambda *x: f(*x, {}), q, k, v)[1](cotangent)

        def along(*args: Any) -> Any:
            return jax.jvp(gradient, args, jax.tree.map(jnp.cos, args))

        return jax.jit(jax.vmap(along))(*stacked)

    found, wanted = second(ring(how, {"sp": 2})), second(plain(**how))
    chex.assert_trees_all_close(found, wanted, atol=1e-11)


def test_interpreted_statement_by_statement() -> None:
    how, more = MASKS["packed"]
    args = operands(16, 16)
    f = ring(how, {"sp": 2}, more=ROWS)
    found = by_statements(f)(*args[:3], more)
    chex.assert_trees_all_close(found, plain(**how)(*args[:3], more), atol=1e-12)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_any_sizes_pieces_and_masks(data: st.DataObject) -> None:
    with jax.enable_x64(True):  # hypothesis runs examples outside of the fixture
        devices = data.draw(st.sampled_from([2, 4]))
        part = data.draw(st.integers(1, 4))
        pieces = data.draw(st.integers(1, part))
        tokens = devices * part
        size = st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(0, 9)))
        how: dict[str, Any] = {
            "is_causal": data.draw(st.booleans()),
            "local_window_size": data.draw(size),
        }
        more: dict[str, Any] = {}
        if data.draw(st.booleans()):
            length = st.integers(0, tokens)
            drawn = data.draw(st.tuples(length, length))
            more["key_value_seq_lengths"] = np.array(drawn, np.int32)
        if data.draw(st.booleans()):
            drawn = data.draw(st.lists(st.integers(0, 2), min_size=tokens))[:tokens]
            segments = np.array([drawn, sorted(drawn)])
            names = "query_segment_ids", "key_value_segment_ids"
            more |= dict.fromkeys(names, segments)
        f = ring(how, {"sp": devices}, chunks=pieces * devices)
        assert_as_plain(f, how, more, *operands(tokens, tokens))
