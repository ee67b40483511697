"""Which mesh a function runs on, and what is said of meshes and devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from jhost import errors
from jhost.runtime.mesh import (
    abstract,
    auto_mesh,
    automatic_axes,
    context_mesh,
    devices_text,
    explicit_mesh,
    foreign_arrays,
    mesh_text,
    resolve_mesh,
    same_mesh,
)

MakeMesh: TypeAlias = Callable[[Sequence[int], Sequence[str]], Mesh]


@pytest.fixture
def mesh(make_mesh: MakeMesh) -> Mesh:
    return make_mesh((4,), ("tp",))


@pytest.fixture
def explicit() -> Mesh:
    return jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Explicit,))


# --- Which mesh ------------------------------------------------------------------- #


def test_the_mesh_that_was_given_comes_first(make_mesh: MakeMesh, mesh: Mesh) -> None:
    with jax.set_mesh(make_mesh((2,), ("dp",))):
        assert resolve_mesh(mesh, [P("tp"), None]) is mesh


def test_then_that_of_the_shardings(make_mesh: MakeMesh, mesh: Mesh) -> None:
    with jax.set_mesh(make_mesh((2,), ("dp",))):
        assert resolve_mesh(None, [P(), NamedSharding(mesh, P("tp"))]) is mesh


def test_then_that_of_set_mesh(mesh: Mesh) -> None:
    assert context_mesh() is None
    with jax.set_mesh(mesh):
        assert context_mesh() == mesh
        assert resolve_mesh(None, [P("tp")]) == mesh


def test_while_tracing_the_mesh_of_set_mesh_is_abstract(mesh: Mesh) -> None:
    seen: list[object] = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        seen.append(context_mesh())
        return x

    with jax.set_mesh(mesh):
        f(jnp.float32(1))
    (inside,) = seen
    assert isinstance(inside, AbstractMesh)
    assert dict(inside.shape) == {"tp": 4}


def test_without_any_there_is_none_and_specs_that_name_axes_are_refused() -> None:
    assert resolve_mesh(None, []) is None
    assert resolve_mesh(None, [P(), P(None, None)]) is None
    with pytest.raises(errors.NoMeshError, match=r"(?s)P\('tp'.*P\('dp'"):
        resolve_mesh(None, [P("tp"), P(), P("dp")])


def test_two_meshes_are_refused(make_mesh: MakeMesh, mesh: Mesh) -> None:
    other = NamedSharding(make_mesh((2,), ("tp",)), P("tp"))
    for given, shardings in (
        (mesh, [other]),
        (None, [NamedSharding(mesh, P()), other]),
    ):
        with pytest.raises(errors.MeshMismatchError, match=r"(?s)tp=4.*tp=2"):
            resolve_mesh(given, shardings)


# --- Types of axes ------------------------------------------------------------------ #


def test_inside_jhost_all_axes_are_automatic(mesh: Mesh, explicit: Mesh) -> None:
    assert auto_mesh(mesh) is mesh
    assert auto_mesh(explicit) == mesh
    assert auto_mesh(explicit.abstract_mesh).axis_types == (AxisType.Auto,)
    assert abstract(explicit) == abstract(mesh) == abstract(explicit.abstract_mesh)
    assert abstract(None).empty


def test_an_explicit_mesh_is_seen_in_types_and_in_the_context(
    mesh: Mesh, explicit: Mesh
) -> None:
    x = jax.device_put(jnp.ones(4), NamedSharding(explicit, P("tp")))
    automatic = jax.device_put(jnp.ones(4), NamedSharding(mesh, P("tp")))
    assert explicit_mesh([automatic, x]) == explicit.abstract_mesh
    assert explicit_mesh([automatic, jnp.ones(4)]) is None
    with jax.set_mesh(explicit):
        found = explicit_mesh([])
    assert found is not None
    assert found.axis_types == (AxisType.Explicit,)


def test_automatic_axes_are_so_inside_only(explicit: Mesh) -> None:
    def types() -> tuple[AxisType, ...]:
        return jax.sharding.get_abstract_mesh().axis_types

    with automatic_axes():
        assert types() == ()
    with jax.set_mesh(explicit):
        with automatic_axes():
            assert types() == (AxisType.Auto,)
        assert types() == (AxisType.Explicit,)


# --- What is said of them ---------------------------------------------------------- #


def test_meshes_are_the_same_by_axes_and_by_devices_where_both_say(
    make_mesh: MakeMesh, mesh: Mesh, explicit: Mesh
) -> None:
    assert same_mesh(mesh, explicit)
    assert same_mesh(mesh, mesh.abstract_mesh)
    assert not same_mesh(mesh, make_mesh((4,), ("dp",)))
    assert not same_mesh(mesh, make_mesh((2,), ("tp",)))
    reversed_devices = Mesh(mesh.devices[::-1], ("tp",))
    assert not same_mesh(mesh, reversed_devices)


def test_arrays_elsewhere_are_named_with_their_devices(
    make_mesh: MakeMesh, mesh: Mesh
) -> None:
    half = NamedSharding(make_mesh((2,), ("tp",)), P())
    x = jnp.ones((2, 3))
    values = {
        "here": jax.device_put(x, NamedSharding(mesh, P())),
        "anywhere": x,
        "params['w']": jax.device_put(x, half),
        "alone": jax.device_put(x, jax.devices()[7]),
        "no array": 3,
    }
    assert foreign_arrays(values, mesh) == [
        "params['w'] of shape (2, 3) is on devices 0, 1",
        "alone of shape (2, 3) is on device 7",
    ]
    assert foreign_arrays(values, mesh.abstract_mesh) == []


def test_meshes_and_devices_have_short_texts(make_mesh: MakeMesh) -> None:
    grid = make_mesh((2, 4), ("dp", "tp"))
    assert mesh_text(grid.abstract_mesh) == "mesh(dp=2, tp=4)"
    assert mesh_text(grid) == "mesh(dp=2, tp=4) on devices 0, 1, 2, 3, 4, 5, 6, 7"
    assert devices_text(jax.devices()[2:3]) == "device 2"
    assert devices_text(jax.devices()[:1] * 9) == "devices 0, 0, 0, 0, 0, 0, 0, 0, ..."
