"""Reads and writes at positions known when it runs, along dims that are sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.statements import Communicate
from tests import budget
from tests.lowering.hand_built import integers, mesh_of
from tests.lowering.on_mesh import communications, exact, on, tp
from tests.lowering.traced import interpreted, plain

Array: TypeAlias = jax.Array
CACHE = P(None, "tp")


def write(cache: Array, new: Array, at: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(cache, new, at, axis=1)


def read(cache: Array, at: Array) -> Array:
    return lax.dynamic_slice_in_dim(cache, at, 2, axis=1)


def write_each(cache: Array, new: Array, at: Array) -> Array:
    return jax.vmap(lambda c, u, p: lax.dynamic_update_slice_in_dim(c, u, p, 0))(
        cache, new, at
    )


def read_each(cache: Array, at: Array) -> Array:
    return jax.vmap(lambda c, p: lax.dynamic_slice_in_dim(c, p, 2, 0))(cache, at)


def cache(*shape: int) -> Any:
    return integers(*(shape or (4, 16, 3)))


# --- What moves --------------------------------------------------------------------- #


@pytest.mark.parametrize("fun", [write, write_each])
@pytest.mark.parametrize("length", [1, 6])
def test_what_is_written_moves_nothing(fun: Callable[..., Array], length: int) -> None:
    at = jnp.array(7) if fun is write else jnp.array([-3, 0, 7, 40])
    args = cache(), cache(4, length, 3), at
    program = exact(fun, *args, **tp(4, (CACHE, P(), P()), CACHE))
    assert communications(program) == []


@pytest.mark.parametrize(("fun", "at"), [(read, 7), (read_each, [-3, 0, 7, 40])])
def test_of_what_is_read_a_sum_moves(fun: Callable[..., Array], at: Any) -> None:
    program = exact(fun, cache(), jnp.array(at), **tp(4, (CACHE, P()), P()))
    assert communications(program) == ["AllReduce tp sum"]


def test_what_is_read_and_sharded_elsewhere_is_scattered() -> None:
    settings = tp(4, (CACHE, P()), P("tp"))
    program = exact(read, cache(), jnp.array(7), **settings)
    assert communications(program) == ["ReduceScatter tp 0 sum"]


def most(x: Array, at: Array) -> Array:
    return lax.dynamic_slice_in_dim(x, at, 9, axis=1)


def test_more_than_half_of_a_dim_is_gathered() -> None:
    args = cache(3, 16, 3), jnp.array(3)
    program = exact(most, *args, **tp(4, (CACHE, P()), P()))
    assert communications(program) == ["AllGather tp 1"]


def test_or_it_is_read_where_another_dim_is_sharded_instead() -> None:
    program = exact(most, cache(), jnp.array(3), **tp(4, (CACHE, P()), P()))
    assert communications(program) == ["AllToAll tp 1 to 0", "AllGather tp 0"]


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, u, p: x.at[:, p].set(u[:, 0]),
        lambda x, u, p: x.at[:, p].add(u[:, 0]),
        lambda x, u, p: x.at[:, 3:6].set(7),
        lambda x, u, p: x.at[jnp.arange(4), p + jnp.arange(4)].set(u[:, 0]),
        lambda x, u, p: lax.dynamic_update_index_in_dim(x, u[:, 0], p, 1),
        lambda x, u, p: jax.vmap(lambda x, u: x.at[p].set(u[0]))(x, u),
    ],
    ids=["set", "add", "static", "of each", "index in dim", "one for all"],
)
def test_other_ways_to_write_move_nothing_either(fun: Callable[..., Array]) -> None:
    args = cache(), cache(4, 1, 3), jnp.array(7)
    program = exact(fun, *args, **tp(4, (CACHE, P(), P()), CACHE))
    assert communications(program) == []


@pytest.mark.parametrize("at", [4, -1, 120])
@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8])
def test_a_part_of_a_slice_that_begins_too_late_is_of_the_last_one(
    at: int, dtype: Any
) -> None:
    """XLA may make one slice of the two, which begins as late as it can by itself."""

    def f(x: Array, at: Array) -> Array:
        return jhost.shard(lax.dynamic_slice_in_dim(x, at, 2), P("tp"))

    exact(f, integers(5, 3), jnp.array(at).astype(dtype), **tp(8, P(), P()))


def test_the_transpose_of_a_write_is_a_read() -> None:
    def back(x: Array, new: Array, at: Array, given: Array) -> Any:
        return jax.vjp(lambda x, new: write(x, new, at), x, new)[1](given)

    args = cache(), cache(4, 2, 3), jnp.array(7), cache()
    settings = tp(4, (CACHE, P(), P(), CACHE), (CACHE, P()))
    assert communications(exact(back, *args, **settings)) == ["AllReduce tp sum"]


@pytest.mark.parametrize(("fun", "at"), [(read, 7), (read_each, [-3, 0, 7, 40])])
def test_the_transpose_of_a_read_is_a_write(fun: Callable[..., Array], at: Any) -> None:
    def back(x: Array, given: Array) -> Any:
        return jax.vjp(lambda x: fun(x, jnp.array(at)), x)[1](given)

    settings = tp(4, (CACHE, P()), (CACHE,))
    assert communications(exact(back, cache(), cache(4, 2, 3), **settings)) == []


def test_a_decoding_loop_leaves_its_cache_where_it_is() -> None:
    def decode(cache: Array, x: Array) -> tuple[Array, Array]:
        def step(at: Any, carried: tuple[Array, Array]) -> tuple[Array, Array]:
            cache, x = carried
            cache = write(cache, x[:, None], at)
            seen = jnp.where(jnp.arange(16)[:, None] <= at, cache, 0)
            return cache, seen.sum(1) % 5

        return lax.fori_loop(2, 9, step, (cache, x))

    settings = tp(4, (CACHE, P()), (CACHE, P()))
    program = exact(decode, cache(), cache(4, 3), **settings)
    found = [s for s in statements(program) if isinstance(s, Communicate)]
    assert [stmt.kind for stmt in found] == ["AllReduce"]


def test_a_write_elsewhere_leaves_a_part_as_it_was() -> None:
    """The part is a slice of what all devices have."""

    def f(x: Array, new: Array, at: Array) -> Array:
        return jhost.shard(x, CACHE).at[:, at].set(new)

    settings = tp(4, (P(), P(), P()), CACHE)
    exact(f, cache(), cache(4, 1, 3)[:, 0], jnp.array(7), **settings)


def test_rows_that_no_mesh_divides_are_written_each_at_its_position() -> None:
    def both(x: Array, new: Array, at: Array) -> tuple[Array, Array]:
        x = jhost.shard(x, P("tp"))
        return write_each(x, new, at), x.at[jnp.arange(5), at].add(new[:, 0])

    at = jnp.array([6, 9, -1, 40, 3])
    exact(both, cache(5, 16, 3), cache(5, 2, 3), at, **tp(4, P(), P()))


# --- At random ---------------------------------------------------------------------- #


@dataclasses.dataclass(frozen=True)
class Case:
    """A write and a read of windows along dims 1 and 2, of each row or of all."""

    mesh: dict[str, int]
    spec: P
    shape: tuple[int, int, int]
    window: tuple[int, int]
    starts: tuple[tuple[int, int], ...]
    each: bool
    unsigned: bool
    dtype: str
    wrapped: str

    def arguments(self) -> tuple[Any, ...]:
        dtype = np.uint8 if self.unsigned else np.int32
        starts = np.array(self.starts).clip(0 if self.unsigned else -99)
        x = np.abs(integers(*self.shape)) % 2
        new = np.abs(integers(self.shape[0], *self.window, seed=1)) % 2
        arrays = (jnp.asarray(a).astype(self.dtype) for a in (x, new))
        return *arrays, starts.astype(dtype)

    def function(self, x: Array, new: Array, starts: Array) -> tuple[Array, Array]:
        x = jhost.shard(x, self.spec)
        match self.wrapped:
            case "scan":

                def step(x: Array, n: Array) -> tuple[Array, Array]:
                    return self.once(x, new, starts + n.astype(starts.dtype))

                x, found = lax.scan(step, x, jnp.arange(2))
            case "gradient":

                def both(x: Array, new: Array) -> tuple[Array, Array]:
                    return self.once(x, new, starts)

                (x, found), back = jax.vjp(both, x, new)
                dx, dnew = back((x, found))
                x, found = x + dx, found + dnew
            case _:
                x, found = self.once(x, new, starts)
        return jhost.shard(x, self.spec), found

    def once(self, x: Array, new: Array, starts: Array) -> tuple[Array, Array]:
        if self.each:
            return jax.vmap(self.row)(x, new, starts)
        first = jnp.zeros((), starts.dtype)
        x = lax.dynamic_update_slice(x, new, (first, *starts[0]))
        return x, lax.dynamic_slice(x, (first, *starts[1]), new.shape)

    def row(self, x: Array, new: Array, start: Array) -> tuple[Array, Array]:
        x = lax.dynamic_update_slice(x, new, (*start,))
        return x, lax.dynamic_slice(x, (*start[::-1],), new.shape)


_MESHES = (
    ({"a": 4}, P(None, "a")),
    ({"a": 8}, P(None, None, "a")),
    ({"a": 2, "b": 2}, P(None, ("b", "a"))),
    ({"a": 2, "b": 2}, P(None, "b", "a")),
    ({"a": 2, "b": 2}, P("b", "a")),
    ({"a": 2}, P("a")),
)


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    mesh, spec = draw(st.sampled_from(_MESHES))
    rows = draw(st.sampled_from([4, 3]))
    shape = rows, draw(st.sampled_from([8, 13])), draw(st.sampled_from([8, 5]))
    start = st.tuples(st.integers(-15, 15), st.integers(-9, 9))
    wrapped = draw(st.sampled_from(["", "scan", "gradient"]))
    dtypes = ["float32"] if wrapped == "gradient" else ["int32", "bool", "bfloat16"]
    width = st.integers(1, 8), st.integers(1, 5)
    return Case(
        mesh=mesh,
        spec=spec,
        shape=shape,
        window=(draw(width[0]), draw(width[1])),
        starts=tuple(draw(start) for _ in range(rows)),
        each=draw(st.booleans()),
        unsigned=draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        wrapped=wrapped,
    )


@settings(max_examples=budget.examples(10), deadline=None)  # each is compiled
@given(_cases())
def test_writes_and_reads_at_random_positions_are_exact(case: Case) -> None:
    args = case.arguments()
    run = interpreted(case.function, mesh=mesh_of(**case.mesh), in_shardings=P())
    chex.assert_trees_all_equal(run(*args), jax.jit(case.function)(*args))


# --- In derivatives ----------------------------------------------------------------- #


def _turned(x: Array, new: Array, at: Array) -> Array:
    return jnp.roll(x, at[0], 1) * new[:, :1]


def _through_stages(x: Array, new: Array, at: Array) -> Array:
    """Microbatches go through stages, as weights differ by the positions of `x`."""
    weights = jnp.swapaxes(x, 0, 1)

    def tick(done: Array, entering: Array) -> tuple[Array, Array]:
        done = jnp.roll(done, 1, 0).at[0].set(entering)
        done = jax.vmap(jax.checkpoint(lambda w, x: jnp.sign(w) * x))(weights, done)
        return done, done[-1]

    first = jnp.zeros_like(weights)
    return lax.scan(tick, first, jnp.stack([new[:, 0], new[:, 1]] * 5))[1]


_POSITIONS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "write": lambda x, new, at: write(x, new, at[0]) * x,
    "write each": lambda x, new, at: write_each(x, new, at) * x,
    "read": lambda x, new, at: read(x, at[0]) * new,
    "read each": lambda x, new, at: read_each(x, at) * new,
    "add": lambda x, new, at: x.at[jnp.arange(4), at].add(new[:, 0]) * x,
    "turn": _turned,
    "stages": _through_stages,
}


def _derived(fun: Callable[..., Array], by: str) -> Callable[..., Any]:
    """A derivative of `fun` by its first two operands, at the third."""

    def slope(x: Array, new: Array, at: Array) -> Any:
        def loss(x: Array, new: Array) -> Array:
            return (fun(x, new, at) ** 2).sum()

        return jax.grad(loss, (0, 1))(x, new)

    match by:
        case "forward":
            return lambda x, new, at: jax.jvp(
                lambda *of: fun(*of, at), (x, new), (new.sum() * x, new)
            )
        case "second order":
            return lambda x, new, at: jax.jvp(
                lambda x, new: slope(x, new, at), (x, new), (jnp.sign(x), new)
            )
        case _:
            return lambda x, new, at: jax.vmap(slope, (None, 0, None))(
                x, jnp.stack([new, -new]), at
            )


_BY = ("forward", "second order", "gradients of a batch")


@pytest.mark.parametrize(
    ("name", "by"),
    # Each in two of the three ways.
    [(name, _BY[(n + k) % 3]) for n, name in enumerate(_POSITIONS) for k in (0, 1)],
)
def test_derivatives_are_exact_in_any_order_of_devices(name: str, by: str) -> None:
    order = np.array(jax.devices()[:4])[[2, 0, 3, 1]].reshape(2, 2)
    sizes = dict.fromkeys(("a", "b"), AxisType.Auto)
    mesh = Mesh(order, (*sizes,), axis_types=(*sizes.values(),))
    spec = P("b", "a") if name != "stages" else P(None, ("b", "a"))
    derived = _derived(_POSITIONS[name], by)
    run = jhost.jit(derived, mesh=mesh, in_shardings=(spec, P(), P()))
    args = np.sign(cache(4, 8, 2)), np.sign(cache(4, 2, 2)), np.array([6, 9, -1, 3])
    chex.assert_trees_all_equal(run(*args), plain(derived, *args))


def test_a_gradient_that_is_asked_for_outside_is_exact() -> None:
    settings = tp(4, (CACHE, P(), P()), CACHE)
    hosted = jhost.jit(_POSITIONS["write each"], **settings)
    args = cache(), cache(4, 2, 3), jnp.array([6, 9, -1, 15])
    found, wanted = (
        jax.vmap(_derived(fun, ""), (None, 0, None))(args[0], args[1][None], args[2])
        for fun in (hosted, _POSITIONS["write each"])
    )
    chex.assert_trees_all_equal(found, wanted)


# --- Of every kind of element ------------------------------------------------------- #


@pytest.mark.parametrize("dtype", ["int4", "float8_e4m3fn", "complex64"])
def test_elements_of_any_size_are_written_and_read(dtype: str) -> None:
    x, new = (jnp.asarray(np.arange(n) % 2).astype(dtype) for n in (8, 2))

    def both(x: Array, new: Array, at: Array) -> tuple[Array, Array]:
        x = lax.dynamic_update_slice(x, new, (at,))
        return x, lax.dynamic_slice(x, (at + 1,), (3,))

    rows = P("tp")
    found = jhost.jit(both, **tp(4, (rows, P(), P()), (rows, P())))(
        x, new, jnp.array(3)
    )
    wanted = both(x, new, jnp.array(3))
    chex.assert_trees_all_equal(*(jax.tree.map(_readable, t) for t in (found, wanted)))


def _readable(x: Array) -> Array:
    return x if x.dtype == np.complex64 else x.astype(np.int32)


def test_random_keys_are_written_and_read_whole() -> None:
    keys = jax.random.split(jax.random.key(0), 8)

    def both(keys: Array, at: Array) -> tuple[Array, Array]:
        keys = lax.dynamic_update_slice(keys, keys[:1], (at,))
        return keys, lax.dynamic_slice(keys, (at - 1,), (2,))

    found = jhost.jit(both, **tp(4, (P("tp"), P()), (P("tp"), P())))(keys, jnp.array(3))
    wanted = both(keys, jnp.array(3))
    data = jax.random.key_data
    chex.assert_trees_all_equal(*(jax.tree.map(data, t) for t in (found, wanted)))


def test_what_is_not_finite_is_read_as_it_is() -> None:
    x = np.array(integers(16, 3), np.float32)
    x[3], x[5], x[7] = np.nan, -0.0, np.inf
    rows = on({"tp": 4}, (P("tp"), P()), P())
    exact(lambda x, at: 1 / lax.dynamic_slice_in_dim(x, at, 4), x, jnp.array(4), **rows)
