"""Functions in JAX's explicit style, whose types say how arrays are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
    auto_axes,
    reshard,
)

import jhost
from jhost import errors

Function = Callable[..., Any]

X = jnp.sin(jnp.arange(64.0)).reshape(8, 8)
W = jnp.cos(jnp.arange(64.0)).reshape(8, 8) / 4


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def sharded(mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    specs = P("dp"), P(None, "tp")
    x, w = (
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((X, W), specs, strict=True)
    )
    return x, w


# --- What a function may say ------------------------------------------------------- #


def resharded(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(reshard(x, P("dp", None))) @ reshard(w, P())


def dots(x: jax.Array, w: jax.Array) -> jax.Array:
    y = jnp.dot(x, w, out_sharding=P("dp", "tp"))
    return jnp.einsum("ij,kj->ik", y, w, out_sharding=P("dp", None))


def asserted(x: jax.Array, w: jax.Array) -> jax.Array:
    y = jax.lax.with_sharding_constraint(x @ w, P("dp", "tp"))
    return jax.nn.relu(y) * jax.nn.softmax(y)


def made(x: jax.Array, w: jax.Array) -> jax.Array:
    noise = jax.random.normal(jax.random.key(0), (8, 8), out_sharding=P("dp", "tp"))
    return x @ w + noise + jnp.ones((8, 8), out_sharding=P("dp", "tp"))


def indexed(x: jax.Array, w: jax.Array) -> jax.Array:
    rows = x.at[jnp.arange(8)[::-1]].get(out_sharding=P("dp", None))
    return rows @ w


def as_types_say(x: jax.Array, w: jax.Array) -> jax.Array:
    assert jax.typeof(x).sharding.spec == P("dp", None)
    y = x @ w
    assert jax.typeof(y).sharding.spec == P("dp", "tp")
    y = jnp.reshape(y * 2, (2, 4, 8), out_sharding=P("dp", None, "tp"))
    y = jnp.reshape(y, (8, 8), out_sharding=P("dp", "tp"))
    return jnp.broadcast_to(y.sum(0), (8, 8)) + reshard(x, jax.typeof(y).sharding)


def in_a_scan(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    def body(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        y = jnp.dot(x, w, out_sharding=P("dp", "tp"))
        return reshard(jnp.tanh(y), P("dp", None)), y.sum()

    return jax.lax.scan(body, x, None, length=3)


def in_a_branch(x: jax.Array, w: jax.Array) -> jax.Array:
    def one(x: jax.Array) -> jax.Array:
        return jnp.dot(x, w, out_sharding=P("dp", None))

    def other(x: jax.Array) -> jax.Array:
        return reshard(reshard(x, P(None, "dp")) * 2, P("dp", None))

    return jax.lax.cond(w.sum() > 0, one, other, x)


def checkpointed(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.checkpoint(dots)(x, w)


def called(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.jit(dots)(x, w) + jhost.jit(resharded)(x, w)


def automatic_inside(x: jax.Array, w: jax.Array) -> jax.Array:
    inside: Any = auto_axes(lambda x, w: jnp.tanh(x @ w), out_sharding=P("dp", "tp"))
    return inside(x, w)


@jax.custom_jvp
def scaled(x: jax.Array) -> jax.Array:
    return reshard(x * 2, P("dp", None))


@scaled.defjvp
def scaled_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return scaled(*primals), reshard(tangents[0] * 3, P("dp", None))


@jax.custom_vjp
def cubed(x: jax.Array) -> jax.Array:
    return reshard(x, P("dp", None)) ** 3


def cubed_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cubed(x), reshard(x, P(None, "tp"))


def cubed_backward(x: jax.Array, y: jax.Array) -> tuple[jax.Array]:
    return (reshard(x, P("dp", None)) * y * 5,)


cubed.defvjp(cubed_forward, cubed_backward)


def with_rules(x: jax.Array, w: jax.Array) -> jax.Array:
    return scaled(x) @ w


def with_rules_backward(x: jax.Array, w: jax.Array) -> jax.Array:
    return cubed(x) @ w


def streamed(x: jax.Array, w: jax.Array) -> jax.Array:
    y = reshard(jhost.stream(x, axis=0, chunks=2), P("dp", None)) @ w
    return jnp.dot(y, w.T, out_sharding=P("dp", None))


FUNCTIONS: list[Function] = [
    resharded,
    dots,
    asserted,
    made,
    indexed,
    as_types_say,
    in_a_scan,
    in_a_branch,
    checkpointed,
    called,
    automatic_inside,
    with_rules,
    with_rules_backward,
    streamed,
]
every = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def assert_same(results: Any, expected: Any) -> None:
    """The same values, and the same types."""
    jax.tree.map(assert_close, results, expected)
    types, wanted = (jax.tree.map(jax.typeof, tree) for tree in (results, expected))
    assert types == wanted


def assert_close(result: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def loss_of(f: Function) -> Function:
    return lambda x, w: sum((leaf**2).sum() for leaf in jax.tree.leaves(f(x, w)))


@every
def test_values_and_types_are_those_of_jax(mesh: Mesh, function: Function) -> None:
    args = sharded(mesh)
    expected = jax.jit(function)(*args)
    assert_same(jhost.jit(function)(*args), expected)


@every
def test_gradients_are_those_of_jax(mesh: Mesh, function: Function) -> None:
    """By itself, and in an outer jit."""
    args = sharded(mesh)
    expected = jax.jit(jax.grad(loss_of(function), (0, 1)))(*args)
    own = jax.grad(loss_of(jhost.jit(function)), (0, 1))
    assert_same(own(*args), expected)
    assert_same(jax.jit(own)(*args), expected)


@every
def test_a_batch_is_that_of_jax(mesh: Mesh, function: Function) -> None:
    x, w = sharded(mesh)
    xs = jnp.stack([x, x + 1, x * 2])
    f, g = jhost.jit(function), jax.jit(function)
    assert_same(jax.vmap(f, (0, None))(xs, w), jax.vmap(g, (0, None))(xs, w))


@pytest.mark.parametrize(
    "function",
    [resharded, dots, made, in_a_scan, automatic_inside, with_rules, streamed],
    ids=lambda f: f.__name__,
)
def test_a_mesh_may_be_given(function: Function) -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    args = sharded(mesh)
    with jax.set_mesh(mesh):
        expected = jax.jit(function)(*args)
    given = jhost.jit(function, mesh=mesh)
    assert_same(given(*args), expected)
    ins = P("dp"), P(None, "tp")
    placed = jhost.jit(function, mesh=mesh, in_shardings=ins)(X, W)
    jax.tree.map(assert_close, placed, expected)


# --- What jhost makes of it -------------------------------------------------------- #


def test_what_is_asked_for_is_how_values_lie(mesh: Mesh) -> None:
    x, w = sharded(mesh)

    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.dot(x, w, out_sharding=P("tp", "dp"))
        return y, reshard(y, P(None, "tp"))

    results = jhost.jit(f).lower(x, w).host_ir.results
    assert [result.shape for result in results] == [(2, 4), (8, 2)]


@pytest.mark.parametrize("axes", ["EA", "AE"])
def test_some_axes_may_be_automatic(axes: str) -> None:
    kinds = {"E": AxisType.Explicit, "A": AxisType.Auto}
    names = ("dp", "tp")
    mesh = jax.make_mesh((2, 4), names, axis_types=tuple(kinds[a] for a in axes))
    name, other = names[axes.index("E")], names[axes.index("A")]

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.dot(x, w, out_sharding=P(name, None))
        y = jax.lax.with_sharding_constraint(y, P(None, other))
        return reshard(jnp.tanh(y), P(None, name))

    with jax.set_mesh(mesh):
        args = [reshard(X, P(name)), reshard(W, P())]
        assert_same(jhost.jit(f)(*args), jax.jit(f)(*args))
        own, plain = (
            jax.grad(loss_of(one), (0, 1)) for one in (jhost.jit(f), jax.jit(f))
        )
        assert_same(own(*args), plain(*args))


def test_functions_that_types_refuse_need_not_name_any(mesh: Mesh) -> None:
    def ambiguous(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w  # both may be gathered, or the sum be made over devices

    x, w = reshard(X, P(None, "tp")), reshard(W, P("tp", None))
    with pytest.raises(Exception, match="out_sharding"):
        jax.jit(ambiguous)(x, w)
    assert_close(jhost.jit(ambiguous)(x, w), X @ W)


def test_what_types_refuse_is_jax_s_own_error(mesh: Mesh) -> None:
    def f(x: jax.Array) -> jax.Array:
        return reshard(x, P("dp", None)) + reshard(x, P("tp", None))

    with pytest.raises(Exception, match="sharding") as theirs:
        jax.jit(f)(X)
    with pytest.raises(type(theirs.value)) as own:
        jhost.jit(f)(X)
    assert str(own.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_types_over_another_mesh_than_the_function_s_are_refused(mesh: Mesh) -> None:
    """JAX takes `dots`, for it traces with the mesh that is set, whatever runs it."""
    flat = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    f = jhost.jit(dots, mesh=flat)
    both = r"(?s)mesh\(dp=2, tp=4\).*mesh\(tp=8\)"
    for call in (
        f,
        f.lower,
        jax.jit(lambda x, w: f(x, w)),
        jax.grad(lambda x, w: f(x, w)[0, 0]),
    ):
        with pytest.raises(errors.MeshMismatchError, match=both):
            call(X, W)
    same = jhost.jit(lambda x, w: jnp.tanh(x @ w), mesh=flat)  # says nothing of them
    np.testing.assert_allclose(same(X, W), jnp.tanh(X @ W), rtol=1e-5, atol=1e-6)


def test_another_error_stays_itself_under_another_mesh(mesh: Mesh) -> None:
    def wrong(x: jax.Array) -> jax.Array:
        raise ValueError("the user's own")

    flat = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="the user's own"):
        jhost.jit(wrong, mesh=flat)(X)


def test_a_sum_that_is_not_made_is_refused(mesh: Mesh) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.dot(x, w, out_sharding=P(None, None, unreduced=frozenset({"tp"})))
        return reshard(y, P(None, None))

    x, w = reshard(X, P(None, "tp")), reshard(W, P("tp", None))
    with pytest.raises(errors.UnsupportedError, match="unreduced"):
        jhost.jit(f)(x, w)


def test_a_shard_map_over_all_axes_may_stand_inside(mesh: Mesh) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        spec = P("dp", "tp")
        mapped = jax.shard_map(jnp.cumsum, in_specs=spec, out_specs=P(("dp", "tp")))
        return mapped(jnp.dot(x, w, out_sharding=spec)).sum()

    args = sharded(mesh)
    assert_same(jhost.jit(f)(*args), jax.jit(f)(*args))


def test_a_shard_map_over_some_axes_is_refused(mesh: Mesh) -> None:
    def f(x: jax.Array) -> jax.Array:
        y, spec = reshard(x, P("dp", "tp")), P("dp")
        return jax.shard_map(
            lambda x: x * 2, axis_names={"dp"}, in_specs=spec, out_specs=spec
        )(y)

    with pytest.raises(errors.UnsupportedError, match="over all axes"):
        jhost.jit(f)(X)


def test_other_arguments_have_no_part_in_it(mesh: Mesh) -> None:
    def f(x: jax.Array, times: int, *, w: jax.Array, name: str) -> jax.Array:
        return jnp.dot(x * times, w, out_sharding=P(name, None))

    x, w = sharded(mesh)
    own = jhost.jit(f, static_argnums=1, static_argnames="name")
    plain = jax.jit(f, static_argnums=1, static_argnames="name")
    assert_same(own(x, 2, name="dp", w=w), plain(x, 2, name="dp", w=w))


def test_the_same_types_are_lowered_once(mesh: Mesh) -> None:
    args, f = sharded(mesh), jhost.jit(dots)
    assert f.lower(*args).host_ir is f.lower(*args).host_ir
