"""A transformer block is a few pipelined loops, forward and backward, and trains."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost.lowering.explain import explain_program
from jhost.lowering.explanation import Explanation
from jhost.lowering.ir.program import Program
from tests.jhost.derived import backward
from tests.jhost.quick_random import quick_key, rngs
from tests.lowering.hand_built import mesh_of
from tests.lowering.traced import loops, work

nnx: Any = pytest.importorskip("flax.nnx")
layers: Any = pytest.importorskip("jhost.nnx")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning"),
]

FEATURES, HEADS, HIDDEN = 16, 8, 32
BATCH, SEQUENCE = 4, 16
HOW: dict[str, dict[str, Any]] = {
    "p2p": {"pipeline": "p2p"},
    "collective": {"pipeline": "collective", "chunks": 2},
}
each_way = pytest.mark.parametrize(
    "how", ["p2p", pytest.param("collective", marks=pytest.mark.slow)]
)
TOKENS = P("dp", "tp")


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(dp=2, tp=4)


def block_on(mesh: Mesh, **options: Any) -> Any:
    with jax.set_mesh(mesh):
        return layers.TransformerBlock(FEATURES, HEADS, HIDDEN, rngs=rngs(), **options)


def call(block: Any, x: jax.Array) -> jax.Array:
    return block(x)


def activations() -> jax.Array:
    values = np.random.default_rng(1).standard_normal((BATCH, SEQUENCE, FEATURES))
    return jnp.array(values, jnp.float32)


def matmuls(program: Program) -> list[int]:
    """How many there are in each loop, once."""
    return [work(loop.body).count("dot_general") for loop in loops(program)]


def along(explanation: Explanation, axis: str) -> list[tuple[str, bool]]:
    """The communications along a mesh axis, and whether each is in a loop."""
    return [
        (row.kind, row.chunks > 1)
        for row in explanation.communications
        if row.axes == (axis,)
    ]


def assert_all_pipelined(explanation: Explanation) -> None:
    assert all(stream.chunks > 1 for stream in explanation.streams), explanation


# --- Loops and communications ------------------------------------------------------- #


@pytest.mark.usefixtures("uncombined")
def test_a_block_is_two_loops_forward_and_two_backward(mesh: Mesh) -> None:
    """Forward a sequence is gathered twice and scattered twice; backward, what enters
    each loop is gathered again for the gradients of its weights.
    """
    block, x = block_on(mesh, num_kv_heads=4), activations()
    f = jhost.jit(call, mesh=mesh, in_shardings=(None, TOKENS), **HOW["collective"])
    ahead, back = backward(f, block, x)
    assert matmuls(ahead) == [3, 4]  # queries, keys, values; out, gate, up, down
    assert matmuls(back) == [8, 6]
    for program, gathered in ((ahead, 2), (back, 4)):
        explanation = explain_program(program)
        assert_all_pipelined(explanation)
        kinds = along(explanation, "tp")
        assert kinds.count(("AllGather", True)) == gathered
        assert kinds.count(("ReduceScatter", True)) == 2
        assert len(kinds) == gathered + 2
    # Along dp nothing but the weights' gradients, each once.
    assert not along(explain_program(ahead), "dp")
    assert along(explain_program(back), "dp") == [("AllReduce", False)] * 7


def test_a_block_from_device_to_device(mesh: Mesh) -> None:
    """A sum is complete before it is sent on: one loop more than by collectives."""
    block, x = block_on(mesh), activations()
    f = jhost.jit(call, mesh=mesh, in_shardings=(None, TOKENS), **HOW["p2p"])
    for program, sent in zip(backward(f, block, x), (4, 6), strict=True):
        explanation = explain_program(program)
        assert_all_pipelined(explanation)
        assert along(explanation, "tp") == [("CollectivePermute", True)] * sent
        assert explanation.loops == 3


@pytest.mark.usefixtures("uncombined")
@each_way
def test_copied_heads_add_only_their_gradients(mesh: Mesh, how: str) -> None:
    """Two heads on four devices: the gradients of their kernels are added up."""
    block, x = block_on(mesh, num_kv_heads=2), activations()
    f = jhost.jit(call, mesh=mesh, in_shardings=(None, TOKENS), **HOW[how])
    ahead, back = map(explain_program, backward(f, block, x))
    assert all(chunked for _, chunked in along(ahead, "tp"))
    unchunked = [row for row in along(back, "tp") if not row[1]]
    assert len(unchunked) == 2
    assert_all_pipelined(back)


def test_blocks_one_after_the_other_share_loops(mesh: Mesh) -> None:
    """An MLP and the queries, keys and values after it are one loop."""
    blocks = [block_on(mesh), block_on(mesh)]

    def both(blocks: Sequence[Any], x: jax.Array) -> jax.Array:
        return functools.reduce(lambda x, block: block(x), blocks, x)

    f = jhost.jit(both, mesh=mesh, in_shardings=(None, TOKENS), **HOW["collective"])
    assert matmuls(f.lower(blocks, activations()).host_ir) == [3, 7, 4]


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_blocks_of_one_kind_are_one_program(mesh: Mesh, kv_heads: int) -> None:
    """Their structures are equal, so what is compiled for one serves the other."""
    rotated = {"rope_theta": 1e4} if hasattr(nnx, "RoPE") else {}
    one, other = (block_on(mesh, num_kv_heads=kv_heads, **rotated) for _ in range(2))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    traced: list[Any] = []

    def counted(block: Any, x: jax.Array) -> jax.Array:
        traced.append(block)
        return block(x)

    f = jhost.jit(counted, mesh=mesh, in_shardings=(None, TOKENS), **HOW["p2p"])
    for block in (one, other):
        jax.eval_shape(f, block, activations())
    assert len(traced) == 1


def test_without_sequence_parallelism_sums_are_all_reduced(mesh: Mesh) -> None:
    block = block_on(mesh, sequence_parallel=False)
    f = jhost.jit(call, mesh=mesh, in_shardings=(None, P("dp")), **HOW["collective"])
    explanation = f.lower(block, activations()).explain()
    assert along(explanation, "tp") == [("AllReduce", True)] * 2
    assert not along(explanation, "dp")


@each_way
def test_a_batch_is_not_gathered_where_nothing_is_said_of_the_results(
    mesh: Mesh, how: str
) -> None:
    """The marks leave the batch alone: that is no wish for a whole one."""
    block, x = block_on(mesh, num_kv_heads=4), activations()
    f = jhost.jit(call, mesh=mesh, in_shardings=(None, TOKENS), **HOW[how])
    lowered: Any = f.lower(block, x)
    assert not along(lowered.explain(), "dp")
    assert lowered.host_ir.results[0].dims[0].axes == ("dp",)


# --- Training ----------------------------------------------------------------------- #

STEPS, LAYERS, VOCABULARY = 10, 1, 12


class Model(nnx.Module):
    """Embedding, blocks, logits; the same parameters with and without jhost."""

    def __init__(self, rngs: Any) -> None:
        self.embed = layers.ParallelEmbed(VOCABULARY, FEATURES, rngs=rngs)
        self.blocks = nnx.List(
            [
                layers.TransformerBlock(
                    FEATURES, HEADS, HIDDEN, num_kv_heads=2, rngs=rngs
                )
                for _ in range(LAYERS)
            ]
        )
        self.norm = nnx.RMSNorm(FEATURES, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def loss_of(model: Any, tokens: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(model(tokens[:, :-1]))
    wanted = jax.nn.one_hot(tokens[:, 1:], VOCABULARY)
    return -jnp.mean(jnp.sum(logits * wanted, axis=-1))


def batch(step: int) -> jax.Array:
    start = np.random.default_rng(step).integers(0, VOCABULARY, (BATCH, 1))
    return jnp.array((start + np.arange(SEQUENCE + 1)) % VOCABULARY)


def losses(mesh: Mesh, loss: Callable[..., jax.Array]) -> list[float]:
    optax: Any = pytest.importorskip("optax")

    @nnx.jit
    def step(model: Any, optimizer: Any, tokens: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, grads)
        return value

    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        model = Model(rngs())
        optimizer = nnx.Optimizer(model, optax.adamw(3e-2), wrt=nnx.Param)
        return [float(step(model, optimizer, batch(n))) for n in range(STEPS)]


@pytest.mark.slow
def test_a_model_trains_as_without_jhost(mesh: Mesh) -> None:
    """`nnx.jit`, `nnx.value_and_grad` and `nnx.Optimizer` are as they always are."""
    hosted = jhost.jit(loss_of, mesh=mesh, in_shardings=(None, P("dp")), **HOW["p2p"])
    given, wanted = losses(mesh, hosted), losses(mesh_of(dp=1, tp=1), loss_of)
    np.testing.assert_allclose(given, wanted, rtol=1e-4)
    assert wanted[-1] < wanted[0] * 0.9


def test_blocks_in_a_scan(mesh: Mesh) -> None:
    """One jhost function, compiled once, over the parameters of all blocks."""

    @nnx.vmap(in_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def stacked(rngs: Any) -> Any:
        return layers.TransformerBlock(FEATURES, HEADS, HIDDEN, rngs=rngs)

    with jax.set_mesh(mesh):
        blocks = stacked(rngs().fork(split=3))
    assert nnx.get_partition_spec(blocks.mlp.up.kernel).get_value() == P(
        None, None, "tp"
    )
    f = jhost.jit(call, mesh=mesh, in_shardings=(None, TOKENS), **HOW["collective"])

    def run(f: Any, blocks: Any, x: jax.Array) -> jax.Array:
        graph, params = nnx.split(blocks)
        x, _ = jax.lax.scan(lambda x, p: (f(nnx.merge(graph, p), x), None), x, params)
        return jnp.sum(x * x)

    given, wanted = (
        jax.jit(jax.value_and_grad(functools.partial(run, g)))(blocks, activations())
        for g in (f, call)
    )
    for one, other in zip(*map(jax.tree.leaves, (given, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


# --- The page ----------------------------------------------------------------------- #

PAGE = Path(__file__).parents[2] / "docs" / "flax.md"


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    """On four devices, as it says."""
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(examples) == 4
    namespace: dict[str, Any] = {}
    for example in examples:
        exec(example, namespace)
    assert capsys.readouterr().out == "2\n"
    first, *_, last = namespace["losses"]
    assert last < first
    model = namespace["nn"].Sequential(
        [namespace["up"], namespace["nn"].relu, namespace["down"]]
    )
    f: Any = jhost.jit(
        model.apply,
        mesh=namespace["mesh"],
        in_shardings=(None, namespace["tokens"]),
        **HOW["p2p"],
    )
    x = jnp.ones((2, 16, 32))
    params = model.init(quick_key(), x)
    assert f.lower(params, x).explain().loops == 1
    wanted = model.apply(params, x)
    np.testing.assert_allclose(f(params, x), wanted, rtol=1e-5, atol=1e-6)
