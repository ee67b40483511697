"""Functions without `mesh=`: their mesh is the arguments', or named inside of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jhost
from jhost import errors, testing

MakeMesh: TypeAlias = Callable[[Sequence[int], Sequence[str]], Mesh]
Wrap: TypeAlias = Callable[[Callable[..., jax.Array]], Callable[..., Any]]

SPECS = (P("tp"), P(None, "tp"), P("tp"))
OPERANDS: tuple[Any, ...] = tuple(
    np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 3 - 1
    for shape in ((8, 4), (4, 16), (16, 4))
)


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream(jnp.maximum(x @ up, 0) @ down, axis=0, chunks=2)


def unmarked(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.maximum(x @ up, 0) @ down


@pytest.fixture
def mesh(make_mesh: MakeMesh) -> Mesh:
    return make_mesh((4,), ("tp",))


def on(mesh: Mesh, specs: Sequence[P] = SPECS) -> list[Any]:
    return [
        jax.device_put(operand, NamedSharding(mesh, spec))
        for operand, spec in zip(OPERANDS, specs, strict=True)
    ]


def mesh_of(args: Sequence[Any]) -> Any:
    sharding = getattr(args[0], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def text(f: Any, *args: Any, **kwargs: Any) -> str:
    return str(f.lower(*args, **kwargs).host_ir)


# --- Arguments -------------------------------------------------------------------- #


@pytest.mark.parametrize("kinds", ["A", "E", "AE", "EA"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "set_mesh"])
@pytest.mark.parametrize("fun", [block, unmarked])
def test_the_program_is_that_of_the_arguments_mesh(
    kinds: str, inside: bool, fun: Callable[..., jax.Array]
) -> None:
    types = {"A": AxisType.Auto, "E": AxisType.Explicit}
    sizes, axes = {1: ((4,), ("tp",)), 2: ((2, 2), ("dp", "tp"))}[len(kinds)]
    mesh = jax.make_mesh(sizes, axes, axis_types=tuple(types[k] for k in kinds))
    args = on(mesh)
    if kinds == "E" and fun is unmarked:
        args = on(mesh, (P("tp"), P(), P()))  # JAX's types refuse the others
    brought, given = jhost.jit(fun), jhost.jit(fun, mesh=mesh)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        assert text(brought, *args) == text(given, *args)
        result, wanted = brought(*args), given(*args)
    assert result.sharding == wanted.sharding
    np.testing.assert_array_equal(result, unmarked(*OPERANDS))


def loss(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *args: f(*args).sum()


AROUND: dict[str, Wrap] = {
    "grad": lambda f: jax.grad(loss(f), (0, 1, 2)),
    "jit": lambda f: jax.jit(lambda *args: f(*args) + 1),
    "jit of grad": lambda f: jax.jit(jax.grad(loss(f), (0, 1))),
    "vmap": lambda f: jax.vmap(f, (None, None, 0)),
    "jvp of grad": lambda f: lambda *args: jax.jvp(jax.grad(loss(f)), args, args),
    "checkpoint": lambda f: jax.grad(loss(jax.checkpoint(f))),
    "scan": lambda f: (
        lambda x, up, down: jax.lax.scan(
            lambda carry, _: (f(carry, up, down), None), x, length=2
        )
    ),
    "nested": lambda f: jhost.jit(lambda *args: f(*args) * 2),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_jax_makes_around_is_that_of_the_arguments_mesh(
    name: str, mesh: Mesh
) -> None:
    args = on(mesh)
    if name == "vmap":
        args[2] = jax.device_put(args[2][None], NamedSharding(mesh, P(None, "tp")))
    brought = AROUND[name](jhost.jit(block))
    given = AROUND[name](jhost.jit(block, mesh=mesh))
    made = testing.programs(brought, *args)
    assert list(map(str, made)) == list(map(str, testing.programs(given, *args)))
    assert {program.mesh.size for program in made} == {4}
    chex.assert_trees_all_equal(brought(*args), AROUND[name](unmarked)(*args))


def test_types_with_shardings_bring_a_mesh(mesh: Mesh) -> None:
    args = on(mesh)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in args]
    f = jhost.jit(block)
    lowered = f.lower(*types)
    assert str(lowered.host_ir) == text(jhost.jit(block, mesh=mesh), *args)
    np.testing.assert_array_equal(lowered.compile()(*args), unmarked(*OPERANDS))


def test_arrays_in_trees_and_keywords_bring_a_mesh(mesh: Mesh) -> None:
    def tree(params: dict[str, Any], n: int, *, x: jax.Array) -> dict[str, Any]:
        return {"y": block(x, *params["w"]) * n}

    x, *w = on(mesh)
    f = jhost.jit(tree, static_argnums=1)
    given = f.with_options(mesh=mesh)
    assert text(f, {"w": w}, 2, x=x) == text(given, {"w": w}, 2, x=x)
    result = f({"w": w}, 2, x=x)["y"]
    np.testing.assert_array_equal(result, 2 * unmarked(*OPERANDS))


def test_specs_are_over_the_mesh_of_the_arguments(mesh: Mesh) -> None:
    f = jhost.jit(block, in_shardings=SPECS, out_shardings=P(None, "tp"))
    result = f(*on(mesh))
    assert result.sharding == NamedSharding(mesh, P(None, "tp"))


def test_a_call_on_another_mesh_is_another_program(
    make_mesh: MakeMesh, mesh: Mesh
) -> None:
    f = jhost.jit(block)
    for args, devices in (
        (on(mesh), 4),
        (list(OPERANDS), 1),
        (on(make_mesh((2,), ("tp",))), 2),
        (on(mesh), 4),
    ):
        assert len(f(*args).sharding.device_set) == devices
        assert text(f, *args) == text(f.with_options(mesh=mesh_of(args)), *args)


def test_arrays_of_no_mesh_run_as_by_jax(mesh: Mesh) -> None:
    """Those committed to no device go anywhere, those committed to one stay there."""
    f = jhost.jit(block)
    x, up, down = on(mesh)
    np.testing.assert_array_equal(f(OPERANDS[0], up, jnp.asarray(down)), f(x, up, down))
    there = jax.device_put(OPERANDS[0], jax.devices()[1])
    assert f(there, *OPERANDS[1:]).sharding.device_set == {jax.devices()[1]}
    with pytest.raises(errors.MeshMismatchError, match=r"x of shape .* is on device 1"):
        f(there, up, down)


def test_arrays_over_two_meshes_are_refused(make_mesh: MakeMesh, mesh: Mesh) -> None:
    other = make_mesh((2, 2), ("a", "b"))
    x, up, down = on(mesh)
    moved = jax.device_put(up, NamedSharding(other, P("a", "b")))
    for call in (jhost.jit(block), jhost.jit(block).lower):
        with pytest.raises(errors.MeshMismatchError) as raised:
            call(x, moved, down)
        for part in (
            "its arguments lie over several: mesh(tp=4) on devices 0, 1, 2, 3, and "
            "mesh(a=2, b=2)",
            "x has P('tp',) over mesh(tp=4)",
            "up has P('a', 'b') over mesh(a=2, b=2)",
        ):
            assert part in str(raised.value)
    whole = jax.device_put(up, NamedSharding(other, P()))  # of the same devices
    np.testing.assert_array_equal(jhost.jit(block)(x, whole, down), unmarked(*OPERANDS))


# --- Inside ----------------------------------------------------------------------- #


def test_arrays_that_are_closed_over_bring_a_mesh(mesh: Mesh) -> None:
    x, up, down = on(mesh)
    f = jhost.jit(lambda x: block(x, up, down))
    given = f.with_options(mesh=mesh)
    for operand in (x, OPERANDS[0]):
        assert text(f, operand) == text(given, operand)
        np.testing.assert_array_equal(f(operand), unmarked(*OPERANDS))
    there = jax.device_put(OPERANDS[0], jax.devices()[1])
    assert f(there).sharding == jax.jit(f.__wrapped__)(there).sharding


def constrained(mesh: Mesh) -> dict[str, Callable[[jax.Array], jax.Array]]:
    def rows(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("tp")))

    return {
        "function": rows,
        "scan": lambda x: jax.lax.scan(lambda c, _: (rows(c), None), x, length=2)[0],
        "cond": lambda x: jax.lax.cond(x[0, 0] < 0, rows, jnp.negative, x),
        "jit": lambda x: jax.jit(rows)(x) + 1,
        "shard_map": lambda x: jax.shard_map(
            lambda x: x + 1, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")
        )(x),
        "jhost": lambda x: jhost.jit(lambda x: x + 1, mesh=mesh)(x),
    }


@pytest.mark.parametrize("where", constrained(jax.make_mesh((1,), ("tp",))))
def test_a_mesh_that_is_named_inside_is_the_functions(where: str, mesh: Mesh) -> None:
    fun = constrained(mesh)[where]
    f = jhost.jit(fun)
    for x in (OPERANDS[0], on(mesh)[0]):
        assert text(f, x) == text(f.with_options(mesh=mesh), x)
        chex.assert_trees_all_equal(f(x), jax.jit(fun)(x))
        assert len(f(x).sharding.device_set) == 4
    x = OPERANDS[0]
    chex.assert_trees_all_equal(jax.jit(f)(x), jax.jit(fun)(x))
    grad = jax.grad(lambda x: f(x).sum())(x)
    chex.assert_trees_all_equal(grad, jax.grad(lambda x: fun(x).sum())(x))


def test_meshes_inside_of_other_devices_are_refused(mesh: Mesh) -> None:
    reversed_ = Mesh(mesh.devices[::-1], ("tp",), axis_types=(AxisType.Auto,))

    def both(x: jax.Array) -> jax.Array:
        for each in (mesh, reversed_):
            x = jax.lax.with_sharding_constraint(x + 1, NamedSharding(each, P("tp")))
        return x

    with pytest.raises(errors.MeshMismatchError, match=r"devices 3, 2, 1, 0 at .*both"):
        jhost.jit(both)(OPERANDS[0])


def test_a_nested_function_on_other_devices_is_named_once(mesh: Mesh) -> None:
    turned = Mesh(mesh.devices[::-1], ("tp",), axis_types=(AxisType.Auto,))

    @jhost.jit(mesh=turned, in_shardings=P("tp"))
    def inner(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x + 1, NamedSharding(turned, P("tp")))

    def outer(x: jax.Array) -> jax.Array:
        return jhost.shard(inner(x), P("tp"))

    def jitted(x: jax.Array) -> jax.Array:
        return jax.jit(inner)(x)

    for fun in (outer, jitted, jax.grad(lambda x: outer(x).sum())):
        f = jhost.jit(fun, mesh=mesh, in_shardings=P("tp"))
        with pytest.raises(errors.MeshMismatchError) as raised:
            f(OPERANDS[0])
        text = str(raised.value)
        assert text.count("devices 3, 2, 1, 0 at test_brought_meshes.py:") == 1
        assert text.count("  * ") == 2
        assert "unknown line" not in text


def test_specs_that_no_mesh_is_known_for_are_said_once() -> None:
    specs = {f"w{n}": P("tp") for n in range(100)}
    f = jhost.jit(lambda params: params, in_shardings=(specs,))
    with pytest.raises(errors.NoMeshError) as raised:
        f({name: OPERANDS[0] for name in specs})
    assert str(raised.value).count("P('tp',)") == 1


def test_where_jax_alone_knows_the_devices_no_more_moves_than_by_jax(
    mesh: Mesh,
) -> None:
    """An outer `jit` shards arrays that lie over no mesh, and types say nothing."""
    ins = tuple(NamedSharding(mesh, spec) for spec in (P("tp"), P(), P()))
    f = jhost.jit(block)
    outer = jax.jit(lambda *args: f(*args), in_shardings=ins)
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    compiled = outer.lower(*OPERANDS).compile().as_text()
    assert not re.findall(rf" ({kinds})(-start)?\(", compiled or "")
    np.testing.assert_array_equal(outer(*OPERANDS), unmarked(*OPERANDS))
