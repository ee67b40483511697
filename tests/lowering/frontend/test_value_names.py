"""Values are named by the lines of the user's that make them."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jhost.lowering.frontend.inline_calls import inline_calls
from jhost.lowering.frontend.value_names import Variables, value_names

X = jnp.ones((4, 4))


def names_of(fun: Callable[..., Any], variables: Variables = "all") -> list[str]:
    """A name for each value, in order."""
    flat = inline_calls(jax.make_jaxpr(fun)(X))
    names = value_names(flat.eqns, {flat.invars[0]: "x"}, variables)
    made = [var for eqn in flat.eqns for var in eqn.outvars]
    return [names[var].split(":")[0] for var in made]


FILE = "test_value_names.py"


def test_a_variable_is_what_is_assigned_as_a_whole() -> None:
    def nested(x: Any) -> Any:
        h = jnp.sin(x * 2.0)
        return jnp.cos(h)

    assert names_of(nested) == [f"mul at {FILE}", "h", f"cos at {FILE}"]


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

    assert names_of(unpacked) == [f"top_k at {FILE}"] * 2


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
    assert names_of(fun, "none") == [f"sin at {FILE}"]


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
