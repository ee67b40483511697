"""Cycles of candidates, which share their scans."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.choose_cycles import ChooseCycles, moving_all
from jhost.lowering.cost.choose_schedule import ChooseSchedule
from jhost.lowering.cost.choose_transfers import ChooseTransfers
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Search
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.pipeline import passes
from tests.lowering.traced import built

RATES = rates_of("NVIDIA H200")


def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    weights = jhost.shard(weights, P(None, "tp", None))
    return jax.lax.scan(layer, jhost.shard(x, P("tp", None)), weights)[0]


def with_communications() -> Program:
    """The layers before any scan is a cycle; each gathers a weight."""
    program = built(layers, (8192, 1024), (4, 1024, 1024), tp=2)
    every = passes(settings=StreamDefaults(finds=False), streams=4, rates=RATES)
    steps = (*every.layouts, *every.loops)
    for step in itertools.takewhile(lambda s: s.name != ChooseSchedule.name, steps):
        program = step.apply(program)
    return program


@pytest.mark.parametrize("gains", [True, False])
def test_candidates_decide_once_for_a_scan(
    gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Program] = []

    def decided(self: ChooseCycles, program: Program, *_: object) -> bool:
        asked.append(program)
        return gains

    monkeypatch.setattr(ChooseCycles, "gains", decided)
    transfers = ChooseTransfers(RATES)
    cycles = ChooseCycles(transfers, moving_all(transfers))
    program = with_communications()
    candidate = dataclasses.replace(program, remarks=(Search(),))
    of_candidates = cycles.of_candidates()
    one, other = map(of_candidates.apply, (program, candidate))
    assert len(asked) == 1
    assert str(one) == str(other)
    assert (str(one) != str(program)) == gains
    cycles.apply(program)
    cycles.apply(candidate)
    assert len(asked) == 3
