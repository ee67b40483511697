"""Buffers and aliases while a program is emitted."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np

from jhost.lowering.emit.buffers import new_view
from jhost.lowering.emit.windows import window
from jhost.lowering.ir.statements import Buffer, Dim


def test_what_came_first_stays_narrow_until_it_is_read() -> None:
    buffer = Buffer(name="sum", shape=(4,), dtype=np.dtype(np.float32), dims=(Dim(),))
    view = new_view(buffer, (4,), mesh_dims=1)
    view.write(first := jnp.arange(4, dtype=jnp.bfloat16))
    assert view.held() is first
    region = view.region.select(0, np.array([2]), 2)
    last = view.select(window((4,), 0, 2, 2, 1, False), region)
    for each, wanted in ((view, [0, 1, 2, 3]), (last, [2, 3])):
        chex.assert_trees_all_equal(each.read(), np.asarray(wanted, np.float32))
    last.write(jnp.ones(2, jnp.bfloat16))
    for each, wanted in ((view, [0, 1, 1, 1]), (last, [1, 1])):
        chex.assert_trees_all_equal(each.read(), np.asarray(wanted, np.float32))
        assert each.held().dtype == np.float32


def test_what_a_later_write_leaves_of_a_part_stays() -> None:
    """Rows 0 and 1 are written, then 1 and 2: row 0 is still what it was."""
    rows = Buffer(name="rows", shape=(3,), dtype=np.dtype(np.float32), dims=(Dim(),))
    view = new_view(rows, (3,), mesh_dims=1)
    for start, values in ((0, [1, 2]), (1, [3, 4])):
        region = view.region.select(0, np.array([start]), 2)
        part = view.select(window((3,), 0, start, 2, 1, False), region)
        part.write(jnp.array(values, jnp.float32))
    chex.assert_trees_all_equal(view.read(), np.asarray([1, 3, 4], np.float32))
