"""Reshapes by a part of an axis: the axis is split, and nothing moves for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jhost
from jhost.lowering.ir.axis_parts import is_part
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts
from jhost.lowering.layouts.split_axes import SplitAxes
from tests import budget
from tests.lowering.hand_built import integers, mesh_of
from tests.lowering.on_mesh import communications, exact, on, program_of
from tests.lowering.traced import built, interpreted, plain

ROWS = P("a")


def rows_in_two(x: Any) -> Any:
    return jnp.abs(x.reshape(2, -1, x.shape[1])).reshape(x.shape)


def test_an_axis_of_four_is_two_axes_where_a_dim_of_two_is_split_off() -> None:
    program = exact(rows_in_two, integers(16, 4), **on({"a": 4}, ROWS, ROWS))
    assert dict(program.mesh.shape) == {"a:(1)2": 2, "a:(2)2": 2}
    assert communications(program) == []


def test_only_what_is_needed_moves_along_a_part() -> None:
    def sums(x: Any) -> Any:
        return x.reshape(2, 8, 4).sum(1)

    program = exact(sums, integers(16, 4), **on({"a": 4}, ROWS, P()))
    wanted = ["AllReduce a:(2)2 sum", "AllGather a:(1)2 0"]
    assert communications(program) == wanted


def test_bodies_are_on_the_same_parts() -> None:
    def scanned(x: Any) -> Any:
        def step(carry: Any, k: Any) -> tuple[Any, Any]:
            return carry + 1, rows_in_two(x) * k + carry

        return lax.scan(step, jnp.float32(0), jnp.arange(3.0))[1]

    outs = P(None, "a")
    program = exact(scanned, integers(16, 4), **on({"a": 4}, ROWS, outs))
    assert any(map(is_part, program.mesh.shape))
    assert communications(program) == []


def test_results_that_nobody_constrains_lie_on_the_users_mesh() -> None:
    def split(x: Any) -> Any:
        return jnp.sin(x.reshape(2, 8, 4))

    made = jhost.jit(split, mesh=mesh_of(a=4), in_shardings=ROWS)
    x = integers(16, 4)
    np.testing.assert_allclose(made(x), np.sin(x.reshape(2, 8, 4)), rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_users_mesh_may_be_set(kind: Any) -> None:
    """JAX refuses any other mesh there."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,))
    x = integers(16, 4)
    with jax.set_mesh(mesh):
        there = jax.device_put(x, ROWS)
        made = jhost.jit(rows_in_two)
        np.testing.assert_array_equal(made(there), np.abs(x))
        gradient = jax.grad(lambda x: (made(x) ** 2).sum())(there)
    np.testing.assert_array_equal(gradient, 2 * x)


def test_marks_of_streams_keep_axes_whole() -> None:
    def f(x: Any) -> Any:
        return rows_in_two(jhost.stream(x * 2, axis=1))

    program = program_of(f, integers(16, 4), **on({"a": 4}, ROWS, ROWS))
    assert dict(program.mesh.shape) == {"a": 4}


def test_no_axis_is_split_that_comes_to_no_uneven_dim() -> None:
    """Layouts on parts are solved anew, which takes as long as all of the others."""

    def batch(x: Any) -> Any:
        heads = jhost.shard(x, P("a")).reshape(8, 2, 4)
        return jhost.shard(heads.reshape(16, 4), P("a"))

    def uneven(x: Any) -> Any:
        return rows_in_two(jhost.shard(x, P("a")))

    split = SplitAxes(PropagateLayouts())
    assert split.sizes(built(batch, (8, 8), a=4)) == {}
    assert split.sizes(built(uneven, (8, 8), a=4)) == {"a": (2, 2)}


# --- At random ---------------------------------------------------------------------- #

_DTYPES = {"f32": np.float32, "bf16": jnp.bfloat16, "i32": np.int32, "i8": np.int8}
_HARD = [-0.0, 0.0, np.nan, np.inf, -3.0, 1.0, 2.0, 5.0]

Step = Callable[[Any], Any]

_STEPS: Mapping[str, Step] = {
    "negated": lambda y: -y,
    "rolled": lambda y: jnp.roll(y, 1, 1),
    "rolled outside": lambda y: jnp.roll(y, 1, 0),
    "turned": lambda y: y[:, ::-1],
    "next": lambda y: jnp.pad(y[:, 1:], ((0, 0), (0, 1), (0, 0))),
    "sorted": lambda y: jnp.sort(y, 1),
    "greatest": lambda y: jnp.where(y == y.max(1, keepdims=True), y, 0),
    "greatest outside": lambda y: jnp.where(y.max(0, keepdims=True) > 1, -y, y),
    "counted": lambda y: y + jnp.arange(y.shape[1], dtype=y.dtype)[:, None],
    "first": lambda y: jnp.broadcast_to(y[:, :1], y.shape),
    "swapped": lambda y: y.swapaxes(0, 1).reshape(y.shape),
    "split again": lambda y: -y.reshape(y.shape[0] * 2, -1, y.shape[2]),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows over some axes, reshaped to `outer` times `inner` for each of some steps."""

    mesh: tuple[tuple[str, int], ...]
    rows: P
    outs: P
    outer: int
    inner: int
    steps: tuple[str, ...]
    dtype: str

    def argument(self) -> np.ndarray:
        shape = (self.outer * self.inner, 4)
        drawn = np.random.default_rng(self.inner).choice(_HARD, shape)
        if not jnp.issubdtype(_DTYPES[self.dtype], jnp.floating):
            drawn = np.nan_to_num(drawn, posinf=7)
        return drawn.astype(_DTYPES[self.dtype])

    def function(self, x: Any) -> Any:
        for step in self.steps:
            x = _STEPS[step](x.reshape(self.outer, self.inner, 4)).reshape(-1, 4)
        return x


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh = draw(st.sampled_from([{"a": 4}, {"a": 8}, {"b": 2, "a": 4}, {"a": 6}]))
    every: list[Any] = ["a", ("b", "a"), ("a", "b"), "b"]
    rows, outs = (
        draw(st.sampled_from([e for e in every if "b" in mesh or "b" not in e]))
        for _ in range(2)
    )
    outer = draw(st.sampled_from([2, 3] if mesh == {"a": 6} else [2, 4]))
    devices = int(np.prod([*mesh.values()]))
    inner = devices * draw(st.sampled_from([1, 2, 3])) // (1 + draw(st.booleans()))
    hypothesis.assume(outer * inner % devices == 0)
    steps = draw(st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=3))
    if inner % 2:
        steps = ["negated" if step == "split again" else step for step in steps]
    return Case(
        mesh=tuple(mesh.items()),
        rows=P(rows),
        outs=draw(st.sampled_from([P(outs), P()])),
        outer=outer,
        inner=inner,
        steps=tuple(steps),
        dtype=draw(st.sampled_from(sorted(_DTYPES))),
    )


@settings(max_examples=budget.examples(12), deadline=None)  # each is compiled
@given(cases())
def test_rows_in_parts_are_exact(case: Case) -> None:
    """Also the signs of zeros, and NaN."""
    x, given = case.argument(), on(dict(case.mesh), case.rows, case.outs)
    program = program_of(case.function, x, **given)
    hypothesis.event(f"axes split: {any(map(is_part, program.mesh.shape))}")
    wanted = np.asarray(plain(case.function, x).astype(np.float32))
    for run in (jhost.jit, interpreted):
        found = np.asarray(run(case.function, **given)(x).astype(np.float32))
        np.testing.assert_array_equal(found, wanted)
        numbers = ~np.isnan(wanted)
        assert (np.signbit(found) == np.signbit(wanted))[numbers].all()
