"""Where a jhost function gets its mesh from, and that all of them give the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jhost
from jhost import errors

MakeMesh = Callable[[Sequence[int], Sequence[str]], Mesh]

X = jnp.arange(64.0).reshape(8, 8)
W = jnp.eye(8, 32) * 2 + 1
SPECS = (P("tp", None), P(None, "tp"))


@pytest.fixture
def mesh(make_mesh: MakeMesh) -> Mesh:
    return make_mesh((4,), ("tp",))


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    """Where `SPECS` shard it: gathers rows, multiplies twice, reduce-scatters."""
    return jhost.stream((x @ w) @ w.T, axis=0, chunks=2)


def expected(x: jax.Array = X, w: jax.Array = W) -> jax.Array:
    return (x @ w) @ w.T


def test_the_mesh_may_be_that_of_a_named_sharding(mesh: Mesh) -> None:
    ins = tuple(NamedSharding(mesh, spec) for spec in SPECS)
    f = jhost.jit(block, in_shardings=ins, out_shardings=NamedSharding(mesh, P("tp")))
    np.testing.assert_array_equal(f(X, W), expected())
    assert dict(f.lower(X, W).host_ir.mesh.shape) == {"tp": 4}


def test_the_mesh_may_be_that_of_set_mesh(make_mesh: MakeMesh, mesh: Mesh) -> None:
    f = jhost.jit(block, in_shardings=SPECS, out_shardings=P("tp"))
    with jax.set_mesh(mesh):
        assert len(f(X, W).sharding.device_set) == 4
    with jax.set_mesh(make_mesh((2,), ("tp",))):
        result = f(X, W)
    assert len(result.sharding.device_set) == 2
    np.testing.assert_array_equal(result, expected())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_its_own_mesh_counts_under_set_mesh_of_another(
    kind: AxisType, mesh: Mesh
) -> None:
    f = jhost.jit(block, mesh=mesh, in_shardings=SPECS, out_shardings=P("tp"))
    other = jax.make_mesh((2, 2), ("a", "b"), (kind, kind), devices=jax.devices()[:4])
    with jax.set_mesh(other):
        results = f(X, W), jax.jit(lambda x, w: f(x, w) + 0)(X, W)
        gradient = jax.grad(lambda x: jhost.jit(block, mesh=mesh)(x, W).sum())(X)
    assert results[0].sharding.is_equivalent_to(NamedSharding(mesh, P("tp")), 2)
    for result in results:
        np.testing.assert_array_equal(result, expected())
    np.testing.assert_allclose(gradient, expected(jnp.ones_like(X)), rtol=1e-6)


def test_set_mesh_of_other_devices_is_refused(mesh: Mesh) -> None:
    f = jhost.jit(block, mesh=mesh, in_shardings=SPECS)
    with jax.set_mesh(Mesh(jax.devices()[4:], ("tp",))):
        with pytest.raises(errors.MeshMismatchError, match="called under") as e:
            f(X, W)
    assert "mesh(tp=4) on devices 4, 5, 6, 7" in str(e.value)


def test_the_mesh_may_be_abstract_until_something_runs(mesh: Mesh) -> None:
    f: Any = jhost.jit(block, in_shardings=SPECS, out_shardings=P("tp"))
    sharded = jax.device_put(X, NamedSharding(mesh, P("tp")))
    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (X, W)]
    no_devices = r"block would run on mesh\(tp=4\), an abstract mesh"
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert f.eval_shape(X, W).shape == X.shape
        assert jax.export.export(f)(*types).nr_devices == 4
        np.testing.assert_array_equal(jhost.jit(block)(sharded, W), expected())
        for call in (f, jhost.jit(block)):
            with pytest.raises(errors.NoMeshError, match=no_devices):
                call(X, W)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "set_mesh"])
def test_auto_and_explicit_meshes_in_and_out_of_set_mesh(
    axis_type: AxisType, inside: bool
) -> None:
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(axis_type,))
    f = jhost.jit(block, mesh=mesh, in_shardings=SPECS, out_shardings=P("tp"))
    g = jax.jit(lambda x, w: f(x, w) + 1)

    def values() -> Iterator[jax.Array]:
        x, w = (
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip((X, W), SPECS, strict=True)
        )
        yield f(x, w)
        yield f(X, W)
        yield g(x, w)
        result, pullback = jax.vjp(f, x, w)
        yield result
        yield pullback(f(x, w))[0]

    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        called, uncommitted, outer, forward, cotangent = values()
    for result in (called, uncommitted, outer - 1, forward):
        np.testing.assert_array_equal(result, expected())
        assert isinstance(result.sharding, NamedSharding)
        assert result.sharding.mesh.axis_types == (axis_type,)
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("tp")), 2)
    np.testing.assert_allclose(cotangent, expected(expected()), rtol=1e-6)


@pytest.mark.parametrize("types", ["EA", "AE"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "set_mesh"])
def test_meshes_of_which_types_tell_some_axes_alone(types: str, inside: bool) -> None:
    kinds = {"E": AxisType.Explicit, "A": AxisType.Auto}
    axis_types = tuple(kinds[letter] for letter in types)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=axis_types)
    specs = P(("dp", "tp")), P(None, "tp")
    x, w = (
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((X, W), specs, strict=True)
    )
    given = jhost.jit(block, mesh=mesh, in_shardings=specs, out_shardings=P("dp", "tp"))
    taken = jhost.jit(block, mesh=mesh)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        results = [
            given(X, W),
            given(x, w),
            taken(x, w),
            jax.jit(lambda x, w: taken(x, w) + 0)(x, w),
            jax.vjp(taken, x, w)[0],
        ]
        cotangent, _ = jax.vjp(given, x, w)[1](given(x, w))
    for result in results:
        np.testing.assert_array_equal(result, expected())
    np.testing.assert_allclose(cotangent, expected(expected()), rtol=1e-6)


def test_a_call_inside_jax_jit_is_pipelined_as_well(mesh: Mesh) -> None:
    f = jhost.jit(block, mesh=mesh, in_shardings=SPECS, out_shardings=P("tp"))
    outer = jax.jit(lambda x, w: f(x, w) * 2)
    np.testing.assert_array_equal(outer(X, W), expected() * 2)
    for text in (f.lower(X, W).as_text(), outer.lower(X, W).as_text()):
        assert text.count("stablehlo.all_gather") == 2
        assert text.count("stablehlo.reduce_scatter") == 2


def test_without_a_sharding_the_argument_s_own_counts(mesh: Mesh) -> None:
    f = jhost.jit(block, mesh=mesh, out_shardings=P("tp"))
    x, w = (
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip((X, W), SPECS, strict=True)
    )
    assert [p.shape for p in f.lower(x, w).host_ir.params] == [(2, 8), (8, 8)]
    assert [p.shape for p in f.lower(X, w).host_ir.params][1] == (8, 8)
    np.testing.assert_array_equal(f(x, w), expected())
    moved = jax.device_put(X, NamedSharding(mesh, P(None, "tp")))
    assert f.lower(moved, w).host_ir.params[0].shape == (8, 2)
    np.testing.assert_array_equal(f(moved, w), expected())


def test_without_a_mesh_the_function_runs_on_one_device() -> None:
    f = jhost.jit(block)
    assert f(X, W).sharding.device_set == {jax.devices()[0]}
    assert [p.shape for p in f.lower(X, W).host_ir.params] == [(8, 8), (8, 32)]


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_any_number_of_devices_gives_the_same(
    make_mesh: MakeMesh, devices: int
) -> None:
    f = jhost.jit(
        lambda x, w: jhost.stream(jnp.tanh(x @ w) @ w.T, axis=0, chunks=2),
        mesh=make_mesh((devices,), ("tp",)),
        in_shardings=(P("tp"), P(None, "tp")),
        out_shardings=P("tp"),
    )
    x, w = (
        jax.random.normal(key, (16, 16)) for key in jax.random.split(jax.random.key(0))
    )
    result = f(x, w)
    np.testing.assert_allclose(result, jnp.tanh(x @ w) @ w.T, rtol=1e-5, atol=1e-5)
    assert len(result.sharding.device_set) == devices
