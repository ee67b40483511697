"""Rates fitted to measurements: those that the measurements were made by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import strategies as st

from jhost.lowering.cost.fit import (
    PROGRAMS,
    Matmul,
    Measurements,
    Traffic,
    Transfer,
    fitted,
)
from jhost.lowering.cost.rates import Link, Rates, rates_of, rates_to_start_from
from jhost.lowering.ir.statements import CommunicationKind

H200 = rates_to_start_from("NVIDIA H200")
assert H200.put is not None
PUT = H200.put
SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
COLLECTIVES: tuple[CommunicationKind, ...] = ("AllGather", "ReduceScatter", "AllReduce")


def moved(link: Link, kind: CommunicationKind, devices: int) -> Iterator[Transfer]:
    """What such a link takes for each size."""
    for held in SIZES:
        bare = Transfer(
            kind=kind, devices=devices, held=held, seconds=1.0, host=link.host
        )
        before, rest = link.delay, link.seconds(kind, bare.received, devices)
        if kind == "CollectivePermute":
            before = (link.delay + link.latency) / PROGRAMS.before - link.latency
        seconds = before + rest
        yield dataclasses.replace(bare, seconds=seconds)


def measured(rates: Rates, devices: int) -> Measurements:
    """What one would measure of devices of such rates."""
    moves: list[Transfer] = []
    puts: list[Transfer] = []
    if devices > 1:
        puts += moved(rates.put, "CollectivePermute", devices) if rates.put else []
        moves += moved(rates.permute, "CollectivePermute", devices)
        for count in {2, devices}:
            kinds = COLLECTIVES if count == devices else COLLECTIVES[:2]
            moves += [m for kind in kinds for m in moved(rates.collective, kind, count)]
    memory = rates.memory / PROGRAMS.memory
    return Measurements(
        multiprocessors=rates.multiprocessors,
        matmuls=tuple(
            Matmul(m=m, n=n, k=k, seconds=rates.matmul_seconds(1, m, n, k))
            for m, n, k in ((8192, 8192, 8192), (4096, 1000, 512), (128, 128, 64))
        ),
        traffic=tuple(
            Traffic(bytes=size, seconds=1e-6 + size / memory) for size in SIZES
        ),
        launch=rates.launch / PROGRAMS.launch,
        host=rates.host,
        moved=tuple(moves),
        hidden=0.9 if rates.permute.beside_compute else 0.1,
        taken=rates.collective.taken / PROGRAMS.taken if devices > 1 else None,
        puts=tuple(puts),
    )


FACTORS = st.floats(0.05, 20)


@st.composite
def some_rates(draw: st.DrawFn) -> Rates:
    """An H200's, each faster or slower by a factor of its own."""
    bandwidth = H200.collective.bandwidth * draw(FACTORS)
    beside = draw(st.booleans())
    put = dataclasses.replace(
        PUT,
        bandwidth=PUT.bandwidth * draw(FACTORS),
        beside_compute=beside,
        host=PUT.host * draw(FACTORS),
    )
    return dataclasses.replace(
        H200,
        matmul=H200.matmul * draw(FACTORS),
        multiprocessors=draw(st.integers(1, 300)),
        memory=H200.memory * draw(FACTORS),
        launch=H200.launch * draw(FACTORS),
        host=H200.host * draw(FACTORS),
        permute=dataclasses.replace(
            H200.permute,
            bandwidth=H200.permute.bandwidth * draw(FACTORS),
            beside_compute=beside,
            host=H200.permute.host * draw(FACTORS),
        ),
        put=draw(st.sampled_from([put, None])),
        collective=dataclasses.replace(
            H200.collective,
            latency=H200.collective.latency * draw(FACTORS),
            bandwidth=bandwidth,
            between_two=bandwidth * draw(st.floats(0.3, 0.95)),
            taken=draw(st.floats(0.1, 1.0)),
        ),
    )


def numbers(link: Link) -> dict[str, float]:
    return {n: v for n, v in dataclasses.asdict(link).items() if v is not None}


@hypothesis.given(some_rates(), st.sampled_from([2, 3, 4, 8]))
def test_rates_are_those_of_what_was_measured(rates: Rates, devices: int) -> None:
    found = fitted(measured(rates, devices), H200)
    for name in ("matmul", "multiprocessors", "memory", "launch", "host"):
        assert getattr(found, name) == pytest.approx(getattr(rates, name), rel=1e-6)
    assert numbers(found.permute) == pytest.approx(numbers(rates.permute), rel=1e-6)
    assert numbers(found.collective) == pytest.approx(
        numbers(rates.collective), rel=1e-6
    )
    assert (found.put is None) == (rates.put is None)
    if found.put and rates.put:
        assert numbers(found.put) == pytest.approx(numbers(rates.put), rel=1e-6)
    assert not found.estimated


def test_one_device_tells_nothing_of_links() -> None:
    start = rates_of("NVIDIA B200")
    assert start is not None
    found = fitted(measured(H200, 1), start)
    assert (found.permute, found.collective) == (start.permute, start.collective)
    assert found.estimated, "nothing is known of what moves"
    assert found.matmul == pytest.approx(H200.matmul)


def test_times_that_are_noise_give_rates_that_can_be_reckoned_with() -> None:
    exact = measured(H200, 2)
    noise = tuple(dataclasses.replace(m, seconds=1e-4) for m in exact.moved)
    found = fitted(dataclasses.replace(exact, moved=noise), H200)
    for link in (found.permute, found.collective):
        assert link.bandwidth > 0
        assert link.delay + link.latency >= 0


def test_a_measurement_of_nothing_known_is_refused() -> None:
    with pytest.raises(ValueError, match="'Telepathy'"):
        Transfer(kind="Telepathy", devices=2, held=2, seconds=1.0, host=0.0)  # pyright: ignore[reportArgumentType]
