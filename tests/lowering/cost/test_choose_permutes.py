"""Peer copies or puts: what is chosen for a program, by which prediction."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.choose_permutes import ChoosePermutes
from jhost.lowering.cost.rates import known_kinds, rates_of, rates_to_start_from
from jhost.lowering.cost.simulate import predict
from jhost.lowering.explain import explain_program, puts
from jhost.lowering.ir.remarks import PermuteReport
from tests.lowering.cost.test_choose_pipelines import lowered, mlp, report, sizes
from tests.lowering.traced import remarks

PUTTING = rates_to_start_from("NVIDIA H200")
COPYING = dataclasses.replace(PUTTING, put=None)
assert PUTTING.put is not None
LIKE_COPIES = dataclasses.replace(PUTTING.put, latency=PUTTING.permute.latency)
QUICK = dataclasses.replace(PUTTING, put=LIKE_COPIES)


@pytest.mark.parametrize(
    ("rows", "kind"), [(2048, "puts"), (4096, "peer copies"), (8192, "peer copies")]
)
def test_puts_where_the_host_is_the_limit_and_peer_copies_elsewhere(
    rows: int, kind: str
) -> None:
    program = lowered(mlp(pipeline="p2p"), *sizes(rows), rates=PUTTING)
    (found,) = remarks(program, PermuteReport)
    assert (found.kind, puts(program)) == (kind, kind == "puts")
    predicted = dict(found.predicted)
    assert next(iter(predicted)) == kind
    assert predicted["puts"].host < predicted["peer copies"].host
    copied = predict(program, COPYING)
    assert predicted["peer copies"] == copied
    assert (kind == "puts") == (copied.host == copied.total)


def test_the_program_is_the_same_but_for_what_is_said_of_it() -> None:
    """The text of a program, and what processes compare, know nothing of it."""
    shapes = sizes(2048)
    put = lowered(mlp(pipeline="p2p"), *shapes, rates=PUTTING)
    copied = lowered(mlp(pipeline="p2p"), *shapes, rates=COPYING)
    assert str(put) == str(copied)
    assert not remarks(copied, PermuteReport)
    assert not explain_program(copied).permutes
    assert "permutes:\n" not in explain_program(copied).text
    (said,) = explain_program(put).permutes
    assert str(said) == (
        "puts, predicted to take 335 us (host 125 us); peer copies 377 us (host 377 us)"
    )
    assert explain_program(put).text.endswith(f"  permutes:\n    {said}")
    assert ChoosePermutes(COPYING).apply(copied) is copied
    assert ChoosePermutes().apply(copied) is copied


@pytest.mark.parametrize("pipeline", ["off", "collective"])
def test_nothing_is_said_where_nothing_is_permuted(pipeline: Any) -> None:
    program = lowered(mlp(pipeline=pipeline), *sizes(2048), rates=PUTTING)
    assert not remarks(program, PermuteReport)


@pytest.mark.parametrize(
    ("share", "kind"), [(1.0, "peer copies"), (0.98, "peer copies"), (0.96, "puts")]
)
def test_peer_copies_stand_unless_puts_gain(share: float, kind: str) -> None:
    """Six puts that keep the host for so much of the time by peer copies."""
    program = lowered(mlp(pipeline="p2p"), *sizes(2048), rates=COPYING)
    free = dataclasses.replace(LIKE_COPIES, host=0.0)
    kernels = predict(program, dataclasses.replace(QUICK, permute=free)).host
    host = (share * predict(program, COPYING).total - kernels) / 6
    rates = dataclasses.replace(QUICK, put=dataclasses.replace(free, host=host))
    (found,) = remarks(ChoosePermutes(rates).apply(program), PermuteReport)
    assert found.kind == kind


def test_a_candidate_is_weighed_by_the_better_kind() -> None:
    """Left alone by peer copies, pipelined by puts that are as quick as these."""
    shapes = sizes(2048)
    assert report(lowered(mlp(), *shapes, rates=COPYING)).pipeline == "off"
    program = lowered(mlp(), *shapes, rates=QUICK)
    assert report(program).pipeline == "p2p"
    assert puts(program)
    (_, chosen), *others = report(program).predicted
    ((_, put), _) = remarks(program, PermuteReport)[0].predicted
    assert chosen == put.total
    assert all(chosen < 0.97 * seconds for _, seconds in others)


def test_one_kind_holds_for_a_program_and_all_bodies_in_it() -> None:
    def layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return mlp(pipeline="p2p")(x, w, v), None

        return lax.scan(layer, jhost.shard(x, P("tp", None)), None, length=3)[0]

    slow = dataclasses.replace(PUTTING.permute, host=1e-4)
    rates = dataclasses.replace(PUTTING, permute=slow)
    program = lowered(layers, *sizes(1024), rates=rates)
    (found,) = remarks(program, PermuteReport)
    assert found in program.remarks
    assert puts(program)
    assert explain_program(program).permutes == (found,)


def test_puts_are_known_where_links_were_measured() -> None:
    def put(kind: str, **how: Any) -> bool:
        rates = rates_of(kind, **how)
        return rates is not None and rates.put is not None

    assert not any(put(kind) for kind in known_kinds())
    known = {kind for kind in known_kinds() if put(kind, puts=True)}
    assert known == {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}
