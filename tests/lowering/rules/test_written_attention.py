"""The rules of `jhost.dot_product_attention`: parts know where they stand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jhost
from jhost.lowering.cost.kernels import kernels
from jhost.lowering.cost.rates import rates_to_start_from
from jhost.lowering.ir.statements import Compute
from jhost.lowering.rules import position_runs
from jhost.lowering.rules.dim_rule import DimRule
from jhost.lowering.rules.table import rule_of
from tests.lowering.on_mesh import program_of

CheckRule: TypeAlias = Callable[..., set[str]]

B, T, S, N, K, H = 2, 4, 4, 4, 2, 3


def array(*shape: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(np.float32)


QUERY, KEY, VALUE = array(B, T, N, H), array(B, S, K, H), array(B, S, K, H, seed=1)
SEGMENTS = np.array([[0, 0, 1, 1], [0, 1, 1, 2]])
HOWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"is_causal": True}, {}),
    "sliding": ({"is_causal": True, "local_window_size": 1}, {}),
    "window": ({"local_window_size": (1, 2)}, {}),
    "bias": ({}, {"bias": array(1, N, T, 1, seed=2)}),
    "all": (
        {},
        {
            "bias": array(B, 1, 1, S, seed=2),
            "mask": array(1, N, T, S, seed=3) > -1,
            "query_seq_lengths": np.array([3, 4], np.int32),
            "key_value_seq_lengths": np.array([2, 0], np.int32),
            "query_segment_ids": SEGMENTS,
            "key_value_segment_ids": SEGMENTS[::-1],
        },
    ),
}


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        pytest.param("sliding", 0, marks=pytest.mark.slow),
        ("all", 64),
        pytest.param("sliding", 64, marks=pytest.mark.slow),
    ],
)
def test_parts_of_attention_are_the_whole(
    name: str, blocks: int, check_rule: CheckRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found, its tangents, and the gradients; in so many blocks at most."""
    monkeypatch.setattr(position_runs, "_MOST_BLOCKS", blocks)
    how, more = HOWS[name]
    bias = {name: x for name, x in more.items() if name == "bias"}

    def attend(query: Any, key: Any, value: Any, bias: Any) -> jax.Array:
        return jhost.dot_product_attention(query, key, value, **how, **more | bias)

    def tangents(*args: Any) -> Any:
        return jax.jvp(attend, args, args)

    def gradients(*args: Any) -> Any:
        return jax.vjp(attend, *args)[1](array(B, T, N, H, seed=4))

    with jax.disable_jit():  # no branch is compiled
        assert "dot_product_attention_jvp" in check_rule(
            tangents, QUERY, KEY, VALUE, bias
        )
        assert "dot_product_attention_vjp" in check_rule(
            gradients, QUERY, KEY, VALUE, bias
        )


def rule_for(dtype: Any = np.float32, **how: Any) -> DimRule:
    args = [x.astype(dtype) for x in (QUERY, KEY, VALUE)]
    attend = functools.partial(jhost.dot_product_attention, **how)
    (eqn,) = jax.make_jaxpr(attend)(*args).eqns
    return rule_of(eqn)


def test_only_what_hides_keys_counts_positions() -> None:
    assert not rule_for().counted
    assert rule_for().window is None
    lengths = rule_for(query_seq_lengths=np.array([3, 4], np.int32))
    assert lengths.counted
    assert lengths.window is None
    causal = rule_for(is_causal=True).window
    assert causal
    assert causal.is_causal
    near = rule_for(is_causal=True, local_window_size=(3, 2)).window
    assert near
    assert (near.left, near.right) == (3, 0)


@pytest.mark.parametrize(("dtype", "score"), [(np.float32, 20), (jnp.bfloat16, 16)])
def test_scores_are_in_memory_between_the_products(dtype: Any, score: int) -> None:
    """Three times as wide as they are made, and twice as narrow as values are."""
    compute = program_of(
        lambda *args: jhost.dot_product_attention(*args, is_causal=True),
        *(x.astype(dtype) for x in (QUERY, KEY, VALUE)),
    ).body[0]
    assert isinstance(compute, Compute)
    (kernel,) = kernels(compute, {}, {})
    assert kernel.matmul == (B * N, T, S, 2 * H)
    assert kernel.between == score * B * N * T * S
    other = dataclasses.replace(kernel, between=0)
    rates = dataclasses.replace(rates_to_start_from("NVIDIA H200"), memory=1.0)
    assert kernel.seconds(rates) - other.seconds(rates) == kernel.between


class _Steps:
    """A place with queries and keys at some positions, and the other factors whole."""

    accumulator, zigzag = None, 1

    def __init__(self, rule: DimRule, at: dict[int, list[int]]) -> None:
        self.rule, self.at = rule, at

    def size(self, factor: int) -> int:
        return (
            len(self.starts(factor)) if factor in self.at else self.rule.sizes[factor]
        )

    def varies(self, factor: int) -> bool:
        return self.parts(factor) > 1

    def parts(self, factor: int) -> int:
        return self.rule.sizes[factor] // self.size(factor)

    def starts(self, factor: int) -> list[int]:
        return self.at[factor]

    positions = starts

    def grain(self, factor: int) -> int:
        return 1


@pytest.mark.parametrize(
    ("queries", "keys", "left", "right", "made"),
    [
        ([0], [2], 4, 0, 0),
        ([2], [0], 4, 0, 1),
        ([0, 3], [1, 2], 4, 0, 1),  # as in zigzag order: late queries see all
        ([0, 2], [0, 2], 4, 0, 2),  # one of four blocks is hidden
        ([3], [0], 2, 0, 0),
        ([3], [1], 2, 0, 1),
        ([0, 1], [1, 3], 4, 1, 1),  # of the keys one is too far for both
        ([0, 1], [3], 4, 1, 0),
    ],
)
def test_scores_are_made_in_blocks(
    queries: list[int], keys: list[int], left: int, right: int, made: int
) -> None:
    rule = rule_for(local_window_size=(left, right))
    assert rule.window
    assert rule.matmul
    at = {rule.window.queries: queries, rule.window.keys: keys}
    assert rule.matmul(_Steps(rule, at)) == (B * N, len(queries), made, 2 * H)
