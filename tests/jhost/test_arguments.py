"""Every argument of what is public, of a wrong type or value: one clear error."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost import errors, testing

X = jnp.ones((8, 2))
WRONG = object()
DOUBLE: Any = jhost.jit(lambda x: jhost.stream(x * 2, axis=0))

JIT = {
    "mesh": [5, "tp"],
    "in_shardings": [5, "tp"],
    "out_shardings": [5, {"y": "tp"}],
    "static_argnums": ["a", 1.5, [None]],
    "static_argnames": [5, [5]],
    "donate_argnums": ["a", 1.5],
    "donate_argnames": [5, [5]],
    "chunks": [0, 1.5, "many", True],
    "pipeline": [5, "ring", []],
    "replication_limit": [-1, 1.5],
    "compiler_options": [[1], "a", 5, {1: 2}, {"xla": WRONG}],
    "tuning": [5, [5]],
}
STREAM = {
    "x": ["rows", None, {"x": 1}],
    "axis": [2, -3, 1.0, None, True, "rows"],
    "chunks": [0, 9, 1.5, True, "many"],
    "pipeline": [5, "ring"],
}
TUNE = {
    "kwargs": [5, [1], {1: 2}],
    "gradients": ["a", 1.5, [None], 7, -2],
    "rounds": [0, 1.5, "a", True],
}
EQUALS = {
    "kwargs": [5, [1]],
    "gradients": ["a", -1],
    "tolerance": ["a", -1, float("nan"), True],
    "pipelines": [[], 5, "off", ["ring"]],
    "meshes": [[], 5, [5], [{"tp": "a"}], [{"tp": 0}], [{"tp": 4096}], [{1: 1}]],
}
PROGRAM = {
    "loops": ["a", 1.5],
    "communications": [5, "AllGather over tp"],
    "kwargs": [5],
}
INITIALIZE = {"program_timeout_seconds": [0, "a", float("nan")]}


def call(function: Any, *args: Any, **fixed: Any) -> Any:
    return lambda name, value: function(*args, **{**fixed, name: value})


FUNCTIONS: dict[str, tuple[Any, dict[str, list[Any]]]] = {
    "jit": (call(jhost.jit, lambda x: x), JIT),
    "with_options": (call(DOUBLE.with_options), {**JIT, "threads": [4]}),
    "stream": (call(jhost.stream, x=X, axis=0), STREAM),
    "serial": (call(jhost.serial), {"x": STREAM["x"]}),
    "shard": (
        call(jhost.shard, x=X, spec=P()),
        {"x": STREAM["x"], "spec": [5, "tp", P(5), P("a", "a"), P("a", "b", "c")]},
    ),
    "tune": (call(jhost.tune, DOUBLE, X, cache=False, progress=False), TUNE),
    "assert_equals_plain": (call(testing.assert_equals_plain, DOUBLE, X), EQUALS),
    "assert_close": (
        call(testing.assert_close, given=X, wanted=X),
        {"given": ["rows"], "wanted": [WRONG], "tolerance": EQUALS["tolerance"]},
    ),
    "assert_program": (call(testing.assert_program, DOUBLE, X), PROGRAM),
    "mesh_of": (
        call(testing.mesh_of),
        {"axes": [5, None, [("tp", 1)], {"tp": 1.5}, {1: 1}, {"tp": -1}]},
    ),
    "initialize": (call(jhost.distributed.initialize), INITIALIZE),
}
CASES = [
    pytest.param(run, name, value, id=f"{function}-{name}-{number}")
    for function, (run, arguments) in FUNCTIONS.items()
    for name, values in arguments.items()
    for number, value in enumerate(values)
]


@pytest.mark.parametrize(("run", "name", "value"), CASES)
def test_what_cannot_be_is_refused(run: Any, name: str, value: Any) -> None:
    with pytest.raises(errors.JhostError) as raised:
        run(name, value)
    assert isinstance(raised.value, TypeError | ValueError)


TAKE_FUNCTIONS = [
    jhost.jit,
    jhost.explain,
    jhost.profile,
    jhost.tune,
    testing.assert_equals_plain,
    testing.assert_pipelined,
    testing.assert_program,
    testing.programs,
]


@pytest.mark.parametrize("function", TAKE_FUNCTIONS, ids=lambda f: f.__name__)
def test_what_is_no_function_is_refused(function: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"takes a function.*but got 5"):
        function(5)


def test_messages_name_the_argument_and_what_was_given() -> None:
    for function, (run, arguments) in FUNCTIONS.items():
        if function in ("jit", "tune", "assert_equals_plain"):
            for name in {"compiler_options", "rounds", "meshes"} & arguments.keys():
                with pytest.raises(errors.JhostError, match=name):
                    run(name, arguments[name][0])


def test_a_number_of_gradients_may_count_from_the_last() -> None:
    how: Any = {"cache": False, "progress": False, "rounds": 1}
    f = jhost.jit(lambda n, x: jhost.stream(x * n.astype(x.dtype), axis=0))
    last = jhost.tune(f, jnp.ones((), jnp.int32), X, gradients=-1, **how)
    assert len(last.programs) == 3
    with pytest.raises(errors.ArgumentError, match="no gradients"):
        jhost.tune(f, jnp.ones((), jnp.int32), X, gradients=-2, **how)


def test_jax_s_own_words_stand_where_they_are_clear() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        DOUBLE()
    with pytest.raises(ValueError, match="only accepts 1 positional arguments"):
        jhost.jit(lambda x: x, donate_argnums=7)(X)
    with pytest.raises(TypeError, match="type <class 'str'>"):
        DOUBLE("a")
