"""`jhost.jit` is `jax.jit` with another compiler: arguments and values."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pydoc
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost
from jhost._call.settings import Settings
from tests.lowering.traced import interpreted

MakeMesh = Callable[[Sequence[int], Sequence[str]], Mesh]

X = jnp.arange(64.0).reshape(8, 8)
W = jnp.eye(8, 32) * 2 + 1
SPECS = (P("tp", None), P(None, "tp"))


@pytest.fixture
def mesh(make_mesh: MakeMesh) -> Mesh:
    return make_mesh((4,), ("tp",))


def options(**given: Any) -> dict[str, Any]:
    """Some of `jhost.jit`'s arguments."""
    return given


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    """Where `SPECS` shard it: gathers rows, multiplies twice, reduce-scatters."""
    return jhost.stream((x @ w) @ w.T, axis=0, chunks=2)


def expected(x: jax.Array = X, w: jax.Array = W) -> jax.Array:
    return (x @ w) @ w.T


# --- The decorator -------------------------------------------------------------- #


def test_the_decorator_works_with_and_without_arguments() -> None:
    @jhost.jit
    def bare(x: jax.Array) -> jax.Array:
        return x + 1

    @jhost.jit(chunks=2)
    def with_arguments(x: jax.Array) -> jax.Array:
        return x + 1

    assert bare(jnp.float32(1)) == with_arguments(jnp.float32(1)) == 2


def test_a_function_says_its_name_its_mesh_and_what_it_was_given(mesh: Mesh) -> None:
    assert repr(jhost.jit(block)) == "<jhost.jit: block>"
    settings = options(in_shardings=SPECS, chunks=2, pipeline="auto")
    assert repr(jhost.jit(block, mesh=mesh, **settings)) == (
        "<jhost.jit: block, mesh(tp=4) on devices 0, 1, 2, 3, "
        "in_shardings=(P('tp', None), P(None, 'tp')), chunks=2>"
    )


def test_the_defaults_are_those_of_the_signature() -> None:
    parameters = inspect.signature(jhost.jit).parameters
    given = {name: p.default for name, p in parameters.items() if name != "f"}
    assert dataclasses.asdict(Settings()) == given


def test_help_lists_what_is_public() -> None:
    text = pydoc.plain(pydoc.render_doc(jhost))
    for name in ("jit", "stream", "shard", "serial", "explain", "tune", "profile"):
        assert f"\n    {name}(" in text
    assert all(hasattr(jhost, name) for name in jhost.__all__)


def test_the_function_keeps_its_name_and_its_docstring() -> None:
    f = jhost.jit(block)
    assert (f.__name__, f.__doc__) == ("block", block.__doc__)
    assert f.__wrapped__ is block


def test_a_partial_function_and_a_callable_object_can_be_compiled() -> None:
    class Scale:
        def __call__(self, x: jax.Array) -> jax.Array:
            return x * 3

    assert jhost.jit(functools.partial(jnp.add, jnp.float32(1)))(jnp.float32(2)) == 3
    assert jhost.jit(Scale())(jnp.float32(2)) == 6


def test_a_method_can_be_decorated() -> None:
    class Model:
        scale = 5

        @functools.partial(jhost.jit, static_argnums=0)
        def apply(self, x: jax.Array) -> jax.Array:
            return x * self.scale

    assert Model.apply(Model(), jnp.float32(2)) == 10


# --- Pytrees, keywords, static and donated arguments ------------------------------ #


def test_pytrees_go_in_and_come_out(mesh: Mesh) -> None:
    def f(params: dict[str, Any], x: jax.Array) -> tuple[Any, dict[str, Any]]:
        return (x @ params["w"], [params["b"]["x"] * 2]), {"x": x, "none": None}

    params = {"w": W, "b": {"x": X}}
    specs = ({"w": P(None, "tp"), "b": {"x": P()}}, P("tp"))
    for compiled in (
        jhost.jit(f),
        jhost.jit(f, mesh=mesh, in_shardings=specs),
        jhost.jit(f, mesh=mesh, in_shardings=specs, out_shardings=P()),
    ):
        chex.assert_trees_all_equal(compiled(params, X), f(params, X))


def test_in_shardings_may_be_a_prefix_of_the_arguments(mesh: Mesh) -> None:
    def f(pair: tuple[jax.Array, dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        return pair[0] + pair[1]["b"] + x

    compiled = jhost.jit(f, mesh=mesh, in_shardings=(P("tp"), P()))
    params = compiled.lower((X, {"b": X}), X).host_ir.params
    assert [param.shape for param in params] == [(2, 8), (2, 8), (8, 8)]
    np.testing.assert_array_equal(compiled((X, {"b": X}), X), 3 * X)


def test_shardings_of_a_list_are_a_list(mesh: Mesh) -> None:
    def f(ws: list[jax.Array]) -> list[jax.Array]:
        return [w + w for w in ws]

    specs = [P("tp"), P(None, "tp")]
    settings: dict[str, Any] = {"in_shardings": (specs,), "out_shardings": specs}
    results = jhost.jit(f, mesh=mesh, **settings)([X, X])
    for result, spec in zip(results, specs, strict=True):
        np.testing.assert_array_equal(result, 2 * X)
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_one_spec_is_for_all_arguments_and_one_for_all_results(mesh: Mesh) -> None:
    f = jhost.jit(
        lambda x, y: (x + y, x - y),
        mesh=mesh,
        in_shardings=P("tp"),
        out_shardings=P(None, "tp"),
    )
    total, difference = f(X, 2 * X)
    for result, value in ((total, 3 * X), (difference, -X)):
        np.testing.assert_array_equal(result, value)
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "tp")), 2)


def test_keywords_are_arguments_too(mesh: Mesh) -> None:
    for settings in (options(), options(mesh=mesh, out_shardings=P("tp"))):
        f = jhost.jit(lambda x, *, scale, shift=0.0: x * scale + shift, **settings)
        np.testing.assert_array_equal(f(X, scale=jnp.float32(2)), 2 * X)
        np.testing.assert_array_equal(f(X, shift=1.0, scale=X), X * X + 1)


def test_keywords_beside_in_shardings_are_refused_as_by_jax(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P("tp"))
    for jit in (jax.jit, jhost.jit):
        f = jit(lambda x, y: x + y, in_shardings=sharding)
        with pytest.raises(ValueError, match="does not support kwargs when in_shard"):
            f(X, y=X)


@pytest.mark.parametrize(
    "static",
    [{"static_argnums": 1}, {"static_argnums": (1,)}, {"static_argnames": "power"}],
    ids=str,
)
def test_static_arguments_go_by_position_and_by_keyword(
    mesh: Mesh, static: dict[str, Any]
) -> None:
    def f(x: jax.Array, power: int) -> jax.Array:
        assert isinstance(power, int)
        return x**power

    compiled = jhost.jit(f, mesh=mesh, out_shardings=P("tp"), **static)
    np.testing.assert_array_equal(compiled(X, 2), X * X)
    np.testing.assert_array_equal(compiled(X, power=3), X * X * X)
    assert jax.grad(lambda x: compiled(x, 2).sum())(X)[0, 1] == 2


def test_a_static_argument_may_be_anything_hashable() -> None:
    f = jhost.jit(
        lambda kind, x: {"sum": x.sum, "max": x.max}[kind](), static_argnums=0
    )
    assert (f("sum", X), f("max", X)) == (X.sum(), 63)


@pytest.mark.parametrize("number", [2, -1, (2,), (-1, 0)])
def test_a_number_counts_among_the_arguments_of_the_call(
    mesh: Mesh, number: int | tuple[int, ...]
) -> None:
    """Of a function that takes any number of them, as `jax.jit` counts."""

    def f(a: Any, *rest: Any) -> Any:
        assert isinstance(rest[-1], float)
        return a + rest[0] * rest[1]

    first: Any = 1.0 if isinstance(number, tuple) and 0 in number else X
    wanted = jax.jit(f, static_argnums=number)(first, X * 10, 3.0)
    for settings in (options(), options(mesh=mesh, out_shardings=P("tp"))):
        compiled = jhost.jit(f, static_argnums=number, **settings)
        np.testing.assert_array_equal(compiled(first, X * 10, 3.0), wanted)


@pytest.mark.parametrize(
    "static",
    [{"static_argnums": 5}, {"static_argnames": "nobody"}],
    ids=str,
)
def test_static_arguments_that_there_are_not_are_refused_as_by_jax(
    static: dict[str, Any],
) -> None:
    with pytest.raises((ValueError, TypeError)) as by_jax:
        jax.jit(block, **static)
    with pytest.raises(by_jax.type) as by_jhost:
        jhost.jit(block, **static)
    assert str(by_jhost.value) == str(by_jax.value)


def test_what_is_donated_is_gone(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P("tp"))
    for donate in (options(donate_argnums=0), options(donate_argnames="x")):
        f = jhost.jit(
            lambda x, y: x + y,
            mesh=mesh,
            in_shardings=P("tp"),
            out_shardings=P("tp"),
            **donate,
        )
        x, y = (jax.device_put(X + 0, sharding) for _ in range(2))
        np.testing.assert_array_equal(f(x, y), 2 * X)
        assert x.is_deleted()
        assert not y.is_deleted()


def test_functions_without_arguments_and_without_results(mesh: Mesh) -> None:
    for settings in (options(), options(mesh=mesh)):
        np.testing.assert_array_equal(jhost.jit(lambda: X @ W, **settings)(), X @ W)
        assert jhost.jit(lambda: None, **settings)() is None
        assert jhost.jit(lambda x: {"none": ()}, **settings)(X) == {"none": ()}
        assert jhost.jit(lambda tree: tree, **settings)({"a": [], "b": None}) == {
            "a": [],
            "b": None,
        }


# --- Values ------------------------------------------------------------------------ #


def test_closed_over_arrays_and_tracers_are_operands(mesh: Mesh) -> None:
    def outer(scale: jax.Array) -> jax.Array:
        f = jhost.jit(
            lambda x: jhost.stream((x @ W) * scale, axis=0, chunks=2),
            mesh=mesh,
            in_shardings=P("tp"),
        )
        return f(X).sum()

    total = (X @ W).sum()
    scale = jnp.float32(3)
    np.testing.assert_allclose(outer(scale), total * 3, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(outer)(scale), total * 3, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(outer)(scale), total, rtol=1e-6)


def test_python_s_numbers_are_results(mesh: Mesh) -> None:
    def f(x: jax.Array) -> Any:
        return x, {"float": 2.0, "list": [3, True, 1j]}

    wanted = jax.jit(f)(X)
    for settings in (options(), options(mesh=mesh, in_shardings=P("tp"))):
        g = jhost.jit(f, **settings)
        chex.assert_trees_all_equal(g(X), wanted)
        for given, plain in zip(
            jax.tree.leaves(g(X)), jax.tree.leaves(wanted), strict=True
        ):
            assert (given.dtype, given.weak_type) == (plain.dtype, plain.weak_type)
        slope, aux = jax.grad(lambda x, g=g: (jnp.sum(g(x)[0]), g(x)[1]), has_aux=True)(
            X
        )
        chex.assert_trees_all_equal((slope, aux), (jnp.ones_like(X), wanted[1]))
        assert jax.eval_shape(g, X) == jax.eval_shape(f, X)


def test_weak_types_stay_weak(mesh: Mesh) -> None:
    half = jnp.ones(8, jnp.bfloat16)
    for settings in (options(), options(mesh=mesh, out_shardings=P("tp"))):
        f = jhost.jit(lambda x, scale=2.0: x * scale, **settings)
        assert f(half).dtype == f(half, scale=3.0).dtype == jnp.bfloat16
    weak = jhost.jit(lambda x: x + 1)(1.0)
    assert weak.weak_type
    assert (weak * half).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32], ids=str)
def test_dtypes_are_kept(mesh: Mesh, dtype: Any) -> None:
    x, w = (X % 3).astype(dtype), W.astype(dtype)
    f = jhost.jit(block, mesh=mesh, in_shardings=SPECS, out_shardings=P("tp"))
    result = f(x, w)
    assert result.dtype == dtype
    # Within bfloat16's rounding, which falls on other partial sums.
    np.testing.assert_allclose(*map(np.float64, (result, expected(x, w))), rtol=1e-2)


def test_nan_and_inf_pass_unchanged(mesh: Mesh) -> None:
    x = X.at[1, 2].set(jnp.nan).at[3, 4].set(jnp.inf).at[5, 6].set(-jnp.inf)
    x = x.at[7, 7].set(-0.0)
    f = jhost.jit(
        lambda x: jhost.stream(x, axis=0, chunks=2),
        mesh=mesh,
        in_shardings=P("tp"),
        out_shardings=P(None, "tp"),
    )
    assert np.asarray(f(x)).tobytes() == np.asarray(x).tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (4, 0)], ids=str)
def test_arrays_of_no_dims_and_of_no_elements(
    mesh: Mesh, shape: tuple[int, ...]
) -> None:
    x = jnp.ones(shape)
    for settings in (
        options(),
        options(mesh=mesh),
        options(mesh=mesh, in_shardings=P("tp") if shape else P()),
    ):
        result = jhost.jit(lambda x: jnp.sin(x) + x, **settings)(x)
        np.testing.assert_array_equal(result, jnp.sin(x) + x)


# --- Traces ------------------------------------------------------------------------ #


def test_a_function_is_traced_once_for_each_type(mesh: Mesh) -> None:
    sharded = options(mesh=mesh, in_shardings=P("tp"))
    for settings in (options(), sharded, options(mesh=mesh)):
        shapes: list[tuple[int, ...]] = []

        def count(x: jax.Array, seen: list[tuple[int, ...]] = shapes) -> jax.Array:
            seen.append(x.shape)
            return x + 1

        f = jhost.jit(count, **settings)
        for x in (X, X, X + 1, X[:4], X):
            f(x)
        jax.jit(lambda x, f=f: f(x) * 2)(X)
        jax.grad(lambda x, f=f: f(x).sum())(X)
        assert shapes == [(8, 8), (4, 8)]


def test_two_calls_give_the_same_bits(mesh: Mesh) -> None:
    f = jhost.jit(block, mesh=mesh, in_shardings=SPECS, out_shardings=P("tp"))
    x = jax.random.normal(jax.random.key(1), X.shape)
    np.testing.assert_array_equal(f(x, W), f(x, W))


def test_interpretation_gives_the_same(mesh: Mesh) -> None:
    f = interpreted(block, mesh=mesh, in_shardings=SPECS)
    np.testing.assert_array_equal(f(X, W), expected())
