"""`jhost.dot_product_attention` as a JAX function: equal to JAX's, by any transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jhost
from jhost import errors
from tests import budget
from tests.jhost import plain_attention

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
MakeMesh = Callable[..., Mesh]


def array(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(values.astype(dtype))


def operands(dtype: Any = np.float32) -> list[jax.Array]:
    """Queries, keys, values, and a cotangent."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    return [array(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]


LENGTHS = np.array([3, 5], np.int32), np.array([7, 4], np.int32)
SEGMENTS = (
    np.array([[0, 0, 1, 1, 2], [0, 0, 0, 1, 3]]),
    np.array([[0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1]]),
)
AS_JAX: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"local_window_size": (1, 2)},
    "wide window": {"local_window_size": (1, 2**31 - 1)},
    "causal window": {"is_causal": True, "local_window_size": 2, "scale": 0.7},
    "bias": {"bias": array(1, N, T, S, seed=5)},
    "bias and mask": {
        "bias": array(B, 1, 1, S, seed=5),
        "mask": array(B, 1, T, S, seed=6) > -1,
    },
    "lengths": {
        "query_seq_lengths": LENGTHS[0],
        "key_value_seq_lengths": LENGTHS[1],
    },
}
HOWS: dict[str, dict[str, Any]] = AS_JAX | {
    "segments": {
        "query_segment_ids": SEGMENTS[0],
        "key_value_segment_ids": SEGMENTS[1],
    },
    "no keys": {
        "is_causal": True,
        "key_value_seq_lengths": np.array([0, 4], np.int32),
    },
}


def derivatives(
    attend: Callable[..., jax.Array], how: dict[str, Any], second: bool = False
) -> Any:
    """A function of operands and a cotangent: the value, and derivatives each way."""
    bias = {name: x for name, x in how.items() if name == "bias"}
    rest = {name: x for name, x in how.items() if name != "bias"}

    def of(*args: Any) -> jax.Array:
        return attend(*args[:3], **args[3], **rest)

    def every(*given: Any) -> Any:
        cotangent = given[3]
        biases = jax.tree.map(lambda x: x.astype(cotangent.dtype), bias)
        args = *given[:3], biases
        along = jax.tree.map(jnp.cos, args)
        value, tangent = jax.jvp(of, args, along)
        _, pull = jax.vjp(of, *args)
        made = value, tangent, pull(cotangent)
        if not second:
            return made
        return *made, jax.jvp(lambda *x: jax.vjp(of, *x)[1](cotangent), args, along)[1]

    return every


def assert_close(given: Any, wanted: Any, tolerance: float) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(given, wanted)
    for one, other in zip(*map(jax.tree.leaves, (given, wanted)), strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        most = max(1.0, np.max(np.abs(other), initial=0))
        np.testing.assert_allclose(one, other, atol=tolerance * most, rtol=0)


@pytest.mark.parametrize("name", AS_JAX)
def test_it_gives_what_jax_s_gives(name: str) -> None:
    args, how = operands(), HOWS[name]
    given, wanted = (
        jax.jit(derivatives(attend, how))(*args)
        for attend in (jhost.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_close(given, wanted, 1e-5)


@budget.first_is_quick("name", ["causal window", "bias", "segments", "no keys"])
def test_in_float64_it_is_attention_to_the_last_digits(name: str) -> None:
    """JAX's takes its softmax in float32 there as well."""
    with jax.enable_x64(True):
        args, how = operands(np.float64), HOWS[name]
        given, wanted = (
            jax.jit(derivatives(attend, how, second=True))(*args)
            for attend in (jhost.dot_product_attention, plain_attention.attention)
        )
        assert_close(given, wanted, 1e-12)


def errors_of(attend: Any, dtype: Any) -> np.ndarray:
    """By how much values and derivatives are off in 16 bits, each at most."""
    narrow = [x.astype(dtype) for x in operands()]
    wide = [x.astype(np.float32) for x in narrow]
    wanted = jax.jit(derivatives(plain_attention.attention, {}))(*wide)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own wants it
        given = jax.jit(derivatives(attend, {}))(*narrow)
    assert {x.dtype for x in jax.tree.leaves(given)} == {jnp.dtype(dtype)}
    pairs = zip(*map(jax.tree.leaves, (given, wanted)), strict=True)
    return np.array([float(np.max(np.abs(np.float32(x) - y))) for x, y in pairs])


def test_in_16_bits_it_is_as_close_as_jax_s() -> None:
    """Of which float16 has no derivatives on a CPU."""
    ours = errors_of(jhost.dot_product_attention, jnp.bfloat16)
    jaxs = errors_of(jax.nn.dot_product_attention, jnp.bfloat16)
    assert np.all(ours <= 2 * jaxs + float(jnp.finfo(jnp.bfloat16).eps)), (ours, jaxs)
    narrower = errors_of(jhost.dot_product_attention, np.float16)
    assert np.all(narrower <= jaxs), (narrower, jaxs)


def test_a_query_that_sees_no_key_finds_0() -> None:
    """JAX's finds the mean of all values there, also of hidden ones."""
    query, key, value, cotangent = operands()
    mask = np.ones((1, 1, T, 1), bool)
    mask[:, :, 2] = False
    bias = np.where(mask, 0, -np.inf).astype(np.float32)
    for more in ((None, mask), (bias,)):

        def attend(*args: Any, more: Any = more) -> jax.Array:
            return jhost.dot_product_attention(*args, *more)

        every = jax.jit(derivatives(attend, {}))
        found, *rest = every(query, key, value, cotangent)
        assert not np.any(found[:, 2])
        assert np.all(found[:, 1])
        assert all(map(np.all, map(np.isfinite, jax.tree.leaves(rest))))
        of_query = rest[1][0]
        assert not np.any(of_query[:, 2])
    other = jax.nn.dot_product_attention(query, key, value, mask=mask)
    np.testing.assert_allclose(
        other[:, 2].reshape(B, K, N // K, H),
        np.broadcast_to(np.mean(value, 1)[:, :, None], (B, K, N // K, H)),
        rtol=1e-5,
    )


@budget.first_is_quick("name", ["bias", "lengths", "segments"])
def test_batched_and_its_derivatives(name: str) -> None:
    args, how = operands(), HOWS[name]
    stacked = jnp.stack([args[0], args[0] / 2], axis=1), args[1], args[2], args[3]
    given, wanted = (
        jax.jit(
            jax.vmap(
                derivatives(attend, how, second=True), in_axes=(1, None, None, None)
            )
        )(*stacked)
        for attend in (jhost.dot_product_attention, plain_attention.attention)
    )
    assert_close(given, wanted, 1e-5)


def test_a_batch_of_biases_that_operands_do_not_have() -> None:
    args, bias = operands()[:3], array(3, 1, 1, T, S, seed=5)

    def gradient(bias: jax.Array, attend: Any) -> jax.Array:
        return jax.grad(lambda bias: jnp.sum(attend(*args, bias) ** 2))(bias)

    given, wanted = (
        jax.jit(jax.vmap(lambda bias, attend=attend: gradient(bias, attend)))(bias)
        for attend in (jhost.dot_product_attention, plain_attention.attention)
    )
    assert_close(given, wanted, 1e-5)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpoint"])
def test_layers_in_a_scan(again: bool) -> None:
    def layers(attend: Any) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], -1, H), [4, 6], axis=2)
            return x + attend(q, k, v, is_causal=True).reshape(x.shape), None

        layer = jax.checkpoint(layer) if again else layer
        return lambda x, w: jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    x, w = array(B, T, 4 * H), array(3, 4 * H, 8 * H, seed=1) / 6
    given, wanted = (
        jax.jit(jax.value_and_grad(layers(attend), (0, 1)))(x, w)
        for attend in (jhost.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_close(given, wanted, 1e-5)


def test_no_scores_are_kept_for_a_backward() -> None:
    args = operands()[:3]

    def kept(attend: Any) -> set[tuple[int, ...]]:
        _, pull = jax.vjp(attend, *args)
        return {x.shape for x in jax.tree.leaves(pull)}

    assert kept(jhost.dot_product_attention) == {
        *(x.shape for x in args),
        (B, T, N),
    }
    assert any(
        T in shape and S in shape for shape in kept(jax.nn.dot_product_attention)
    )


def test_what_is_not_asked_for_is_not_computed() -> None:
    query, key, value, cotangent = operands()
    bias = array(1, N, T, S, seed=5)

    def pull(query: jax.Array) -> Any:
        attend = jhost.dot_product_attention
        return jax.vjp(lambda q: attend(q, key, value, bias), query)[1](cotangent)

    eqns = jax.make_jaxpr(pull)(query).eqns
    assert [e.params["argnums"] for e in eqns if "argnums" in e.params] == [(0,)]


def test_a_part_of_its_tangents_may_be_known() -> None:
    """As where it is linearized in one operand, and another moves along with none."""
    query, key, value, cotangent = operands()

    def moved(tangent: jax.Array, attend: Any) -> jax.Array:
        tangents = tangent, jnp.zeros_like(key), jnp.zeros_like(value)
        return jax.jvp(attend, (query, key, value), tangents)[1]

    given, wanted = (
        jax.jit(lambda g, a=attend: jax.vjp(lambda t: moved(t, a), query)[1](g))(
            cotangent
        )
        for attend in (jhost.dot_product_attention, plain_attention.attention)
    )
    assert_close(given, wanted, 1e-5)


@budget.first_is_quick("check_vma", [True, False])
def test_in_a_shard_map(check_vma: bool, make_mesh: MakeMesh) -> None:
    """Keys are the same on all devices, so their gradients are summed."""
    query, key, value, cotangent = operands()
    key, value = key[:1], value[:1]

    def sharded(attend: Any) -> Any:
        specs = P("dp"), P(), P()
        mapped = jax.shard_map(
            attend,
            mesh=make_mesh((2,), ("dp",)),
            in_specs=specs,
            out_specs=P("dp"),
            check_vma=check_vma,
        )
        return derivatives(mapped, {})

    given, wanted = (
        jax.jit(sharded(attend))(query, key, value, cotangent)
        for attend in (jhost.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_close(given, wanted, 1e-5)


def test_on_a_mesh_with_explicit_axes_results_have_the_types_of_operands() -> None:
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Explicit,))
    batch = NamedSharding(mesh, P("dp"))
    with jax.set_mesh(mesh):
        args = jax.device_put(tuple(operands()), batch)
        every = jax.jit(derivatives(jhost.dot_product_attention, {}))
        for given in jax.tree.leaves(every(*args)):
            assert jax.typeof(given).sharding.spec[0] == "dp"


def test_the_precision_is_that_of_the_call() -> None:
    query, key, value, cotangent = operands()
    with jax.default_matmul_precision("highest"):
        jaxpr = jax.make_jaxpr(jhost.dot_product_attention)(query, key, value)
        _, pull = jax.vjp(jhost.dot_product_attention, query, key, value)
    (eqn,) = jaxpr.eqns
    assert eqn.params["settings"].precision == "highest"
    assert "precision = [HIGHEST" in jax.jit(pull).lower(cotangent).as_text()


# --- Shapes ------------------------------------------------------------------------- #


@pytest.mark.parametrize(
    "shape", [(0, T, N, H), (B, 0, N, H), (B, T, 0, H), (B, T, N, 0)]
)
def test_empty_arrays(shape: tuple[int, ...]) -> None:
    key = jnp.ones((shape[0], S, shape[2] // 2, shape[3]))
    args = jnp.ones(shape), key, key, jnp.ones(shape)
    given = derivatives(jhost.dot_product_attention, {"is_causal": True})(*args)
    chex.assert_trees_all_equal_shapes(given[2][:3], args[:3])
    assert given[0].shape == shape


def test_no_keys_at_all() -> None:
    query, key, value, cotangent = operands()
    every = derivatives(jhost.dot_product_attention, {})
    given = every(query, key[:, :0], value[:, :0], cotangent)
    assert not any(map(np.any, jax.tree.leaves(given)))


def test_the_batch_may_be_left_out() -> None:
    query, key, value, _ = operands()
    mask, bias = HOWS["bias and mask"]["mask"][0], HOWS["bias"]["bias"][0, 0]
    given, wanted = (
        attend(query[0], key[0], value[0], bias, mask)
        for attend in (jhost.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_close(given, wanted, 1e-6)


# --- Refusals ----------------------------------------------------------------------- #


def test_all_that_does_not_fit_is_said_at_once() -> None:
    query, key, value, _ = operands()
    with pytest.raises(errors.OperandsError) as caught:
        jhost.dot_product_attention(
            query,
            key.astype(jnp.bfloat16),
            value[:, :3],
            mask=jnp.ones((B, N, T, 2)),
            query_seq_lengths=jnp.ones(B),
            key_value_seq_lengths=jnp.ones((B, 1), np.int32),
            query_segment_ids=jnp.ones((B, T)),
        )
    said = [line[4:] for line in str(caught.value).splitlines() if line[:4] == "  * "]
    assert said == [
        "key is bfloat16, but query is float32: cast one of them",
        "value has shape (2, 3, 2, 8) for (B, S, K, H), but S is 7",
        "mask has shape (2, 4, 5, 2) for (B, N, T, S), each of which may be 1, "
        "but S is 7",
        "mask is float32, not bool: what is added to scores is a bias",
        "query_seq_lengths is float32, but lengths are int32",
        "key_value_seq_lengths has shape (2, 1), but needs the dims B",
        "query_segment_ids is float32, but segments are numbered by integers",
        "key_value_segment_ids is missing: segments are compared",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"query": jnp.ones((B, T, 3, H))}, "no multiple of the 2 that key has"),
        ({"query": jnp.ones((B, T, N, H), np.int32)}, "attention is of floats"),
        ({"key": jnp.ones((B, S, K, H + 1))}, "but H is 8"),
        ({"query": jnp.ones((1, B, T, N, H))}, "needs the dims B, T, N, H"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    query, key, value, _ = operands()
    given = {"query": query, "key": key, "value": value} | change
    with pytest.raises(errors.OperandsError, match=said):
        jhost.dot_product_attention(given["query"], given["key"], given["value"])


@pytest.mark.parametrize("size", [(1, 2, 3), 1.5, (1, None)])
def test_a_window_is_of_ints(size: Any) -> None:
    query, key, value, _ = operands()
    with pytest.raises(errors.ArgumentError, match="local_window_size"):
        jhost.dot_product_attention(query, key, value, local_window_size=size)


def test_a_scale_is_a_number() -> None:
    query, key, value, _ = operands()

    def scaled(scale: Any) -> jax.Array:
        return jhost.dot_product_attention(query, key, value, scale=scale)

    with pytest.raises(errors.ArgumentError, match="multiply the query"):
        jax.jit(scaled)(2.0)
