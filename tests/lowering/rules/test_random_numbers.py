"""Random numbers: each device, and each chunk, draws its part of the same bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.extend.random import threefry2x32_p
from jax.sharding import PartitionSpec as P

import jhost
from jhost._jax import aval_of
from jhost.lowering.emit.program import emit
from jhost.lowering.ir.program import Program
from jhost.lowering.rules.table import reason_of, rule_of
from tests import budget
from tests.lowering.hand_built import mesh_of
from tests.lowering.on_mesh import communications, exact, on, tp
from tests.lowering.traced import notes, work

CheckRule: TypeAlias = Callable[..., set[str]]

KEY = jax.random.key(7)


def _only_eqn(function: Callable[..., Any], *args: Any) -> JaxprEqn:
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return eqn


# --- Parts -------------------------------------------------------------------------- #


@pytest.mark.parametrize("width", [8, pytest.param(16, marks=pytest.mark.slow), 32, 64])
def test_a_part_of_the_bits_has_the_bits_of_the_whole(
    width: int, check_rule: CheckRule
) -> None:
    dtype = f"uint{width}"
    with jax.enable_x64(width == 64):
        check_rule(lambda key: jax.random.bits(key, (4, 6), dtype), KEY)


def test_a_batch_of_keys_is_drawn_from_in_parts(check_rule: CheckRule) -> None:
    keys = jax.random.split(KEY, (2, 3))
    draw = jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (4, 2))))
    assert check_rule(lambda keys: draw(keys), keys) == {"random_bits"}
    assert len(rule_of(_only_eqn(draw, keys)).sizes) == 4
    check_rule(jax.vmap(jax.vmap(jax.random.bits)), keys)  # one number a key


@dataclasses.dataclass(frozen=True)
class _Tail:
    """The last steps of every factor."""

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    accumulator: np.dtype | None = None
    zigzag: int = 1

    def size(self, factor: int) -> int:
        return self.steps[factor]

    def varies(self, factor: int) -> bool:
        return self.parts(factor) > 1

    def parts(self, factor: int) -> int:
        return -(-self.sizes[factor] // self.steps[factor])

    def positions(self, factor: int) -> Any:
        start = self.sizes[factor] - self.steps[factor]
        return start + jnp.arange(self.steps[factor], dtype=jnp.int32)

    def starts(self, factor: int) -> list[Any]:
        return [self.sizes[factor] - self.steps[factor]]

    def grain(self, factor: int) -> int:
        return 1


@budget.first_is_quick(
    "shape",
    [(3, 2**31 - 7), (2**31 - 1, 5), (70000, 70001, 3), (2, 2**17, 2**16 + 1, 2**12)],
)
def test_positions_beyond_32_bits_are_counted(shape: tuple[int, ...]) -> None:
    eqn = _only_eqn(lambda key: jax.random.bits(key, shape), KEY)
    steps = tuple(min(size, 3) for size in shape)
    (given,) = rule_of(eqn).rebind(eqn, [KEY], _Tail(shape, steps))
    tails = (
        range(size - count, size) for size, count in zip(shape, steps, strict=True)
    )
    position = np.zeros((), np.uint64)
    for tail, size in zip(tails, shape, strict=True):
        position = position[..., None] * np.uint64(size) + np.array(tail, np.uint64)
    words = (position >> np.uint64(32)).astype(np.uint32), position.astype(np.uint32)
    key = [np.broadcast_to(word, steps) for word in jax.random.key_data(KEY)]
    high, low = threefry2x32_p.bind(*key, *words)
    np.testing.assert_array_equal(given, high ^ low)


# --- What stays whole --------------------------------------------------------------- #


def _rbg(key: jax.Array) -> jax.Array:
    return jax.random.bits(key, (4,))


def _of_an_older_order(key: jax.Array) -> jax.Array:
    with jax.threefry_partitionable(False):
        return jax.random.bits(key, (4,))


@budget.first_is_quick(
    ("draw", "kind"),
    [(_rbg, "rbg"), (_rbg, "unsafe_rbg"), (_of_an_older_order, "threefry2x32")],
)
def test_bits_that_depend_on_the_size_stay_whole(
    draw: Callable[..., Any], kind: str, check_rule: CheckRule
) -> None:
    key = jax.random.key(7, impl=kind)
    check_rule(draw, key)
    eqn = _only_eqn(draw, key)
    rule = rule_of(eqn)
    assert rule.opaque
    assert "this generator draws" in reason_of(eqn, rule)
    settings = tp(4, None, P("tp"))
    program = exact(draw, key, **settings)
    assert notes(program, "this generator draws")


def test_an_order_chosen_inside_the_function_is_kept() -> None:
    """The setting is that of the line, whatever holds where the program is lowered."""
    other = jax.random.split(KEY)[1]

    def both(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.random.bits(key, (8,)), _of_an_older_order(other)

    exact(both, KEY, **tp(4, None, P("tp")))
    with jax.threefry_partitionable(False):
        exact(both, KEY, **tp(4, None, P("tp")))


@budget.first_is_quick("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_batches_of_keys_are_made_as_by_jax(kind: str, check_rule: CheckRule) -> None:
    keys = jax.vmap(lambda seed: jax.random.key(seed, impl=kind))(jnp.arange(6))
    names = check_rule(
        jax.vmap(lambda key: jax.random.fold_in(jax.random.split(key, 2)[1], 3)), keys
    )
    assert {"random_split", "random_fold_in"} <= names
    rule = rule_of(_only_eqn(jax.vmap(jax.random.split), keys))
    assert rule.opaque == (kind != "threefry2x32")


def test_one_key_is_no_business_of_layouts() -> None:
    def f(x: jax.Array, seed: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.split(jax.random.key(seed))[0], 5)
        return x + jax.random.randint(key, x.shape, 0, 9)

    x = jnp.arange(32, dtype=jnp.int32).reshape(8, 4)
    program = exact(f, x, np.int32(3), **tp(4, (P("tp"), P()), P("tp")))
    assert not communications(program)
    assert not notes(program)


# --- On devices --------------------------------------------------------------------- #


def _sizes_of_integers(jaxpr: Jaxpr) -> Iterator[int]:
    for eqn in jaxpr.eqns:
        bodies = list(jaxprs_in_params(eqn.params))
        for inner in bodies:
            yield from _sizes_of_integers(getattr(inner, "jaxpr", inner))
        # What leaves the body of a `shard_map` has the size of the whole there.
        for aval in [] if bodies else map(aval_of, eqn.outvars):
            if jnp.issubdtype(aval.dtype, np.integer):
                yield math.prod(aval.shape)


def _largest_integers(program: Program, *args: Any) -> int:
    """The elements of the largest array of integers that a device makes."""
    mesh = mesh_of(**dict(program.mesh.shape))
    closed = jax.make_jaxpr(emit(program, mesh))(*args)
    return max(_sizes_of_integers(closed.jaxpr))


def _dropped(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)


DRAWS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "uniform": lambda x, key: x + jax.random.uniform(key, x.shape),
    "normal": lambda x, key: x + jax.random.normal(key, x.shape),
    "normal in bfloat16": lambda x, key: (
        x + jax.random.normal(key, x.shape, jnp.bfloat16).astype(x.dtype)
    ),
    "randint": lambda x, key: (
        x + jax.random.randint(key, x.shape, 0, 1000).astype(x.dtype)
    ),
    "truncated": lambda x, key: x + jax.random.truncated_normal(key, -1, 1, x.shape),
    "gumbel": lambda x, key: x + jax.random.gumbel(key, x.shape),
    "dropout": _dropped,
}


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        *(pytest.param(name, False, id=f"typed-{name}") for name in DRAWS),
        # Of a raw key one is made first, whatever is drawn by it.
        *(
            pytest.param(name, True, id=f"raw-{name}")
            for name in ("randint", "dropout")
        ),
    ],
)
def test_each_device_draws_its_own_part(name: str, raw: bool) -> None:
    key = jax.random.key_data(KEY) if raw else KEY
    x = jnp.arange(96, dtype=jnp.float32).reshape(8, 12)
    settings = on({"dp": 2, "tp": 2}, (P("dp", "tp"), P()), P("dp", "tp"))
    plain = jax.jit(DRAWS[name], compiler_options=settings["compiler_options"])
    hosted = jhost.jit(DRAWS[name], **settings)
    chex.assert_trees_all_equal(hosted(x, key), plain(x, key))
    program = hosted.lower(x, key).host_ir
    assert not communications(program)
    assert _largest_integers(program, x, key) <= x.size // 4


def test_keys_of_a_batch_stay_where_they_are() -> None:
    keys = jax.random.split(KEY, 8)
    draw = jax.vmap(lambda key: jax.random.bits(key, (6,)))
    program = exact(draw, keys, **tp(4, P("tp"), P("tp")))
    assert not communications(program)
    assert _largest_integers(program, keys) <= 12
    # By what is drawn from each key, too.
    program = exact(draw, keys, **on({"a": 4, "b": 2}, P("a"), P("a", "b")))
    assert not communications(program)
    assert _largest_integers(program, keys) <= 6


def test_a_batched_function_draws_in_parts() -> None:
    x = jnp.arange(32, dtype=jnp.float32).reshape(8, 4)
    settings = tp(4, (P("tp"), P()), P("tp"))
    keys = jax.random.split(KEY, 3)
    hosted = jax.vmap(jhost.jit(_dropped, **settings), (None, 0))
    chex.assert_trees_all_equal(hosted(x, keys), jax.vmap(_dropped, (None, 0))(x, keys))


def _block(x: jax.Array, up: jax.Array, down: jax.Array, key: jax.Array) -> jax.Array:
    return jhost.stream(_dropped(x @ up, key) @ down, 0)


@budget.first_is_quick("how", [("p2p", 4), ("p2p", 8), ("collective", 2)])
def test_each_chunk_draws_its_own_part(how: tuple[str, int]) -> None:
    pipeline, chunks = how
    args = (
        jnp.arange(32.0).reshape(16, 2) % 5,
        jnp.arange(64.0).reshape(2, 32) % 3,
        jnp.arange(64.0).reshape(32, 2) % 7,
    )
    ins = (P("tp"), P(None, "tp"), P("tp"), P())
    settings = tp(4, ins, P("tp"), pipeline=pipeline, chunks=chunks)
    program = exact(_block, *args, KEY, **settings)
    drawing = [word for word in work(program.body) if "random_bits" in word]
    assert any(word.startswith("loop") for word in drawing)
    assert _largest_integers(program, *args, KEY) <= 16 // chunks * 8


def test_uneven_chunks_and_padded_dims_draw_the_same() -> None:
    def f(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
        h = jhost.shard(_dropped(x, key), P(None, "tp"))
        return jhost.stream(lax.dot(h, w), 0)

    x, w = jnp.arange(70.0).reshape(7, 10) % 5, jnp.arange(20.0).reshape(10, 2) % 3
    settings = tp(4, (P(), P(), P()), P(), pipeline="collective", chunks=3)
    exact(f, x, w, KEY, **settings)
