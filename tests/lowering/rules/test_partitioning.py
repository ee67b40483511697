"""`custom_partitioning` in parts, by the factors that its notation names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import (
    BATCHING,
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec as P

import jhost
from jhost import errors
from jhost.lowering.rules.table import reason_of, rule_of
from tests.lowering.hand_built import mesh_of
from tests.lowering.on_mesh import communications, exact, tp
from tests.lowering.traced import array, loops, notes, work

CheckRule: TypeAlias = Callable[..., set[str]]
Local: TypeAlias = Callable[..., Any]


def partitioned(
    fun: Callable[..., Any],
    notation: Any,
    local: Callable[[Any], Local] | None = None,
    shardings: Callable[..., Any] | None = None,
    **settings: Any,
) -> Callable[..., Any]:
    """`fun` with a rule; `local` makes what a device does of the operands' shards."""

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        function = fun if local is None else local(operands)
        takes = jax.tree.map(lambda x: x.sharding, operands)
        makes = jax.tree.map(lambda x: x.sharding, results)
        if shardings is not None:
            makes, takes = shardings(mesh, makes, takes)
        return mesh, function, makes, takes

    made = custom_partitioning(fun)
    made.def_partition(partition, sharding_rule=notation, **settings)
    return lambda *args: made(*args)


def only_eqn(function: Callable[..., Any], *args: Any) -> JaxprEqn:
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return eqn


def project(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("bsd,df->bsf", x, w)


def summed_over_shards(operands: Any) -> Local:
    axes = operands[1].sharding.spec[0]
    return lambda x, w: lax.psum(project(x, w), axes) if axes else project(x, w)


PROJECT = partitioned(
    project,
    "b s d, d f -> b s f",
    summed_over_shards,
    reduction_factors=("d",),
    need_replication_factors=("s",),
)
X, W = array(4, 3, 6), array(6, 4, seed=1)


def test_factors_have_names(check_rule: CheckRule) -> None:
    assert check_rule(PROJECT, X, W) == {"custom_partitioning"}
    rule = rule_of(only_eqn(PROJECT, X, W))
    assert sorted(zip(rule.sizes, rule.reducers, strict=True), key=str) == [
        (4, None),
        (4, None),
        (6, "sum"),
    ]
    assert rule.operands[0][1] is None
    assert rule.contracts


def test_a_sum_that_goes_on_has_the_dtype_of_its_accumulator() -> None:
    settings = tp(2, (P(), P()), P(), pipeline="collective", chunks=2)

    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        return PROJECT(x, jhost.stream(w, 0))

    halves = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    exact(gradient, *halves, **settings)


def test_leading_dims_are_counted(check_rule: CheckRule) -> None:
    def scaled(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y

    last = ArrayMapping(BATCHING, "i")
    for notation in (
        "... i, ... i -> ... i",
        SdyShardingRule((last, last), (last,)),
    ):
        f = partitioned(scaled, notation)
        check_rule(f, X, X)
        assert len(rule_of(only_eqn(f, X, X)).sizes) == 3


def test_the_major_factor_of_a_dim_can_be_cut(check_rule: CheckRule) -> None:
    def heads(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x.reshape(*x.shape[:-1], -1, 3)
        return y, jnp.sum(y, -1)

    f = partitioned(heads, "b s (n h) -> b s n h, b s n")
    check_rule(f, X)
    rule = rule_of(only_eqn(f, X))
    assert rule.sizes == (4, 3, 2)
    last = rule.operands[0][2]
    assert last is not None
    assert last.scale == 3


# --- On devices --------------------------------------------------------------------- #


def test_shards_stay_where_they_are() -> None:
    program = exact(PROJECT, X, W, **tp(4, (P("tp"), P()), P("tp")))
    assert not communications(program)
    program = exact(PROJECT, X, W, **tp(2, (P(None, None, "tp"), P("tp")), P("tp")))
    assert communications(program) == ["ReduceScatter tp 0 sum"]


@pytest.mark.parametrize("pipeline", ["p2p", "collective"])
def test_a_stream_goes_through(pipeline: str) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(PROJECT(x, w) + 1, 0)

    x, settings = array(8, 3, 6), {"pipeline": pipeline, "chunks": 2}
    program = exact(
        f, x, W, **tp(2, (P("tp"), P(None, "tp")), P(None, None, "tp"), **settings)
    )
    assert loops(program)
    (loop, *_) = [word for word in work(program.body) if word.startswith("loop")]
    assert "custom_partitioning" in loop


# --- What stays whole --------------------------------------------------------------- #


def by_rank(operands: Any) -> Local:
    axis = operands[0].sharding.spec[0]
    return lambda x: x + (lax.axis_index(axis) if axis else 0)


def of_global_size(operands: Any) -> Local:
    size = operands[0].shape[0]
    return lambda x: x / size


def mean(operands: Any) -> Local:
    axis, size = operands[0].sharding.spec[0], operands[0].shape[0]
    return lambda x: lax.psum(jnp.sum(x, 0) / size, axis)


def unsummed(operands: Any) -> Local:
    del operands
    return lambda x: jnp.sum(x, 0)


def refused(mesh: Any, *_: Any) -> Any:
    raise ValueError(f"not on {mesh}")


def gathered(mesh: Any, makes: Any, takes: Any) -> Any:
    del takes
    return makes, (NamedSharding(mesh, P()),)


def same(x: jax.Array) -> jax.Array:
    return x + 0


def total(x: jax.Array) -> jax.Array:
    return jnp.sum(x, 0)


REDUCED: dict[str, Any] = {"reduction_factors": ("i",)}
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "rank": (partitioned(same, "i -> i", by_rank), "on a part"),
    "size": (partitioned(same, "i -> i", of_global_size), "on a part"),
    "mean": (partitioned(total, "i ->", mean, **REDUCED), "on a part"),
    "unsummed": (
        partitioned(total, "i ->", unsummed, **REDUCED),
        "on a part by itself",
    ),
    "error": (partitioned(same, "i -> i", shardings=refused), "on a part"),
    "gathered": (
        partitioned(same, "i -> i", shardings=gathered),
        "on a part by itself",
    ),
    "unnamed": (partitioned(total, "i ->"), "no factor to cut"),
    "replicated": (
        partitioned(same, "i -> i", need_replication_factors=("i",)),
        "no factor to cut",
    ),
    "written late": (partitioned(same, lambda *_: "i -> i"), "names factors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_works_on_no_part_alone_is_whole(name: str) -> None:
    function, reason = REFUSED[name]
    x = np.arange(8, dtype=np.float32)
    eqn = only_eqn(function, x)
    rule = rule_of(eqn)
    assert rule.opaque
    assert reason in reason_of(eqn, rule)
    program = exact(function, x, **tp(4, P("tp"), P()))
    assert communications(program) == ["AllGather tp 0"]
    assert notes(program, reason)


def test_one_factor_may_work_where_another_does_not(check_rule: CheckRule) -> None:
    def ranked(operands: Any) -> Local:
        axis = operands[0].sharding.spec[1]
        return lambda x: x + (lax.axis_index(axis) * 0 if axis else 0)

    f = partitioned(same, "i j -> i j", ranked)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert rule_of(only_eqn(f, x)).sizes == (4,)
    check_rule(f, x)


# --- Not on parts ------------------------------------------------------------------- #

PLACES: dict[str, Callable[[Local], Local]] = {
    "alone": lambda f: f,
    "scan": lambda f: lambda x: lax.scan(lambda h, _: (h + f(h), None), x, None, 2)[0],
    "cond": lambda f: lambda x: lax.cond(x[0, 0] < 9, f, lambda x: x, x),
    "while": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, h: h + f(h), x),
    "checkpoint": lambda f: jax.checkpoint(lambda x: x + f(x)),
    "solve": lambda f: (
        lambda x: lax.custom_linear_solve(lambda v: f(2 * v), x, lambda _, b: f(b) / 2)
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_whole_runs_under_set_mesh(place: str) -> None:
    """There types know the mesh, and are bound again in a program on one device."""
    x, place_of = array(4, 6), PLACES[place]
    f = partitioned(lambda x: x * 3, "i j -> i j", shardings=_rows)
    with jax.set_mesh(mesh_of(tp=2)):
        given = jhost.jit(place_of(f), in_shardings=P(None, "tp"))(x)
    assert jnp.array_equal(given, jax.jit(place_of(lambda x: x * 3))(x))


def _rows(mesh: Any, makes: Any, takes: Any) -> Any:
    """Not the shards there are, so that nothing runs on these."""
    rows = NamedSharding(mesh, P(mesh.axis_names[0]))
    return rows, (rows,)


def test_shards_of_other_shapes_than_it_says_are_refused() -> None:
    def wrong(mesh: Any, makes: Any, takes: Any) -> Any:
        return NamedSharding(mesh, P()), (NamedSharding(mesh, P(None, "tp")),)

    f = partitioned(lambda x: x, "i j -> i j", shardings=wrong)
    x = array(4, 6)
    for place in ("alone", "scan", "cond"):
        inside = jhost.jit(PLACES[place](f), mesh=mesh_of(tp=2))
        with pytest.raises(
            errors.OperandsError, match=r"\[4, 3\] but promised float32\[4, 6\]"
        ):
            inside(x)
