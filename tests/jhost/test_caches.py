"""What jhost keeps of functions: while they live, and no longer."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost import errors
from jhost._call import build
from jhost._call.execute import interpreting
from jhost._jax import ClosedJaxpr
from jhost.lowering.ir.program import Program
from jhost.lowering.layouts import propagate_layouts
from jhost.lowering.streams import plan
from jhost.testing import mesh_of

X = jnp.ones((8, 8))

SETTINGS: dict[str, Any] = {
    "one device": {},
    "four devices": {"mesh": mesh_of({"tp": 4}), "in_shardings": P("tp")},
    "interpreted": {},
}


@pytest.fixture(autouse=True, scope="module")
def from_here_on() -> None:
    """What other tests left is not looked through, which takes a second each time."""
    gc.collect()
    gc.freeze()


def use_new_function(**settings: Any) -> Callable[..., Any]:
    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.tanh(x @ x), axis=0, chunks=2)

    g: Callable[..., Any] = jhost.jit(f, **settings)
    jax.block_until_ready((g(X), jax.grad(lambda x: jnp.sum(g(x)))(X)))
    return g


def held() -> int:
    """How many programs and jaxprs there are."""
    gc.collect()
    kinds = map(type, gc.get_objects())
    return sum(issubclass(kind, Program | ClosedJaxpr) for kind in kinds)


def grows_each_time(use: Callable[[], object]) -> bool:
    """Whether each of some uses leaves more than six kilobytes behind.

    What is made once may come in any of them, and tables grow at times: in each of them
    only what is never given back grows.
    """

    def growth() -> int:
        start, _ = tracemalloc.get_traced_memory()
        use()
        gc.collect()
        end, _ = tracemalloc.get_traced_memory()
        return end - start

    tracemalloc.start()
    grows = all(growth() > 6_000 for _ in range(12))
    tracemalloc.stop()
    return grows


@pytest.mark.parametrize("name", ["one device", "four devices"])
def test_a_dropped_function_leaves_nothing(name: str) -> None:
    use_new_function(**SETTINGS[name])
    before = held()
    assert not grows_each_time(lambda: use_new_function(**SETTINGS[name]))
    assert held() <= before


def test_a_small_jaxpr_that_is_kept_each_time_is_seen() -> None:
    kept: list[ClosedJaxpr] = []
    before = held()

    def use() -> None:
        f = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x))))
        kept.append(f(np.ones((8, 8), np.float32)))

    assert grows_each_time(use)
    assert held() > before
    assert not grows_each_time(lambda: kept.append(kept[0]))


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("name", ["one device", "four devices"])
def test_a_dropped_function_frees_what_it_closes_over_at_once(name: str) -> None:
    def use(w: jax.Array) -> None:
        g = jhost.jit(
            lambda x: jhost.stream(jnp.tanh(x @ w), axis=0, chunks=2), **SETTINGS[name]
        )
        jax.block_until_ready((g(X), jax.grad(lambda x: jnp.sum(g(x)))(X)))

    w = X + 1
    closed_over = weakref.ref(w)
    use(w)
    del w
    assert closed_over() is None


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("name", ["one device", "four devices"])
def test_a_call_leaves_no_reference_cycles(name: str) -> None:
    use_new_function(**SETTINGS[name])  # this fills what is made once
    gc.collect()
    use_new_function(**SETTINGS[name])
    assert gc.collect() == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_jax_clear_caches_releases_what_living_functions_made(name: str) -> None:
    jax.clear_caches()
    before = held()
    with interpreting() if name == "interpreted" else nullcontext():
        f = use_new_function(**SETTINGS[name])
    assert held() > before
    jax.clear_caches()
    assert held() <= before
    assert f(X).shape == X.shape


@jhost.jit
def of_this_module(x: jax.Array) -> jax.Array:
    return jhost.stream(x * 2, axis=0, chunks=2)


def test_a_function_of_a_module_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(of_this_module)) is of_this_module
    assert copy.deepcopy(of_this_module) is of_this_module
    for unnamed in (jhost.jit(lambda x: x), jhost.jit(functools.partial(jnp.add, 1))):
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(unnamed)


def test_what_was_compiled_is_forgotten_when_asked() -> None:
    traces: list[str] = []

    @jhost.jit
    def double(x: jax.Array) -> jax.Array:
        traces.append("")
        return x * 2

    x = jnp.arange(4)
    for _ in range(2):
        assert double(x).tolist() == [0, 2, 4, 6]
        assert double(x).tolist() == [0, 2, 4, 6]
    before = len(traces)
    double.clear_cache()
    assert double(x).tolist() == [0, 2, 4, 6]
    assert len(traces) > before


def counted_traces(jit: Callable[..., Any]) -> Counter[str]:
    """How often a function, its inner one and its rule are traced in some calls."""
    counts: Counter[str] = Counter()

    @jax.custom_jvp
    def inner(x: jax.Array) -> jax.Array:
        counts["inner"] += 1
        return x * 2

    @inner.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        counts["rule"] += 1
        return inner(*primals), tangents[0] * 2

    def f(x: jax.Array) -> jax.Array:
        counts["f"] += 1
        return jax.lax.scan(lambda c, _: (inner(c), None), inner(x), None, length=2)[0]

    g = jit(f)
    for _ in range(2):
        for use in (g, jax.grad(lambda x: jnp.sum(g(x))), jax.vmap(g), g.lower):
            use(X)
        jax.jit(lambda x: g(g(x)))(X)
    return counts


@pytest.mark.parametrize("name", ["one device", "four devices"])
def test_nothing_is_traced_more_often_than_by_jax_jit(name: str) -> None:
    hosted = functools.partial(jhost.jit, **SETTINGS[name])
    assert counted_traces(hosted) == counted_traces(jax.jit)


def test_types_of_results_are_those_of_the_plain_function() -> None:
    def f(x: jax.Array, scale: float, *, wide: bool) -> dict[str, jax.Array]:
        y = jhost.stream(x * scale, axis=0)
        return {"y": y.astype(jnp.float32) if wide else y, "sum": y.sum()}

    hosted = jhost.jit(f, static_argnames="wide")
    for x in (
        jnp.ones((8, 2), jnp.bfloat16),
        jax.ShapeDtypeStruct((0, 3), jnp.float16),
    ):
        for wide in (False, True):
            plain = jax.eval_shape(functools.partial(f, wide=wide), x, 2.0)
            assert hosted.eval_shape(x, 2.0, wide=wide) == plain
    with pytest.raises(errors.StreamDimError):
        jhost.jit(lambda x: jhost.stream(jnp.sort(x, 0), axis=0)).eval_shape(x)


@pytest.mark.parametrize("donated", [(), (0, 2)], ids=["kept", "donated"])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_arguments_that_nothing_reads_are_no_second_program(
    donated: tuple[int, ...],
) -> None:
    """JAX takes them out of the program, which is lowered before that."""

    def f(_: jax.Array, x: jax.Array, last: jax.Array) -> jax.Array:
        return jhost.stream(jnp.tanh(x @ x), axis=0, chunks=2)

    mesh = mesh_of({"tp": 4})
    g = jhost.jit(f, mesh=mesh, in_shardings=P("tp"), donate_argnums=donated)
    counted = mock.Mock(wraps=build.build_program)
    with mock.patch.object(build, "build_program", counted):
        compiled = g.lower(X, X, X).compile()
        assert counted.call_count == 1
        np.testing.assert_array_equal(compiled(X + 1, X, X + 2), g(X + 1, X, X + 2))
        assert counted.call_count == 1
    np.testing.assert_allclose(g(X + 1, X, X + 2), f(X, X, X), rtol=1e-6)
    gradient = jax.grad(lambda *xs: jnp.sum(g(*xs)), (0, 1, 2))
    one, other, third = gradient(X, X * 0.1, X)
    np.testing.assert_array_equal(one, jnp.zeros_like(X))
    np.testing.assert_array_equal(third, jnp.zeros_like(X))
    wanted = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x)))(X * 0.1)
    np.testing.assert_allclose(other, wanted, rtol=1e-5)


def test_a_block_and_its_gradient_are_made_once() -> None:
    """One program for each pass; what one stage has found is handed on to the next."""

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.nn.gelu(jhost.stream(x, axis=0) @ up) @ down

    specs = P("tp"), P(None, "tp"), P("tp")
    f = jhost.jit(block, mesh=mesh_of({"tp": 4}), in_shardings=specs)
    work = (
        (build, "build_program"),
        (plan, "plan_streams"),
        (propagate_layouts, "solve_layouts"),
    )
    with contextlib.ExitStack() as stack:
        programs, plans, layouts = (
            stack.enter_context(
                mock.patch.object(module, name, wraps=getattr(module, name))
            )
            for module, name in work
        )
        jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1, 2))(X, X, X)
    assert programs.call_count <= 3
    assert plans.call_count <= 6
    assert layouts.call_count <= 3
