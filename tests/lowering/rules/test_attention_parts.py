"""Blocks of a sliding window are computed as its pairs of queries and keys ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from jhost.lowering.rules.attention_parts import AttentionBlocks
from jhost.lowering.rules.dim_rule import AttentionWindow
from jhost.lowering.rules.position_runs import PositionRun


class Named(AttentionBlocks):
    """Blocks that say how they are computed, and compute nothing."""

    def as_it_is(self, eqn: Any, args: Sequence[Any]) -> list[Any]:
        return ["as it is"]

    def unmasked(self, eqn: Any, args: Sequence[Any]) -> list[Any]:
        return ["unmasked"]

    def masked(self, eqn: Any, args: Sequence[Any]) -> list[Any]:
        return ["masked"]

    def nothing(self, eqn: Any, args: Sequence[Any]) -> list[Any]:
        return ["nothing"]


@pytest.mark.parametrize("side", [1, 2, 3])
def test_a_block_is_hidden_masked_or_seen_whole(side: int) -> None:
    """The diagonal is as the whole, whatever the window."""
    eqn: Any = None
    for left in range(7):
        window = AttentionWindow(queries=0, keys=1, left=left, right=0)
        blocks = Named(window=window, sizes=(12, 12), operands=(), results=())
        for distance in range(-side, 5 * side, side):
            steps = np.arange(side)
            behind = distance + steps[:, None] - steps
            seen = (behind >= 0) & (behind <= left)
            wanted = "masked" if seen.any() else "nothing"
            wanted = "unmasked" if seen.all() else wanted
            wanted = "as it is" if distance == 0 else wanted
            with mock.patch.object(jax.lax, "switch", _chosen):
                row = PositionRun(0, side, distance, side)
                assert blocks.block(eqn, (), row, PositionRun(0, side, 0, side)) == [
                    wanted
                ]


def _chosen(case: Any, branches: Sequence[Any], *args: Any) -> Any:
    return branches[int(case)](*args)
