"""Random scans, and what JAX derives of them: as the plain function, exactly."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, get_args
from unittest import mock

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.layouts import carry_partial_sums
from jhost.lowering.schedule.scheduled_transfer import TransferForm
from tests import finding, sums
from tests.lowering.traced import by_statements
from tests.random_scans import ScanCase, scans

_SPECS = (
    ("up", P(None, None, "d")),
    ("down", P(None, "d")),
    ("shared", P("d")),
    ("gain", P()),
)

_SCAN = ScanCase(
    devices=2,
    length=0,
    dtype="float32",
    of_weights="float32",
    steps=("both", "every"),
    extra="",
    stacks=(),
    reverse=False,
    unroll=1,
    counted=False,
    policy="nothing",
    prevents_cse=True,
    around="",
    taken="forward",
    outside=False,
    specs=_SPECS,
    rows=P("d"),
    batch=2,
    donated=False,
)

OFFLOADED_NOTHING = dataclasses.replace(
    _SCAN, policy="offload dots", around="cond", taken="value and gradient"
)
"""An empty stack in the host's memory, which is exchanged for another dim."""

OFFLOADED_TWICE = dataclasses.replace(
    _SCAN,
    length=2,
    steps=("both", "switch"),
    policy="offload dots",
    prevents_cse=False,
    around="twice",
    taken="gradient",
    outside=True,
)
"""JAX calls a value the host's inside of a body, and the device's outside."""

OFFLOADED_IN_A_BRANCH = dataclasses.replace(
    _SCAN,
    length=2,
    steps=("cond", "both"),
    policy="offload dots",
    taken="tangent of gradient",
)
"""JAX calls a result of one branch the host's, and that of another the device's."""

FOUND_AND_LAID_OUT_ANEW = dataclasses.replace(
    _SCAN, length=2, steps=("both", "down"), around="vmap"
)
"""Once the streams are found, layouts change, and nothing moves along one of them."""

CONDITION_OF_ACTIVATIONS = dataclasses.replace(
    _SCAN,
    steps=("shared", "up", "shared", "cond"),
    policy="dots without batch dims",
    taken="gradient of gradient",
    specs=(
        ("up", P()),
        ("down", P(None, None, "d")),
        ("shared", P("d")),
        ("gain", P(None, "d")),
    ),
)
"""An activation is read by a condition, which has no result of its own."""


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(
    scans(),
    st.sampled_from([*get_args(TransferForm), None]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_random_scans_equal_the_plain_function(
    case: ScanCase,
    way: TransferForm | None,
    work: bool,
    within: bool,
    little: bool,
    compiled: bool,
) -> None:
    """However transfers go, be they as small as here, and whatever work moves.

    Nor do chunks of whatever moves change it, in loops that nobody asked for.
    """
    case.count()
    expected = case.by(jax.jit)(*case.arguments())
    hypothesis.assume(largest(expected) <= case.exact)
    check(expected, case, way, work, within, little, compiled)


@pytest.mark.parametrize(
    ("case", "way", "within", "compiled"),
    [
        (OFFLOADED_NOTHING, None, True, True),
        (OFFLOADED_TWICE, "permutes", False, False),
        (OFFLOADED_IN_A_BRANCH, None, False, True),
        (FOUND_AND_LAID_OUT_ANEW, None, True, True),
        (CONDITION_OF_ACTIVATIONS, "permutes", False, True),
    ],
    ids=[
        "offloaded nothing",
        "offloaded twice",
        "offloaded in a branch",
        "laid out anew",
        "condition of activations",
    ],
)
def test_scans_that_once_did_not(
    case: ScanCase, way: TransferForm | None, within: bool, compiled: bool
) -> None:
    expected = case.by(jax.jit)(*case.arguments())
    check(expected, case, way, False, within, True, compiled)


def check(
    expected: Any,
    case: ScanCase,
    way: TransferForm | None,
    work: bool,
    within: bool,
    little: bool,
    compiled: bool,
) -> None:
    # Of two functions: a program of one is lowered once, whatever is patched later.
    settled = functools.partial(jhost.jit, **case.settings())
    f, again = case.by(settled), dataclasses.replace(case).by(settled)
    no_latency = mock.patch.object(carry_partial_sums, "_LATENCY_BYTES", 0)
    with sums.moving(way, work, within, little), no_latency:
        moved = (f if compiled else by_statements(f))(*case.arguments())
    with finding.everywhere():
        found = again(*case.arguments())
    for result in (moved, found):
        chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)
        chex.assert_trees_all_equal(*map(as_numbers, (result, expected)))


def as_numbers(tree: Any) -> Any:
    """In NumPy, with narrow floats as float32, which it compares."""

    def number(a: jax.Array) -> Any:
        floats = jnp.issubdtype(a.dtype, jnp.floating)
        return np.asarray(a).astype(np.float32) if floats else a

    return jax.tree.map(number, tree)


def largest(tree: Any) -> float:
    """The largest float in a tree of arrays; infinite if one is no number."""
    floats = (a for a in jax.tree.leaves(as_numbers(tree)) if a.dtype == np.float32)
    sizes = [float(np.max(np.abs(a), initial=0)) for a in floats]
    return max((n if n == n else np.inf for n in sizes), default=0.0)
