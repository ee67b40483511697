"""The dim rules of slices and updates at computed indices, in parts of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest
from jax import lax

from tests.lowering.hand_built import integers

CheckRule: TypeAlias = Callable[..., set[str]]

# Of nine: before the first, so that a window crosses borders, and behind the last.
STARTS = np.array([-4, 0, 2, 5, 40], np.int32)


@pytest.mark.parametrize("start", STARTS.tolist())
def test_one_position(start: int, check_rule: CheckRule) -> None:
    for width in (1, 4):
        check_rule(
            lambda x, at, width=width: lax.dynamic_slice(x, (at, 0), (width, 2)),
            integers(9, 3),
            np.int32(start),
        )
        check_rule(
            lambda x, new, at: lax.dynamic_update_slice(x, new, (at, 2)),
            integers(9, 3),
            integers(width, 2),
            np.int32(start),
        )


@pytest.mark.parametrize(
    ("start", "size"), [(np.uint8(255), 200), (np.int8(-128), 300)]
)
def test_an_index_of_few_bits(start: Any, size: int, check_rule: CheckRule) -> None:
    # XLA (of JAX 0.10) takes the bound of 300 modulo 256, so none goes so far.
    x, new = integers(size), integers(2)
    check_rule(lambda x, at: lax.dynamic_slice(x, (at,), (2,)), x, start)
    check_rule(lambda x, u, at: lax.dynamic_update_slice(x, u, (at,)), x, new, start)


@pytest.mark.parametrize("width", [1, 4, 6])
def test_a_position_for_each_row(width: int, check_rule: CheckRule) -> None:
    x = integers(5, 9, 3)

    def read(x: Any, at: Any) -> Any:
        return lax.dynamic_slice(x, (at, 0), (width, 3))

    def write(x: Any, new: Any, at: Any) -> Any:
        return lax.dynamic_update_slice(x, new, (at, 0))

    check_rule(jax.vmap(read), x, STARTS)
    check_rule(jax.vmap(read, (None, 0), 1), x[0], STARTS)
    check_rule(jax.vmap(write), x, integers(5, width, 3), STARTS)


_GATHER = lax.GatherDimensionNumbers((0, 2), (), (1, 0))
_SCATTER = lax.ScatterDimensionNumbers((0, 2), (), (1, 0))


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_windows_among_the_dims_of_indices(mode: str, check_rule: CheckRule) -> None:
    """A window that is not all in bounds is filled, or dropped, as a whole."""
    x = integers(9, 6)
    at = np.array([[1, 8], [-1, 3], [4, 4], [3, 5]], np.int32)

    def read(x: Any, at: Any) -> Any:
        return lax.gather(x, at, _GATHER, (4, 3), mode=mode, fill_value=-7)

    def add(x: Any, at: Any, new: Any) -> Any:
        return lax.scatter_add(x, at, new, _SCATTER, mode=mode)

    check_rule(read, x, at)
    check_rule(add, x, at, integers(4, 4, 3))
