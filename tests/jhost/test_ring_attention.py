"""Attention over keys that are sharded: a loop each way, equal to the plain one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import jhost
from tests import budget
from tests.jhost import plain_attention
from tests.lowering.on_mesh import on
from tests.lowering.rules.reference_attention import as_with_cudnn
from tests.lowering.traced import by_statements

ROWS = P(None, "sp")
SP4 = {"sp": 4}
BATCH, HEADS, SHARED, SIZE = 2, 4, 2, 8


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    as_with_cudnn(monkeypatch)


def attention(**how: Any) -> Callable[..., jax.Array]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k = jhost.stream(k, axis=1)
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **how)

    return attend


def operands(tokens: int, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    """Queries, keys, values, and a cotangent."""
    shapes = [(BATCH, tokens, n, SIZE) for n in (HEADS, SHARED, SHARED, HEADS)]
    return [normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


def normal(*shape: int, seed: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(values.astype(dtype))


def with_gradients(f: Callable[..., jax.Array], *args: jax.Array) -> Any:
    """What a function gives, and the gradients of all its operands."""

    def both(*args: jax.Array) -> Any:
        y, pull = jax.vjp(f, *args[:-1])
        return y, pull(args[-1])

    return jax.jit(both)(*args)


def assert_as_plain(f: Callable[..., Any], plain: Any, *args: jax.Array) -> None:
    found, wanted = (with_gradients(each, *args) for each in (f, plain))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    assert_close(found, wanted)


def assert_close(found: Any, wanted: Any) -> None:
    """In 16 bits, where parts are rounded before they are combined."""
    found, wanted = jax.tree.map(lambda x: x.astype(np.float32), (found, wanted))
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-2 * np.max(np.abs(other)))


def ring(
    fun: Callable[..., jax.Array],
    axes: Mapping[str, int] = SP4,
    ins: Any = ROWS,
    outs: Any = ROWS,
    **how: Any,
) -> Any:
    """`fun` by the p2p pipeline, with no options that an outer `jax.jit` would miss."""
    settings = {"compiler_options": None, "pipeline": "p2p", **how}
    return jhost.jit(fun, **on(axes, ins, outs, **settings))


MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (9, 0)},
}


@pytest.mark.parametrize(
    ("pipeline", "devices", "chunks", "mask"),
    [
        pytest.param("p2p", 4, "auto", "all", marks=pytest.mark.slow),
        pytest.param("p2p", 4, "auto", "window", marks=pytest.mark.slow),
        ("p2p", 2, 4, "causal"),  # in pieces
        ("collective", 2, 2, "window"),
    ],
)
def test_keys_go_around_in_one_loop_each_way(
    pipeline: Any, devices: int, chunks: Any, mask: str
) -> None:
    plain, args = attention(**MASKS[mask]), operands(8 * devices)
    f = ring(plain, {"sp": devices}, pipeline=pipeline, chunks=chunks)
    assert_as_plain(f, plain, *args)
    explanation = jhost.explain(lambda *args: with_gradients(f, *args), *args)
    assert explanation.loops == 2
    kinds = {row.kind for row in explanation.communications}
    collectives = {"AllGather", "ReduceScatter"}
    assert kinds == ({"CollectivePermute"} if pipeline == "p2p" else collectives)


@pytest.mark.parametrize(
    "mask", [pytest.param("all", marks=pytest.mark.slow), "causal"]
)
def test_lengths_are_those_of_the_whole(mask: str) -> None:
    """Of no keys, some, and all; no kernel is given a length of 0."""
    lengths = {
        "query_seq_lengths": np.array([32, 19], np.int32),
        "key_value_seq_lengths": np.array([0, 13], np.int32),
    }
    f, args = ring(attention(**MASKS[mask], **lengths)), operands(32)
    plain = partial(plain_attention.attention, **MASKS[mask], **lengths)
    wide = [x.astype(np.float32) for x in args]
    assert_close(with_gradients(f, *args), with_gradients(plain, *wide))
    kinds = {row.kind for row in jhost.explain(f, *args[:3]).communications}
    assert kinds == {"CollectivePermute"}


def test_statements_say_how_parts_are_combined() -> None:
    f = ring(attention(is_causal=True))
    *args, _ = operands(32)
    lines = str(f.lower(*args).host_ir).splitlines()
    own, others = (line.strip() for line in lines if "softmax=" in line)
    kernel = "result_zigzag_sum, v_2_zigzag softmax= dot_product_attention_fwd_wrapper"
    assert own.startswith(kernel)
    assert own.endswith("at rank(sp) * 8 of 32 in zigzag order over 4")
    assert others.startswith(kernel)
    assert others.endswith(
        "at (rank(sp) + i + 1) mod 4 * 8 of 32 in zigzag order over 4"
    )


@pytest.mark.usefixtures("uncombined")
def test_without_a_loop_keys_are_gathered_and_queries_stay() -> None:
    plain, args = attention(is_causal=True), operands(16)
    f = ring(plain, pipeline="off")
    assert_as_plain(f, plain, *args)
    rows = jhost.explain(f, *args[:3]).communications
    assert [(row.kind, row.value) for row in rows] == [
        ("AllGather", "k"),
        ("AllGather", "v"),
    ]


def test_few_queries_and_many_keys() -> None:
    """As in decoding: no layout has parts of the keys on several devices."""
    plain, (_, k, v, _) = attention(), operands(64)
    q = k[:, :2].repeat(2, axis=2)
    specs = P(), ROWS, ROWS
    for pipeline in ("off", "collective"):
        f = ring(plain, SP4, specs, P(), pipeline=pipeline)
        assert_as_plain(f, plain, q, k, v, jnp.ones_like(q))


def test_interpreted_statement_by_statement() -> None:
    plain, args = attention(is_causal=True), operands(16)
    assert_as_plain(by_statements(ring(plain, {"sp": 2})), plain, *args)


@pytest.mark.slow
def test_heads_over_one_axis_and_keys_around_another() -> None:
    plain, args = attention(is_causal=True), operands(16)
    spec = P(None, "sp", "tp")
    f = ring(plain, {"sp": 2, "tp": 2}, spec, spec)
    assert_as_plain(f, plain, *args)
    rows = jhost.explain(f, *args[:3]).communications
    assert {(row.kind, row.axes) for row in rows} == {("CollectivePermute", ("sp",))}


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(False, id="kept"),
        pytest.param(True, marks=pytest.mark.slow, id="checkpoint"),
    ],
)
def test_in_a_scan_over_layers(again: bool) -> None:
    attend = attention(is_causal=True)

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], -1, SIZE), [2, 3], axis=2)
        return x + attend(q, k, v).reshape(x.shape), None

    def layers(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(layer) if again else layer, x, w)[0]

    width = 2 * SIZE
    x, dy = (normal(2, 16, width, seed=n) for n in range(2))
    w = normal(2, width, 2 * width, seed=2) / 8
    f = ring(layers, ins=(ROWS, P()))
    assert_as_plain(f, layers, x, w, dy)
    assert jhost.explain(f, x, w).loops == 1


def test_a_scan_stacks_parts_of_the_keys() -> None:
    """Those that the forward leaves for the backward, in one program."""
    attend = attention(is_causal=True)

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        q, k = jnp.split((x @ w).reshape(*x.shape[:2], -1, SIZE), [4], axis=2)
        return x + attend(q, k, k).reshape(x.shape), None

    def gradients(x: jax.Array, w: jax.Array) -> Any:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1))(x, w)

    x = normal(2, 16, 4 * SIZE, seed=0)
    w = normal(3, 4 * SIZE, 5 * SIZE, seed=1) / 8
    f = ring(gradients, ins=(ROWS, P()), outs=(ROWS, P()))
    found, wanted = f(x, w), jax.jit(gradients)(x, w)
    for one, other in zip(found, wanted, strict=True):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, atol=2e-2 * np.max(np.abs(other)))
    text = str(f.lower(x, w).host_ir)
    assert "bf16[3, 2, 4@sp, 1, 8]" in text
    assert "bf16[3, 2, 16, 1, 8]" not in text


def test_batched_and_its_gradient() -> None:
    plain, args = attention(is_causal=True), operands(16)
    stacked = [jnp.stack([x, x / 2]) for x in args]
    assert_as_plain(jax.vmap(ring(plain)), jax.vmap(plain), *stacked)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_sizes_pieces_and_masks(data: st.DataObject) -> None:
    devices = data.draw(st.sampled_from([1, 2, 4]))
    each = data.draw(st.integers(1, 4))  # in zigzag order, if they have two halves
    assume(devices * each % 2 == 0)  # as the kernel wants them
    pieces = data.draw(st.integers(1, each))
    how = MASKS[data.draw(st.sampled_from(sorted(MASKS)))]
    dtype = data.draw(st.sampled_from([jnp.bfloat16, jnp.float16]))
    plain, args = attention(**how), operands(devices * each, dtype)
    assert_as_plain(ring(plain, {"sp": devices}, chunks=pieces * devices), plain, *args)


def test_keys_are_not_kept_whole_for_the_backward() -> None:
    plain, args = attention(is_causal=True), operands(16)

    def step(*args: jax.Array) -> Any:
        y, pull = jax.vjp(plain, *args[:-1])
        return y, pull(args[-1])

    text = str(ring(step).lower(*args).host_ir)
    assert text.count("shift=3 - i") == 4  # keys and values, for either way
    whole = f"bf16[{BATCH}, 16~s0, {SHARED}, {SIZE}]"
    assert whole not in text


@budget.first_is_quick(
    ("tokens", "said"),
    [
        (16, "in zigzag order, so each device has 1/4 of the work"),
        (
            12,
            "in order of position, so the last device has 7/16 of the work: a device's",
        ),
    ],
)
def test_each_device_has_as_much_to_do_where_its_part_has_halves(
    tokens: int, said: str
) -> None:
    """In zigzag order are also the keys of most tests above."""
    plain, args = attention(is_causal=True), operands(tokens)
    f = ring(plain)
    if tokens == 12:
        assert_as_plain(f, plain, *args)
    notes = [str(note) for note in jhost.explain(f, *args[:3]).notes]
    assert any(said in note for note in notes), notes


def test_parts_of_keys_may_end_where_those_of_queries_do_not() -> None:
    """Queries are whole, and of the 10 keys of a device pieces have 4, 4 and 2."""
    plain, args = attention(is_causal=True), operands(20)
    batches = P("sp"), ROWS, ROWS
    f = ring(plain, {"sp": 2}, batches, P("sp"), chunks=6)
    chex.assert_trees_all_close(f(*args[:3]), jax.jit(plain)(*args[:3]), atol=2e-2)


@pytest.mark.parametrize(
    ("window", "steps", "computed"),
    [(1, 1, False), (9, 1, True), (10, 2, True), (64, 3, False)],
)
def test_a_window_reaches_the_nearest_devices_alone(
    window: int, steps: int, computed: bool
) -> None:
    """Each device has 8 keys, of which those before a query's own count the window."""
    plain = attention(is_causal=True, local_window_size=(window - 1, 0))
    f, args = ring(plain), operands(32)
    if computed:
        chex.assert_trees_all_close(f(*args[:3]), jax.jit(plain)(*args[:3]), atol=2e-2)
    keys = jhost.explain(f, *args[:3]).communications[0]
    assert (keys.kind, keys.value) == ("CollectivePermute", "k")
    assert keys.bytes == steps * args[1].nbytes // 4
