"""The dim rules of what reads windows of dims, in parts that begin anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jhost.lowering.frontend.inline_calls import inline_calls
from jhost.lowering.frontend.shifts import with_shifts
from jhost.lowering.rules.table import rule_of
from tests.lowering.hand_built import integers

CheckRule: TypeAlias = Callable[..., set[str]]


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: lax.slice(x, (1,), (8,), (3,)),
        lambda x: lax.slice(x, (1,), (9,), (2,)),
        lambda x: lax.slice(x, (7,), (8,)),
        lambda x: lax.pad(x, 2.0, ((-2, 3, 0),)),
        lambda x: lax.pad(x, 2.0, ((1, -1, 2),)),
        lambda x: lax.rev(x, (0,)),
        lambda x: lax.concatenate([x, x[:1], 2 * x], 0),
        lambda x: lax.reduce_window(
            x, 0.0, lax.add, (3,), (2,), ((2, 1),), (2,), (2,)
        ),
        lambda x: lax.reduce_window(x, 1.0, lax.mul, (3,), (1,), "SAME"),
        # XLA begins with the initial value once, and skips places without an element.
        lambda x: lax.reduce_window(x, 2.0, lax.add, (3,), (1,), "SAME", (2,)),
        lambda x: lax.reduce_window(
            x, 2.0, lambda a, b: a + b + 1, (3,), (1,), "SAME"
        ),
        lambda x: lax.reduce_window(
            (x, lax.iota(np.int32, len(x))),
            (-1.0, np.int32(-1)),
            lambda a, b: (lax.max(a[0], b[0]), lax.select(a[0] >= b[0], a[1], b[1])),
            (3,), (2,), ((2, 1),), (2,), (2,),
        ),
    ],
    ids=[
        "stride", "own stride", "small", "cut and padded", "spread out", "rev",
        "concatenate", "windows with gaps", "any reduction", "any beginning",
        "any function", "a function of pairs",
    ],
)  # fmt: skip
def test_one_dim(fun: Callable[[Any], Any], check_rule: CheckRule) -> None:
    check_rule(fun, integers(9))


@pytest.mark.parametrize(
    ("padding", "more"),
    [
        ((3, 1), {}),
        ((1, 2), {"lhs_dilation": (2,), "window_strides": (3,)}),
        ((2, 1), {"lhs_dilation": (2,)}),
        ((-1, 3), {"lhs_dilation": (3,)}),
        ((0, 1), {"lhs_dilation": (2,), "window_strides": (2,)}),
        ((-1, 4), {"rhs_dilation": (2,), "feature_group_count": 2}),
        ((0, 5), {"batch_group_count": 2, "window_strides": (2,)}),
    ],
    ids=[
        "padded",
        "transposed",
        "by two",
        "by three",
        "even",
        "groups of features",
        "groups of batches",
    ],
)
def test_convolutions(
    padding: tuple[int, int], more: dict[str, Any], check_rule: CheckRule
) -> None:
    params: dict[str, Any] = {"window_strides": (1,), **more}
    channels = 4 // params.get("feature_group_count", 1)

    def convolved(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(x, kernel, padding=[padding], **params)

    check_rule(convolved, integers(2, 4, 6), integers(4, channels, 3))


def test_a_kernel_as_large_as_the_operand_is_summed_over(check_rule: CheckRule) -> None:
    def convolved(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(x, kernel, (1,), [(2, 0)])

    check_rule(convolved, integers(1, 2, 6), integers(1, 2, 6))
    eqn = jax.make_jaxpr(convolved)(integers(1, 2, 6), integers(1, 2, 6)).jaxpr.eqns[0]
    rule = rule_of(eqn)
    (factor,) = rule.windowed
    assert rule.reducers[factor] == "sum"


@pytest.mark.parametrize("dilation", [1, 2])
def test_nothing_stands_for_padding_that_would_change_a_value(
    dilation: int, check_rule: CheckRule
) -> None:
    """A maximum's derivative takes what is behind NaN; 1 (inf + i) is inf + NaN i."""

    def reduced(x: Any, combine: Any, begin: Any) -> Any:
        padding, spread = ((2, 3),), (dilation,)
        begun = np.asarray(begin, x.dtype)[()]
        return lax.reduce_window(x, begun, combine, (3,), (1,), padding, spread)

    x, numbers = integers(10), np.arange(10) + np.ones(10, np.complex64)
    x[[0, 4, 9]] = np.nan
    numbers[[0, 4, 9]] = complex(np.inf, 1), complex(np.nan, 2), complex(np.inf, -0.0)
    scales = (2.0 ** integers(10)).astype(jnp.float8_e8m0fnu)
    tangents = np.arange(10, dtype=x.dtype)
    check_rule(
        lambda x, t: jax.jvp(lambda x: reduced(x, lax.max, -np.inf), (x,), (t,)),
        x,
        tangents,
    )
    check_rule(lambda x: reduced(x, lax.mul, 1), numbers)
    check_rule(lambda x: reduced(x, lax.max, 0), numbers)
    check_rule(lambda x: reduced(x, lax.add, 1), scales)


@pytest.mark.parametrize(("window", "stride"), [(3, 2), (2, 3)])
def test_what_a_maximum_hands_back(
    window: int, stride: int, check_rule: CheckRule
) -> None:
    def pool(x: Any) -> Any:
        return lax.reduce_window(
            x, -np.inf, lax.max, (window,), (stride,), [(0, max(window - stride, 0))]
        )

    x = integers(6)
    check_rule(lambda x, given: jax.vjp(pool, x)[1](given)[0], x, pool(x))


def test_a_rotation_reads_before_and_behind_the_seam() -> None:
    closed = jax.make_jaxpr(lambda x: lax.concatenate([x[5:], x[:5]], 0))(integers(8))
    (eqn,) = with_shifts(inline_calls(closed)).eqns
    joined = rule_of(eqn).joined
    assert joined is not None
    found = [(operand, reads.first, reads.steps) for operand, reads in joined.reads]
    assert found == [(0, 5, (0, 3)), (0, -3, (3, 8))]
