"""`jax.shard_map` in a jhost function: laid out as its specs say, and run in place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
)

import jhost
from jhost import errors
from jhost.testing import assert_close
from tests.jhost.blocks import Function
from tests.lowering.hand_built import mesh_of
from tests.lowering.traced import array, interpreted

MESH = mesh_of(a=2, b=2)
X, Y = array(8, 4), array(4, 8, seed=1)

# LLVM's optimizations would take most of the time.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}

each_check = pytest.mark.parametrize("check_vma", [True, False])


def parts(f: Function, *ins: Any, out: Any, **more: Any) -> Function:
    """`f` on each device's parts."""
    how = {"mesh": MESH, "check_vma": True, **more}
    map_over: Any = jax.shard_map
    return map_over(f, in_specs=ins, out_specs=out, **how)


def same(
    f: Function,
    *args: Any,
    mesh: Mesh = MESH,
    tolerance: float = 0,
    **how: Any,
) -> None:
    """jhost's values are those of `jax.jit`, compiled and interpreted."""
    wanted = jax.jit(f, compiler_options=QUICK)(*args)
    how = {"mesh": mesh, "compiler_options": QUICK, **how}
    for run in (jhost.jit, interpreted):
        given = run(f, **how)(*args)
        assert_close(given, wanted, tolerance=tolerance)


def same_gradients(
    f: Function, *args: Any, where: Sequence[str] = ("around", "inside"), **how: Any
) -> Any:
    """By every argument, around the jhost function and inside of it; and the values.

    Returns the values.
    """

    def gradients(g: Function) -> Function:
        def loss(*args: Any) -> Any:
            outs = g(*args)
            return sum(jnp.sum(out * out) for out in jax.tree.leaves(outs)), outs

        return jax.grad(loss, tuple(range(len(args))), has_aux=True)

    wanted = jax.jit(gradients(f), compiler_options=QUICK)(*args)
    jit: Any = functools.partial(jhost.jit, mesh=MESH, compiler_options=QUICK, **how)
    given = {"around": gradients(jit(f)), "inside": jit(gradients(f))}
    for place in where:
        assert_close(given[place](*args), wanted, tolerance=0)
    return wanted[1]


# --- Collectives ------------------------------------------------------------------ #


def _shifted(x: jax.Array) -> jax.Array:
    return lax.ppermute(x, "a", [(0, 1), (1, 0)])


def _exchanged(x: jax.Array) -> jax.Array:
    return lax.all_to_all(x, "a", 1, 0, tiled=True)


def _ranked(x: jax.Array) -> jax.Array:
    return x * (lax.axis_index("a") + 2 * lax.axis_index(("b", "a"))).astype(x.dtype)


def _in_a_loop(x: jax.Array) -> jax.Array:
    def step(c: jax.Array, w: jax.Array) -> Any:
        return c + lax.psum(w, "a"), c * w

    last, each = lax.scan(step, lax.pcast(jnp.zeros(2), ("a", "b"), to="varying"), x)
    return each + last


def _in_a_branch(x: jax.Array) -> jax.Array:
    taken = lax.psum(jnp.sum(x), ("a", "b")) > 0
    return lax.cond(taken, lambda x: x - lax.psum(x, "b"), lambda x: x, x)


def _with_a_rule(x: jax.Array) -> jax.Array:
    @jax.custom_vjp
    def cubed(x: jax.Array) -> jax.Array:
        return x * lax.psum(x, "a")

    # Not the true derivative, so that one that is lost shows.
    cubed.defvjp(lambda x: (cubed(x), x), lambda x, ct: (ct + lax.pmean(x, "b"),))
    return jax.nn.relu(cubed(x))


def _recomputed(x: jax.Array) -> jax.Array:
    def cubed(x: jax.Array) -> jax.Array:
        return x * lax.psum(x * x, "b")

    return jax.checkpoint(cubed)(x)


BODIES: dict[str, tuple[Function, Any]] = {
    "nothing": (lambda x: 2 * x + 1, P("a", "b")),
    "psum": (lambda x: lax.psum(x, "a"), P(None, "b")),
    "psum of all": (lambda x: lax.psum(jnp.sum(x), ("a", "b")), P()),
    "all_gather": (lambda x: lax.all_gather(x, "a", tiled=True), P("b", "a")),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True),
        P(("a", "b")),
    ),
    "ppermute": (_shifted, P("a", "b")),
    "all_to_all": (_exchanged, P(None, ("b", "a"))),
    "axis_index": (_ranked, P("a", "b")),
    "scan": (_in_a_loop, P("a", "b")),
    "cond": (_in_a_branch, P("a", "b")),
    "custom_vjp": (_with_a_rule, P("a", "b")),
    "checkpoint": (_recomputed, P("a", "b")),
    "a function of jhost's": (jhost.jit(lambda x: x * x), P("a", "b")),
}


@pytest.mark.parametrize(
    "check_vma", [True, pytest.param(False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", BODIES)
def test_a_body_with_collectives(name: str, check_vma: bool) -> None:
    body, out = BODIES[name]
    mapped = parts(body, P("a", "b"), out=out, check_vma=check_vma)

    def f(x: jax.Array, y: jax.Array) -> Any:
        return mapped(x + 1) * jnp.sum(y), mapped(2 * y.T)

    how: dict[str, Any] = {"in_shardings": (P("b"), P(None, "a"))}
    where = ("around",) if check_vma else ("inside",)
    wanted = same_gradients(f, X % 3, Y % 3, where=where, **how)
    if check_vma:
        by_statements = interpreted(f, mesh=MESH, **how)(X % 3, Y % 3)
        assert_close(by_statements, wanted, tolerance=0)


@each_check
def test_over_some_of_the_axes(check_vma: bool) -> None:
    """Along the others every device has all, and marks in the body say nothing."""

    def body(x: jax.Array) -> jax.Array:
        x = jhost.shard(x, P(None, "b"))
        return lax.psum(x @ x.T * (lax.axis_index("a").astype(x.dtype) + 2), "a")

    mapped = parts(body, P(None, "a"), out=P(), axis_names={"a"}, check_vma=check_vma)
    same(lambda x: mapped(x) + x @ x.T, X, in_shardings=P("b", "a"))
    same_gradients(lambda x: mapped(x * x), X % 2, in_shardings=P("b", "a"))


# --- Meshes and specs --------------------------------------------------------------- #


def test_however_the_mesh_is_given() -> None:
    def f(x: jax.Array, mesh: Any) -> jax.Array:
        mapped = parts(lambda x: lax.psum(x, "b"), P("a", "b"), out=P("a"), mesh=mesh)
        return mapped(x) * 2

    bare = AbstractMesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    wanted = X[:, :2] * 2 + X[:, 2:] * 2
    for mesh in (MESH, MESH.abstract_mesh, bare):
        given = jhost.jit(functools.partial(f, mesh=mesh), mesh=MESH)(X)
        assert_close(given, wanted, tolerance=0)
    explicit = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    for context in (MESH, explicit):
        with jax.set_mesh(context):
            given = jhost.jit(functools.partial(f, mesh=None))(X)
            assert_close(given, wanted, tolerance=0)


@pytest.mark.parametrize("axes", [{"a": 8}, {"a": 4, "b": 2}, {"a": 1, "b": 4}])
def test_meshes_of_any_shape(axes: dict[str, int]) -> None:
    mesh = mesh_of(**axes)
    names = tuple(axes)

    def f(x: jax.Array) -> Any:
        def body(x: jax.Array) -> Any:
            return x + lax.axis_index("a").astype(x.dtype), lax.psum(x, names)

        mapped = parts(body, P(None, names), out=(P(None, names), P()), mesh=mesh)
        return mapped(x @ x.T)

    same(f, X, mesh=mesh, in_shardings=P("a"))


def test_results_that_are_alike_on_all_devices() -> None:
    def body(x: jax.Array) -> Any:
        return lax.pmax(jnp.max(x), ("a", "b")), lax.pmean(x, "a"), jnp.ones(3)

    mapped = parts(body, P("a", "b"), out=(P(), P(None, "b"), P()), check_vma=False)
    same(lambda x: mapped(x + x), X)
    same(lambda x: mapped(x + x)[1] @ jnp.ones((4, 2)), X, out_shardings=P("a", "b"))


def test_without_operands() -> None:
    def body() -> Any:
        return jnp.ones((2, 3)) * lax.axis_index(("a", "b")).astype(jnp.float32)

    mapped = parts(body, out=P(None, ("a", "b")))
    same(lambda x: mapped()[:, 4:8].T @ x[:2] + x[:4], X, out_shardings=P(None, "b"))
    same(lambda: mapped(), out_shardings=P("b"))


def test_empty_arrays() -> None:
    """XLA of JAX 0.11 dies of the same under `jax.jit`, so that nothing is compared."""

    def body(x: jax.Array, y: jax.Array) -> Any:
        return 2 * x, y + lax.psum(jnp.sum(x), ("a", "b"))

    mapped = parts(body, P("a"), P("b"), out=(P("a"), P("b")), check_vma=False)
    for run in (jhost.jit, interpreted):
        for shape in ((4, 0), (0, 2)):
            f = run(lambda x, y: mapped(x + x, y), mesh=MESH)
            empty, same_y = f(jnp.ones(shape), X)
            assert empty.shape == shape
            assert_close(same_y, X, tolerance=0)


def test_literals_and_arrays_that_are_closed_over() -> None:
    table = np.arange(8, dtype=np.float32).reshape(2, 4)

    def f(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, c: jax.Array, t: jax.Array) -> jax.Array:
            return x * c + t + jnp.asarray(table)[:, :2] @ jnp.ones((2, 2)) + Y[:2, :2]

        mapped = parts(body, P("a", "b"), P(), P(None, "b"), out=P("a", "b"))
        return mapped(x[:4], 2.0, jnp.asarray(table))

    same(f, X)
    same_gradients(f, X)


def test_keys() -> None:
    keys = jax.random.split(jax.random.key(0), 8)

    def body(keys: jax.Array, key: jax.Array) -> Any:
        key = jax.random.fold_in(key, lax.axis_index("a"))
        drawn = jax.vmap(lambda k: jax.random.uniform(k, (3,)))(keys)
        return drawn, jax.random.normal(key, (2,)), jax.random.split(key, 2)

    out = P(("a", "b")), P("a"), P("a")
    mapped = parts(body, P(("a", "b")), P(), out=out)

    def f(keys: jax.Array) -> Any:
        drawn, more, new = mapped(keys, keys[0])
        return drawn, more, jax.random.key_data(new)

    same(f, keys, tolerance=1e-6, in_shardings=P("b"))


# --- Transforms --------------------------------------------------------------------- #


def _mixed(check_vma: bool) -> Function:
    def body(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.psum_scatter(x @ y, "b", scatter_dimension=1, tiled=True) ** 3

    return parts(body, P("a", "b"), P("b"), out=P("a", "b"), check_vma=check_vma)


@pytest.mark.parametrize(("inside", "check_vma"), [(False, True), (True, False)])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x, y: jax.jvp(f, (x, y), (y.T, x.T)),
        lambda f: jax.vmap(f, (0, None)),
        lambda f: jax.vmap(f, (None, 2), 1),
        lambda f: jax.jit(jax.hessian(lambda x, y: jnp.sum(f(x, y)), 1)),
        lambda f: jax.grad(lambda x, y: jnp.sum(jax.checkpoint(f)(x, y)), (0, 1)),
        lambda f: lambda x, y: jax.linearize(f, x, y)[1](y.T, x.T),
        lambda f: jax.grad(
            lambda x, y: jnp.sum(jax.vmap(f, (0, None), spmd_axis_name=())(x, y)),
            (0, 1),
        ),
    ],
    ids=["jvp", "vmap", "vmap to 1", "hessian", "checkpoint", "linearize", "batches"],
)
def test_transforms(transform: Any, inside: bool, check_vma: bool) -> None:
    f, (x, y) = _mixed(check_vma), (X % 2, Y % 2)
    args = (x, y)
    for batched in (args, (jnp.stack([x, -x]), y), (x, jnp.stack([y, 2 * y], 2))):
        try:
            wanted = jax.jit(transform(f), compiler_options=QUICK)(*batched)
        except (TypeError, ValueError):
            continue  # a transform is for one of them
        jit: Any = functools.partial(jhost.jit, mesh=MESH)
        g = jit(transform(f)) if inside else transform(jit(f))
        assert_close(g(*batched), wanted, tolerance=0)
        return
    raise AssertionError("it fits no arguments")


def test_vmap_over_a_mesh_axis() -> None:
    def f(x: jax.Array) -> jax.Array:
        mapped = parts(lambda x: lax.psum(x, "b"), P(None, "b"), out=P())
        return jax.vmap(mapped, spmd_axis_name="a")(x)

    same(f, jnp.stack([X, 2 * X]), in_shardings=P("b"))


# --- Streams ------------------------------------------------------------------------ #


def test_what_moves_there_is_explained() -> None:
    """In the body itself, in loops as often as they go round, and in all branches."""

    def body(x: jax.Array) -> jax.Array:
        def again(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.ppermute(x, "a", [(0, 1), (1, 0)]), None

        x = lax.scan(again, x, None, length=3)[0]
        x = lax.cond(True, lambda x: x, lambda x: lax.pmax(x, "a"), x)
        x = lax.psum_scatter(lax.all_gather(x, "a"), "a")
        return lax.all_to_all(x, ("a", "b"), 0, 0, tiled=True)

    mapped = parts(body, P(("a", "b")), out=P(("a", "b")), check_vma=False)
    f = jhost.jit(lambda x: mapped(x), mesh=MESH)
    rows = jhost.explain(f, jnp.ones((16, 4))).communications
    assert [(row.kind, row.axes, row.bytes, row.times) for row in rows] == [
        ("CollectivePermute", ("a",), 3 * 64, 3),
        ("AllReduce", ("a",), 64, 1),
        ("AllGather", ("a",), 64, 1),
        ("ReduceScatter", ("a",), 64, 1),
        ("AllToAll", ("a", "b"), 48, 1),
    ]
    assert all(row.written and "test_shard_map.py" in row.where for row in rows)
    assert str(rows[0]).startswith(
        "CollectivePermute of f32[4, 4] over a: 192 bytes a device, as written, 3 times"
    )


def test_streams_stop_there_and_say_why() -> None:
    mapped = parts(lambda x: x * 2, P(None, "b"), out=P(None, "b"))

    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        return mapped(jhost.stream(x @ y, 0, chunks=2)) @ x

    how: dict[str, Any] = {"in_shardings": (P("a"), P()), "pipeline": "collective"}
    same(f, X, Y, **how)
    report = jhost.explain(jhost.jit(f, mesh=MESH, **how), X, Y).text
    assert "shard_map takes and gives whole parts, as its specs say" in report


@pytest.mark.parametrize("dim", [0, 1])
def test_a_stream_on_what_it_takes_alone_is_refused(dim: int) -> None:
    mapped = parts(lambda x: x * 2, P("a"), out=P("a"))
    f = jhost.jit(
        lambda x: mapped(jhost.stream(x, dim, chunks=2, pipeline="collective")),
        mesh=MESH,
    )
    with pytest.raises(errors.StreamDimError, match="takes and gives whole parts"):
        f(X)


def test_pipelines_before_and_behind_it() -> None:
    """A kernel between two projections, each of which is a loop."""
    mesh = mesh_of(tp=4)
    attend = parts(
        lambda x: jnp.cumsum(x, 0), P(None, "tp"), out=P(None, "tp"), mesh=mesh
    )

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        x = jhost.stream(x, 0)
        return jhost.stream(attend(x @ up) @ down, 0)

    up, down = array(4, 8, seed=2), array(8, 4, seed=3)
    how: dict[str, Any] = {
        "in_shardings": (P("tp"), P(None, "tp"), P("tp")),
        "out_shardings": P("tp"),
        "pipeline": "p2p",
    }
    same(block, X, up, down, mesh=mesh, **how)
    text = str(jhost.jit(block, mesh=mesh, **how).lower(X, up, down).host_ir)
    before, behind = text.split("shard_map(v)")
    for loop in before, behind:
        assert loop.count("CollectivePermute(") == 1


def test_a_dim_that_is_padded_around_it_is_cut_before() -> None:
    mapped = parts(lambda x: lax.psum(x, "a"), P(None, "a"), out=P(), check_vma=False)

    def f(x: jax.Array) -> jax.Array:
        x = jhost.shard(x + 1, P(("a", "b"), None))
        return jhost.shard(mapped(x * x), P("b", None)) * 3

    same(f, X[:5])
    same_gradients(f, X[:5] % 2)


# --- Kernels ------------------------------------------------------------------------ #


@each_check
def test_a_kernel_of_pallas(check_vma: bool) -> None:
    """With types JAX's own interpretation of kernels does not get as far."""

    def kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2 + y_ref[...]

    def body(x: jax.Array, y: jax.Array) -> jax.Array:
        call = pl.pallas_call(
            kernel,
            out_shape=jax.typeof(x),
            grid=(2,),
            in_specs=[pl.BlockSpec((2, 2), lambda i: (i, 0))] * 2,
            out_specs=pl.BlockSpec((2, 2), lambda i: (i, 0)),
            interpret=True,
        )
        return call(x, y) + lax.psum(x, "a")

    mapped = parts(body, *[P("a", "b")] * 2, out=P("a", "b"), check_vma=check_vma)
    sums = jnp.tile(X[:4] + X[4:], (2, 1))
    for run in (jhost.jit, interpreted):
        f = run(lambda x, y: mapped(x, x @ y @ x), mesh=MESH, in_shardings=P("b"))
        assert_close(f(X, Y), 2 * X + X @ Y @ X + sums, tolerance=0)


# --- Refusals ----------------------------------------------------------------------- #


def over(mesh: Any) -> Function:
    axis = mesh.axis_names[0]
    return parts(lambda x: x + 1, P(axis), out=P(axis), mesh=mesh)


def test_other_meshes_are_refused_by_their_lines() -> None:
    others = mesh_of(a=4), mesh_of(a=2), mesh_of(a=2, c=2), mesh_of(b=2, a=2)

    def f(x: jax.Array) -> jax.Array:
        for mesh in others:
            x = over(mesh)(x)
        return over(MESH)(x)

    with pytest.raises(errors.MeshMismatchError) as refusal:
        jhost.jit(f, mesh=MESH)(X)
    text = str(refusal.value)
    for shape in ("mesh(a=4)", "mesh(a=2)", "mesh(a=2, c=2)", "mesh(b=2, a=2)"):
        assert f"{shape} at test_shard_map.py:" in text
    assert "the function's: mesh(a=2, b=2)" in text
    assert text.count("test_shard_map.py") == len(others)


def test_other_devices_are_refused() -> None:
    moved = Mesh(np.array(jax.devices()[4:]).reshape(2, 2), ("a", "b"))
    turned = Mesh(MESH.devices[::-1], ("a", "b"))
    for mesh in (moved, turned):
        there = Mesh(mesh.devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        f = jhost.jit(lambda x, mesh=there: over(mesh)(x), mesh=MESH)
        with pytest.raises(errors.MeshMismatchError, match=r"at test_shard_map.py:\d+"):
            f(X)


def _looped(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 2, lambda i, x: over(MESH)(x), x)


def _scanned(x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, _: (over(MESH)(x), x), x, None, length=2)[0]


def _branching(x: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] > 0, over(MESH), lambda x: x, x)


@pytest.mark.parametrize("f", [_looped, _scanned, _branching])
def test_bodies_of_control_flow_hold_it(f: Function) -> None:
    same(f, X)
    same_gradients(f, X)


def test_it_is_refused_in_another_one() -> None:
    def nested(x: jax.Array) -> jax.Array:
        inner = parts(lambda x: x * 2, P("b"), out=P("b"), mesh=None, axis_names={"b"})
        return parts(inner, P("a"), out=P("a"), axis_names={"a"})(x)

    with pytest.raises(
        errors.UnsupportedError,
        match=r"in the body of a shard_map, .* at test_shard_map.py:\d+",
    ):
        jhost.jit(nested, mesh=MESH)(X)
    jhost.jit(nested)(X)  # without a mesh it is JAX's own business


def test_a_mark_in_it_is_refused() -> None:
    mapped = parts(lambda x: jhost.stream(x * 2, 0), P("a"), out=P("a"))
    with pytest.raises(errors.StreamDimError, match="in the body of a shard_map"):
        jhost.jit(mapped, mesh=MESH)(X)


def constrained(spec: P, manual: str, body: Function) -> Function:
    """A `shard_map` manual over some axes, with a sharding in a body in its body."""
    sharding = NamedSharding(MESH, spec)

    def f(x: Any) -> Any:
        return lax.with_sharding_constraint(x, sharding) * x

    return parts(body(f), P("a"), out=P("a"), axis_names=set(manual), check_vma=False)


INNER_BODIES: dict[str, Function] = {
    "alone": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda x, _: (f(x), None), x, None, 2)[0],
    "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x))),
}


@pytest.mark.parametrize("body", INNER_BODIES.values(), ids=INNER_BODIES)
def test_a_sharding_in_it_is_of_automatic_axes_alone(body: Function) -> None:
    """JAX says so as it lowers the body, in whatever that stands."""
    free = P.UNCONSTRAINED
    for spec in (P("a"), P("a", "b"), P(None, "b"), P(None, None), P(free, None)):
        for manual in ("a", "ab"):
            f = constrained(spec, manual, body)
            try:
                wanted = jax.jit(f, compiler_options=QUICK)(X)
            except ValueError:
                with pytest.raises(errors.UnknownAxisError, match="are manual there"):
                    jhost.jit(f)(X)
            else:
                given = jhost.jit(f, compiler_options=QUICK)(X)
                assert_close(given, wanted, tolerance=0)


def test_a_sharding_of_manual_axes_is_refused_in_jax_s_words() -> None:
    f = constrained(P("a", "b"), "ab", lambda f: f)
    words = (
        r"contains a manual axes \('a', 'b'\) of mesh\(a=2, b=2\), "
        r"at test_shard_map.py:\d+"
    )
    for call in (
        jhost.jit(f),
        jhost.jit(f).lower,
        jax.grad(jhost.jit(lambda x: f(x)[0, 0])),
    ):
        with pytest.raises(errors.UnknownAxisError, match=words):
            call(X)


def test_explain_says_what_moves_for_it() -> None:
    mapped = parts(lambda x: lax.psum(x, "a"), P("a"), out=P())
    f = jhost.jit(lambda x: mapped(x * 2), mesh=MESH, in_shardings=P(None, "a"))
    (report,) = [r for r in f.lower(X).host_ir.remarks if "shard_map" in str(r)]
    assert "as its specs say" in str(report)


def test_constants_deep_in_a_body_under_a_mesh() -> None:
    """Their types may know of the mesh under which they were traced."""
    table = np.arange(4, dtype=np.float32)

    def body(x: jax.Array) -> jax.Array:
        def step(c: jax.Array, w: jax.Array) -> Any:
            return c + 2 * w.sum() + Y[0, 0], jnp.where(w > 0, w, 3.0) + table[:2]

        last, each = lax.scan(step, jnp.float32(1.5), x)
        return each * jax.jit(lambda x: x + Y[1, 1] * 1.5)(last)

    for names in ({"a", "b"}, {"b"}):
        mapped = parts(
            body, P(None, "b"), out=P(None, "b"), check_vma=False, axis_names=names
        )

        def f(x: jax.Array, mapped: Function = mapped) -> jax.Array:
            return mapped(x * 1.5) + 0.5

        same(f, X)
        with jax.set_mesh(MESH):
            same(f, X)
