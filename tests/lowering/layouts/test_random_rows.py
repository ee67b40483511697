"""Lookups in tables, and updates of them, sharded at random and exact in every mode.

Tables are larger than what is looked up, and smaller than what is added to them, so
that they stay where they are.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.statements import Compute, walk
from tests import budget
from tests.lowering.hand_built import mesh_of
from tests.lowering.on_mesh import program_of
from tests.lowering.traced import interpreted

_DTYPES = {
    "i32": np.int32,
    "u8": np.uint8,
    "f32": np.float32,
    "bf16": jnp.bfloat16,
    "bool": np.bool_,
    "f16": np.float16,
    "i8": np.int8,
}
_HARD = [-0.0, -1e-8, 1 / 3, 99.0]
"""A cast rounds some of these, and adding 0.0 to -0.0 would change its sign."""
_UPDATES = ("add", "subtract", "multiply", "max", "min", "set")


@dataclasses.dataclass(frozen=True)
class Case:
    """A table of `rows`, which is read or updated at `tokens`, and how both lie.

    `update` names the update.  Without one the rows are read, and may be constrained
    and cast.
    """

    update: str | None
    mode: str
    dtype: str
    rows: int
    two_dims: bool
    tokens: np.ndarray
    table_spec: P
    tokens_spec: P
    chunks: int | None
    cast: str | None = None
    constrained: bool = False

    def table(self) -> jax.Array:
        shape = (self.rows, 4, 2) if self.two_dims else (self.rows, 2)
        table = self._numbers(shape)
        # Sums of updates have any order: they are exact for small integers only.
        looked_up = self.update is None and self.cast
        if looked_up and jnp.issubdtype(table.dtype, jnp.floating):
            return jnp.array(_HARD)[table.astype(np.int32)].astype(table.dtype)
        return table

    def _numbers(self, shape: tuple[int, ...]) -> jax.Array:
        numbers = np.random.default_rng(0).integers(0, 4, shape)
        return jnp.array(numbers).astype(_DTYPES[self.dtype])

    def arguments(self) -> tuple[jax.Array, ...]:
        tokens = jnp.array(self.tokens)
        if self.update is None:
            return self.table(), tokens
        return self.table(), tokens, self._numbers((*tokens.shape, 2))

    def function(self, table: Any, tokens: Any, *updates: Any) -> Any:
        """Marked where a stream may go: along the tokens."""
        at = table.at[tokens, tokens % 3] if self.two_dims else table.at[tokens]
        if self.update is None:
            return self.cast_of(self.marked(at.get(mode=self.mode)))
        (new,) = updates
        if self.chunks is not None:
            new = jnp.maximum(new, new)  # what a loop can make
            new = jhost.stream(new, 0, chunks=self.chunks, pipeline="collective")
        return getattr(at, self.update)(new, mode=self.mode)

    def marked(self, found: Any) -> Any:
        if self.chunks is None:
            return found
        return jhost.stream(found, 0, chunks=self.chunks, pipeline="collective")

    def cast_of(self, found: Any) -> Any:
        if self.constrained:
            found = jhost.shard(found, P(*self.tokens_spec, None))
        return found.astype(_DTYPES[self.cast]) if self.cast else found

    def settings(self) -> dict[str, Any]:
        table, tokens = self.table_spec, self.tokens_spec
        updates = () if self.update is None else (P(*tokens, None),)
        return {
            "mesh": mesh_of(a=2, b=2),
            "in_shardings": (table, tokens, *updates),
            "out_shardings": P(*tokens, None) if self.update is None else table,
        }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    update = draw(st.sampled_from([None, *_UPDATES]))
    dtypes = sorted(_DTYPES)
    if update not in (None, "max", "min", "set"):
        dtypes.remove("bool")
    mode = draw(st.sampled_from(["clip", "fill", "promise_in_bounds"]))
    rows = draw(st.sampled_from([64, 256] if update is None else [4, 8]))
    shape = (4, 2) if update is None else (8, 4)
    beyond = 0 if mode == "promise_in_bounds" else 3
    number = st.integers(-rows - beyond, rows - 1 + beyond)
    count = shape[0] * shape[1]
    unique = update == "set"  # which of two is kept is not said
    if unique:
        mode, number = "fill", st.integers(0, 10 * count)
    tokens = draw(st.lists(number, min_size=count, max_size=count, unique=unique))
    two_dims = draw(st.booleans())
    axes = draw(st.permutations(["a", "b", None, None]))
    of_rows = [axes[0], axes[1] if two_dims else None]
    if draw(st.integers(0, 3)) == 0:
        of_rows = [("a", "b"), None]
    free = [axis for axis in ("a", "b") if axis not in str(of_rows)]
    of_tokens = (draw(st.sampled_from([None, *free])), None)
    return Case(
        update=update,
        mode=mode,
        dtype=draw(st.sampled_from(dtypes)),
        rows=rows,
        two_dims=two_dims,
        tokens=np.array(tokens, np.int32).reshape(shape),
        table_spec=P(*of_rows[: 1 + two_dims]),
        tokens_spec=P(*of_tokens),
        chunks=draw(st.sampled_from([None, None, 2])),
        cast=draw(st.sampled_from([None, *sorted(_DTYPES)])),
        constrained=draw(st.booleans()),
    )


def _is_cut(case: Case) -> Counter[str]:
    """What is spread over devices: rows that indices pick, or updates reduced over."""
    program = program_of(case.function, *case.arguments(), **case.settings())
    found = Counter[str]()
    for stmt in walk(program.body):
        for eqn in stmt.unit.eqns if isinstance(stmt, Compute) else ():
            spread = {f for f, axes in enumerate(eqn.axes) if axes}
            found["rows"] += bool(spread & eqn.rule.picked)
            found["updates"] += bool(spread & (eqn.rule.unstreamed - eqn.rule.picked))
    return found


@settings(max_examples=budget.examples(8), deadline=None)  # each is compiled
@given(cases())
def test_sharded_tables_are_looked_up_and_updated_exactly(case: Case) -> None:
    for kind, count in _is_cut(case).items():
        hypothesis.event(f"{kind} are {'cut' if count else 'whole'}")
    wanted = jax.jit(case.function)(*case.arguments())
    for run in (jhost.jit, interpreted):
        given = run(case.function, **case.settings())(*case.arguments())
        chex.assert_trees_all_equal_shapes_and_dtypes(given, wanted)
        chex.assert_trees_all_equal(given, wanted)
        if jnp.issubdtype(wanted.dtype, jnp.floating):
            assert (jnp.signbit(given) == jnp.signbit(wanted)).all()
