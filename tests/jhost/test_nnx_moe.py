"""A mixture of experts gives what all experts of all tokens give, by their weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jhost
from jhost import errors
from tests.jhost.quick_random import kernel_by_numpy, quick_key, rngs
from tests.lowering.hand_built import mesh_of
from tests.lowering.on_mesh import calls

nnx: Any = pytest.importorskip("flax.nnx")
layers: Any = pytest.importorskip("jhost.nnx")
dispatch: Any = pytest.importorskip("jhost.nnx._dispatch")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
MESHES: dict[str, dict[str, int]] = {
    "1": {"ep": 1},
    "4": {"ep": 4},
    "2 x 2": {"dp": 2, "ep": 2},
}
TOKENS = 2, 8, 8


def made(mesh: Mesh | None, *sizes: int, **options: Any) -> Any:
    """A layer, which knows the mesh if there is one, and the same for all meshes."""
    options = {
        "kernel_init": kernel_by_numpy,
        "router_init": kernel_by_numpy,
        **options,
    }
    make = functools.partial(layers.MoE, *sizes, rngs=rngs(), **options)
    if mesh is None:
        return make()
    with jax.set_mesh(mesh):
        return make(batch_axes=[axis for axis in mesh.axis_names if axis == "dp"])


def spec_of(mesh: Mesh) -> P:
    return P("dp" if "dp" in mesh.axis_names else None, "ep")


def tokens(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    values = np.random.default_rng(9).standard_normal(shape or TOKENS)
    return jax.device_put(values.astype(dtype))


def call(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x)


def dense(layer: Any, x: jax.Array) -> jax.Array:
    """Every token by every expert, weighted by how it has chosen."""
    router, wide = layer.router[...], layer.router[...].dtype
    logits = jnp.matmul(x.astype(wide), router, precision="highest")
    weights, chosen = lax.top_k(jax.nn.softmax(logits), layer.top_k)
    if layer.normalize:
        weights = weights / jnp.sum(weights, -1, keepdims=True)
    weights = weights[..., None] * jax.nn.one_hot(chosen, layer.num_experts, dtype=wide)
    x = x.astype(layer.dtype or x.dtype)
    gate, up, down = (
        w and w[...].astype(x.dtype) for w in (layer.gate, layer.up, layer.down)
    )
    h = jnp.einsum("...m,emf->...ef", x, up)
    if gate is None:
        h = layer.activation(h)
    else:
        h = layer.activation(jnp.einsum("...m,emf->...ef", x, gate)) * h
    y = jnp.einsum("...ef,efm->...em", h, down).astype(wide)
    return jnp.einsum("...ke,...em->...m", weights, y).astype(x.dtype)


def graded(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Values, and gradients by all parameters and the tokens."""

    def loss(layer: Any, x: jax.Array) -> Any:
        y = f(layer, x)
        y = y.astype(jnp.float32) if y.dtype == jnp.bfloat16 else y
        return jnp.sum(jnp.sin(y)), y

    return jax.value_and_grad(loss, (0, 1), has_aux=True)


def check(
    layer: Any,
    x: jax.Array,
    mesh: Mesh,
    *,
    tolerance: float,
    f: Callable[..., jax.Array] = call,
    plain: Callable[..., jax.Array] = dense,
    around: bool = False,
) -> None:
    jit: Any = functools.partial(
        jhost.jit,
        mesh=mesh,
        in_shardings=(None, spec_of(mesh)),
        compiler_options=QUICK,
    )
    there = jax.device_put(x, NamedSharding(mesh, spec_of(mesh)))
    given = (graded(jit(f)) if around else jit(graded(f)))(layer, there)
    # On one device: what XLA compiles is for all meshes.
    alone = jax.tree.map(np.asarray, layer)
    wanted = jax.jit(graded(plain), compiler_options=QUICK)(alone, x)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(v).astype(np.float64) for v in (a, b))
        most = max(1, np.max(np.abs(b), initial=0))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * most)


# --- Values and gradients ----------------------------------------------------------- #


@pytest.mark.parametrize(
    ("axes", "around"),
    # On four devices in a row are all tests below, on two some of any mixture.
    [("1", True), ("2 x 2", True), ("2 x 2", False)],
)
def test_all_is_as_by_every_expert(axes: str, around: bool) -> None:
    """Gated in the one, plain in the other."""
    mesh = mesh_of(**MESHES[axes])
    layer = made(mesh, 8, 16, 4, gated=around)
    check(layer, tokens(), mesh, tolerance=1e-5, around=around)


@pytest.mark.parametrize(("top_k", "normalize"), [(1, False), (8, True)])
def test_any_number_of_experts_for_a_token(top_k: int, normalize: bool) -> None:
    """Also more than a device has, and all."""
    mesh = mesh_of(ep=4)
    layer = made(mesh, 8, 16, 8, top_k=top_k, normalize=normalize)
    check(layer, tokens(), mesh, tolerance=1e-5)


@pytest.mark.parametrize("expert", [0, 7])
def test_all_tokens_to_one_expert(expert: int) -> None:
    """Whose device then has all of them, and the others have none."""
    mesh = mesh_of(ep=4)

    def init(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        return kernel_by_numpy(key, shape, dtype).at[:, expert].add(50)

    layer = made(mesh, 8, 16, 8, top_k=1, router_init=init)
    x = jnp.abs(tokens())
    (chosen,) = set(np.ravel(jnp.argmax(x @ layer.router[...], -1)).tolist())
    assert chosen == expert
    check(layer, x, mesh, tolerance=1e-5)


def test_float64() -> None:
    mesh = mesh_of(ep=4)
    with jax.enable_x64(True):
        layer = made(mesh, 8, 16, 8, param_dtype=jnp.float64)
        check(layer, tokens(dtype=jnp.float64), mesh, tolerance=1e-12)


def test_bfloat16_to_its_rounding() -> None:
    """Weights and their sum are float32, and so is the router."""
    mesh = mesh_of(ep=4)
    layer = made(mesh, 8, 16, 8, dtype=jnp.bfloat16)
    assert layer.router[...].dtype == jnp.float32
    check(layer, tokens(dtype=jnp.bfloat16), mesh, tolerance=2**-6)


def test_a_sum_over_experts_is_rounded_once() -> None:
    """All experts alike, and each weight an eighth: the sum is what one gives."""

    def same(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        return jnp.broadcast_to(kernel_by_numpy(key, shape[1:], dtype), shape)

    mesh = mesh_of(ep=4)
    options: dict[str, Any] = {"kernel_init": same, "param_dtype": jnp.bfloat16}
    zeros = nnx.initializers.zeros_init()
    layer = made(mesh, 8, 16, 8, top_k=8, router_init=zeros, **options)
    x = tokens(dtype=jnp.bfloat16)
    one = made(None, 8, 16, 1, top_k=1, **options)
    for name in ("gate", "up", "down"):
        getattr(one, name)[...] = getattr(layer, name)[...][:1]
    sharded = jhost.jit(call, mesh=mesh, in_shardings=(None, P(None, "ep")))
    chex.assert_trees_all_equal(
        sharded(layer, jax.device_put(x, NamedSharding(mesh, P(None, "ep")))), one(x)
    )


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    devices = draw(st.sampled_from([1, 2, 4]))
    experts = devices * draw(st.integers(1, 3))
    return {
        "devices": devices,
        "experts": experts,
        "top_k": draw(st.integers(1, experts)),
        "batch": draw(st.sampled_from([(), (1,), (3,), (2, 0), (2, 2)])),
        "sequence": devices * draw(st.integers(0, 3)),
        "features": draw(st.integers(1, 5)),
        "hidden": draw(st.integers(1, 5)),
        "gated": draw(st.booleans()),
        "normalize": draw(st.booleans()),
        "skew": draw(st.sampled_from([0.0, 10.0])),  # to few of the experts
    }


@pytest.mark.slow
@given(mixtures())
@settings(max_examples=4, deadline=None)
def test_any_mixture(drawn: dict[str, Any]) -> None:
    mesh = mesh_of(ep=drawn["devices"])

    def init(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        tilt = drawn["skew"] * jnp.arange(shape[1], dtype=dtype)
        return kernel_by_numpy(key, shape, dtype) + tilt

    layer = made(
        mesh,
        *(drawn[size] for size in ("features", "hidden", "experts")),
        **{name: drawn[name] for name in ("top_k", "gated", "normalize")},
        router_init=init,
    )
    x = tokens(*drawn["batch"], drawn["sequence"], drawn["features"])
    jit = functools.partial(jax.jit, compiler_options=QUICK)
    chex.assert_trees_all_close(
        jit(graded(call))(layer, x), jit(graded(dense))(layer, x), rtol=1e-5, atol=1e-5
    )


# --- Where it stands ---------------------------------------------------------------- #


def test_under_a_checkpoint() -> None:
    mesh = mesh_of(ep=4)
    layer = made(mesh, 8, 16, 8)
    check(layer, tokens(), mesh, tolerance=1e-5, f=jax.checkpoint(call))


@pytest.mark.parametrize("scan", ["lax", pytest.param("nnx", marks=pytest.mark.slow)])
def test_layers_in_a_scan(scan: str) -> None:
    mesh = mesh_of(ep=4)
    with jax.set_mesh(mesh):
        make = nnx.vmap(lambda key: layers.MoE(8, 16, 8, rngs=nnx.Rngs(key)))
        stacked = make(jax.random.split(quick_key(), 3))

    def step(x: jax.Array, layer: Any) -> Any:
        return x / 2 + layer(x), None

    def scanned(stacked: Any, x: jax.Array) -> jax.Array:
        if scan == "nnx":
            return nnx.scan(step, in_axes=(nnx.Carry, 0))(x, stacked)[0]
        return lax.scan(jax.checkpoint(step), x, stacked)[0]

    def plain(stacked: Any, x: jax.Array) -> jax.Array:
        for number in range(3):
            layer = jax.tree.map(lambda a, n=number: a[n], stacked)
            x = x / 2 + dense(layer, x)
        return x

    check(stacked, tokens(), mesh, tolerance=1e-5, f=scanned, plain=plain)


def test_tangents() -> None:
    layer, x = made(mesh_of(ep=4), 8, 16, 8), tokens()

    def pushed(f: Callable[..., jax.Array]) -> Any:
        def both(layer: Any, x: jax.Array) -> Any:
            return jax.jvp(f, (layer, x), (layer, x))

        return jax.jit(both, compiler_options=QUICK)(layer, x)

    chex.assert_trees_all_close(pushed(call), pushed(dense), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_of_gradients() -> None:
    """By tokens and by kernels."""
    mesh = mesh_of(ep=4)
    layer = made(mesh, 8, 16, 8)

    def slopes(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def summed(layer: Any, x: jax.Array) -> jax.Array:
            gradients = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1))
            cosines = jax.tree.map(lambda g: jnp.sum(jnp.cos(g)), gradients(layer, x))
            return jax.tree.reduce(jnp.add, cosines)

        return summed

    check(layer, tokens(), mesh, tolerance=1e-5, f=slopes(call), plain=slopes(dense))


@pytest.mark.parametrize("axes", ["1", pytest.param("4", marks=pytest.mark.slow)])
def test_vmap_of_gradients(axes: str) -> None:
    mesh = mesh_of(**MESHES[axes])
    layer, x = made(mesh, 8, 16, 8), jnp.stack([tokens(), 2 * tokens()])

    def mapped(f: Callable[..., jax.Array]) -> Any:
        gradients = jax.vmap(
            jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args)))), (None, 0)
        )
        return jax.jit(gradients, compiler_options=QUICK)(layer, x)

    chex.assert_trees_all_close(mapped(call), mapped(dense), rtol=1e-5, atol=1e-5)


def test_without_a_mesh_and_without_jit() -> None:
    layer, x = made(None, 8, 16, 8), tokens()
    wanted = jax.jit(dense)(jax.tree.map(np.asarray, layer), x)
    there = made(mesh_of(ep=4), 8, 16, 8)
    for result in (layer(x), there(x)):
        chex.assert_trees_all_close(result, wanted, rtol=1e-5, atol=1e-5)
    token = jax.jit(call)(layer, x[0, 0])
    chex.assert_trees_all_close(token, wanted[0, 0], rtol=1e-5, atol=1e-5)


def test_a_jit_without_a_mesh_closes_over_the_layer() -> None:
    """It has the mesh of the kernels; of other devices JAX says what is wrong."""
    mesh = mesh_of(ep=4)
    layer, x = made(mesh, 8, 16, 8), tokens()
    f: Any = jax.jit(lambda x: layer(x))
    wanted = jax.jit(dense)(jax.tree.map(np.asarray, layer), x)
    there = jax.device_put(x, NamedSharding(mesh, P(None, "ep")))
    for each in (x, there):
        chex.assert_trees_all_close(f(each), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"incompatible devices.*argument x"):
        f(jax.device_put(x, jax.devices()[0]))


def test_on_a_mesh_with_explicit_axes() -> None:
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Explicit,))
    layer, x = made(mesh, 8, 16, 8), tokens()
    wanted = jax.jit(dense)(jax.tree.map(np.asarray, layer), x)
    x = jax.device_put(x, NamedSharding(mesh, P(None, "ep")))
    for jit in (jax.jit, functools.partial(jhost.jit, mesh=mesh)):
        with jax.set_mesh(mesh):
            given = jit(call)(layer, x)
        np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-5)


# --- What moves --------------------------------------------------------------------- #


@pytest.mark.parametrize("known", [True, False])
def test_no_kernel_moves(known: bool) -> None:
    """By the layer's own exchange, or where it knew no mesh, by the layouts' choice."""
    mesh = mesh_of(ep=4)
    layer = made(mesh if known else None, 64, 128, 8)
    x = jax.ShapeDtypeStruct((2, 8, 64), jnp.float32)
    kernels = jax.tree.map(lambda w: P("ep") if w.ndim == 3 else P(), layer)
    types = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), layer)
    specs = kernels, P(None, "ep")
    f = jhost.jit(graded(call), mesh=mesh, in_shardings=specs)
    program = f.lower(types, x).host_ir
    shapes = " ".join(calls(program, "ragged_dot"))
    assert "2x64x128" in shapes
    assert "8x64x128" not in shapes


def _counts() -> np.ndarray:
    """From each of four devices, to each."""
    return np.array([[2, 0, 3, 1], [0, 0, 0, 6], [6, 0, 0, 0], [1, 2, 3, 0]], np.int32)


def _as_documented(
    operand: jax.Array, output: jax.Array, *numbers: jax.Array, axis_name: str
) -> jax.Array:
    """What JAX says that `ragged_all_to_all` does, of what all devices have."""
    rows = lax.all_gather(operand, axis_name)
    first, sent, place, received = (lax.all_gather(n, axis_name) for n in numbers)
    me = lax.axis_index(axis_name)
    index = jnp.arange(len(output))
    for source in range(len(rows)):
        count = sent[source, me]
        start = place[source, me]
        here = (index >= start) & (index < start + count)
        taken = rows[source].at[index - start + first[source, me]].get(mode="clip")
        output = jnp.where(
            here[:, None] & (count == received[me, source]), taken, output
        )
    return output


def test_both_exchanges_move_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of GPUs by what JAX says of it, for XLA has none on CPUs."""
    monkeypatch.setattr(lax, "ragged_all_to_all", _as_documented)
    mesh, moved = mesh_of(ep=4), _counts()
    rows = jnp.arange(4 * 6 * 2.0).reshape(24, 2) + 1

    def run(exchange: Callable[..., jax.Array], **more: Any) -> Any:
        body = functools.partial(exchange, moved=jnp.array(moved), axis="ep", **more)
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
        )
        return jax.jit(mapped)(rows)

    padded = run(dispatch._padded, most=6, room=13)
    chex.assert_trees_all_equal(run(dispatch._ragged, room=13), padded)
    source = rows.reshape(4, 6, 2)
    starts = np.cumsum(moved, 1) - moved
    for to, came in enumerate(padded.reshape(4, 13, 2)):
        wanted = np.concatenate(
            [source[i, starts[i, to] :][: moved[i, to]] for i in range(4)]
        )
        np.testing.assert_array_equal(came[: len(wanted)], wanted)
        assert not np.any(came[len(wanted) :])


# --- Balance ------------------------------------------------------------------------ #


def test_the_load_is_balanced_where_all_are_chosen_alike() -> None:
    layer, x = made(mesh_of(ep=4), 8, 16, 8, top_k=8), tokens()
    balance = jax.jit(lambda layer, x: layer.load_balance(x))
    np.testing.assert_allclose(balance(layer, x), 1, rtol=1e-6)

    def one(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        return jnp.zeros(shape, dtype).at[:, 3].set(50)

    layer = made(None, 8, 16, 8, top_k=1, router_init=one)
    np.testing.assert_allclose(balance(layer, jnp.abs(x)), 8, rtol=1e-6)


def test_the_load_balance_is_switch_transformers() -> None:
    mesh = mesh_of(ep=4)
    layer, x = made(mesh, 8, 16, 8, top_k=2), tokens()
    p = np.asarray(jax.nn.softmax(x @ layer.router[...])).reshape(-1, 8)
    chosen = np.argsort(-p, 1)[:, :2]
    share = np.bincount(chosen.ravel(), minlength=8) / chosen.size
    wanted = 8 * np.sum(share * p.mean(0))
    f: Any = jhost.jit(
        jax.value_and_grad(lambda layer, x: layer.load_balance(x)),
        mesh=mesh,
        in_shardings=(None, P(None, "ep")),
    )
    loss, grads = f(layer, jax.device_put(x, NamedSharding(mesh, P(None, "ep"))))
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert np.any(grads.router[...])
    assert not np.any(grads.up[...])


# --- Refusals ----------------------------------------------------------------------- #


@pytest.mark.parametrize("top_k", [0, 9])
def test_a_token_has_between_one_and_all_experts(top_k: int) -> None:
    with pytest.raises(errors.OptionError, match=f"top_k={top_k}.*num_experts=8"):
        made(None, 8, 16, 8, top_k=top_k)


def test_devices_have_as_many_experts_and_tokens_each() -> None:
    mesh = mesh_of(ep=4)
    with pytest.raises(errors.DivisibilityError, match="number of experts is 6"):
        made(mesh, 8, 16, 6)
    layer = made(mesh, 8, 16, 8)
    with pytest.raises(errors.DivisibilityError, match=r"dim 1 .*7 = 1 \* 4 \+ 3"):
        layer(tokens(2, 7, 8))
    with pytest.raises(errors.DimError, match=r"shape \(8,\)"):
        layer(tokens(8))
