"""What `jhost._jax` hides: tracing, where a call is made, and the user's line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import compute_on
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

from jhost._jax import (
    arg_names,
    aval_of,
    close,
    evaluate,
    is_tracing,
    result_paths,
    source_line,
    trace,
    under_outer_trace,
    user_context,
)

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def model(params: dict[str, jax.Array], x: jax.Array, *, scale: float = 1.0) -> Any:
    return {"y": x @ params["w"] * scale, "x": x}


def eqns_of(function: Callable[..., Any], *args: Any) -> list[JaxprEqn]:
    return list(jax.make_jaxpr(function)(*args).eqns)


def test_a_trace_keeps_the_user_s_names() -> None:
    traced = trace(model, ({"w": X.T}, X), {"scale": 2.0})
    assert arg_names(traced.jaxpr) == ("params['w']", "x", "scale")
    assert result_paths(traced.jaxpr) == ("result['x']", "result['y']")
    results = evaluate(traced.jaxpr, (*traced.consts, *traced.args))
    chex.assert_trees_all_close(
        jax.tree.unflatten(traced.out_tree, results), model({"w": X.T}, X, scale=2.0)
    )


def test_a_trace_keeps_weak_types() -> None:
    weak = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    traced = trace(lambda x, y: x * y, (1.0, weak), {})
    assert [aval_of(v).weak_type for v in traced.jaxpr.invars] == [True, True]


def test_static_and_donated_arguments_are_those_of_jit() -> None:
    def run(kind: str, x: jax.Array, n: int, *, y: jax.Array) -> jax.Array:
        return x * n + y if kind == "affine" else x

    by_num = trace(run, ("affine", X, 3), {"y": X}, static_argnums=(0, 2))
    by_name = trace(
        run,
        ("affine", X),
        {"y": X, "n": 3},
        static_argnames=("kind", "n"),
        donate_argnames="y",
    )
    for traced in (by_num, by_name):
        assert arg_names(traced.jaxpr) == ("x", "y")
        chex.assert_trees_all_equal(traced.args, (X, X))
        chex.assert_trees_all_equal(evaluate(traced.jaxpr, traced.args)[0], X * 4)
    assert by_num.donated == (False, False)
    assert by_name.donated == (False, True)
    args, kwargs = jax.tree.unflatten(by_name.in_tree, by_name.args)
    assert (len(args), list(kwargs)) == (1, ["y"])


def test_what_a_function_closes_over_comes_before_its_arguments() -> None:
    def check(outer: jax.Array) -> jax.Array:
        traced = trace(lambda x: x * X + outer, (X,), {})
        assert not traced.jaxpr.consts
        assert len(traced.jaxpr.invars) == len(traced.consts) + 1
        assert any(value is outer for value in traced.consts)
        assert arg_names(traced.jaxpr) == ("", "", "x")
        return evaluate(traced.jaxpr, (*traced.consts, *traced.args))[0]

    chex.assert_trees_all_equal(check(X + 1), X * X + X + 1)
    chex.assert_trees_all_equal(jax.jit(check)(X + 1), X * X + X + 1)
    grad = jax.grad(lambda x: check(x).sum())(X)
    chex.assert_trees_all_equal(grad, jnp.ones_like(X))


def test_a_callable_without_weak_references_is_traced() -> None:
    class Scale:
        __slots__ = ("by",)

        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.by

    traced = trace(Scale(3.0), (X,), {})
    chex.assert_trees_all_equal(evaluate(traced.jaxpr, traced.args)[0], X * 3)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda f: f(X), False),
        (lambda f: jax.jvp(f, (X,), (X,)), False),
        (lambda f: jax.grad(lambda x: f(x).sum())(X), False),
        (lambda f: jax.linearize(f, X), False),
        (lambda f: jax.vmap(jax.grad(lambda x: f(x).sum()))(X), False),
        (lambda f: jax.jit(f)(X), True),
        (lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X), True),
        (lambda f: jax.grad(jax.jit(lambda x: f(x).sum()))(X), True),
        (lambda f: jax.make_jaxpr(f)(X), True),
        (lambda f: jax.checkpoint(f)(X), True),
        (lambda f: jax.lax.scan(lambda h, _: (f(h), None), X, None, 2), True),
        (
            lambda f: jax.shard_map(
                f,
                mesh=jax.make_mesh((2,), ("tp",), (jax.sharding.AxisType.Auto,)),
                in_specs=jax.P("tp"),
                out_specs=jax.P("tp"),
            )(X),
            True,
        ),
    ],
    ids=[
        *("eager", "jvp", "grad", "linearize", "vmap of grad", "jit", "jit of grad"),
        *("grad of jit", "make_jaxpr", "checkpoint", "scan", "shard_map"),
    ],
)
def test_a_call_knows_whether_a_larger_program_holds_it(
    transform: Callable[[Callable[[jax.Array], jax.Array]], Any], expected: bool
) -> None:
    seen: list[bool] = []

    def call(x: jax.Array) -> jax.Array:
        seen.append(under_outer_trace())
        return x * 2.0

    transform(call)
    assert set(seen) == {expected}


def test_a_constant_inside_jit_is_no_tracer() -> None:
    """So a tracer among the arguments is not what tells where a call is made."""
    seen: list[tuple[bool, bool]] = []

    def call(x: jax.Array) -> jax.Array:
        seen.append((is_tracing(x), is_tracing(X, 1.0)))
        return x

    jax.jit(call)(X)
    assert seen == [(True, False)]


def test_jaxprs_in_parameters_close() -> None:
    (eqn,) = eqns_of(jax.checkpoint(jnp.sin), X)
    inner = close(eqn.params["jaxpr"])
    assert close(inner) is inner
    chex.assert_trees_all_close(evaluate(inner, [X])[0], jnp.sin(X))


def test_the_type_of_an_array_is_known_and_others_are_refused() -> None:
    mul, ref, *_ = eqns_of(lambda x: jax.new_ref(x * 2.0)[...], X)
    literal = mul.invars[1]
    assert isinstance(literal, Literal)
    assert [aval_of(atom).shape for atom in mul.invars] == [X.shape, ()]
    with pytest.raises(TypeError, match="expected an array, got Ref"):
        aval_of(ref.outvars[0])


def test_an_equation_knows_the_user_s_line() -> None:
    (eqn,) = eqns_of(lambda x: jnp.sin(x), X)
    assert re.match(r"test_jax\.py:\d+ \(.*<lambda>\)$", source_line(eqn))
    # What has no traceback, as the equations that JAX makes up, has no line either.
    silent = type(eqn.source_info)(None, eqn.source_info.name_stack)
    assert source_line(eqn.replace(source_info=silent)) == "an unknown line"


def test_the_user_s_line_is_never_one_of_jhost() -> None:
    from jhost._annotate import stream

    (eqn,) = eqns_of(lambda x: stream(x, 0), X)
    assert source_line(eqn).startswith("test_jax.py")


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_library_s_line_is_followed_by_the_user_s_own(folder: str) -> None:
    text = "def outer(x):\n    return inner(x)\ndef inner(x):\n    return x * x\n"
    library: dict[str, Any] = {}
    exec(compile(text, f"/env/{folder}/flax/linear.py", "exec"), library)
    (eqn,) = eqns_of(lambda x: library["outer"](x), X)
    library_s, own = source_line(eqn).split(" from ")
    assert library_s == "linear.py:4 (inner)"
    assert re.match(r"test_jax\.py:\d+ \(.*<lambda>\)$", own)


def test_a_bound_again_equation_keeps_line_name_and_metadata() -> None:
    def user(x: jax.Array) -> jax.Array:
        with jax.named_scope("layer"), set_xla_metadata(kind="attention"):
            return jnp.sin(x)

    (eqn,) = eqns_of(user, X)

    def again(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"), user_context(eqn):
            return eqn.primitive.bind(x, **eqn.params)

    (bound,) = eqns_of(again, X)
    assert source_line(bound) == source_line(eqn)
    assert str(bound.source_info.name_stack) == "outer/layer"
    assert bound.ctx.xla_metadata == {"kind": "attention"}


def test_a_bound_again_equation_keeps_its_compute_stream() -> None:
    # The form that takes a function, whose name changed in 0.11.
    annotate = getattr(compute_on, "compute_on2", compute_on.compute_on)
    device = jax.memory.Space.Device
    on_stream = annotate(jnp.sin, compute_type="gpu_stream:1", out_memory_spaces=device)
    (call,) = eqns_of(on_stream, X)
    (inner,) = jaxprs_in_params(call.params)
    (eqn,) = inner.eqns

    def again(x: jax.Array) -> jax.Array:
        with user_context(eqn):
            return eqn.primitive.bind(x, **eqn.params)

    (bound,) = eqns_of(again, X)
    assert bound.ctx.compute_type == "gpu_stream:1"
