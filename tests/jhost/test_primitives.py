"""Markers: the identity outside jhost, and still there in every derived program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import JaxprEqn, jaxprs_in_params
from jax.sharding import Mesh, PartitionSpec as P

from jhost import errors
from jhost._annotate import serial, shard, stream

MakeMesh = Callable[[Sequence[int], Sequence[str]], Mesh]
Function = Callable[[jax.Array], jax.Array]

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
MARKS = {
    "stream": partial(stream, axis=0, chunks=2, pipeline="p2p"),
    "serial": serial,
    "shard": partial(shard, spec=P("tp", None)),
}
each_mark = pytest.mark.parametrize(("name", "mark"), MARKS.items(), ids=MARKS)


def eqns_of(function: Callable[..., Any], *args: Any) -> list[JaxprEqn]:
    def walk(jaxpr: Any) -> list[JaxprEqn]:
        inner = [
            e for q in jaxpr.eqns for s in jaxprs_in_params(q.params) for e in walk(s)
        ]
        return [*jaxpr.eqns, *inner]

    return walk(jax.make_jaxpr(function)(*args).jaxpr)


def marks_in(name: str, function: Callable[..., Any], *args: Any) -> list[JaxprEqn]:
    return [e for e in eqns_of(function, *args) if e.primitive.name == name]


def twice(mark: Function, x: jax.Array) -> jax.Array:
    return jnp.sin(mark(jnp.sin(mark(x)) * x))


def scanned(mark: Function, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(mark(h * scale)), None

    return jax.lax.scan(layer, x, jnp.array([0.5, 2.0, 1.0]))[0]


def total(function: Callable[[Function, jax.Array], jax.Array], mark: Function) -> Any:
    return lambda x: function(mark, x).sum()


TRANSFORMS: dict[str, Callable[[Any], Callable[[jax.Array], Any]]] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.cos(x)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "second order": lambda f: jax.jit(jax.jacfwd(jax.grad(f))),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, -x])),
}


@each_mark
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("function", [twice, scanned])
def test_a_marker_is_the_identity(
    name: str,
    mark: Function,
    transform: Callable[[Any], Callable[[jax.Array], Any]],
    function: Callable[[Function, jax.Array], jax.Array],
) -> None:
    marked = transform(total(function, mark))(X)
    plain = transform(total(function, lambda x: x))(X)
    chex.assert_trees_all_close(marked, plain, rtol=1e-6)


@each_mark
def test_a_marker_takes_integers(name: str, mark: Function) -> None:
    def pick(x: jax.Array, index: jax.Array) -> jax.Array:
        return (x * mark(index)).sum()

    index = jnp.arange(12).reshape(4, 3)
    with jax.numpy_dtype_promotion("standard"):
        grad = jax.grad(pick)(X, index)
    chex.assert_trees_all_close(grad, index.astype(X.dtype))


@each_mark
def test_a_marker_keeps_a_weak_type(name: str, mark: Function) -> None:
    (eqn,) = marks_in(name, lambda x: mark(jnp.broadcast_to(x, (4, 3))), 1.0)
    assert eqn.outvars[0].aval == eqn.invars[0].aval


@each_mark
def test_the_transpose_of_a_marker_is_the_marker(name: str, mark: Function) -> None:
    eqns = marks_in(name, jax.grad(lambda x: (mark(x) * 2.0).sum()), X)
    assert len(eqns) == 2  # one on the value, one on its cotangent
    spec = eqns[0].params.get("spec")
    left = {"spec": tuple(axes or None for axes in spec)} if spec else {}
    # What a value is to be whole for, its cotangent need not be.
    assert eqns[1].params == {**eqns[0].params, **left}


@each_mark
@pytest.mark.parametrize("transform", ["grad", "checkpoint", "second order"])
@pytest.mark.parametrize("function", [twice, scanned])
def test_derived_programs_keep_their_marks(
    name: str,
    mark: Function,
    transform: str,
    function: Callable[[Function, jax.Array], jax.Array],
) -> None:
    forward = marks_in(name, total(function, mark), X)
    derived = marks_in(name, TRANSFORMS[transform](total(function, mark)), X)
    assert len(derived) >= 2 * len(forward)


@pytest.mark.parametrize(("in_axis", "expected"), [(0, 2), (1, 2), (2, 1), (-1, 1)])
def test_vmap_shifts_the_axis_of_a_stream(in_axis: int, expected: int) -> None:
    batch = jnp.ones((2, 2, 2))
    batched = jax.vmap(partial(stream, axis=1), in_axes=in_axis, out_axes=in_axis)
    (eqn,) = marks_in("stream", batched, batch)
    assert eqn.params["axis"] == expected
    chex.assert_trees_all_equal(batched(batch), batch)


@pytest.mark.parametrize(
    ("in_axis", "expected"),
    [(0, (None, ("tp",), ())), (1, (("tp",), None, ())), (2, (("tp",), (), None))],
)
def test_vmap_leaves_its_own_dim_of_a_spec_free(in_axis: int, expected: object) -> None:
    batched = jax.vmap(MARKS["shard"], in_axes=in_axis)
    (eqn,) = marks_in("shard", batched, jnp.ones((2, 2, 2)))
    assert eqn.params["spec"] == expected


def test_vmap_with_an_spmd_axis_name_puts_it_into_the_spec() -> None:
    batched = jax.vmap(MARKS["shard"], spmd_axis_name="dp")
    (eqn,) = marks_in("shard", batched, jnp.ones((2, 2, 2)))
    assert eqn.params["spec"] == (("dp",), ("tp",), ())


def test_vmap_over_an_axis_that_the_spec_has_is_refused() -> None:
    batched = jax.vmap(MARKS["shard"], spmd_axis_name="tp")
    with pytest.raises(errors.DuplicateAxisError, match="spmd_axis_name"):
        batched(jnp.ones((2, 2, 2)))


@each_mark
def test_vmap_leaves_a_marker_on_an_unmapped_value_alone(
    name: str, mark: Function
) -> None:
    (plain,) = marks_in(name, mark, X)
    batched = jax.vmap(lambda y: mark(X) + y, spmd_axis_name="tp")
    (eqn,) = marks_in(name, batched, jnp.ones((2, 4, 3)))
    assert eqn.params == plain.params
    under_scan = jax.vmap(lambda y: scanned(mark, X) + y)
    (eqn,) = marks_in(name, under_scan, jnp.ones((2, 4, 3)))
    assert eqn.params == plain.params


@each_mark
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_marker_is_the_identity_in_shard_map(
    name: str,
    mark: Function,
    check_vma: bool,
    wrap: Callable[[Any], Any],
    make_mesh: MakeMesh,
) -> None:
    @partial(
        jax.shard_map,
        mesh=make_mesh((2,), ("tp",)),
        in_specs=P(None, "tp"),
        out_specs=P(),
        check_vma=check_vma,
    )
    def summed(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sin(mark(x)), "tp")

    x = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)
    chex.assert_trees_all_close(wrap(summed)(x)[:, 0], jnp.sin(x).sum(1), rtol=1e-6)
    grad = wrap(jax.grad(lambda x: summed(x).sum()))(x)
    chex.assert_trees_all_close(grad, jnp.cos(x), rtol=1e-6)


@each_mark
def test_a_marker_keeps_the_manual_axes_of_its_operand(
    name: str, mark: Function, make_mesh: MakeMesh
) -> None:
    """Otherwise `shard_map` accepts `out_specs` that are wrong."""
    wrong = jax.shard_map(
        mark, mesh=make_mesh((2,), ("tp",)), in_specs=P("tp"), out_specs=P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        wrong(X)


@each_mark
def test_a_marker_leaves_no_trace_in_the_program(name: str, mark: Function) -> None:
    marked = jax.jit(lambda x: twice(mark, x)).lower(X).as_text()
    plain = jax.jit(lambda x: twice(lambda x: x, x)).lower(X).as_text()
    assert marked == plain
