"""Parallel flax layers give what flax's own give, in values and gradients."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost import errors
from tests.jhost.derived import vjp
from tests.jhost.quick_random import kernel_by_numpy, quick_key, rngs
from tests.lowering.hand_built import mesh_of
from tests.lowering.traced import array

nnx: Any = pytest.importorskip("flax.nnx")
layers: Any = pytest.importorskip("jhost.nnx")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MESHES: dict[str, dict[str, int]] = {
    "1": {"tp": 1},
    "2": {"tp": 2},
    "4": {"tp": 4},
    "2 x 4": {"dp": 2, "tp": 4},
}
HOW: dict[str, dict[str, Any]] = {
    "p2p": {"pipeline": "p2p"},
    "collective": {"pipeline": "collective", "chunks": 2},
}
BATCH, SEQUENCE, FEATURES, HIDDEN = 2, 16, 8, 16


class PlainMLP(nnx.Module):
    def __init__(self, **options: Any) -> None:
        self.up = nnx.Linear(FEATURES, HIDDEN, **options)
        self.down = nnx.Linear(HIDDEN, FEATURES, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


class PlainSwiGLU(nnx.Module):
    def __init__(self, **options: Any) -> None:
        options = {"use_bias": False, **options}
        self.gate = nnx.Linear(FEATURES, HIDDEN, **options)
        self.up = nnx.Linear(FEATURES, HIDDEN, **options)
        self.down = nnx.Linear(HIDDEN, FEATURES, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class PlainBlock(nnx.Module):
    def __init__(self, kv_heads: int, **options: Any) -> None:
        norm = functools.partial(nnx.RMSNorm, FEATURES, epsilon=1e-5, **options)
        self.attention_norm = norm()
        self.attention = nnx.MultiHeadAttention(
            8, FEATURES, num_kv_heads=kv_heads, use_bias=False, decode=False, **options
        )
        self.mlp_norm = norm()
        self.mlp = PlainSwiGLU(**options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.mlp(self.mlp_norm(x))


def made(mesh: Mesh, make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A layer that knows the mesh."""
    with jax.set_mesh(mesh):
        return make(*args, rngs=rngs(), **options)


BY_NUMPY: dict[str, Any] = {"kernel_init": kernel_by_numpy}


def integral(layer: Any) -> Any:
    """The layer with small integers as parameters, so that sums are exact."""
    graph, state = nnx.split(layer)
    numbers = iter(range(1000))
    state = jax.tree.map(
        lambda x: jax.device_put(array(*x.shape, seed=next(numbers)), x.sharding), state
    )
    return nnx.merge(graph, state)


def tokens(dtype: Any = jnp.float32) -> jax.Array:
    shape = BATCH, SEQUENCE, FEATURES
    return jnp.array(np.random.default_rng(9).standard_normal(shape), dtype)


def call(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x)


def by_jhost(mesh: Mesh, how: str, spec: P | None = None) -> Any:
    if spec is None:
        spec = P("dp" if "dp" in mesh.axis_names else None, "tp")
    return jhost.jit(call, mesh=mesh, in_shardings=(None, spec), **HOW[how])


def assert_alike(
    f: Any, layer: Any, plain: Any, x: jax.Array, atol: float = 0, scale: float = 1
) -> None:
    """Result and cotangents; and the parameters drawn are the same ones.

    The plain layer is on one device: what XLA compiles is for all meshes.
    """
    given, wanted = (jax.tree.leaves(nnx.state(one)) for one in (layer, plain))
    chex.assert_trees_all_equal(given, wanted)
    plain = jax.tree.map(np.asarray, plain)
    result = jax.eval_shape(call, plain, x)
    cotangent = array(*result.shape, seed=7).astype(result.dtype) * scale
    given = jax.tree.leaves(jax.jit(vjp(f))(cotangent, layer, x))
    wanted = jax.tree.leaves(jax.jit(vjp(call))(cotangent, plain, x))
    chex.assert_trees_all_equal_shapes_and_dtypes(given, wanted)
    for one, other in zip(given, wanted, strict=True):
        size = max(1, np.max(np.abs(np.float32(other)))) if atol else 1
        np.testing.assert_allclose(
            np.float32(one) / size, np.float32(other) / size, rtol=0, atol=atol
        )


# --- Linear layers ------------------------------------------------------------------ #

COLUMN = functools.partial(layers.ColumnParallelLinear, FEATURES, HIDDEN)
ROW = functools.partial(layers.RowParallelLinear, FEATURES, HIDDEN)
MLP = functools.partial(layers.ParallelMLP, FEATURES, HIDDEN, activation=jax.nn.relu)
LINEAR = functools.partial(nnx.Linear, FEATURES, HIDDEN)

PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "columns": (COLUMN, LINEAR),
    "columns, no bias": (
        functools.partial(COLUMN, use_bias=False),
        functools.partial(LINEAR, use_bias=False),
    ),
    "rows": (ROW, LINEAR),
    "rows, whole sequence": (
        functools.partial(ROW, sequence_parallel=False),
        LINEAR,
    ),
    "mlp": (MLP, PlainMLP),
    "mlp, whole sequence": (functools.partial(MLP, sequence_parallel=False), PlainMLP),
}


@pytest.mark.parametrize(
    ("name", "how", "axes"),
    [
        ("mlp", "p2p", "1"),
        ("mlp", "collective", "2 x 4"),
        ("mlp", "p2p", "4"),
        ("rows", "collective", "2"),
        ("columns, no bias", "p2p", "4"),
        ("rows, whole sequence", "p2p", "2"),
        ("mlp, whole sequence", "collective", "2 x 4"),
    ],
)
def test_linear_layers_are_exact(name: str, how: str, axes: str) -> None:
    mesh = mesh_of(**MESHES[axes])
    parallel, plain = (integral(made(mesh, make, **BY_NUMPY)) for make in PAIRS[name])
    x = array(BATCH, SEQUENCE, FEATURES)
    assert_alike(by_jhost(mesh, how), parallel, plain, x)


@pytest.mark.parametrize("axes", ["1", "2 x 4"])
def test_swiglu_is_flax_s(axes: str) -> None:
    mesh = mesh_of(**MESHES[axes])
    parallel = made(mesh, layers.ParallelSwiGLU, FEATURES, HIDDEN, **BY_NUMPY)
    plain = made(mesh, PlainSwiGLU, **BY_NUMPY)
    assert_alike(by_jhost(mesh, "p2p"), parallel, plain, tokens(), atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "spec"), [((FEATURES,), P()), ((SEQUENCE, FEATURES), P("tp"))]
)
def test_tokens_may_have_fewer_dims(shape: tuple[int, ...], spec: P) -> None:
    mesh = mesh_of(tp=4)
    both = PAIRS["columns"]
    parallel, plain = (integral(made(mesh, make, **BY_NUMPY)) for make in both)
    assert_alike(by_jhost(mesh, "p2p", spec), parallel, plain, array(*shape))


def test_a_sequence_that_does_not_divide() -> None:
    """Ten tokens on four devices."""
    mesh, x = mesh_of(tp=4), array(BATCH, 10, FEATURES)
    both = PAIRS["mlp"]
    parallel, plain = (integral(made(mesh, make, **BY_NUMPY)) for make in both)
    assert_alike(by_jhost(mesh, "p2p", P()), parallel, plain, x)


def test_without_jhost_a_layer_is_flax_s_own() -> None:
    parallel, plain = (make(rngs=rngs()) for make in PAIRS["mlp"])
    assert_alike(call, parallel, plain, tokens())


def test_computing_in_bfloat16() -> None:
    mesh = mesh_of(dp=2, tp=2)
    how = {"dtype": jnp.bfloat16}
    parallel = made(mesh, layers.TransformerBlock, FEATURES, 8, HIDDEN, **how)
    plain = made(mesh, PlainBlock, 8, **how)
    x = tokens(jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        assert_alike(by_jhost(mesh, "p2p"), parallel, plain, x, atol=4e-2)


# --- Attention ---------------------------------------------------------------------- #


@pytest.mark.parametrize(
    ("kv_heads", "axes"),
    [(4, "4"), (2, "4"), (1, "2 x 4")],
)
def test_attention_with_shared_heads(kv_heads: int, axes: str) -> None:
    """On four devices two heads, or one, are copied to those that use them."""
    mesh = mesh_of(**MESHES[axes])
    options = {"num_kv_heads": kv_heads, **BY_NUMPY}
    parallel = made(mesh, layers.ParallelAttention, 8, FEATURES, **options)
    plain = made(mesh, nnx.MultiHeadAttention, 8, FEATURES, decode=False, **options)
    assert_alike(by_jhost(mesh, "p2p"), parallel, plain, tokens(), atol=1e-5)


def test_shared_heads_that_no_device_has_alone() -> None:
    """Six heads on four devices: twelve copies, three a device."""
    mesh = mesh_of(tp=4)
    options = {"num_kv_heads": 6, "qkv_features": 24, **BY_NUMPY}
    parallel = made(mesh, layers.ParallelAttention, 12, FEATURES, **options)
    plain = made(mesh, nnx.MultiHeadAttention, 12, FEATURES, decode=False, **options)
    assert_alike(by_jhost(mesh, "p2p"), parallel, plain, tokens(), atol=1e-5)


@pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this flax has no RoPE")
def test_rotary_positions() -> None:
    mesh = mesh_of(dp=2, tp=4)
    rotated = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE(1e4))
    options = {"num_kv_heads": 2, "qkv_features": 16, **BY_NUMPY}
    parallel = made(
        mesh, layers.ParallelAttention, 8, FEATURES, rope_theta=1e4, **options
    )
    plain = made(
        mesh,
        nnx.MultiHeadAttention,
        8,
        FEATURES,
        attention_fn=rotated,
        decode=False,
        **options,
    )
    assert_alike(by_jhost(mesh, "p2p"), parallel, plain, tokens(), atol=1e-5)


def test_rotation_and_an_attention_of_the_user_s_own_are_refused() -> None:
    attend = nnx.dot_product_attention
    with pytest.raises(errors.OptionError, match="both rope_theta and attention_fn"):
        layers.ParallelAttention(
            8, FEATURES, rope_theta=1e4, attention_fn=attend, rngs=rngs()
        )


def test_an_older_flax_without_rotation_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(nnx, "RoPE", raising=False)
    with pytest.raises(errors.OptionError, match=r"has no nnx.RoPE. Install flax>="):
        layers.ParallelAttention(8, FEATURES, rope_theta=1e4, rngs=rngs())


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(errors.DivisibilityError, match=r"6 = 1 \* 4 \+ 2"):
        made(mesh_of(tp=4), layers.ParallelAttention, 6, 12)


def test_heads_are_right_where_the_mesh_was_not_known() -> None:
    """Made without a mesh, the layer has no copies; heads are then padded."""
    parallel = layers.ParallelAttention(8, FEATURES, num_kv_heads=2, rngs=rngs())
    plain = nnx.MultiHeadAttention(
        8, FEATURES, num_kv_heads=2, decode=False, rngs=rngs()
    )
    assert_alike(by_jhost(mesh_of(tp=4), "p2p"), parallel, plain, tokens(), atol=1e-5)


# --- Embedding and logits ----------------------------------------------------------- #


@pytest.mark.parametrize(
    ("sequence_parallel", "axes"),
    [(True, "2 x 4"), (False, "1"), (False, "2 x 4")],
)
def test_embedding_and_logits(sequence_parallel: bool, axes: str) -> None:
    mesh = mesh_of(**MESHES[axes])
    parallel = made(
        mesh, layers.ParallelEmbed, 24, FEATURES, sequence_parallel=sequence_parallel
    )
    plain = made(mesh, nnx.Embed, 24, FEATURES)
    parallel, plain = integral(parallel), integral(plain)
    drawn = np.random.default_rng(1).integers(0, 24, (BATCH, SEQUENCE), np.int32)
    words = jnp.array(drawn)

    def logits(embed: Any, words: jax.Array) -> jax.Array:
        return embed.attend(embed(words))

    f = jhost.jit(logits, mesh=mesh, in_shardings=(None, P()), **HOW["p2p"])
    weights = array(BATCH, SEQUENCE, 24, seed=3)
    given, wanted = (
        jax.jit(jax.value_and_grad(lambda e, g=g: jnp.sum(g(e, words) * weights)))(e)
        for g, e in ((f, parallel), (logits, plain))
    )
    chex.assert_trees_all_equal(jax.tree.leaves(given), jax.tree.leaves(wanted))


# --- Shardings of parameters -------------------------------------------------------- #


def specs(layer: Any) -> list[P]:
    return jax.tree.leaves(
        nnx.get_partition_spec(nnx.state(layer)), is_leaf=lambda x: isinstance(x, P)
    )


def test_parameters_carry_flax_s_metadata_and_lie_there() -> None:
    mesh = mesh_of(dp=2, tp=4)
    block = made(mesh, layers.TransformerBlock, 8, 8, 16, num_kv_heads=2)
    wanted = {
        "attention.query": P(None, "tp", None),
        "attention.key": P(),  # two heads on four devices
        "attention.value": P(),
        "attention.out": P("tp", None, None),
        "mlp.gate": P(None, "tp"),
        "mlp.up": P(None, "tp"),
        "mlp.down": P("tp", None),
    }
    for path, spec in wanted.items():
        name, part = path.split(".")
        kernel = getattr(getattr(block, name), part).kernel
        assert nnx.get_partition_spec(kernel).get_value() == spec
        if spec:
            assert kernel.sharding.spec == spec
    assert len(specs(block)) == len(wanted) + 2


def test_biases_follow_the_features() -> None:
    mesh = mesh_of(tp=4)
    column, row = made(mesh, COLUMN), made(mesh, ROW)
    assert specs(column) == [P("tp"), P(None, "tp")]
    assert specs(row) == [P(), P("tp", None)]


def test_gradients_lie_where_parameters_do() -> None:
    """In a step that `jax.jit` compiles, which knows nothing of the layers."""
    mesh = mesh_of(dp=2, tp=4)
    block = made(mesh, layers.TransformerBlock, 8, 8, 16)
    f = by_jhost(mesh, "p2p")
    grads = jax.jit(jax.grad(lambda m, x: jnp.sum(f(m, x))))(block, tokens())
    for given, wanted in zip(
        jax.tree.leaves(nnx.state(grads)),
        jax.tree.leaves(nnx.state(block)),
        strict=True,
    ):
        assert given.sharding.is_equivalent_to(wanted.sharding, given.ndim)


def test_a_sharding_of_the_user_s_stays() -> None:
    """Weights sharded over dp too: gathered for the matmul, gradients scattered."""
    mesh = mesh_of(dp=2, tp=4)
    init = nnx.with_partitioning(nnx.initializers.normal(), ("dp", "tp"))
    both = functools.partial(made, mesh)
    parallel = integral(both(COLUMN, kernel_init=init))
    plain = integral(both(LINEAR, kernel_init=init))
    assert parallel.kernel.sharding.spec == P("dp", "tp")
    f = by_jhost(mesh, "p2p")
    x = array(BATCH, SEQUENCE, FEATURES)
    assert_alike(f, parallel, plain, x)
    grads = jax.jit(jax.grad(lambda m, x: jnp.sum(f(m, x))))(parallel, x)
    assert grads.kernel.sharding.spec == P("dp", "tp")


def test_another_axis_name() -> None:
    mesh = mesh_of(model=4)
    parallel = integral(made(mesh, MLP, mesh_axis="model"))
    plain = integral(made(mesh, PlainMLP))
    assert specs(parallel)[1] == P("model", None)
    f = by_jhost(mesh, "p2p", P(None, "model"))
    assert_alike(f, parallel, plain, array(BATCH, SEQUENCE, FEATURES))


# --- Around ------------------------------------------------------------------------- #


def test_linen_layers_take_the_same_matmuls() -> None:
    nn: Any = pytest.importorskip("flax.linen")
    mesh, x = mesh_of(tp=4), array(BATCH, SEQUENCE, FEATURES)

    def mlp(up: Any, down: Any) -> Any:
        return nn.Sequential(
            [
                nn.Dense(HIDDEN, dot_general=up),
                jax.nn.relu,
                nn.Dense(FEATURES, dot_general=down),
            ]
        )

    plain = mlp(None, None)
    parallel = mlp(layers.ColumnParallelDot(), layers.RowParallelDot())
    params = plain.init(quick_key(), x)
    params = jax.tree.map(lambda p: array(*p.shape), params)
    f: Any = jhost.jit(
        parallel.apply, mesh=mesh, in_shardings=(None, P(None, "tp")), **HOW["p2p"]
    )
    assert f.lower(params, x).explain().loops == 1
    cotangent = array(BATCH, SEQUENCE, FEATURES, seed=7)
    chex.assert_trees_all_equal(
        vjp(f)(cotangent, params, x), vjp(plain.apply)(cotangent, params, x)
    )


def test_jhost_is_imported_without_what_few_programs_need() -> None:
    """Each of them takes as long as a half of jhost, in every process.

    Without flax, jhost's layers say what to install.
    """
    code = (
        "import sys, jhost\n"
        "print({'flax', 'scipy', 'jax.experimental.pallas'} & sys.modules.keys())\n"
        "sys.modules['flax'] = None\n"
        "import jhost.nnx"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stderr
    assert "pip install 'flax>=0.12.8'" in run.stderr
