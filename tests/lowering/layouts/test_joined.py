"""The pieces of several arrays, or for several windows of one, in few permutes."""

from __future__ import annotations

import itertools

import hypothesis
import numpy as np
from hypothesis import strategies as st

from jhost.lowering.layouts.halo import Halo, plan_halo
from jhost.lowering.layouts.joined import plan_join
from jhost.lowering.layouts.together import plan_together
from jhost.lowering.rules.reads import WindowReads


def _parts(number: int, size: int, part: int | None, devices: int) -> np.ndarray:
    """What each device has of an array, whose padding is -1."""
    elements = np.arange(size) + 1000 * number
    if part is None:
        return np.broadcast_to(elements, (devices, size))
    padded = np.full(part * devices, -1)
    padded[:size] = elements
    return padded.reshape(devices, part)


def _assembled(halo: Halo, arrays: list[np.ndarray]) -> np.ndarray:
    """The window of each device, made of the pieces; -1 where there is none."""
    devices = len(arrays[0])
    most = max((piece.size for piece in halo.pieces), default=0)
    made = np.full((devices, halo.window + 2 * most), -1)
    for piece in halo.pieces:
        assert sorted(piece.sources) == [*range(devices)]
        for device, sender in enumerate(piece.sources):
            array = arrays[piece.arrays[sender] if piece.arrays else 0][sender]
            sent = array[piece.starts[sender] :][: piece.size]
            length = piece.lengths[device] if piece.lengths else piece.size
            place = piece.places[device] + most
            if -length < place - most < halo.window:
                assert len(sent) >= length
                made[device, place : place + length] = sent[:length]
    return made[:, most : most + halo.window]


def _moved(halos: list[Halo]) -> int:
    pieces = (piece for halo in halos for piece in halo.pieces if not piece.stays)
    return sum(size for _, size, *_ in {piece.sent for piece in pieces})


@hypothesis.given(st.data())
def test_each_device_gets_its_part_of_arrays_in_a_row(data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=5))
    whole = data.draw(st.lists(st.booleans(), min_size=5, max_size=5))
    ends = [*itertools.accumulate(sizes)]
    reads = tuple(
        WindowReads(size=size, first=size - end, steps=(end - size, end))
        for size, end in zip(sizes, ends, strict=True)
    )
    parts = tuple(
        None if is_whole else -(-size // devices)
        for size, is_whole in zip(sizes, whole, strict=False)
    )
    count = max(-(-ends[-1] // devices), 1) + data.draw(st.integers(0, 1))
    halo = plan_join(reads, parts, count, devices)
    arrays = [
        _parts(n, size, part, devices)
        for n, (size, part) in enumerate(zip(sizes, parts, strict=True))
    ]
    made = _assembled(halo, arrays).reshape(-1)
    wanted = [np.arange(size) + 1000 * n for n, size in enumerate(sizes)]
    np.testing.assert_array_equal(made[: ends[-1]], np.concatenate(wanted))


@hypothesis.given(st.data())
def test_windows_of_one_array_move_no_more_together(data: st.DataObject) -> None:
    devices, part = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    count, size = data.draw(st.integers(1, 6)), devices * part
    windows = data.draw(st.integers(1, 4))
    reads = tuple(
        WindowReads(
            size=size,
            first=data.draw(st.integers(-4, size)),
            stride=data.draw(st.sampled_from((-1, 1, 1, 2))),
            extent=data.draw(st.integers(1, 3)),
            steps=(0, devices * count),
        )
        for _ in range(windows)
    )
    halos = plan_together(reads, (count,) * windows, part, devices)
    alone = [plan_halo(each, count, part, devices) for each in reads]
    assert _moved([*halos]) <= _moved(alone)
    whole = _parts(0, size, part, devices)
    for each, halo in zip(reads, halos, strict=True):
        for device, window in enumerate(_assembled(halo, [whole])):
            start = each.start(device * count, count)
            needed = each.needed(device * count, count)
            at = [element - start for element in needed]
            np.testing.assert_array_equal(window[at], np.array([*needed]))


def test_arrays_of_one_size_move_as_much_as_a_part_of_the_result() -> None:
    sizes, devices, part = [512] * 3, 8, 64
    ends = [*itertools.accumulate(sizes)]
    reads = tuple(
        WindowReads(size=512, first=512 - end, steps=(end - 512, end)) for end in ends
    )
    halo = plan_join(reads, (part,) * 3, 192, devices)
    assert [(piece.size, set(piece.places)) for piece in halo.pieces] == [
        (64, {0}), (64, {64}), (64, {128}),
    ]  # fmt: skip


def test_parts_of_a_split_array_move_together() -> None:
    reads = tuple(
        WindowReads(size=1536, first=start, steps=(0, 512)) for start in (0, 512, 1024)
    )
    halos = plan_together(reads, (64,) * 3, 192, 8)
    assert _moved([*halos]) <= 3 * 64
