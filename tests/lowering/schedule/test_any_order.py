"""Whatever goes by which lane, and however many are under way: the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args
from unittest import mock

import jax
import jax.numpy as jnp
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.choose_forms import ChooseForms
from jhost.lowering.cost.products_in_parts import ProductsInParts
from jhost.lowering.ir.bodies import programs
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Wait
from jhost.lowering.schedule import intervals, room
from jhost.lowering.schedule.permutes import is_made_of_permutes
from jhost.lowering.schedule.scheduled_transfer import TransferForm
from tests import budget, sums
from tests.lowering.on_mesh import exact, on
from tests.lowering.outside import gradients_of, layer, operands

WAYS: Sequence[TransferForm | None] = (*get_args(TransferForm), None)


def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Rows stay where they are."""
    for w in weights:
        x = jhost.shard(layer(x, w), P(("dp", "fsdp")))
    return x


def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jax.checkpoint(layers)(x, w, w.T), None), x, w)[0]


def lanes(ways: Sequence[TransferForm | None]) -> Callable[..., TransferForm | None]:
    """A lane for each transfer by its name, the ways in turn; None leaves it alone."""

    def way(stmt: Communicate, mesh: Mapping[str, int]) -> TransferForm | None:
        chosen = ways[sum(stmt.name.encode()) % len(ways)]
        made = chosen != "permutes" or is_made_of_permutes(stmt, mesh)
        return chosen if made else "collective"

    return way


def check_window(program: Program, window: int) -> None:
    """No more is gathered ahead, in straight lines, than so many of the largest."""
    for each in programs(program):
        sizes = {
            stmt.name: max(bytes_of(stmt.source), bytes_of(stmt.out))
            for stmt in each.body
            if isinstance(stmt, Communicate) and stmt.kind == "AllGather"
        }
        under_way: set[str] = set()
        for stmt in each.body:
            match stmt:
                case Communicate(name=name) if name in sizes:
                    under_way.add(name)
                case Wait(communication=name):
                    under_way.discard(name)
                case _:
                    pass
            ahead = sum(sizes[name] for name in under_way)
            assert ahead <= window * max(sizes.values(), default=0)


@given(
    f=st.sampled_from([layers, scanned]),
    axes=st.sampled_from(
        [{"dp": 2, "fsdp": 2}, {"dp": 1, "fsdp": 4}, {"dp": 4, "fsdp": 1}]
    ),
    count=st.integers(1, 4),
    window=st.integers(1, 4),
    of_sums=st.integers(1, 6),
    ways=st.lists(st.sampled_from(WAYS), min_size=1, max_size=5),
    in_parts=st.booleans(),
)
@settings(max_examples=budget.examples(6), deadline=None)
def test_any_lanes_and_any_window(
    f: Any,
    axes: dict[str, int],
    count: int,
    window: int,
    of_sums: int,
    ways: list[TransferForm | None],
    in_parts: bool,
) -> None:
    x, *weights = operands(8, count, 4)
    specs = P(("dp", "fsdp")), *[P("fsdp")] * count
    if f is scanned:
        weights, specs = [jnp.stack(weights)], (specs[0], P(None, "fsdp"))
    with (
        sums.moving("collective"),
        mock.patch.object(ChooseForms, "way", staticmethod(lanes(ways))),
        mock.patch.object(ProductsInParts, "gains", return_value=in_parts),
        mock.patch.object(intervals, "_WINDOW", window),
        mock.patch.object(
            room, "_WINDOW", dict.fromkeys(get_args(TransferForm), of_sums)
        ),
    ):
        program = exact(gradients_of(f), x, *weights, **on(axes, specs, specs))
    check_window(program, window)
