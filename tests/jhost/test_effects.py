"""Callbacks, printing, randomness and checks in a jhost function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jhost
from tests.jhost.blocks import (
    ARGS,
    SPECS,
    Function,
    assert_same,
    each_pipeline,
    gradients,
    hosted,
    relu_block,
    rows,
    same,
    square_loss,
)

X, UP, DOWN = ARGS

# --- Callbacks ---------------------------------------------------------------- #

Place = Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array]


def scanned(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.scan(lambda h, _: (jax.checkpoint(f)(h), None), x, None, length=2)[0]


def looped(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]


def taken(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] < 100, f, lambda x: x, x)


def solved(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.custom_linear_solve(f, x, lambda matvec, b: matvec(b))


@pytest.mark.parametrize(
    ("place", "times"),
    [(lambda f, x: f(x), 1), (scanned, 2), (looped, 2), (taken, 1), (solved, 1)],
    ids=["outside", "scan", "while", "cond", "solver"],
)
def test_a_callback_is_called_once_for_all_devices(place: Place, times: int) -> None:
    seen: list[np.ndarray] = []

    def watched(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda v: seen.append(np.asarray(v)), x)
        return x

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return relu_block(place(watched, x), up, down)

    hosted(block, "p2p")(*ARGS)
    jax.effects_barrier()
    assert [np.array_equal(v, X) for v in seen] == [True] * times


@each_pipeline
def test_printing_under_transforms(
    pipeline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        jax.debug.print("sum {}", jnp.sum(x @ up))
        return relu_block(x, up, down)

    f = hosted(block, pipeline, compiler_options=None)
    for call in (f, jax.jit(f), jax.grad(square_loss(f))):
        call(*ARGS)
        jax.effects_barrier()
        assert capsys.readouterr().out == f"sum {jnp.sum(X @ UP)}\n"


def test_what_a_callback_returns_is_the_same_everywhere() -> None:
    """Each kind of number comes from the first device to the others bit by bit."""
    values = (
        np.array([-0.0, np.nan, np.inf, 1.5], np.float32),
        np.array([-0.0, 2.0], jnp.bfloat16),
        np.array([True, False]),
        np.array([-3, 7], np.int8),
        np.array([1 - 2j], np.complex64),
    )
    calls: list[int] = []

    def host(x: Any) -> Any:
        calls.append(1)
        return values

    def f(x: jax.Array) -> Any:
        return io_callback(host, values, jnp.sum(x)), rows(x @ UP)

    given, _ = hosted(f, "collective", in_shardings=P("tp"), out_shardings=None)(X)
    for one, other in zip(given, values, strict=True):
        for shard in one.addressable_shards:
            assert np.asarray(shard.data).tobytes() == other.tobytes()
    assert len(calls) == 1


def test_a_pure_callback_may_be_batched() -> None:
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = x @ up
        doubled = jax.pure_callback(
            lambda v: 2 * np.asarray(v), h, h, vmap_method="sequential"
        )
        return rows(doubled @ down)

    same(
        lambda f: jax.vmap(f, (0, None, None))(jnp.stack([X, -X]), UP, DOWN),
        block,
        "collective",
    )


def test_ordered_callbacks_over_devices_are_refused_as_by_jax() -> None:
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        jax.debug.callback(lambda v: None, x, ordered=True)
        return relu_block(x, up, down)

    with pytest.raises(ValueError, match="ordered effects are not supported for more"):
        hosted(block, "p2p")(*ARGS)


@pytest.mark.parametrize("callback", [jax.pure_callback, io_callback])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "set_mesh"])
def test_callbacks_on_explicit_meshes(callback: Any, inside: bool) -> None:
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Explicit,))
    there = jax.device_put(X, NamedSharding(mesh, P("tp")))

    def doubled(x: jax.Array) -> jax.Array:
        y = callback(lambda x: 2 * np.asarray(x), jax.typeof(X), x)
        return rows(y + x)

    f = jhost.jit(doubled, mesh=mesh, chunks=2)
    named = jhost.jit(doubled, mesh=mesh, chunks=2, in_shardings=P("tp"))
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        results = [f(there), named(X), named(there), jax.jit(f)(there)]
    for result in results:
        assert_same(result, 3 * X)


# --- Randomness --------------------------------------------------------------- #


def dropout(x: jax.Array, up: jax.Array, down: jax.Array, key: jax.Array) -> jax.Array:
    h = jnp.maximum(x @ up, 0)
    kept = jax.random.bernoulli(key, 0.5, h.shape)
    return rows(jnp.where(kept, 2 * h, 0) @ down)


KEY_SPECS: dict[str, Any] = {"in_shardings": (*SPECS, P())}


@each_pipeline
@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_dropout_has_the_same_mask_in_chunks(kind: str, pipeline: str) -> None:
    key = jax.random.key(7, impl=kind)
    same(lambda f: f(*ARGS, key), dropout, pipeline, **KEY_SPECS)


@pytest.mark.parametrize("remat", [False, True])
def test_the_backward_program_drops_what_the_forward_dropped(remat: bool) -> None:
    def grads(f: Function) -> Any:
        f = jax.checkpoint(f) if remat else f
        return gradients(f)(*ARGS, jax.random.key(7))

    same(grads, dropout, "p2p", **KEY_SPECS)


def test_keys_are_arguments_results_and_batches() -> None:
    keys = jax.random.split(jax.random.key(1), 2)
    same(
        lambda f: jax.vmap(f, (None, None, None, 0))(*ARGS, keys),
        dropout,
        "collective",
        **KEY_SPECS,
    )

    def split(x: jax.Array, key: jax.Array) -> Any:
        mine, rest = jax.random.split(key)
        noise = jax.random.randint(mine, x.shape, -2, 3).astype(x.dtype)
        return rows((x + noise) @ UP @ DOWN), jax.random.fold_in(rest, 3)

    specs = {"in_shardings": (P("tp"), P()), "out_shardings": None}
    given, key = hosted(split, "collective", **specs)(X, keys[0])
    wanted, wanted_key = split(X, keys[0])
    assert_same(given, wanted)
    assert jax.random.key_data(key).tolist() == jax.random.key_data(wanted_key).tolist()


# --- Checks ------------------------------------------------------------------- #


def test_checkify_around() -> None:
    checked = checkify.checkify(hosted(relu_block, "p2p"), errors=checkify.float_checks)
    error, y = checked(*ARGS)
    assert error.get() is None
    assert_same(y, relu_block(*ARGS))
    error, _ = checked(jnp.asarray(X).at[0, 0].set(jnp.inf), 0 * UP, DOWN)
    assert "nan generated by primitive" in str(error.get())


@pytest.mark.parametrize("place", ["around", "inside"])
def test_checks_inside_are_reported(place: str) -> None:
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        checkify.check(jnp.all(x >= 0), "x is negative")
        return relu_block(x, up, down)

    if place == "around":
        checked = checkify.checkify(hosted(block, "p2p"))
    else:
        checked = hosted(checkify.checkify(block), "p2p", out_shardings=None)
    for x, message in ((jnp.abs(X), None), (X, "x is negative")):
        error, y = checked(x, UP, DOWN)
        assert (error.get() or "").startswith(message or "")
        assert (error.get() is None) == (message is None)
        assert_same(y, relu_block(x, UP, DOWN))
