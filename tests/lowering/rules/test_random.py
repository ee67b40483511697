"""The dim rules on random shapes: whatever is cut, the parts make the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from hypothesis import given, settings, strategies as st
from jax import lax

CheckRule: TypeAlias = Callable[..., set[str]]

_SHAPES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)


def _ints(shape: list[int] | tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape)
    return (np.arange(size, dtype=np.int32) * 7919 % 101).reshape(shape)


@st.composite
def _factorization(draw: st.DrawFn, size: int) -> list[int]:
    """A shape of `size` elements."""
    shape: list[int] = []
    while size > 1:
        shape.append(draw(st.sampled_from([n for n in range(1, 13) if size % n == 0])))
        size //= shape[-1]
    return shape


@settings(settings.get_profile("programs"))  # others with either JAX
@given(st.data(), st.sampled_from([1, 6, 12, 24]))
def test_reshape(check_rule: CheckRule, data: st.DataObject, size: int) -> None:
    old = data.draw(_factorization(size))
    new = data.draw(_factorization(size))
    check_rule(lambda x: lax.reshape(x, new), _ints(old))


@settings(settings.get_profile("programs"))  # others with either JAX
@given(st.data(), _SHAPES)
def test_broadcast_in_dim(
    check_rule: CheckRule, data: st.DataObject, shape: list[int]
) -> None:
    positions = st.sets(st.integers(0, len(shape) - 1))
    kept = sorted(data.draw(positions))
    sizes = [data.draw(st.sampled_from([1, shape[dim]])) for dim in kept]
    check_rule(lambda x: lax.broadcast_in_dim(x, shape, kept), _ints(sizes))


@settings(settings.get_profile("programs"))  # others with either JAX
@given(st.data(), _SHAPES)
def test_transpose(
    check_rule: CheckRule, data: st.DataObject, shape: list[int]
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    check_rule(lambda x: lax.transpose(x, order), _ints(shape))


@settings(settings.get_profile("programs"))  # others with either JAX
@given(st.data(), _SHAPES)
def test_slice(check_rule: CheckRule, data: st.DataObject, shape: list[int]) -> None:
    starts = [data.draw(st.sampled_from([0, size // 2])) for size in shape]
    strides = data.draw(st.sampled_from([None, [1] * len(shape), [2] * len(shape)]))
    check_rule(lambda x: lax.slice(x, starts, shape, strides), _ints(shape))


@settings(settings.get_profile("programs"))  # others with either JAX
@given(st.data(), _SHAPES)
def test_pad(check_rule: CheckRule, data: st.DataObject, shape: list[int]) -> None:
    widths = st.sampled_from([(0, 0, 0), (1, 0, 0), (0, -1, 0), (0, 0, 1)])
    config = [data.draw(widths) for _ in shape]
    check_rule(lambda x: lax.pad(x, 7, config), _ints(shape))


@settings(settings.get_profile("programs"))  # others with either JAX
@given(st.data(), _SHAPES)
def test_concatenate(
    check_rule: CheckRule, data: st.DataObject, shape: list[int]
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    other = [*shape[:dim], 2, *shape[dim + 1 :]]
    check_rule(lambda x, y: lax.concatenate((x, y), dim), _ints(shape), _ints(other))


@settings(settings.get_profile("programs"))  # others with either JAX
@given(st.data(), st.permutations("bcmk"), st.permutations("bcnk"))
def test_dot_general(
    check_rule: CheckRule, data: st.DataObject, lhs: list[str], rhs: list[str]
) -> None:
    sizes = {name: data.draw(st.sampled_from([1, 2, 3])) for name in "bcmnk"}
    shared = data.draw(st.permutations("bck"))
    count = data.draw(st.integers(0, 3))
    batch, contracted = shared[:count], shared[count:]

    def positions(names: list[str], group: list[str]) -> list[int]:
        return [names.index(name) for name in group]

    numbers = (
        (positions(lhs, contracted), positions(rhs, contracted)),
        (positions(lhs, batch), positions(rhs, batch)),
    )
    check_rule(
        lambda x, y: lax.dot_general(x, y, numbers),
        _ints([sizes[name] for name in lhs]),
        _ints([sizes[name] for name in rhs]),
    )


@settings(settings.get_profile("programs"))  # others with either JAX
@given(st.data(), _SHAPES, st.sampled_from(["clip", "fill"]))
def test_gather(
    check_rule: CheckRule, data: st.DataObject, shape: list[int], mode: str
) -> None:
    slices = [data.draw(st.sampled_from([1, size])) for size in shape]
    collapsible = [dim for dim, size in enumerate(slices) if size == 1]
    collapsed = sorted(data.draw(st.sets(st.sampled_from(collapsible or [0]))))
    collapsed = [dim for dim in collapsed if dim in collapsible]
    indexed = data.draw(st.permutations(range(len(shape))))
    indexed = indexed[: data.draw(st.integers(0, len(shape)))]
    batch = data.draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))
    offsets = len(shape) - len(collapsed)
    places = itertools.combinations(range(offsets + len(batch)), offsets)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=data.draw(st.sampled_from(list(places))),
        collapsed_slice_dims=tuple(collapsed),
        start_index_map=tuple(indexed),
    )
    indices = _ints([*batch, len(indexed)]) % 5 - 1
    check_rule(
        lambda x, i: lax.gather(x, i, numbers, tuple(slices), mode=mode),
        _ints(shape),
        indices,
    )
