"""Arithmetic of intervals, against sets of moments."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given, strategies as st

from jhost.runtime.profile.intervals import Interval, length, subtract, union

MOMENTS = range(20)

intervals = st.lists(
    st.tuples(st.integers(0, 19), st.integers(0, 19)).map(
        lambda ends: (float(min(ends)), float(max(ends)))
    )
)


def moments(found: Iterable[Interval]) -> set[int]:
    """Which unit steps lie in any of them."""
    return {t for t in MOMENTS if any(a <= t < b for a, b in found)}


@given(intervals)
def test_a_union_covers_what_its_intervals_do(some: list[Interval]) -> None:
    assert moments(union(some)) == moments(some)


@given(intervals)
def test_a_union_is_in_order_with_gaps_and_nothing_empty(some: list[Interval]) -> None:
    cover = union(some)
    assert all(start < end for start, end in cover)
    assert all(before[1] < after[0] for before, after in pairwise(cover))


@given(intervals, intervals)
def test_a_difference_is_what_only_the_first_covers(
    some: list[Interval], others: list[Interval]
) -> None:
    left = subtract(union(some), union(others))
    assert moments(left) == moments(some) - moments(others)
    assert union(left) == left


@given(intervals)
def test_a_length_counts_each_moment_once(some: list[Interval]) -> None:
    assert length(union(some)) == len(moments(some))


@given(intervals, intervals)
def test_what_is_left_and_what_is_shared_make_the_whole(
    some: list[Interval], others: list[Interval]
) -> None:
    cover, taken = union(some), union(others)
    left = subtract(cover, taken)
    assert length(left) + length(subtract(cover, left)) == length(cover)
