"""cuDNN's attention in parts, sharded and in chunks: by batch and groups of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

import jhost
from jhost._jax import aval_of
from jhost.lowering.frontend.inline_calls import inline_calls
from jhost.lowering.ir.program import Program
from jhost.lowering.rules import position_runs
from jhost.lowering.rules.dim_rule import DimRule, part_shape, shape_of
from jhost.lowering.rules.table import reason_of, rule_of
from tests.jhost.derived import programs, vjp
from tests.lowering.on_mesh import communications, on, tp
from tests.lowering.rules.reference_attention import CUDNN, as_with_cudnn
from tests.lowering.traced import loops, work

CheckRule: TypeAlias = Callable[..., set[str]]

B, T, S, N, K, H = 4, 6, 4, 4, 2, 8


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    as_with_cudnn(monkeypatch)


def array(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(values.astype(np.float32).astype(dtype))


def attention_eqns(function: Callable[..., Any], *args: Any) -> list[JaxprEqn]:
    eqns = inline_calls(jax.make_jaxpr(function)(*args)).eqns
    return [eqn for eqn in eqns if "attention" in eqn.primitive.name]


# --- Rules, against a reference on the CPU ------------------------------------------ #


def operands(heads_first: bool, bias: tuple[int, int] | None) -> list[Any]:
    """In the order of the kernels': ten, then what a backward has besides."""
    sequences = array(B, T, N, H), array(B, S, K, H, seed=1), array(B, S, K, H, seed=2)
    if heads_first:
        sequences = tuple(x.swapaxes(1, 2) for x in sequences)
    unused = jnp.zeros(0)
    lengths = jnp.array([2, 6, 1, 5], jnp.int32), jnp.array([3, 1, 4, 2], jnp.int32)
    tilt = unused if bias is None else array(*bias, T, S, seed=3)
    return [*sequences, tilt, *lengths, *[unused] * 4]


def params(heads_first: bool, bias: Any, mask: str, **more: Any) -> dict[str, Any]:
    mask_type = CUDNN.MaskType[mask]
    has_bias = bias is not None
    common = {"scale": 0.3, "seed": 42, "dropout_rate": 0.0, "mask_type": mask_type}
    common |= {"variadic_args": (has_bias, has_bias), "layout": int(heads_first)}
    common |= {"sliding_window_length": None}
    if hasattr(CUDNN, "_register_fused_attention_primitive"):  # from JAX 0.11 on
        common |= {"score_mod": None}
    return common | more


# Masks and biases do not meet in a rule, so that not each has to come with each.
@pytest.mark.parametrize(
    ("bias", "heads_first", "mask"),
    [
        (None, False, "CAUSAL"),
        pytest.param((B, N), False, "CAUSAL", marks=pytest.mark.slow),
        ((B, 1), False, "PADDING_CAUSAL"),
        ((1, 1), True, "NO_MASK"),
    ],
)
def test_batches_and_heads_attend_apart(
    bias: Any, heads_first: bool, mask: str, check_rule: CheckRule
) -> None:
    args = operands(heads_first, bias)
    settings = params(heads_first, bias, mask)
    forward = CUDNN._dot_product_attention_fwd_p_wrapper.bind
    backward = CUDNN._dot_product_attention_bwd_p_wrapper.bind
    with jax.disable_jit():  # no branch is compiled
        for training in (False, True):
            check_rule(
                lambda *a, t=training: forward(*a, **settings, is_training=t), *args
            )
        found, sums = forward(*args, **settings, is_training=True)
        args += [sums, found, array(*found.shape, seed=4)]
        check_rule(lambda *args: backward(*args, **settings), *args)
    (eqn,) = attention_eqns(lambda *args: backward(*args, **settings), *args)
    rule = rule_of(eqn)
    stretched = [bias is not None and bias[dim] == 1 for dim in range(2)]
    heads = tuple("sum" if lacks else None for lacks in stretched)
    assert rule.reducers[:2] == heads
    assert rule.reducers[2:] == (() if bias and "PADDING" in mask else ("sum", "sum"))
    assert rule.contracts


# What is seen is one interval of keys, which a mask and a window bound, by either way.
@pytest.mark.parametrize(
    ("mask", "window", "blocks"),
    [
        ("CAUSAL", 3, 64),
        ("CAUSAL", 3, 0),
        pytest.param("CAUSAL", None, 64, marks=pytest.mark.slow),
        pytest.param("PADDING_CAUSAL", None, 64, marks=pytest.mark.slow),
    ],
)
def test_parts_of_a_mask_are_the_mask(
    mask: str,
    window: int | None,
    blocks: int,
    check_rule: CheckRule,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(position_runs, "_MOST_BLOCKS", blocks)
    args = operands(False, None)
    settings = params(False, None, mask) | {"sliding_window_length": window}
    forward = CUDNN._dot_product_attention_fwd_p_wrapper.bind
    backward = CUDNN._dot_product_attention_bwd_p_wrapper.bind
    with jax.disable_jit():  # no branch is compiled
        check_rule(lambda *a: forward(*a, **settings, is_training=True), *args)
        found, sums = forward(*args, **settings, is_training=True)
        args += [sums, found, array(*found.shape, seed=4)]
        check_rule(lambda *args: backward(*args, **settings), *args)


@pytest.mark.parametrize(
    ("mask", "window"), [("NO_MASK", 3), ("PADDING_CAUSAL", 3), ("ALIBI", None)]
)
def test_sequences_are_whole_where_parts_cannot_tell_what_is_seen(
    mask: str, window: int | None
) -> None:
    args = operands(False, None)
    settings = params(False, None, mask) | {"sliding_window_length": window}
    forward = CUDNN._dot_product_attention_fwd_p_wrapper.bind
    (eqn,) = attention_eqns(lambda *a: forward(*a, **settings, is_training=True), *args)
    rule = rule_of(eqn)
    assert len(rule.sizes) == 2
    assert not rule.unsharded


def test_the_kernels_have_the_rules_of_their_wrappers(check_rule: CheckRule) -> None:
    args, settings = operands(True, (1, N)), params(True, (1, N), "NO_MASK")
    settings.pop("score_mod", None)
    extra = {"score_mod_name": None, "score_mod_jaxpr": None}
    if hasattr(CUDNN, "_register_fused_attention_primitive"):
        settings |= extra
    forward = CUDNN._dot_product_attention_fwd_p.bind
    check_rule(lambda *args: forward(*args, **settings, is_training=True), *args)
    found, sums = forward(*args, **settings, is_training=True)
    backward = CUDNN._dot_product_attention_bwd_p.bind
    check_rule(lambda *args: backward(*args, **settings), *args, sums, found, found)


@pytest.mark.parametrize("kind", ["_p", "_p_wrapper"])
def test_the_largest_magnitudes_are_of_all_parts(
    kind: str, check_rule: CheckRule
) -> None:
    query, key, value, *_ = operands(False, None)
    settings = {"scale": 0.3, "use_causal_mask": True, "layout": 0}
    scale = jnp.ones((1, 1, 1, 1))
    forward = getattr(CUDNN, f"_dot_product_attention_fp8_fwd{kind}").bind
    backward = getattr(CUDNN, f"_dot_product_attention_fp8_bwd{kind}").bind
    args = [query, key, value, *[scale] * 6]
    for training in (False, True):
        check_rule(lambda *a, t=training: forward(*a, **settings, is_training=t), *args)
    found, _, _, sums = forward(*args, **settings, is_training=True)
    args = [query, key, value, found, found, sums, *[scale] * 12]
    check_rule(lambda *args: backward(*args, **settings), *args)


# --- What JAX traces ---------------------------------------------------------------- #


class _Part:
    """A half of each factor that is named, and the others whole."""

    accumulator, zigzag = None, 1

    def __init__(self, rule: DimRule, cut: set[int]) -> None:
        self.whole = rule.sizes
        self.sizes = [
            size // 2 if factor in cut else size
            for factor, size in enumerate(rule.sizes)
        ]

    def size(self, factor: int) -> int:
        return self.sizes[factor]

    def varies(self, factor: int) -> bool:
        return self.parts(factor) > 1

    def parts(self, factor: int) -> int:
        return self.whole[factor] // self.sizes[factor]

    def positions(self, factor: int) -> Any:
        return jnp.arange(self.sizes[factor])

    def starts(self, factor: int) -> list[Any]:
        return [0]

    def grain(self, factor: int) -> int:
        return self.sizes[factor]


def assert_shapes_of_parts(eqn: JaxprEqn) -> None:
    rule = rule_of(eqn)
    for cut in ({0}, {1}, {0, 1}):
        place = _Part(rule, cut & set(range(len(rule.sizes))))
        parts = [
            jax.ShapeDtypeStruct(part_shape(dims, aval.shape, place), aval.dtype)
            for aval, dims in zip(map(aval_of, eqn.invars), rule.operands, strict=True)
        ]
        made = jax.eval_shape(lambda *args, p=place: rule.rebind(eqn, args, p), *parts)
        wanted = [
            part_shape(dims, shape_of(v), place)
            for v, dims in zip(eqn.outvars, rule.results, strict=True)
        ]
        assert [result.shape for result in made] == wanted


HALF = jnp.bfloat16
QUERY, KEY = (
    jax.ShapeDtypeStruct((B, length, heads, 64), HALF)
    for length, heads in ((128, N), (256, K))
)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (16, 0)},
    "bias": {"bias": jax.ShapeDtypeStruct((1, N, 128, 256), HALF)},
    "mask": {"mask": jax.ShapeDtypeStruct((B, 1, 128, 256), np.bool_)},
    "lengths": {
        "query_seq_lengths": jax.ShapeDtypeStruct((B,), np.int32),
        "key_value_seq_lengths": jax.ShapeDtypeStruct((B,), np.int32),
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_jax_binds_has_the_shapes_of_its_parts(name: str) -> None:
    given = ARGUMENTS[name]
    static = {k: v for k, v in given.items() if not hasattr(v, "shape")}
    arrays = {k: v for k, v in given.items() if k not in static}

    def attend(q: Any, k: Any, v: Any, more: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, implementation="cudnn", **static, **more
        )

    def loss(q: Any, k: Any, v: Any, more: Any) -> Any:
        return attend(q, k, v, more).astype(np.float32).sum()

    for function in (attend, jax.grad(loss, (0, 1, 2))):
        eqns = attention_eqns(function, QUERY, KEY, KEY, arrays)
        assert eqns
        for eqn in eqns:
            assert not rule_of(eqn).opaque
            assert_shapes_of_parts(eqn)


def test_pages_are_whole_and_heads_are_not() -> None:
    table = jax.ShapeDtypeStruct((B, 1, 4, 1), np.int32)
    lengths = jax.ShapeDtypeStruct((B,), np.int32)
    pages = jax.ShapeDtypeStruct((4 * B, 64, K, 64), HALF)

    def attend(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        mask = CUDNN.MaskType.PADDING
        return CUDNN.paged_attention(q, k, v, *rest, mask_type=mask)

    args = QUERY, pages, pages, lengths, lengths, table, table
    (eqn,) = attention_eqns(attend, *args)
    assert rule_of(eqn).sizes == (K,)
    assert_shapes_of_parts(eqn)


WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout_rate": 0.5}, "draws its dropout for the whole"),
    "packed": (
        {
            **dict.fromkeys(("q_seqlen", "kv_seqlen"), jnp.ones((B, 2), np.int32)),
            **dict.fromkeys(("q_offsets", "kv_offsets"), jnp.ones((B, 3), np.int32)),
        },
        "sequences are packed",
    ),
    "function of scores": ({"score_mod": lambda s: s * 2}, "`score_mod` was written"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_depends_on_the_whole_says_so(name: str) -> None:
    given, reason = WHOLE[name]
    if name.startswith("function") and not hasattr(
        CUDNN, "_register_fused_attention_primitive"
    ):
        pytest.skip(f"JAX {jax.__version__} has no function of scores")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return CUDNN.dot_product_attention(q, k, v, **given)

    (eqn,) = attention_eqns(attend, QUERY, KEY, KEY)
    rule = rule_of(eqn)
    assert rule.opaque
    assert reason in reason_of(eqn, rule)


# --- Blocks ------------------------------------------------------------------------- #


def block(x: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array, wo: jax.Array):
    """Attention with its projections, causal, two heads of queries a head of keys."""

    def heads(w: jax.Array) -> jax.Array:
        y = x @ w
        return y.reshape(*y.shape[:2], -1, H)

    found = jax.nn.dot_product_attention(
        heads(wq), heads(wk), heads(wv), is_causal=True, implementation="cudnn"
    )
    return jhost.stream(found.reshape(*x.shape[:2], -1) @ wo, 0)


def weights(features: int = 8, heads: int = 8) -> list[jax.Array]:
    sizes = heads * H, heads // 2 * H, heads // 2 * H
    up = [array(features, n, seed=n + i, dtype=HALF) for i, n in enumerate(sizes)]
    return [*up, array(heads * H, features, seed=9, dtype=HALF)]


def kernels(program: Program) -> Iterator[str]:
    yield from (word for word in work(program.body) if "attention" in word)


def assert_close(given: Any, wanted: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(given, wanted)
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        one, other = (np.asarray(value, np.float32) for value in (one, other))
        np.testing.assert_allclose(
            one, other, rtol=3e-2, atol=3e-2 * np.abs(other).max()
        )


INS = P("dp"), P(None, "tp"), P(None, "tp"), P(None, "tp"), P("tp")


def test_a_block_keeps_batches_and_heads_where_they_are() -> None:
    args = [array(8, T, 8, dtype=HALF), *weights()]
    settings = on({"dp": 2, "tp": 4}, INS, P("dp"), pipeline="off")
    hosted = jhost.jit(block, **settings)
    assert_close(hosted(*args), block(*args))
    assert communications(hosted.lower(*args).host_ir) == ["AllReduce tp sum"]


def test_gradients_of_a_block_keep_them_too() -> None:
    args = [array(8, T, 8, dtype=HALF), *weights()]
    settings = on({"dp": 2, "tp": 4}, INS, P("dp"), pipeline="off")
    both = vjp(jhost.jit(block, **settings))
    cotangent = array(8, T, 8, seed=7, dtype=HALF)
    assert_close(both(cotangent, *args), vjp(block)(cotangent, *args))
    _, backward = programs(both, cotangent, *args)
    moved = communications(backward)
    assert not [text for text in moved if text.startswith(("AllGather", "AllToAll"))]
    assert any("bwd" in kernel for kernel in kernels(backward))


@pytest.mark.parametrize("how", [("p2p", 4), ("collective", 2)])
def test_a_stream_over_the_batch_goes_through_attention(how: tuple[str, int]) -> None:
    pipeline, chunks = how
    args = [array(8, T, 8, dtype=HALF), *weights()]
    specs = P("tp"), *INS[1:]
    settings = tp(4, specs, P("tp"), pipeline=pipeline, chunks=chunks)
    hosted = jhost.jit(block, **settings)
    assert_close(hosted(*args), block(*args))
    program = hosted.lower(*args).host_ir
    assert len(loops(program)) == 1
    (loop,) = [w for w in work(program.body) if w.startswith("loop")]
    assert "dot_product_attention_fwd_wrapper" in loop
    both = vjp(hosted)
    cotangent = array(8, T, 8, seed=7, dtype=HALF)
    assert_close(both(cotangent, *args), vjp(block)(cotangent, *args))
    _, backward = programs(both, cotangent, *args)
    texts = [w for w in work(backward.body) if w.startswith("loop")]
    assert any("dot_product_attention_bwd_wrapper" in text for text in texts)


@pytest.mark.parametrize("shape", [(1, 1), (1, N), (8, 1), (8, N)])
def test_the_gradient_of_a_bias_is_summed_over_devices_that_share_it(
    shape: tuple[int, int],
) -> None:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        return CUDNN.dot_product_attention(q, k, v, bias, scale=0.3)

    sequences = [
        array(8, length, heads, H, seed=length, dtype=HALF)
        for length, heads in ((T, N), (S, K), (S, K))
    ]
    args = [*sequences, array(*shape, T, S, seed=5, dtype=HALF)]
    spec = P(*("dp" if shape[0] > 1 else None, "tp" if shape[1] > 1 else None))
    whole = P("dp", None, "tp")
    settings = on({"dp": 4, "tp": 2}, (whole, whole, whole, spec), whole)
    both = vjp(jhost.jit(attend, **settings))
    cotangent = array(8, T, N, H, seed=7, dtype=HALF)
    assert_close(both(cotangent, *args), vjp(attend)(cotangent, *args))
    _, backward = programs(both, cotangent, *args)
    axes = ",".join(axis for axis, n in zip(("dp", "tp"), shape, strict=True) if n == 1)
    assert communications(backward) == ([f"AllReduce {axes} sum"] if axes else [])
