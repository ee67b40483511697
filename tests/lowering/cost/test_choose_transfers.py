"""Which sums over devices are made by permutes, by prediction and as asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
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


def chosen(
    rows: int = 8192,
    width: int = 4096,
    devices: int = 2,
    kind: str = "NVIDIA H200",
    reach: Any = None,
    **how: Any,
) -> Program:
    rates = rates_of(kind)
    rates = rates and dataclasses.replace(rates, reach=reach or {})
    sequence = passes(settings=StreamDefaults(**how), streams=4, rates=rates).all
    shapes = (rows, width), (width, width), (width, width)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return run_passes(built(gradients, *args, dp=devices), sequence)


def swaps(program: Program) -> int:
    return permutes(program)["dp"]


def test_large_sums_are_said_to_go_by_permutes() -> None:
    program = chosen()
    assert swaps(program) == 1  # the first weight's has no work behind it
    (note,) = remarks(program, Note)
    assert note.form == (
        "{}: 33.6 MB summed over dp by permutes, beside what is computed next"
    )


@pytest.mark.parametrize(
    "how",
    [
        {"pipeline": "off"},
        {"pipeline": "collective"},
        {"width": 512},  # half a megabyte
        {"devices": 3, "rows": 9216},
        {"reach": {"dp": "host"}},
        {"reach": {"dp": "hosts"}, "pipeline": "p2p"},
        {"kind": "cpu"},
        {"kind": "none that is known"},
        {"rows": 64},  # the work behind it takes less than adding
    ],
    ids=str,
)
def test_others_stay_collectives(how: dict[str, Any]) -> None:
    assert not swaps(chosen(**how))


def test_asked_for_by_name_they_need_no_rates() -> None:
    assert swaps(chosen(kind="none that is known", pipeline="p2p")) == 1
