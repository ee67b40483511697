"""The backward program: pipelined as the forward, with no byte more than needed.

What the forward hands on keeps its layout, so that nothing moves between the two.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.explain import explain_program
from jhost.lowering.ir.display_names import display_name
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Allocate, walk
from jhost.testing import programs
from tests.jhost.derived import backward, moves, vjp
from tests.lowering.on_mesh import on
from tests.lowering.traced import array, loops, notes

Array = jax.Array
Golden = Callable[..., None]

ROWS, COLUMNS = P("tp"), P(None, "tp")
HOW: dict[str, dict[str, Any]] = {
    "off": {"pipeline": "off"},
    "collective": {"pipeline": "collective", "chunks": 2},
    "p2p": {"pipeline": "p2p"},
}
each_way = pytest.mark.parametrize("how", HOW)


def mlp(x: Array, up: Array, down: Array) -> Array:
    return jhost.stream(jax.nn.relu(x @ up) @ down, 0)


def gated(x: Array, gate: Array, up: Array, down: Array) -> Array:
    return jhost.stream((jnp.maximum(x @ gate, 0) * (x @ up)) @ down, 0)


def matmul(x: Array, w: Array) -> Array:
    return jhost.stream(x @ w, 0)


def projections(x: Array, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    return jhost.stream(x @ q, 0), x @ k, x @ v


def contracted(x: Array, y: Array) -> Array:
    return jnp.swapaxes(jhost.stream(x, 0), 0, 1) @ y


def on_the_right(w: Array, x: Array) -> Array:
    return jhost.stream(w @ jnp.swapaxes(x, 0, 1), 1)


def batched(x: Array, up: Array, down: Array) -> Array:
    return jhost.stream(jnp.maximum(x @ up, 0) @ down, 1)


X, UP, DOWN = (32, 8), (8, 64), (64, 8)

# name: function, shapes, shardings of the arguments, of the result, communications of
# the forward and of the backward, each of the bytes of a matrix of 32 x 8.
BLOCKS: dict[str, tuple[Any, Any, Any, Any, int, int]] = {
    "mlp": (mlp, (X, UP, DOWN), (ROWS, COLUMNS, ROWS), ROWS, 2, 3),
    "gated mlp": (gated, (X, UP, UP, DOWN), (ROWS, COLUMNS, COLUMNS, ROWS), ROWS, 2, 3),
    "gather": (matmul, (X, UP), (ROWS, COLUMNS), COLUMNS, 1, 2),
    "projections": (
        projections,
        (X, UP, UP, UP),
        (ROWS, *[COLUMNS] * 3),
        COLUMNS,
        1,
        2,
    ),
    "scatter": (matmul, ((32, 64), DOWN), (COLUMNS, ROWS), ROWS, 1, 1),
    "reduce": (matmul, ((32, 64), DOWN), (COLUMNS, ROWS), P(), 2, 0),
}


def function(name: str, devices: int, **how: Any) -> tuple[Any, list[Array]]:
    """A block as a jhost function along tp, and arguments for it."""
    fun, shapes, ins, outs, *_ = BLOCKS[name]
    settings = on({"tp": devices}, ins, outs, **how)
    args = [array(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return jhost.jit(fun, **settings), args


def bytes_moved(program: Program) -> int:
    return sum(int(move.split()[-1]) for move in moves(program))


# --- Bytes -------------------------------------------------------------------------- #


@each_way
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", BLOCKS)
def test_each_activation_moves_once(name: str, devices: int, how: str) -> None:
    """The input, the result's cotangent and the input's: the weights stay apart."""
    f, args = function(name, devices, **HOW[how])
    activation = 4 * 32 * 8 * (devices - 1) // devices
    counts = [bytes_moved(program) / activation for program in backward(f, *args)]
    assert counts == [float(count) for count in BLOCKS[name][-2:]]


@pytest.mark.parametrize("how", ["collective", "p2p"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_backward_is_one_loop(name: str, how: str) -> None:
    f, args = function(name, 4, **HOW[how])
    _, back = backward(f, *args)
    assert len(loops(back)) == (0 if (name, how) == ("reduce", "p2p") else 1)
    assert all(row not in str(back) for row in ("AllToAll", "AllReduce"))


def test_both_programs_are_dumped(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JHOST_DUMP", "host_ir")
    monkeypatch.setenv("JHOST_DUMP_DIR", str(tmp_path))
    specs = (ROWS, COLUMNS, ROWS), ROWS

    # A function of its own: what was lowered before is not lowered again.
    def own(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return mlp(x, up, down)

    f = jhost.jit(own, **on({"tp": 2}, *specs, pipeline="p2p"))
    programs = [str(p) for p in backward(f, array(*X), array(*UP), array(*DOWN))]
    paths = sorted(tmp_path.iterdir())
    ends = [path.name.split(".", 2)[2] for path in paths[-2:]]
    assert ends == ["forward.host_ir.txt", "backward.host_ir.txt"]
    dumped = [path.read_text() for path in paths]
    assert [text.rstrip() for text in dumped[-2:]] == [p.rstrip() for p in programs]


def test_what_the_loop_does(golden: Golden) -> None:
    """dy and x come; two matmuls and both weight gradients; dx goes."""
    f, args = function("mlp", 2, pipeline="p2p")
    _, back = backward(f, *args)
    golden(re.sub(r"\bresult_(?=\d)", "y", str(back)))  # as JAX 0.10 names them


# --- What is saved ------------------------------------------------------------------ #


def test_arguments_are_saved_as_they_are() -> None:
    """Neither copied nor gathered: the forward's results are its own and one mask."""
    f, args = function("mlp", 4, pipeline="p2p")
    forward, back = backward(f, *args)
    made = {result.shape for result in forward.results[1:]}
    assert made == {(32, 64 // 4)}
    assert {param.shape for param in back.params} == {
        (32, 64 // 4),
        *((32 // 4, 8), (8, 64 // 4), (64 // 4, 8)),
    }


def test_each_layer_s_derivatives_are_made_in_its_own_loop() -> None:
    """JAX computes them all at the start; in the first loop they would all be kept."""

    def layers(x: Array, up: Array, down: Array) -> Array:
        for _ in range(3):
            x = jhost.stream(jnp.tanh(x @ up) @ down, 0)
        return x

    settings = on({"tp": 4}, (ROWS, COLUMNS, ROWS), ROWS, pipeline="p2p")
    args = array(64, 8), array(*UP), array(*DOWN)
    _, back = backward(jhost.jit(layers, **settings), *args)
    assert len(loops(back)) == 3
    allocated = [s.buffer.shape for s in walk(back.body) if isinstance(s, Allocate)]
    assert (64, UP[1] // 4) not in allocated


def test_a_copy_that_the_user_asked_for_whole_is_gathered_again() -> None:
    def f(x: Array, w: Array) -> Array:
        return jhost.stream(jhost.shard(x, P()) @ w, 0)

    settings = on({"tp": 4}, (ROWS, COLUMNS), COLUMNS, pipeline="p2p")
    forward, back = backward(jhost.jit(f, **settings), array(*X), array(*UP))
    assert len(forward.results) == 1
    assert (32 // 4, 8) in {param.shape for param in back.params}
    params = {display_name(back, param.name) for param in back.params}
    rows = explain_program(back).communications
    assert [row.kind for row in rows if row.value in params] == ["CollectivePermute"]


@pytest.mark.parametrize("place", ["around", "inside"])
def test_a_policy_may_keep_what_was_gathered(place: str) -> None:
    """It is gathered in the forward's loop alone, and its cotangent is scattered."""

    def f(x: Array, w: Array) -> Array:
        x = checkpoint_name(jhost.shard(x, P()), "gathered")
        return jhost.stream(x @ w, 0)

    policy = jax.checkpoint_policies.save_only_these_names("gathered")
    settings = on({"tp": 4}, (ROWS, COLUMNS), COLUMNS, pipeline="p2p")
    if place == "inside":
        kept = jhost.jit(jax.checkpoint(f, policy=policy), **settings)
    else:
        kept = jax.checkpoint(jhost.jit(f, **settings), policy=policy)
    args = array(*X), array(*UP, seed=1)
    forward, *_, back = backward(kept, *args)
    assert X in {result.shape for result in forward.results}
    activation = 4 * 32 * 8 * 3 // 4
    assert moves(forward) == [f"CollectivePermute tp {activation}"]
    assert moves(back) == [f"CollectivePermute tp {activation}"]
    check_gradients(kept, f, *args)


def attention(x: Array, q: Array, k: Array, v: Array, out: Array) -> Array:
    """Four heads of eight, in four sequences of eight."""
    x = jhost.shard(x, P())
    parts = [jhost.serial(part) for part in (jhost.stream(x @ q, 0), x @ k, x @ v)]
    queries, keys, values = (part.reshape(4, 8, 8, 8) for part in parts)
    weights = jax.nn.softmax(jnp.einsum("sqhd,skhd->shqk", queries, keys))
    mixed = jnp.einsum("shqk,skhd->sqhd", weights, values).reshape(32, 64)
    return jhost.stream(jhost.serial(mixed) @ out, 0)


@each_way
def test_each_activation_of_an_attention_block_moves_once(how: str) -> None:
    """x and y forward; backward y's cotangent, x once more, and x's cotangent."""
    specs = (ROWS, COLUMNS, COLUMNS, COLUMNS, ROWS), ROWS
    f = jhost.jit(attention, **on({"tp": 4}, *specs, **HOW[how]))
    shapes = X, UP, UP, UP, DOWN
    args = [array(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    activation = 4 * 32 * 8 * 3 // 4
    counts = [bytes_moved(program) / activation for program in backward(f, *args)]
    assert counts == [2.0, 3.0]


def test_a_mark_on_an_argument_streams_the_weights_gradient() -> None:
    """Where only the weight is differentiated no cotangent carries the mark."""

    def f(x: Array, w: Array) -> Array:
        return jhost.stream(x, 0) @ w

    settings = on({"tp": 4}, (ROWS, COLUMNS), COLUMNS, pipeline="p2p")
    compiled, x, w = jhost.jit(f, **settings), array(*X), array(*UP)
    _, back = backward(lambda w: compiled(x, w), w)
    (loop,) = loops(back)
    assert "CollectivePermute" in str(loop)


# --- Values ------------------------------------------------------------------------- #

MESHES: dict[str, dict[str, int]] = {"4": {"tp": 4}, "2 x 2": {"dp": 2, "tp": 2}}
PATTERNS: dict[str, tuple[Any, Any, Any, Any]] = {
    name: (fun, shapes, ins, outs)
    for name, (fun, shapes, ins, outs, *_) in BLOCKS.items()
} | {
    "gather after": (matmul, (X, (8, 4)), (ROWS, P()), P()),
    "contracted": (contracted, (X, (32, 64)), (ROWS, COLUMNS), COLUMNS),
    "on the right": (on_the_right, ((64, 8), X), (ROWS, ROWS), ROWS),
}


@pytest.mark.parametrize(
    ("name", "how", "axes"),
    [
        *((name, how, "4") for name in PATTERNS for how in ("collective", "p2p")),
        # Over dp, which they do not name, all are alike.
        *((name, "p2p", "2 x 2") for name in ("mlp", "gather after")),
    ],
)
def test_gradients_are_exact(name: str, how: str, axes: str) -> None:
    fun, shapes, ins, outs = PATTERNS[name]
    f = jhost.jit(fun, **on(MESHES[axes], ins, outs, **HOW[how]))
    check_gradients(f, fun, *[array(*s, seed=i) for i, s in enumerate(shapes)])


def check_gradients(f: Any, plain: Any, *args: Any) -> None:
    cotangent = jax.tree.map(
        lambda aval: array(*aval.shape, seed=9), jax.eval_shape(plain, *args)
    )
    wanted = jax.jit(vjp(plain))(cotangent, *args)
    chex.assert_trees_all_equal(vjp(f)(cotangent, *args), wanted)


# --- Data parallel ------------------------------------------------------------------ #


@pytest.mark.usefixtures("uncombined")
@each_way
def test_gradients_of_replicated_weights_are_summed_once(how: str) -> None:
    """Rows over dp and tp: along dp nothing moves but the weights' gradients."""
    rows = P(("dp", "tp"))
    specs = (rows, COLUMNS, ROWS), rows
    f = jhost.jit(mlp, **on({"dp": 2, "tp": 2}, *specs, **HOW[how]))
    args = array(64, 16), array(16, 64, seed=1), array(64, 16, seed=2)
    forward, back = backward(f, *args)
    along_dp = [move for move in moves(back) if "dp" in move]
    assert along_dp == [f"AllReduce dp {4 * 16 * 64 // 2}"] * 2
    assert not any("dp" in move for move in moves(forward))
    assert bytes_moved(back) - 2 * 4 * 16 * 64 // 2 == 3 * 4 * 32 * 16 // 2
    check_gradients(f, mlp, *args)


@pytest.mark.usefixtures("uncombined")
def test_a_batch_over_dp_and_rows_over_tp() -> None:
    specs = (P("dp", "tp"), COLUMNS, ROWS), P("dp", "tp")
    f = jhost.jit(batched, **on({"dp": 2, "tp": 2}, *specs, pipeline="p2p"))
    args = array(4, 16, 16), array(16, 64, seed=1), array(64, 16, seed=2)
    _, back = backward(f, *args)
    assert [move.split()[:2] for move in moves(back) if "dp" in move] == [
        ["AllReduce", "dp"]
    ] * 2
    check_gradients(f, batched, *args)


# --- Checkpoints -------------------------------------------------------------------- #


def test_what_is_computed_again_is_pipelined() -> None:
    """Outside: the mark on the result goes, as nothing reads it; one stays."""
    f, args = function("mlp", 4, pipeline="p2p")
    forward, again, back = backward(jax.checkpoint(f), *args)
    activation = 4 * 32 * 8 * 3 // 4
    counts = [bytes_moved(program) // activation for program in (forward, again, back)]
    assert counts == [2, 1, 3]
    assert [len(loops(program)) for program in (forward, again, back)] == [1, 1, 1]
    check_gradients(jax.checkpoint(f), mlp, *args)


def test_a_checkpoint_inside_is_one_loop() -> None:
    fun, _, ins, outs, *_ = BLOCKS["mlp"]
    _, args = function("mlp", 4)
    f = jhost.jit(jax.checkpoint(fun), **on({"tp": 4}, ins, outs, pipeline="p2p"))
    forward, back = backward(f, *args)
    assert [len(loops(program)) for program in (forward, back)] == [1, 1]
    assert len(forward.results) == 1
    assert bytes_moved(back) == 3 * 4 * 32 * 8 * 3 // 4
    check_gradients(f, mlp, *args)


def test_under_a_policy_weights_keep_their_layouts() -> None:
    f, args = function("mlp", 4, pipeline="p2p")
    saved = jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    *_, back = backward(saved, *args)
    assert bytes_moved(back) == 3 * 4 * 32 * 8 * 3 // 4
    assert (8, 64 // 4) in {param.shape for param in back.params}


def test_layers_in_a_scan_are_pipelined_backward() -> None:
    f, (x, up, down) = function("mlp", 4, pipeline="p2p")

    def model(x: Array, weights: tuple[Array, Array]) -> Array:
        return jax.lax.scan(lambda x, w: (f(x, *w), None), x, weights)[0]

    stacked = jnp.stack([up, up]), jnp.stack([down, down])
    *_, forward, back = backward(model, x, stacked)
    assert [len(loops(program)) for program in (forward, back)] == [1, 1]
    assert bytes_moved(back) == 3 * 4 * 32 * 8 * 3 // 4


def test_a_tangent_program_keeps_the_streams() -> None:
    f, args = function("mlp", 4, pipeline="p2p")
    (jvp,) = programs(lambda *args: jax.jvp(f, args, args), *args)
    assert len(loops(jvp)) == 1
    assert not notes(jvp)
