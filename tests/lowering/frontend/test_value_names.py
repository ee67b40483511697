"""Values are named by the lines of the user's that make them."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from jhost.lowering.frontend.build import build
from jhost.lowering.frontend.inline_calls import inline_calls
from jhost.lowering.frontend.value_names import Variables, value_names
from jhost.lowering.frontend.values import DisplayNames

X = jnp.ones((4, 4))


def names_of(fun: Callable[..., Any], variables: Variables = "all") -> list[str]:
    """A name for each value, in order."""
    flat = inline_calls(jax.make_jaxpr(fun)(X))
    names = value_names(flat.eqns, {flat.invars[0]: "x"}, variables)
    made = [var for eqn in flat.eqns for var in eqn.outvars]
    return [re.sub(r":\d+$", "", names[var]) for var in made]


FILE = "test_value_names.py"


def test_a_variable_is_what_is_assigned_as_a_whole() -> None:
    def nested(x: Any) -> Any:
        h = jnp.sin(x * 2.0)
        return jnp.cos(h)

    wanted = [f"`x * 2.0` at {FILE}", "h", f"`jnp.cos(h)` at {FILE}"]
    assert names_of(nested) == wanted


def test_a_long_call_is_called_by_its_function() -> None:
    def long(x: Any) -> Any:
        return jnp.cos(jnp.sin(x) * 2.0 + jnp.tanh(x) * 3.0 + jnp.exp(x) * 4.0 + x)

    assert names_of(long)[-1] == f"`jnp.cos(...)` at {FILE}"


def test_a_long_operation_is_called_by_its_short_operand() -> None:
    def right(x: Any) -> Any:
        return jnp.sin(x) * 2.0 + jnp.tanh(x) * 3.0 + jnp.exp(x) * 4.0 + jnp.cos(x)

    def left(x: Any) -> Any:
        return x @ (jnp.sin(x) * 2.0 + jnp.tanh(x) * 3.0 + jnp.exp(x) * 4.0)

    assert names_of(right)[-1] == f"`... + jnp.cos(x)` at {FILE}"
    assert names_of(left)[-1] == f"`x @ ...` at {FILE}"


def test_another_long_expression_is_called_by_its_primitive() -> None:
    def long(x: Any) -> Any:
        return (jnp.sin(x) * 2.0 + jnp.tanh(x) * 3.0 + jnp.exp(x) * 4.0) // (
            jnp.sin(x) * 2.0 + jnp.tanh(x) * 3.0 + jnp.exp(x) * 4.0
        )

    def both(x: Any) -> Any:
        return (jnp.sin(x) * 2.0 + jnp.tanh(x) * 3.0 + jnp.exp(x) * 4.0) * (
            jnp.sin(x) * 2.0 + jnp.tanh(x) * 3.0 + jnp.exp(x) * 4.0
        )

    assert "..." not in names_of(long)[-1]
    assert names_of(both)[-1] == f"mul at {FILE}"


def test_what_a_call_makes_on_the_way_is_called_by_primitive_and_call() -> None:
    def attend(x: Any) -> Any:
        weights = jax.nn.softmax(x)
        return weights

    *before, last = names_of(attend)
    assert last == "weights"
    assert f"exp in `jax.nn.softmax(x)` at {FILE}" in before
    assert f"a sum in `jax.nn.softmax(x)` at {FILE}" in before


def test_a_cast_inside_a_call_is_called_as_its_operand() -> None:
    def mean(x: Any) -> Any:
        return jnp.mean(jnp.bfloat16(jnp.sin(x)))  # in float32

    _, narrow, wide, *_ = names_of(mean)
    assert narrow == wide == f"`jnp.bfloat16(jnp.sin(x))` at {FILE}"


def test_what_is_cast_or_reshaped_keeps_its_name() -> None:
    def cast(x: Any) -> Any:
        h = jnp.sin(x)
        return x.astype(jnp.bfloat16).reshape(16), h.T

    *_, cast_x, flat, turned = names_of(cast)
    assert (cast_x, flat, turned) == ("x", "x", "h")


def test_a_weight_that_a_line_casts_keeps_its_path() -> None:
    def cast(x: Any) -> Any:
        kernel = x.astype(jnp.bfloat16).T
        scaled = kernel * 2
        return kernel, scaled

    assert {"kernel", "scaled"} <= {*names_of(cast)}
    flat = inline_calls(jax.make_jaxpr(cast)(X))
    path = "params['kernel']"
    names = value_names(flat.eqns, {flat.invars[0]: path}, paths=[path])
    assert [names[var] for var in flat.outvars] == [path, "scaled"]


def gradients_of(fun: Callable[..., Any], weights: Any) -> list[str]:
    """What the gradients are called that the function's weights get."""
    closed: Any = jax.make_jaxpr(jax.grad(fun))(weights)
    flat, paths = inline_calls(closed), sorted(weights)
    given = dict(zip(flat.invars, paths, strict=True))
    names = value_names(flat.eqns, given, "all", paths)
    return [re.sub(r":\d+$", "", names[var]) for var in flat.outvars]


def test_a_gradient_is_called_by_its_parameter() -> None:
    def block(w: Any) -> Any:
        x = jnp.ones((3, 4))
        for name in ("a", "b"):  # one line for two weights
            x = jnp.tanh(x @ w[name].astype(jnp.float32)) * w["gain"]
        return x.sum()

    weights = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4)), "gain": jnp.ones(4)}
    a, b, _ = gradients_of(block, weights)
    assert (a, b) == ("the gradient of a", "the gradient of b")


def test_square_values_are_not_taken_for_weights() -> None:
    def square(w: Any) -> Any:
        h = jnp.sin(jnp.ones((4, 4)))
        return jnp.sum(jnp.cos((h @ w["a"]) @ w["b"]) @ w["c"])

    weights = {name: jnp.ones((4, 4)) for name in "abc"}
    assert gradients_of(square, weights) == [f"the gradient of {n}" for n in "abc"]


def test_a_loop_s_results_are_called_as_in_its_body() -> None:
    def scanned(x: Any) -> Any:
        def body(total: Any, row: Any) -> Any:
            rows = row * 2.0
            return total + rows, rows

        return jax.lax.scan(body, jnp.zeros(4), x)

    closed: Any = jax.make_jaxpr(scanned)(X)
    program = build(
        inline_calls(closed),
        name="scanned",
        mesh=AbstractMesh((), ()),
        param_names=["x"],
        result_names=["y", "z"],
        display_names=DisplayNames(["x"], [None, None], "all", frozenset("x")),
    )
    sums, rows = (program.display_names[each.name] for each in program.results)
    assert sums.startswith("`total + rows` at ")
    assert rows == "rows"


def test_statements_of_several_lines_and_targets() -> None:
    class Box:
        pass

    box: Any = Box()

    def several(x: Any) -> Any:
        one, two = jnp.sin(x), jnp.cos(x)
        box.value = jnp.tanh(
            one,
        )
        two += box.value
        two = (last := jnp.exp(two))
        typed: Any = last * last
        return typed

    wanted = ["one", "two", "box.value", "two", "last", "typed"]
    assert names_of(several) == wanted


def test_one_variable_for_several_results_names_none() -> None:
    def unpacked(x: Any) -> Any:
        values, places = jax.lax.top_k(x, 2)
        return values, places

    assert names_of(unpacked) == [f"top_k in `jax.lax.top_k(x, 2)` at {FILE}"] * 2


def test_of_what_a_call_makes_the_last_is_its_value() -> None:
    def call(x: Any) -> Any:
        y = jax.nn.softmax(x)
        return y

    *before, last = names_of(call)
    assert last == "y"
    assert all(name.endswith(f" at {FILE}") for name in before)
    assert "y" not in names_of(call, "alone")  # which of them it is, nobody knows


def test_programs_of_cotangents_have_no_variables() -> None:
    def fun(x: Any) -> Any:
        y = jnp.sin(x)
        return y

    assert names_of(fun, "alone") == ["y"]
    assert names_of(fun, "none") == [f"sin in `jnp.sin(x)` at {FILE}"]


@pytest.mark.parametrize("text", ["", "%magic\ny = x * 2\n", "y = x * 2\n"])
def test_a_source_that_is_missing_or_no_python_names_no_variable(text: str) -> None:
    code = "def fun(x):\n    y = x * x\n    return y\n"
    scope: dict[str, Any] = {}
    exec(compile(code, "/nowhere/cell.py", "exec"), scope)
    linecache.cache["/nowhere/cell.py"] = (len(text), None, text.splitlines(True), "")
    assert names_of(lambda x: scope["fun"](x)) == ["mul at cell.py"]


def test_what_jax_traces_once_is_at_the_line_of_its_call() -> None:
    def twice(x: Any) -> Any:
        q = jnp.linalg.norm(x)
        return q + jnp.linalg.norm(x + 1.0)

    found = names_of(twice)
    assert "q" in found
    assert all(name == "q" or name.endswith(FILE) for name in found)
