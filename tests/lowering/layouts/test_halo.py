"""The pieces of which devices make the windows of a dim that they read."""

from __future__ import annotations

import hypothesis
import numpy as np
from hypothesis import strategies as st

from jhost.lowering.layouts.halo import Halo, plan_halo
from jhost.lowering.rules.reads import WindowReads


def _windows(halo: Halo, parts: np.ndarray) -> np.ndarray:
    """The window of each device, made of the pieces; -1 where there is none."""
    devices, _ = parts.shape
    most = max((piece.size for piece in halo.pieces), default=0)
    made = np.full((devices, halo.window + 2 * most), -1)
    for piece in halo.pieces:
        for device in range(devices):
            sender = piece.sources[device]
            start, place = piece.starts[sender], piece.places[device] + most
            assert 0 <= start <= parts.shape[1] - piece.size
            made[device, place : place + piece.size] = parts[
                sender, start : start + piece.size
            ]
    return made[:, most : most + halo.window]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[WindowReads, int, int, int]:
    devices, part = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    count = draw(st.integers(1, 6))
    first, end = sorted(draw(st.tuples(*[st.integers(0, devices * count)] * 2)))
    reads = WindowReads(
        size=draw(st.integers(1, devices * part)),
        first=draw(st.integers(-8, devices * part + 4)),
        stride=draw(st.sampled_from((-2, -1, 1, 1, 2, 3))),
        extent=draw(st.integers(1, 9)),
        dilation=draw(st.integers(1, 3)),
        steps=(first, end),
    )
    return reads, count, part, devices


@hypothesis.given(_cases())
def test_each_device_has_in_its_window_what_its_steps_read(
    case: tuple[WindowReads, int, int, int],
) -> None:
    reads, count, part, devices = case
    halo = plan_halo(reads, count, part, devices)
    assert all(sorted(p.sources) == [*range(devices)] for p in halo.pieces)
    parts = np.arange(devices * part).reshape(devices, part)
    windows = _windows(halo, parts)
    for device, window in enumerate(windows):
        start = reads.start(device * count, count)
        wanted = {
            place // reads.dilation
            for step in range(device * count, (device + 1) * count)
            if reads.steps[0] <= step < reads.steps[1]
            for place in range(
                reads.first + reads.stride * step,
                reads.first + reads.stride * step + reads.extent,
            )
            if place % reads.dilation == 0 and 0 <= place < reads.size * reads.dilation
        }
        assert all(window[element - start] == element for element in wanted)


def test_a_shift_takes_one_element_of_one_neighbour() -> None:
    halo = plan_halo(WindowReads(size=16, first=-1, steps=(0, 16)), 4, 4, 4)
    assert [(p.sources, p.size, p.places[1]) for p in halo.pieces] == [
        ((0, 1, 2, 3), 3, 1),
        ((3, 0, 1, 2), 1, 0),
    ]


def test_a_shift_by_a_part_takes_the_whole_part() -> None:
    halo = plan_halo(WindowReads(size=16, first=4, steps=(0, 12)), 4, 4, 4)
    assert [(p.sources, p.size) for p in halo.pieces] == [((1, 2, 3, 0), 4)]


def test_a_reversal_exchanges_whole_parts() -> None:
    halo = plan_halo(WindowReads(size=16, first=15, stride=-1, steps=(0, 16)), 4, 4, 4)
    assert [(p.sources, p.size) for p in halo.pieces] == [((3, 2, 1, 0), 4)]


def test_a_window_wider_than_a_part_takes_several_neighbours() -> None:
    halo = plan_halo(WindowReads(size=4, first=-2, extent=3, steps=(0, 4)), 1, 1, 4)
    assert [(p.sources, p.size) for p in halo.pieces] == [
        ((0, 1, 2, 3), 1),
        ((2, 3, 0, 1), 1),
        ((3, 0, 1, 2), 1),
    ]


def test_what_half_of_the_devices_need_of_all_comes_in_few_permutes() -> None:
    """As of an array that is joined with itself: each device needs two parts."""
    halo = plan_halo(WindowReads(size=16, first=0, steps=(0, 16)), 4, 2, 8)
    moved = [piece for piece in halo.pieces if not piece.stays]
    assert [piece.size for piece in moved] == [2, 2]
    for piece in moved:
        assert sorted(piece.sources) == [*range(8)]


def test_a_device_that_reads_its_own_part_alone_gets_nothing() -> None:
    halo = plan_halo(
        WindowReads(size=16, first=0, extent=2, stride=2, steps=(0, 8)), 2, 4, 4
    )
    assert halo.is_own(4)
