"""Zigzag order: who has which positions, and how they get there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jhost.lowering.ir.index import Rank
from jhost.lowering.ir.ranks import Ranks
from jhost.lowering.ir.zigzag import exchanges, position

devices = st.integers(1, 9)


@given(count=devices, part=st.integers(1, 4))
def test_each_device_has_an_early_part_and_a_late_one(count: int, part: int) -> None:
    size = 2 * count * part
    steps = position(np.arange(size), size, count).reshape(count, 2, part)
    for rank in range(count):
        early, late = rank * part, (2 * count - 1 - rank) * part
        expected = [early + np.arange(part), late + np.arange(part)]
        np.testing.assert_array_equal(steps[rank], expected)


@given(count=devices)
def test_two_permutations_lead_from_one_order_to_the_other(count: int) -> None:
    ranks = Ranks({"sp": count})
    parts = np.arange(2 * count).reshape(count, 2)
    found = np.full((count, 2), -1)
    for each in exchanges(Rank("sp"), count):
        target, source, slot = (
            ranks.everywhere(ranks.value(index, {}))
            for index in (each.target, each.source, each.slot)
        )
        assert sorted(target) == [*range(count)]
        np.testing.assert_array_equal(source[target], np.arange(count))
        found[target, slot[target]] = parts[:, each.half]
    np.testing.assert_array_equal(
        found.ravel(), position(np.arange(2 * count), 2 * count, count)
    )


@pytest.mark.parametrize("count", [2, 4])
def test_all_devices_see_as_many_keys_at_each_step(count: int) -> None:
    size = 8 * count
    where = position(np.arange(size), size, count).reshape(count, -1)
    for step in range(1, count):
        seen = {
            int((where[rank][:, None] >= where[(rank + step) % count]).sum())
            for rank in range(count)
        }
        assert seen == {(size // count) ** 2 // 2}
