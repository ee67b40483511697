"""`jhost.testing`: each check passes what is right and names what is wrong."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jhost
from jhost import errors, testing
from jhost._testing.values import Case
from tests import budget
from tests.jhost.blocks import ARGS, SPECS, relu_block, rows, square_loss
from tests.lowering.on_mesh import on, tp

ON_FOUR = tp(4, SPECS, SPECS[0])
block = jhost.jit(relu_block, **ON_FOUR)


def wrong_in(attribute: str) -> Any:
    """A jhost function whose plain one gives twice the value, or the gradient."""

    @jax.custom_vjp
    def twice(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        return (2 * cotangent,)

    twice.defvjp(lambda x: (x, None), backward)
    f: Any = jhost.jit(relu_block, **ON_FOUR)
    with_options = f.with_options

    def replaced(**options: Any) -> Any:
        changed = with_options(**options)
        changed.__wrapped__ = f.__wrapped__
        return changed

    f.with_options = replaced
    wrap = {"value": lambda y: 2 * y, "gradients": twice}[attribute]
    f.__wrapped__ = lambda *args: wrap(relu_block(*args))
    return f


# --- Values ------------------------------------------------------------------------- #


def test_every_pipeline_is_tried_on_every_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    run = Case.problems

    def noted(self: Any, pipeline: Any, tolerance: Any) -> list[str]:
        seen.append((self.mesh.size, pipeline))
        return run(self, pipeline, tolerance)

    monkeypatch.setattr(Case, "problems", noted)
    meshes = [{"tp": 2}, testing.mesh_of({"tp": 4})]
    testing.assert_equals_plain(block, *ARGS, tolerance=0, meshes=meshes)
    pipelines = ("auto", "off", "collective", "p2p")
    assert seen == [(size, how) for size in (2, 4) for how in pipelines]


def test_a_pipeline_that_cannot_be_is_left_out_unless_it_was_named() -> None:
    f = jhost.jit(lambda x: rows(jnp.sin(x)), **tp(4, P("tp"), P("tp")))
    testing.assert_equals_plain(f, ARGS[0])
    with pytest.raises(errors.PipelineError):
        testing.assert_equals_plain(f, ARGS[0], pipelines=["p2p"])


@budget.first_is_quick("what", ["value", "gradients"])
def test_what_differs_is_named_with_its_case(what: str) -> None:
    with pytest.raises(AssertionError) as raised:
        testing.assert_equals_plain(wrong_in(what), *ARGS, pipelines=["p2p"])
    text = str(raised.value)
    assert "relu_block differs from the plain function" in text
    assert f"pipeline='p2p' on mesh(tp=4) on devices 0, 1, 2, 3, {what}: " in text
    assert "they differ by " in text


def test_gradients_can_be_left_out() -> None:
    testing.assert_equals_plain(wrong_in("gradients"), *ARGS, gradients=False)


def test_arguments_may_be_integers_keywords_and_trees() -> None:
    @jhost.jit(**tp(4, None, P("tp")))  # JAX takes no in_shardings with keywords
    def f(x: Any, n: jax.Array, *, scale: float) -> Any:
        return {"y": rows(x["x"]) * scale, "n": n + 1}

    x = {"x": ARGS[0]}
    testing.assert_equals_plain(f, x, jnp.arange(8), kwargs={"scale": jnp.ones(())})


def test_named_shardings_follow_to_another_mesh() -> None:
    mesh = testing.mesh_of({"tp": 4})
    named = [NamedSharding(mesh, spec) for spec in SPECS]
    f = jhost.jit(relu_block, in_shardings=tuple(named), out_shardings=named[0])
    testing.assert_equals_plain(f, *map(np.asarray, ARGS), meshes=[{"tp": 2}])


def test_meshes_with_explicit_axes_and_donated_arguments_are_fine() -> None:
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
    f = jhost.jit(lambda x, w: rows(jnp.maximum(x @ w, 0)), donate_argnums=0)
    with jax.set_mesh(mesh):
        x = jax.device_put(ARGS[0], P("tp"))
        w = jax.device_put(ARGS[1], P(None, "tp"))
        testing.assert_equals_plain(f, x, w, tolerance=0)
        assert not x.is_deleted()


def test_types_that_differ_are_an_error() -> None:
    with pytest.raises(AssertionError, match=r"(?i)dtype"):
        testing.assert_close(jnp.ones(2), jnp.ones(2, jnp.bfloat16))


@pytest.mark.parametrize(
    ("dtype", "step", "fine"),
    [
        ("float32", 1e-5, True),
        ("float32", 1e-3, False),
        ("bfloat16", 1e-2, True),
        ("bfloat16", 4e-2, False),
        ("int32", 1, False),
    ],
)
def test_the_tolerance_is_the_dtypes(dtype: str, step: float, fine: bool) -> None:
    x = jnp.ones(4, dtype)
    y = (x.astype("float32") + step).astype(dtype)
    if fine:
        testing.assert_close(y, x)
        with pytest.raises(AssertionError, match="the tolerance is 0e"):
            testing.assert_close(y, x, tolerance=0)
    else:
        with pytest.raises(AssertionError, match="they differ by"):
            testing.assert_close(y, x)


def test_a_plain_function_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match=r"testing\.assert_equals_plain"):
        testing.assert_equals_plain(relu_block, *ARGS)  # pyright: ignore[reportArgumentType]


def test_a_mesh_of_too_many_devices_is_refused() -> None:
    with pytest.raises(
        errors.OptionError, match=r"\{'tp': 4096\} needs more"
    ) as raised:
        testing.mesh_of({"tp": 4096})
    assert "JAX_NUM_CPU_DEVICES=4096" in str(raised.value)


def test_numbers_and_what_has_no_values_are_compared() -> None:
    testing.assert_close(1.0, 1.0)
    with pytest.raises(AssertionError, match="they differ by"):
        testing.assert_close(1.0, 2.0)
    nothing = np.zeros(2, jax.dtypes.float0)
    testing.assert_close(nothing, nothing)
    with pytest.raises(AssertionError, match="dtypes"):
        testing.assert_close(nothing, np.zeros(2, np.float32))


# --- Pipelines ---------------------------------------------------------------------- #


def test_what_is_pipelined_passes_forward_and_backward() -> None:
    f = block.with_options(pipeline="collective", chunks=2)
    testing.assert_pipelined(f, *ARGS)
    testing.assert_pipelined(jax.grad(square_loss(f), (0, 1, 2)), *ARGS)


def test_what_is_not_pipelined_is_named_with_the_reason() -> None:
    with pytest.raises(AssertionError) as raised:
        testing.assert_pipelined(block.with_options(pipeline="off"), *ARGS)
    assert "not pipelined: off, as asked [blocks.py:" in str(raised.value)


def test_what_is_not_pipelined_is_named_with_its_program() -> None:
    step = jax.jit(jax.grad(square_loss(block.with_options(pipeline="off"))))
    with pytest.raises(AssertionError) as raised:
        testing.assert_pipelined(step, *ARGS)
    for name in ("relu_block (forward)", "relu_block (backward)"):
        assert f"* {name}, s0 on axis 0: not pipelined" in str(raised.value)


def contracted(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream(jnp.maximum(x @ up, 0), axis=1) @ down


IDLE = {
    "a contracted dim": (contracted, ON_FOUR),
    "an axis of size 1": (relu_block, on({"tp": 1}, SPECS, SPECS[0])),
    "no mesh": (relu_block, {}),
    "rows that stay": (relu_block, tp(4, (P("tp"), P(), P()), P("tp"))),
}


@budget.first_is_quick("where", IDLE)
def test_a_loop_in_which_nothing_moves_is_made_and_hides_nothing(where: str) -> None:
    fun, settings = IDLE[where]
    f = jhost.jit(fun, chunks=2, **settings)
    explanation = jhost.explain(f, *ARGS)
    assert explanation.loops == 1  # it saves memory
    (stream,) = explanation.streams
    assert (stream.pipeline, stream.chunks) == ("collective", 2)
    assert (stream.moves, stream.hides) == (False, False)
    text = "2 chunks, as asked; nothing moves in this loop: it hides nothing ["
    assert text in str(explanation)
    with pytest.raises(AssertionError, match="These streams hide nothing") as raised:
        testing.assert_pipelined(f, *ARGS)
    assert text in str(raised.value)
    testing.assert_equals_plain(f, *ARGS, tolerance=0, pipelines=["auto"])


@pytest.mark.parametrize("f", [jnp.sin, jhost.jit(jnp.sin)], ids=["plain", "jhost"])
def test_no_stream_is_no_pipeline(f: Any) -> None:
    with pytest.raises(AssertionError, match="There are no streams to pipeline"):
        testing.assert_pipelined(f, ARGS[0])


MOVES = ["AllGather over tp", "ReduceScatter over tp"]


def test_loops_and_communications_are_as_expected() -> None:
    f = block.with_options(pipeline="collective", chunks=2)
    testing.assert_program(f, *ARGS, loops=1, communications=MOVES)
    testing.assert_program(f, *ARGS)
    grad = jax.grad(square_loss(f), (0, 1, 2))
    again = [*MOVES, "AllGather over tp"]  # the backward gathers x again
    testing.assert_program(grad, *ARGS, loops=2, communications=[*MOVES, *again])


def test_other_loops_and_communications_are_named() -> None:
    wanted = ["AllGather over tp", "AllReduce over tp"]
    with pytest.raises(AssertionError) as raised:
        testing.assert_program(
            block.with_options(pipeline="off"), *ARGS, loops=1, communications=wanted
        )
    text = str(raised.value)
    assert "expected 1 loops, got 0" in text
    assert "missing: AllReduce over tp" in text
    assert "too much: ReduceScatter over tp" in text
    assert "relu_block: 0 loops" in text


def test_numbers_of_python_s_are_compared_as_arrays() -> None:
    testing.assert_close({"x": 1.0, "n": 2}, {"x": 1.0, "n": 2})
    with pytest.raises(AssertionError, match=r"they differ by 5\.0e-01"):
        testing.assert_close(1.0, 2.0)
    with pytest.raises(AssertionError, match="types"):
        testing.assert_close(1, 1.0)


def test_gradients_by_integers_hold_nothing_to_compare() -> None:
    nothing = np.zeros((2,), jax.dtypes.float0)
    testing.assert_close(nothing, nothing)
    with pytest.raises(AssertionError, match="shapes"):
        testing.assert_close(nothing, np.zeros((3,), jax.dtypes.float0))
    with pytest.raises(AssertionError, match="types"):
        testing.assert_close(nothing, np.zeros((2,), np.float32))
