"""Lookups and updates where a part has some of the rows, or of the updates."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jhost.lowering.rules.dim_rule import DimRule
from jhost.lowering.rules.table import rule_of

CheckRule: TypeAlias = Callable[..., set[str]]

LOOKUPS = ("clip", "fill", "promise_in_bounds")
UPDATES = ("clip", "drop", "promise_in_bounds")
# Before the first row of six, in some, behind the last, and a row twice.
INDICES = np.array([-1, 0, 3, 5, 6, -7, 3, 100], np.int32)
RAW = lax.GatherDimensionNumbers((1,), (0,), (0,))
RAW_UPDATES = lax.ScatterDimensionNumbers((1,), (0,), (0,))


def _table(rows: int = 6, dtype: Any = np.int32) -> np.ndarray:
    return (np.arange(rows * 2) * 7 % 11 - 3).reshape(rows, 2).astype(dtype)


def _rule(function: Callable[..., Any], *args: Any) -> DimRule:
    closed = jax.make_jaxpr(function)(*args)
    names = "gather", "scatter", "scatter-add"
    (eqn,) = [e for e in closed.jaxpr.eqns if e.primitive.name in names]
    return rule_of(eqn)


def _lookup(mode: str, **more: Any) -> Callable[..., Any]:
    """JAX's own lookup of rows: no index is counted from the end."""
    return lambda x, i: lax.gather(x, i[:, None], RAW, (1, 2), mode=mode, **more)


# --- Lookups ------------------------------------------------------------------------ #


def test_the_rows_of_a_lookup_are_summed_over() -> None:
    rule = _rule(lambda x, i: x[i], _table(), INDICES)
    assert rule.reducers == (None, None, "sum")
    assert rule.counted == rule.picked == rule.unstreamed == {2}
    assert not rule.reduces, "no work is done for each row"
    assert not rule.contracts


@pytest.mark.parametrize("mode", LOOKUPS)
@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        (np.int8, 6),
        pytest.param(np.uint8, 6, marks=pytest.mark.slow),
        (np.uint32, 6),
        pytest.param(np.int32, 6, marks=pytest.mark.slow),
        (np.int8, 300),
        pytest.param(np.uint8, 300, marks=pytest.mark.slow),
    ],
)
def test_bounds_are_those_of_the_whole(
    mode: str, dtype: Any, rows: int, check_rule: CheckRule
) -> None:
    """Also where an index cannot be as large as the last row is."""
    ends = np.iinfo(dtype)
    index = np.array([0, 5, 6, 3, ends.max, ends.min, ends.max - 1], dtype)
    check_rule(_lookup(mode, fill_value=-7), _table(rows)[:, :2], index)


@pytest.mark.parametrize("mode", LOOKUPS)
def test_indices_wider_than_a_position(mode: str, check_rule: CheckRule) -> None:
    with jax.enable_x64(True):
        index = np.array([3, 2**32 + 3, -(2**32), 2**62, -1], np.int64)
        check_rule(_lookup(mode, fill_value=-7), _table(), index)
        update = mode.replace("fill", "drop")
        check_rule(_updated(lax.scatter_add, update), _table(), index, _table(5))


@pytest.mark.parametrize(
    ("mode", "value"),
    [*((mode, np.nan) for mode in LOOKUPS), ("fill", np.inf), ("clip", -np.inf)],
)
def test_what_is_not_looked_up_does_not_leak(
    mode: str, value: float, check_rule: CheckRule
) -> None:
    table = _table(dtype=np.float32)
    table[1:5] = value
    for index in (np.array([0, 5]), np.array([0, 2, 5, 9])):
        check_rule(lambda x, i: x.at[i].get(mode=mode), table, index)


@pytest.mark.parametrize(
    ("dtype", "reducer"),
    [
        (np.bool_, "or"),
        (np.uint8, "sum"),
        (np.float16, "sum"),
        (jnp.bfloat16, "sum"),
        (np.complex64, "sum"),
        (jnp.float8_e4m3fn, None),  # no collective adds these
        (jnp.int4, "sum"),  # as int8
    ],
)
def test_lookups_of_any_type(
    dtype: Any, reducer: str | None, check_rule: CheckRule
) -> None:
    table = jnp.array(_table() % 3).astype(dtype)
    for mode in ("clip", "fill"):  # a promise is kept by the clip of what is outside
        rule = _rule(lambda x, i, m=mode: x.at[i].get(mode=m), table, INDICES)
        assert [r for r in rule.reducers if r] == [reducer] * (reducer is not None)
        check_rule(lambda x, i, m=mode: x.at[i].get(mode=m), table, INDICES)


def test_keys_are_looked_up_in_the_whole(check_rule: CheckRule) -> None:
    keys = jax.random.split(jax.random.key(0), 6)
    check_rule(lambda x, i: x[i], keys, np.array([1, 5]))
    assert not any(_rule(lambda x, i: x[i], keys, np.array([1, 5])).reducers)


_X = np.arange(24, dtype=np.int32).reshape(4, 3, 2) - 9
_PAIRS = np.array([[0, -1, 3], [7, 2, 2]], np.int32)
_FORMS: dict[str, tuple[Callable[..., Any], int]] = {
    "two dims": (lambda x, i: x[i, i - 1], 2),
    "the middle": (lambda x, i: x[:, i], 1),
    "apart": (lambda x, i: x[i, :, i], 2),
    "one row": (lambda x, i: x.at[i[0, 0]].get(mode="fill"), 1),
    "take": (lambda x, i: jnp.take(x, i, axis=1), 1),
    "take, clipped": (lambda x, i: jnp.take(x, i, axis=0, mode="clip"), 1),
    "along an axis": (
        lambda x, i: jnp.take_along_axis(x[0], i[:, :2].T % 3, axis=0),
        1,
    ),
    "a window": (lambda x, i: x[i, 1:2], 2),
    "in a batch": (lambda x, i: jax.vmap(lambda x, i: x[i])(x[:2], i), 1),
}


@pytest.mark.parametrize("form", _FORMS)
def test_forms_of_lookups(form: str, check_rule: CheckRule) -> None:
    function, cut = _FORMS[form]
    with jax.disable_jit():  # `take` is a call
        closed = jax.make_jaxpr(function)(_X, _PAIRS)
    assert "gather" in check_rule(jaxpr_as_fun(closed), _X, _PAIRS)
    gathers = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "gather"]
    assert any(len(rule_of(eqn).picked) == cut for eqn in gathers)


def test_a_lookup_of_nothing(check_rule: CheckRule) -> None:
    check_rule(lambda x, i: x[i], _X, np.zeros((0, 2), np.int32))
    check_rule(lambda x, i: x[i], _X[:, :0], _PAIRS)
    check_rule(lambda x, i: x.at[i].add(1), _X, np.zeros((0, 2), np.int32))
    check_rule(lambda x, i: x.at[i].add(1), _X[:, :0], _PAIRS)


# --- Updates ------------------------------------------------------------------------ #


def _updated(scatter: Callable[..., Any], mode: str) -> Callable[..., Any]:
    return lambda x, i, u: scatter(x, i[:, None], u, RAW_UPDATES, mode=mode)


def test_updates_are_reduced_over_and_rows_are_not() -> None:
    rule = _rule(lambda x, i, u: x.at[i].add(u), _table(), INDICES, _table(8))
    assert rule.reducers == ("sum", None, None)
    assert rule.picked == {2}
    assert rule.unstreamed == {0, 2}
    assert rule.reduces
    assert not rule.contracts


def test_where_updates_take_the_place_of_values_their_order_counts() -> None:
    rule = _rule(lambda x, i, u: x.at[i].set(u), _table(), INDICES, _table(8))
    assert rule.reducers == (None, None)
    assert rule.picked == {1}


_SCATTERS = {
    "add": lax.scatter_add,
    "sub": lax.scatter_sub,
    "mul": lax.scatter_mul,
    "max": lax.scatter_max,
    "min": lax.scatter_min,
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *itertools.product(("add", "max", "set"), UPDATES),
        # Other reducers of the same rule.
        *(
            pytest.param(name, "clip", marks=pytest.mark.slow)
            for name in ("sub", "mul", "min")
        ),
    ],
)
def test_updates_in_parts(name: str, mode: str, check_rule: CheckRule) -> None:
    update = _SCATTERS.get(name, lax.scatter)
    # What one of two updates in one place leaves there is not said.
    index = INDICES[INDICES != 3] if name == "set" else INDICES
    index = index[:-1] if name == "set" and mode == "clip" else index
    # What a type changes is the identity of the reducer, which is every mode's.
    for dtype in (np.int32, np.float32, np.uint8) if mode == "drop" else (np.int32,):
        table, new = _table(dtype=dtype), _table(len(index), dtype)
        check_rule(_updated(update, mode), table, index[1:], new[1:])
    if name in ("add", "max"):
        # Of JAX 0.10, XLA's own drops those above what int8 makes of 299, which is 43.
        narrow = np.array([0, 5, 40, -128, 6], np.int8)
        check_rule(_updated(update, mode), _table(300), narrow, _table(5))


@pytest.mark.parametrize("name", _SCATTERS)
def test_infinities_are_counted_once(name: str, check_rule: CheckRule) -> None:
    table = _table(dtype=np.float32)
    table[::2], table[1] = np.inf, np.nan
    new = _table(8, np.float32)
    new[3] = -np.inf
    with np.errstate(invalid="ignore"):
        check_rule(_updated(_SCATTERS[name], "drop"), table, INDICES, new)


@pytest.mark.parametrize("name", ["max", "min"])
def test_updates_of_truth_values(name: str, check_rule: CheckRule) -> None:
    table, new = _table() > 0, _table(8) > 2
    check_rule(_updated(_SCATTERS[name], "clip"), table, INDICES, new)


def test_updates_of_other_types(check_rule: CheckRule) -> None:
    for dtype in (np.complex64, jnp.bfloat16, jnp.float8_e4m3fn):
        table, new = (jnp.array(_table(n) % 3).astype(dtype) for n in (6, 8))
        check_rule(_updated(lax.scatter_add, "drop"), table, INDICES, new)
    keys = jax.random.split(jax.random.key(0), 6)
    check_rule(lambda x, i: x.at[i].set(x[i - 1]), keys, np.array([1, 5]))


_UPDATES: dict[str, Callable[..., Any]] = {
    "two dims": lambda x, i: x.at[i, i - 1].add(i[..., None]),
    "the middle": lambda x, i: x.at[:, i].add(2),
    "one row": lambda x, i: x.at[i[0, 0]].add(2),
    "a window": lambda x, i: x.at[i, 1:2].max(2),
    "in a batch": lambda x, i: jax.vmap(lambda x, i: x.at[i].mul(3))(x[:2], i),
    "sorted": lambda x, i: x.at[jnp.sort(i.ravel())].add(2, indices_are_sorted=True),
    "unique": lambda x, i: x.at[i[0]].add(2, unique_indices=True),
    "a function": lambda x, i: x.at[i[0]].apply(jnp.sign),
}


@pytest.mark.parametrize("form", _UPDATES)
def test_forms_of_updates(form: str, check_rule: CheckRule) -> None:
    names = check_rule(_UPDATES[form], _X, _PAIRS)
    assert any(name.startswith("scatter") for name in names)


def test_what_is_promised_of_indices_holds_for_parts_of_them() -> None:
    def update(x: Any, i: Any) -> Any:
        more = {"indices_are_sorted": True, "unique_indices": True}
        return x.at[i].add(2, mode="drop", **more)

    closed = jax.make_jaxpr(update)(_table(), np.array([1, 3, 4, 5]))
    eqn = closed.jaxpr.eqns[-1]
    rule = rule_of(eqn)

    def params(**sizes: int) -> Any:
        class Part:
            accumulator, zigzag = None, 1

            def size(self, factor: int) -> int:
                return sizes.get(f"f{factor}", rule.sizes[factor])

            def varies(self, factor: int) -> bool:
                return self.parts(factor) > 1

            def parts(self, factor: int) -> int:
                return rule.sizes[factor] // self.size(factor)

            def positions(self, factor: int) -> Any:
                return jnp.arange(self.size(factor))

            def starts(self, factor: int) -> list[Any]:
                return [0]

            def grain(self, factor: int) -> int:
                return self.size(factor)

        args = _table(), np.array([[1], [3], [4], [5]]), _table(4)
        made = jax.make_jaxpr(lambda *args: rule.rebind(eqn, args, Part()))(*args)
        return made.jaxpr.eqns[-1].params

    updates, rows = sorted(rule.unstreamed)
    for part in ({}, {f"f{updates}": 2}):
        assert params(**part)["indices_are_sorted"]
        assert params(**part)["unique_indices"]
    # Those of other parts come in between.
    assert not params(**{f"f{rows}": 3})["indices_are_sorted"]
    assert params(**{f"f{rows}": 3})["unique_indices"]
