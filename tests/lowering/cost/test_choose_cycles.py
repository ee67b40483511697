"""Cycles of candidates, which share their scans."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.choose_cycles import ChooseCycles, moving_all
from jhost.lowering.cost.choose_forms import ChooseForms
from jhost.lowering.cost.choose_schedule import ChooseSchedule
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.ir.bodies import held_bodies
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Search
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.ir.statements import Buffer, Communicate, Scan
from jhost.lowering.pipeline import passes
from jhost.lowering.schedule.copied import with_names
from jhost.lowering.verify.program import verify
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


def renamed(program: Program) -> Program:
    """The program with other names outside of its bodies."""
    buffers = (b for s in program.body for bs in reads_writes(s) for b in bs)
    sent = (s.name for s in program.body if isinstance(s, Communicate))
    names = {name: f"{name}_z" for name in (*(b.name for b in buffers), *sent)}
    names |= {param.name: f"{param.name}_z" for param in program.params}

    def other(buffer: Buffer) -> Buffer:
        return dataclasses.replace(buffer, name=names[buffer.name])

    return dataclasses.replace(
        program,
        params=tuple(map(other, program.params)),
        results=tuple(map(other, program.results)),
        body=tuple(with_names(program.body, names)),
    )


def around(program: Program) -> str:
    """The text of a program without its scans, its words numbered as they come.

    So programs are the same if only names differ.
    """
    body = tuple(stmt for stmt in program.body if not isinstance(stmt, Scan))
    text = str(dataclasses.replace(program, body=body))
    numbers = {
        word: n for n, word in enumerate(dict.fromkeys(re.findall(r"\w+", text)))
    }
    return re.sub(r"\w+", lambda found: str(numbers[found[0]]), text)


def test_a_cycle_is_written_again_in_other_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ChooseCycles, "gains", lambda *_: True)
    transfers = ChooseForms(RATES)
    cycles = ChooseCycles(transfers, moving_all(transfers)).of_candidates()
    program = with_communications()
    first, again = map(cycles.apply, (program, renamed(program)))
    anew = cycles.of_candidates().apply(renamed(program))
    verify(again, after="choose_cycles")
    assert [*map(id, held_bodies(first))] == [*map(id, held_bodies(again))]
    assert around(again) == around(anew)
    # In the same names it has the same statements, which passes know.
    same = cycles.apply(dataclasses.replace(program, remarks=(Search(),)))
    assert all(map(operator.is_, same.body, first.body))


@pytest.mark.parametrize("gains", [True, False])
def test_candidates_decide_once_for_a_scan(
    gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Program] = []

    def decided(self: ChooseCycles, program: Program, *_: object) -> bool:
        asked.append(program)
        return gains

    monkeypatch.setattr(ChooseCycles, "gains", decided)
    transfers = ChooseForms(RATES)
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
