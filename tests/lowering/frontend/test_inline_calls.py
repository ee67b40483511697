"""A jaxpr without calls: what is inlined, what is kept, and that it means the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost.lowering.frontend.inline_calls import FlatJaxpr, inline_calls
from jhost.lowering.rules.dim_rule import bind, shape_of
from jhost.lowering.rules.properties import INLINED
from tests.lowering.traced import array, check

MakeMesh = Callable[..., Mesh]


def inlined(fun: Callable[..., Any], *args: Any) -> list[str]:
    """The primitives left of `fun`; evaluated one by one they give what `fun` gives."""
    flat = inline_calls(jax.make_jaxpr(fun)(*args))
    check_defined_once(flat)
    given = evaluate(flat, args)
    chex.assert_trees_all_close(given, jax.tree.leaves(fun(*args)), rtol=1e-6)
    return [eqn.primitive.name for eqn in flat.eqns]


def check_defined_once(flat: FlatJaxpr) -> None:
    defined = set(flat.invars)
    for eqn in flat.eqns:
        assert eqn.primitive.name not in INLINED
        assert defined.issuperset(v for v in eqn.invars if isinstance(v, Var))
        assert defined.isdisjoint(eqn.outvars)
        defined.update(eqn.outvars)
    assert defined.issuperset(flat.outvars)


def evaluate(flat: FlatJaxpr, args: Any) -> list[Any]:
    env: dict[Var, Any] = dict(zip(flat.invars, args, strict=True))

    def run(eqn: JaxprEqn) -> list[Any]:
        ins = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        return bind(eqn, ins)

    for eqn in flat.eqns:
        env.update(zip(eqn.outvars, run(eqn), strict=True))
    return [env[var] for var in flat.outvars]


def loss(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jnp.sum(fun(*args))


# --- Calls -------------------------------------------------------------------------- #


def test_jit_is_inlined_at_any_depth() -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * 2

    @jax.jit
    def outer(x: jax.Array) -> jax.Array:
        return inner(x) + inner(inner(x))

    names = inlined(outer, array(4))
    assert names == ["sin", "mul"] * 3 + ["add"]


def test_custom_jvp_is_inlined() -> None:
    assert inlined(jax.nn.relu, array(4)) == ["max"]


def test_the_derivative_by_a_custom_jvp_is_what_the_rule_says() -> None:
    """The rules have acted before the calls are inlined."""

    @jax.custom_jvp
    def f(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(*primals), 3 * tangents[0]))
    names = inlined(jax.grad(loss(f)), array(4))
    assert "cos" not in names


def test_custom_vjp_is_inlined() -> None:
    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * jnp.tanh(x),))
    assert inlined(f, array(4)) == ["sin"]
    names = inlined(jax.grad(loss(f)), array(4))
    assert "tanh" in names
    assert "cos" not in names


@jax.jit
def twice_sin(x: jax.Array) -> jax.Array:
    return jnp.sin(jnp.sin(x))


def test_of_a_linear_solve_its_solution_is_inlined() -> None:
    def f(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.custom_linear_solve(
            lambda v: a * v, x, lambda _, y: y / (a + b - b), lambda _, y: y / (b + a)
        )

    assert inlined(f, array(4), array(4), array(4) + 1) == ["add", "sub", "div"]
    pulled = jax.grad(loss(f))  # by the transposed solution
    names = inlined(pulled, array(4), array(4) + 1, array(4) + 2)
    assert names == ["broadcast_in_dim", "add", "div"]


def test_remat_is_inlined_without_a_barrier_in_the_forward() -> None:
    assert inlined(jax.checkpoint(twice_sin), array(4)) == ["sin", "sin"]


def test_remat_keeps_its_barrier_where_it_is_differentiated() -> None:
    """Without it XLA would find the forward's values again, and keep them."""
    names = inlined(jax.grad(loss(jax.checkpoint(twice_sin))), array(4))
    assert names.count("optimization_barrier") == 2  # x and the cotangent
    barrier = names.index("optimization_barrier")
    assert "sin" in names[barrier:]


def test_a_barrier_is_an_equation_for_each_operand() -> None:
    """Of what was differentiated, and of its cotangent: the one binds not the other."""
    f = jax.grad(loss(jax.checkpoint(twice_sin)))
    flat = inline_calls(jax.make_jaxpr(f)(array(4)))
    ((one, other),) = flat.barriers
    assert one.invars == [flat.invars[0]]
    assert {one, other} <= {*flat.eqns}


def test_with_streams_each_operand_has_a_barrier_of_its_own() -> None:
    """A stream goes through one of them; the others' values need not have its dim."""

    @jax.checkpoint
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(jhost.stream(jnp.sin(x) * y, 0))

    names = inlined(jax.grad(loss(f), (0, 1)), array(4), array(4))
    assert names.count("optimization_barrier") == 3  # x, y, and the cotangent


def test_remat_that_may_be_merged_has_no_barrier() -> None:
    remat = jax.checkpoint(twice_sin, prevent_cse=False)
    assert "optimization_barrier" not in inlined(jax.grad(loss(remat)), array(4))


def test_a_jhost_function_inside_another_is_inlined_with_its_marks() -> None:
    @jhost.jit
    def inner(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.tanh(x), axis=0, chunks=2)

    def outer(x: jax.Array) -> jax.Array:
        return inner(x) + 1

    assert inlined(outer, array(4)) == ["tanh", "stream", "add"]
    program = check(outer, array(4), rtol=1e-6)
    assert "for i in range(2)" in str(program)


def test_a_function_called_twice_has_variables_of_its_own_each_time() -> None:
    @jax.jit
    def inner(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, x * 2

    def outer(x: jax.Array) -> jax.Array:
        a, b = inner(x)
        c, d = inner(b)
        return a + b + c + d

    assert inlined(outer, array(4)) == ["mul", "mul", "add", "add", "add"]


# --- Control flow ------------------------------------------------------------------- #


def test_scan_stays_whole() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.scan(lambda c, row: (c + twice_sin(row), c), jnp.zeros(3), x)

    assert inlined(f, array(4, 3)).count("scan") == 1


def test_while_and_cond_stay_whole() -> None:
    def f(x: jax.Array) -> jax.Array:
        x = lax.while_loop(lambda x: jnp.sum(x) < 100, lambda x: x * 2 + 1, x)
        return lax.cond(x[0] > 0, twice_sin, jnp.tanh, x)

    names = inlined(f, array(4))
    assert (names.count("while"), names.count("cond")) == (1, 1)


# --- Code that does nothing --------------------------------------------------------- #


def test_dead_code_is_dropped() -> None:
    @jax.jit
    def inner(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(x), jnp.cos(x)

    def f(x: jax.Array) -> jax.Array:
        return inner(x)[0]

    assert inlined(f, array(4)) == ["sin"]


def test_effects_are_kept() -> None:
    def f(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: None, jnp.sin(x))
        return x * 2

    flat = inline_calls(jax.make_jaxpr(f)(array(4)))
    assert flat.eqns[0].primitive.name == "sin"
    assert flat.eqns[1].effects


def test_an_empty_piece_and_a_move_to_nowhere_are_left_out() -> None:
    def f(x: jax.Array) -> list[jax.Array]:
        empty = lax.slice_in_dim(x, 4, 4)
        whole = jnp.concatenate([empty, x, empty])
        joined = jnp.concatenate([x, empty, whole])
        return jax.device_put([whole, joined, jnp.concatenate([empty, empty])])

    assert inlined(f, array(4)) == ["slice", "concatenate"]


# --- Literals ----------------------------------------------------------------------- #


def test_a_result_that_is_a_literal_is_made_by_an_equation() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, float, jax.Array]:
        return x, 2.0, x

    flat = inline_calls(jax.make_jaxpr(f)(array(4)))
    (eqn,) = flat.eqns
    assert flat.outvars == (flat.invars[0], eqn.outvars[0], flat.invars[0])
    assert jhost.jit(f)(array(4))[1] == 2


@pytest.mark.parametrize("mark", [jhost.serial, lambda x: jhost.shard(x, P())])
def test_a_mark_on_a_literal_is_on_a_variable(
    mark: Callable[[Any], Any], make_mesh: MakeMesh
) -> None:
    def f(x: jax.Array) -> jax.Array:
        return x + mark(2.0)

    mesh = make_mesh((2,), ("tp",))
    chex.assert_trees_all_equal(jhost.jit(f, mesh=mesh)(array(4)), array(4) + 2)


def closes_over(value: Any) -> Callable[..., Any]:
    """A function whose inner call has a const."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        @jax.jit
        def inner(x: jax.Array) -> jax.Array:
            return x + value

        return inner(x), inner(x * 2)

    return f


@pytest.mark.parametrize("value", [np.arange(4, dtype=np.float32), array(4, seed=3)])
def test_an_array_that_a_call_closes_over_is_one_variable(value: Any) -> None:
    flat = inline_calls(jax.make_jaxpr(closes_over(value))(array(4)))
    literals = [
        eqn
        for eqn in flat.eqns
        if any(isinstance(v, Literal) and shape_of(v) for v in eqn.invars)
    ]
    assert len(literals) == 1
    assert len(literals[0].invars) == 1
    chex.assert_trees_all_equal(
        evaluate(flat, [array(4)]), [array(4) + value, array(4) * 2 + value]
    )


def test_such_an_array_is_cut_like_any_other(make_mesh: MakeMesh) -> None:
    """Sharded and streamed, where the call has the whole of it."""
    f = closes_over(jnp.arange(8.0))

    def streamed(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, z = f(x)
        return jhost.stream(y, axis=0, chunks=2), z

    mesh = make_mesh((2,), ("tp",))
    program = check(streamed, array(8), mesh=mesh, in_shardings=P("tp"))
    assert "for i in range(2)" in str(program)
    assert program.results[0].shape == (4,)
