"""Which transfers outside of loops are by permutes, by prediction and as asked."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.choose_forms import ChooseForms
from jhost.lowering.cost.choose_schedule import ChooseSchedule
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import permutes
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.pipeline import passes, run_passes
from tests.lowering.traced import built, remarks


def gradients(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    def loss(w: jax.Array, v: jax.Array) -> jax.Array:
        h = jnp.sin(jhost.shard(x, P("dp")) @ w) @ v
        return jnp.sum(jnp.square(h).astype(jnp.float32))

    return jax.grad(loss, (0, 1))(w, v)


def shards(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    x, w, v = (jhost.shard(each, P("dp")) for each in (x, w, v))
    return jhost.shard(x @ w, P("dp")) @ v


def chosen(
    f: Callable[..., Any] = gradients,
    *,
    rows: int = 8192,
    width: int = 4096,
    devices: int = 2,
    kind: str = "NVIDIA H200",
    reach: Any = None,
    between: str = "",
    **how: Any,
) -> Program:
    rates = rates_of(kind)
    rates = rates and dataclasses.replace(rates, reach=reach or {})
    sequence = passes(
        settings=StreamDefaults(**how), streams=4, rates=rates, between=between.split()
    ).all
    shapes = (rows, width), (width, width), (width, width)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return run_passes(built(f, *args, dp=devices), sequence)


def swaps(program: Program) -> int:
    return permutes(program)["dp"]


def test_large_sums_are_said_to_go_by_permutes() -> None:
    program = chosen()
    assert swaps(program) == 1  # the first weight's has no work behind it
    (note,) = remarks(program, Note)
    assert note.form == (
        "{}: 33.6 MB summed over dp by permutes, beside the work that comes after"
    )


def test_large_sums_go_by_permutes_beside_a_scan_that_takes_much_longer() -> None:
    """The gain counts against what stands outside of bodies."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.sin(x @ w), None

        return gradients(x, w, v), lax.scan(layer, x, length=1000)[0]

    assert swaps(chosen(f)) == 2  # the scan hides the other one as well


@pytest.mark.parametrize(("devices", "rows"), [(2, 8192), (3, 9216)])
def test_large_shards_are_said_to_come_by_permutes(devices: int, rows: int) -> None:
    """Of any number of devices; the first are read at once.

    Over three, a loop in which rows move instead would be found.
    """
    program = chosen(shards, devices=devices, rows=rows, width=12288, finds=False)
    assert swaps(program) == devices - 1
    (note,) = remarks(program, Note)
    assert note.form == (
        "{}: 302.0 MB gathered over dp by permutes, beside the work that comes before"
    )


@pytest.mark.parametrize("f", [gradients, shards])
@pytest.mark.parametrize(
    "how",
    [
        {"pipeline": "off"},
        {"pipeline": "collective"},
        {"width": 512},  # half a megabyte
        {"reach": {"dp": "host"}},
        {"reach": {"dp": "hosts"}, "pipeline": "p2p"},
        {"kind": "cpu"},
        {"kind": "none that is known"},
        {"rows": 64},  # the work behind it takes less than adding
    ],
    ids=str,
)
def test_others_stay_collectives(f: Callable[..., Any], how: dict[str, Any]) -> None:
    assert not swaps(chosen(f, **how))


def test_all_reduces_of_three_devices_stay_collectives() -> None:
    assert not swaps(chosen(devices=3, rows=9216))


@pytest.mark.parametrize("f", [gradients, shards])
def test_asked_for_by_name_they_need_no_rates(f: Callable[..., Any]) -> None:
    assert swaps(chosen(f, kind="none that is known", pipeline="p2p")) == 1


@pytest.mark.parametrize("kind", ["NVIDIA H200", "none that is known"])
def test_between_processes_collectives_are_put_in_order_by_count(kind: str) -> None:
    """Unasked, whatever the rates say: all processes write the same program."""
    how: dict[str, Any] = {"kind": kind, "reach": {"dp": "host"}, "between": "dp"}
    program = chosen(**how)
    assert not swaps(program)
    (note,) = remarks(program, Note)
    assert note.form == "{}: 33.6 MB summed over dp, beside the work that comes after"
    (note,) = remarks(chosen(shards, **how), Note)
    assert note.form == (
        "{}: 33.6 MB gathered over dp, beside the work that comes before"
    )


@pytest.mark.parametrize(
    "how", [{"pipeline": "off"}, {"pipeline": "collective"}, {"width": 512}], ids=str
)
def test_others_between_processes_stay_where_they_are(how: dict[str, Any]) -> None:
    for f in (gradients, shards):
        assert not remarks(chosen(f, between="dp", reach={"dp": "hosts"}, **how), Note)


@pytest.mark.parametrize("gains", [True, False])
def test_candidates_decide_once_for_equal_transfers(
    gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other transfers are weighed anew, and without candidates all are."""
    program, wider = with_communications(4096), with_communications(8192)
    candidate = dataclasses.replace(program, name="candidate")
    asked: list[Program] = []

    def weighed(self: ChooseForms, program: Program, *_: object) -> bool:
        asked.append(program)
        return gains

    monkeypatch.setattr(ChooseForms, "gains", weighed)
    transfers = ChooseForms(rates_of("NVIDIA H200"), moves_work=False)
    of_candidates = transfers.of_candidates()
    ordered = [of_candidates.apply(each) for each in (program, candidate)]
    assert len(asked) == 1
    one, other = map(str, ordered)
    assert one == other.replace("program candidate", "program f")
    assert (one != str(program)) == gains
    of_candidates.apply(wider)
    assert len(asked) == 2
    transfers.apply(program)
    transfers.apply(candidate)
    assert len(asked) == 4


def with_communications(width: int) -> Program:
    """The gradients before any transfer has a form; one sum stands beside work."""
    settings = StreamDefaults(finds=False)
    steps = passes(settings=settings, streams=4, rates=rates_of("NVIDIA H200"))
    shapes = (8192, width), (width, width), (width, width)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = built(gradients, *args, dp=2)
    for step in itertools.takewhile(lambda s: s.name != ChooseSchedule.name, steps.all):
        program = step.apply(program)
    return program
