"""Where pieces of windows stand in a row that is the same on all devices."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, strategies as st

from jhost.lowering.rules.row_of_pieces import plan_row


def windows(
    places: Sequence[Sequence[int]], lengths: Sequence[int], size: int
) -> list[list[tuple[int, int] | None]]:
    """Each device's window of the row, as elements of pieces."""
    row = plan_row(places, lengths, size)
    assert row is not None
    made: list[tuple[int, int] | None] = [None] * row.length
    for number, place in row.places:
        for element in range(lengths[number]):
            if 0 <= place + element < row.length:
                assert made[place + element] is None
                made[place + element] = number, element
    return [made[start : start + size] for start in row.starts]


def test_a_piece_stands_on_both_sides_of_a_part() -> None:
    """The second device reads it before its own part, and the third behind it."""
    places = [[2, 1, 0, -1], [5, 0, 4, 5]]
    first, second, third, last = windows(places, [4, 1], 5)
    own = [(0, element) for element in range(4)]
    assert first[2:] == own[:3]
    assert second == [(1, 0), *own]
    assert third == [*own, (1, 0)]
    assert last[:3] == own[1:]


def test_pieces_that_overlap_stand_in_no_row() -> None:
    assert plan_row([[0, 0], [4, 3]], [4, 4], 8) is None


@given(st.data())
def test_each_device_finds_its_pieces_in_the_row(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    place = st.integers(-5, size)
    places = [data.draw(st.lists(place, min_size=3, max_size=3)) for _ in lengths]
    if plan_row(places, lengths, size) is None:
        return
    for device, window in enumerate(windows(places, lengths, size)):
        for number, length in enumerate(lengths):
            for element in range(length):
                at = places[number][device] + element
                if 0 <= at < size:
                    assert window[at] == (number, element)


def test_a_large_piece_is_not_written_twice() -> None:
    """As in a tiling: half of the devices have the two pieces the other way round."""
    assert plan_row([[0, 4], [4, 0]], [4, 4], 8) is None
