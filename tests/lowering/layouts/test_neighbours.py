"""Dims that are read in windows: each device gets what it needs of its neighbours."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Compute
from tests import budget
from tests.lowering.hand_built import integers, mesh_of
from tests.lowering.on_mesh import communications, exact, on, program_of, tp
from tests.lowering.traced import interpreted

Array: TypeAlias = jax.Array
ROWS, SEQUENCE = P("tp"), P(None, "tp")


def received(program: Program) -> int:
    """The elements that each device receives by permutes, and by nothing else."""
    found = [s for s in statements(program) if isinstance(s, Communicate)]
    assert {stmt.kind for stmt in found} <= {"CollectivePermute"}
    return sum(int(np.prod(stmt.out.shape)) for stmt in found)


# --- How much moves ----------------------------------------------------------------- #


def _rows(fun: Callable[[Array], Any], out: Any = ROWS) -> int:
    """What a function of 16 rows of 3 receives, which gives what it should."""
    return received(exact(fun, integers(16, 3), **tp(4, (ROWS,), out)))


@pytest.mark.parametrize(
    ("fun", "rows"),
    [
        (lambda x: jnp.roll(x, 1, 0), 1),
        (lambda x: jnp.roll(x, 6, 0), 4),
        (lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1], 1),
        (lambda x: jnp.concatenate([x[1:], jnp.zeros_like(x[:1])]), 1),
        (lambda x: jnp.pad(x[1:] - x[:-1], ((0, 1), (0, 0))), 1),
        (lambda x: x[::2], 0),
        (lambda x: lax.pad(x, 7.0, ((0, 1, 1), (0, 0, 0))), 0),
        (lambda x: x[::-1], 4),
        (lambda x: x[:8], 4),
        (lambda x: jnp.pad(x, ((5, 0), (0, 0)))[:-5], 4),
    ],
    ids=[
        "roll", "roll by more than a part", "shift", "next", "difference", "stride",
        "spread out", "reversal", "half", "shift by more than a part",
    ],
)  # fmt: skip
def test_rows_of_neighbours_are_all_that_moves(
    fun: Callable[[Array], Array], rows: int
) -> None:
    assert _rows(fun) == rows * 3


def test_each_of_eight_devices_sends_its_rows_to_its_mirror() -> None:
    """On four or fewer, so many places further on is as many places back."""
    program = exact(lambda x: x[::-1], integers(16, 3), **tp(8, (ROWS,), ROWS))
    assert received(program) == 2 * 3


def test_a_device_of_one_row_gets_rows_of_several_others() -> None:
    def mean(x: Array) -> Array:
        return lax.reduce_window(x, 0, lax.add, (3, 1), (1, 1), "SAME")

    program = exact(mean, integers(4, 3), **tp(4, (ROWS,), ROWS))
    assert received(program) == 2 * 3


def test_halos_of_two_dims_hold_the_corners() -> None:
    def smooth(x: Array) -> Array:
        return lax.reduce_window(x, 0, lax.add, (3, 3), (1, 1), "SAME")

    settings = on({"a": 2, "b": 2}, (P("b", "a"),), P("b", "a"))
    # A row of the one neighbour, and of the other a column of what is then there.
    assert received(exact(smooth, integers(8, 8), **settings)) == 4 + 6


def test_rows_over_two_axes_in_any_order_have_the_same_neighbours() -> None:
    def shift(x: Array) -> Array:
        return jnp.roll(x, 1, 0)

    settings = on({"a": 2, "b": 2}, (P(("b", "a")),), P(("b", "a")))
    program = exact(shift, integers(16, 3), **settings)
    assert received(program) == 3


def _convolution(
    padding: tuple[int, int], **more: Any
) -> Callable[[Array, Array], Array]:
    numbers = ("NTC", "TIO", "NTC")
    return lambda x, k: lax.conv_general_dilated(
        x, k, more.pop("window_strides", (1,)), [padding], dimension_numbers=numbers,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("padding", "kernel", "more", "places"),
    [
        ((3, 0), (4, 6, 5), {}, 3),
        ((3, 0), (4, 1, 6), {"feature_group_count": 6}, 3),
        ((6, 0), (4, 6, 5), {"rhs_dilation": (2,)}, 6),
        ((1, 1), (4, 6, 5), {"window_strides": (2,)}, 2),
        ((2, 2), (4, 6, 5), {"lhs_dilation": (2,)}, 2),
        ((11, 0), (12, 6, 5), {}, 11),
    ],
    ids=["causal", "depthwise", "dilated", "strided", "transposed", "wide"],
)
def test_convolutions_get_the_edges_of_their_neighbours(
    padding: tuple[int, int], kernel: Any, more: dict[str, Any], places: int
) -> None:
    fun, x = _convolution(padding, **more), integers(2, 16, 6)
    program = exact(fun, x, integers(*kernel), **tp(4, (SEQUENCE, P()), SEQUENCE))
    assert received(program) == 2 * places * 6


@pytest.mark.parametrize(
    ("positions", "taps", "dilation", "stride"),
    [(13, 1, 3, 1), (10, 2, 2, 1), (19, 2, 3, 1), (8, 3, 3, 1), (11, 1, 2, 3)],
)
def test_a_kernel_without_a_number_meets_no_gap(
    positions: int, taps: int, dilation: int, stride: int
) -> None:
    """Also where the parts of the result begin with different numbers of gaps."""
    conv = _convolution((0, 0), lhs_dilation=(dilation,), window_strides=(stride,))

    def sharded(x: Array, kernel: Array) -> Array:
        return conv(jhost.shard(x, SEQUENCE), kernel)

    kernel = np.array(integers(taps, 2, 3), np.float32)
    kernel[0, 0, 1], kernel[-1, 1, 0], kernel[-1, 0, 2] = np.nan, np.inf, -np.inf
    x = np.array(integers(2, positions, 2), np.float32)
    program = exact(sharded, x, kernel, **tp(4, (P(), P()), P()))
    assert any(made.startswith("AllGather") for made in communications(program))


def test_the_gradient_of_a_kernel_is_a_sum_over_devices() -> None:
    conv = _convolution((3, 0))

    def gradients(x: Array, kernel: Array, given: Array) -> Any:
        return jax.vjp(conv, x, kernel)[1](given)

    shapes = (2, 64, 6), (4, 6, 6), (2, 64, 6)
    args = [integers(*shape) for shape in shapes]
    ins = SEQUENCE, P(), SEQUENCE
    program = exact(gradients, *args, **tp(4, ins, (SEQUENCE, P())))
    # Positions before a device's own for the kernel's, and behind them for the other.
    assert sorted(communications(program)) == [
        "AllReduce tp sum",
        "CollectivePermute tp",
        "CollectivePermute tp",
    ]


@pytest.mark.parametrize(
    ("positions", "more"),
    [(32, {}), (9, {}), (31, {"window_strides": (2,)}), (32, {"rhs_dilation": (3,)})],
    ids=["plain", "few", "strided", "dilated"],
)
def test_the_gradient_of_a_kernel_is_so_too_where_the_result_is_uneven(
    positions: int, more: dict[str, Any]
) -> None:
    """Padding of the result meets no element, which may be no number."""

    def gradients(x: Array, kernel: Array) -> Any:
        made, back = jax.vjp(_convolution((0, 0), **more), x, kernel)
        return back(lax.broadcasted_iota(made.dtype, made.shape, 1) % 3)

    x = np.array(integers(2, positions, 3), np.float32)
    x[0, -1, 0] = np.nan
    kernel = np.array(integers(3, 3, 2), np.float32)

    def sharded(x: Array, kernel: Array) -> Any:
        return gradients(jhost.shard(x, SEQUENCE), kernel)

    program = exact(sharded, x, kernel, **tp(4, (P(), P()), P()))
    found = communications(program)
    assert "AllReduce tp sum" in found
    # Of what x's gradient is, which leaves whole.
    assert sum(each.startswith("AllGather") for each in found) == 1


@pytest.mark.parametrize(("window", "stride", "edges"), [(2, 2, 0), (3, 2, 4)])
def test_a_maximum_hands_back_to_its_own_part(
    window: int, stride: int, edges: int
) -> None:
    def pool(x: Array) -> Array:
        return lax.reduce_window(
            x, -np.inf, lax.max, (1, window, 1), (1, stride, 1), "SAME"
        )

    def back(x: Array, given: Array) -> Array:
        return jax.vjp(pool, x)[1](given)[0]

    x, given = (integers(3, n, 2) for n in (32, 16))
    program = exact(back, x, given, **tp(4, (SEQUENCE, SEQUENCE), SEQUENCE))
    assert received(program) == edges * 3 * 2


@settings(max_examples=budget.examples(10), deadline=None)  # each is compiled
@given(
    window=st.integers(1, 6),
    stride=st.integers(1, 5),
    edges=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    rows=st.one_of(st.integers(1, 6), st.integers(8, 16)),
)
def test_a_maximum_hands_back_where_strides_and_parts_do_not_fit(
    window: int, stride: int, edges: tuple[int, int], rows: int
) -> None:
    # Padding alone has no maximum of its own.
    low, high = (min(edge, window - 1) for edge in edges)
    x = integers(4 * rows, 2)
    hypothesis.assume(len(x) + low + high >= window)

    def pool(x: Array) -> Array:
        edges = (low, high), (0, 0)
        return lax.reduce_window(x, -np.inf, lax.max, (window, 1), (stride, 1), edges)

    def back(x: Array) -> Array:
        made, back = jax.vjp(pool, x)
        return back(lax.broadcasted_iota(made.dtype, made.shape, 0) % 5)[0]

    program = exact(back, x, **tp(4, (ROWS,), ROWS))
    # Steps are as long as divides both sizes.  Few rows are gathered in fewer bytes.
    steps = len(x) // math.gcd(len(x), stride)
    if rows >= 8 and steps % 4 == 0:
        assert "AllGather" not in str(communications(program))


# --- In other programs -------------------------------------------------------------- #


def test_a_difference_goes_back_to_neighbours() -> None:
    def loss(x: Array) -> Array:
        return ((x[1:] - x[:-1]) ** 2).sum()

    x = integers(16, 3)
    program = exact(jax.grad(loss), x, **tp(4, (ROWS,), ROWS))
    assert received(program) == 2 * 3


@pytest.mark.parametrize(("first", "last"), [(0, 4), (3, 6)])
def test_what_is_kept_of_a_row_a_device_stays_there(first: int, last: int) -> None:
    def loss(x: Array) -> Array:
        return (x[first:last] ** 2).sum()

    x = integers(8, 3)
    program = exact(jax.grad(loss), x, **tp(8, (ROWS,), ROWS))
    assert received(program) <= 3 * first


def test_a_scan_moves_one_row_an_iteration() -> None:
    def steps(x: Array) -> Array:
        def step(x: Array, _: None) -> tuple[Array, None]:
            return jnp.pad(x[1:] - x[:-1], ((0, 1), (0, 0))), None

        return lax.scan(step, x, None, length=3)[0]

    assert _rows(steps) == 3


def test_a_small_slice_is_the_sum_of_what_each_device_has() -> None:
    program = exact(lambda x: x[5:7] * 2, integers(16, 3), **tp(4, (ROWS,), P()))
    assert communications(program) == ["AllReduce tp sum"]


def test_a_row_that_is_mostly_padding_is_made_in_parts() -> None:
    """The gradient of a slice, added to another one: no device has all rows."""

    def f(x: Array) -> Array:
        first = jnp.pad(x[2:5], ((3, 10), (0, 0)), constant_values=7)
        return x + jnp.flip(first[:8], 0).sum() + first

    program = exact(f, integers(16, 3), **tp(4, (ROWS,), ROWS))
    computed = [s for s in statements(program) if isinstance(s, Compute)]
    shapes = [out.shape for stmt in computed for out in stmt.outs]
    assert max(shape[0] for shape in shapes if shape) < 16


def test_a_split_of_a_sharded_dim_moves_parts() -> None:
    def f(x: Array) -> tuple[Array, ...]:
        return tuple(jnp.split(x, 2, 0))

    assert _rows(f, (ROWS, ROWS)) <= 2 * 6 * 3


def test_a_stream_ends_at_what_is_read_in_windows() -> None:
    def f(x: Array, w: Array) -> Array:
        x = jhost.stream(x, 0, chunks=4, pipeline="p2p")
        return jnp.roll(x @ w, 1, 0) + 1

    exact(f, integers(16, 4), integers(4, 4), **tp(4, (ROWS, P(None, "tp")), ROWS))


# --- At random ---------------------------------------------------------------------- #


@dataclasses.dataclass(frozen=True)
class Case:
    """A chain of steps along dim 0 of an array, which comes and goes sharded."""

    mesh: dict[str, int]
    axes: tuple[str, ...]
    rows: int
    steps: tuple[tuple[str, int, int], ...]

    def function(self, x: Array) -> Array:
        for name, a, b in self.steps:
            x = _STEPS[name](x, a, b)
        more = -x.shape[0] % 8  # results divide
        return lax.pad(x, 0.0, ((0, more, 0), (0, 0, 0)))

    def settings(self) -> dict[str, Any]:
        return {
            "mesh": mesh_of(**self.mesh),
            "in_shardings": (P(self.axes),),
            "out_shardings": P(self.axes),
        }


def _windows(x: Array, width: int, stride: int) -> Array:
    sizes, strides = (1 + width % 5, 1), (1 + stride % 3, 1)
    return lax.reduce_window(x, 0.0, lax.add, sizes, strides, "SAME")


def _convolved(x: Array, width: int, stride: int) -> Array:
    kernel = jnp.arange(1 + width % 6, dtype=x.dtype)[:, None, None] - 2
    out = lax.conv_general_dilated(
        x.T[:, :, None], kernel, (1 + stride % 2,), [(width % 4, 3)],
        lhs_dilation=(1 + width % 2,), rhs_dilation=(1 + stride % 3,),
        dimension_numbers=("NTC", "TIO", "NTC"),
    )  # fmt: skip
    return out[:, :, 0].T


def _by_kernel(x: Array, width: int, stride: int) -> Array:
    """With the gradient of a kernel added, which is a sum of all rows."""

    def convolved(kernel: Array) -> Array:
        return lax.conv_general_dilated(
            jnp.sign(x.T)[:, :, None], kernel, (1 + stride % 3,), [(width % 2, 0)],
            rhs_dilation=(1 + width % 2,), dimension_numbers=("NTC", "TIO", "NTC"),
        )  # fmt: skip

    taps = min(1 + width % 4, 1 + (len(x) - 1) // 2)
    made, back = jax.vjp(convolved, jnp.zeros((taps, 1, 1), x.dtype))
    given = made + lax.broadcasted_iota(made.dtype, made.shape, 1) % 3
    return x + jnp.sum(back(given)[0] % 7)


_STEPS: dict[str, Callable[[Array, int, int], Array]] = {
    "roll": lambda x, a, b: jnp.roll(x, a - b, 0),
    "slice": lambda x, a, b: x[a % 3 : max(len(x) - b % 5, a % 3 + 1)],
    "stride": lambda x, a, b: x[a % 2 :: 1 + b % 3] if len(x) > 2 else x,
    "pad": lambda x, a, b: (
        lax.pad(x, float(a), ((a % 7 - 2, b, a % 2), (0, 0, 0))) if len(x) > 2 else x
    ),
    "rev": lambda x, a, b: x[::-1] + a,
    "twice": lambda x, a, b: jnp.concatenate([x * a, x[: b % 4], x]),
    "joined": lambda x, a, b: jnp.concatenate(
        [x * n if n % 2 else x[n % 3 :] for n in range(1 + a % 5)]
    ),
    "tiled": lambda x, a, b: jnp.tile(x, (1 + a % 4, 1))[: 1 + 3 * len(x) // 2 + b],
    "split": lambda x, a, b: functools.reduce(
        lambda y, z: jnp.concatenate([z, y]), jnp.split(x, [len(x) // 3, len(x) // 2])
    ),
    "difference": lambda x, a, b: x[1:] * a - x[:-1] if len(x) > 1 else x,
    "tail": lambda x, a, b: x[-1 - a % 2 :] * b + x[:1],
    "windows": _windows,
    "convolved": _convolved,
    "by kernel": _by_kernel,
    "scaled": lambda x, a, b: x * (jnp.arange(len(x), dtype=x.dtype) % 3 - a)[:, None],
}


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    mesh, axes = draw(
        st.sampled_from(
            [
                ({"a": 4}, ("a",)),
                ({"a": 8}, ("a",)),
                ({"a": 2, "b": 2}, ("b", "a")),
                ({"a": 2, "b": 2}, ("b",)),
            ]
        )
    )
    number = st.integers(0, 9)
    step = st.tuples(st.sampled_from(sorted(_STEPS)), number, number)
    steps = draw(st.lists(step, min_size=1, max_size=3))
    return Case(mesh, axes, draw(st.sampled_from([8, 16, 40])), tuple(steps))


@settings(max_examples=budget.examples(10), deadline=None)  # each is compiled
@given(_cases())
def test_chains_of_windows_are_exact(case: Case) -> None:
    x = integers(case.rows, 2)
    kinds = Counter(
        stmt.kind
        for stmt in statements(program_of(case.function, x, **case.settings()))
        if isinstance(stmt, Communicate)
    )
    for kind in kinds:
        hypothesis.event(kind)
    given = interpreted(case.function, **case.settings())(x)
    chex.assert_trees_all_equal(given, jax.jit(case.function)(x))


# --- Of every kind of element ------------------------------------------------------- #


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "int4", "float8_e4m3fn"])
def test_elements_of_any_size_are_shifted(dtype: str) -> None:
    x = jnp.array(np.arange(8) % 2).astype(dtype)

    def shift(x: Array) -> Array:
        return lax.rev(lax.pad(x, x.dtype.type(0), [(1, -1, 0)]), [0])

    found = jhost.jit(shift, **tp(4, (ROWS,), ROWS))(x)
    chex.assert_trees_all_equal(found.astype(int), shift(x).astype(int))


def test_random_keys_come_whole() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    found = jhost.jit(lambda k: jnp.roll(k, 1), **tp(4, (ROWS,), ROWS))(keys)
    data = jax.random.key_data
    chex.assert_trees_all_equal(data(found), data(jnp.roll(keys, 1)))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.pad(x, ((4, 4), (0, 0))),
        lambda x: jnp.roll(x, 1, 0),
        lambda x: jnp.cumsum(x, 0),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1), (1, 1), [(2, 2), (0, 0)]),
    ],
    ids=["pad", "roll", "cumsum", "reduce_window"],
)
def test_empty_arrays_are_read_in_windows(fun: Callable[[Array], Array]) -> None:
    x = jnp.zeros((0, 3))
    found = interpreted(fun, **tp(4, (ROWS,), ROWS))(x)
    chex.assert_trees_all_equal(np.asarray(found), np.asarray(fun(x)))


def test_what_is_not_finite_stays_where_it_is() -> None:
    x = np.array(integers(16, 3))
    x[3], x[5], x[7] = np.nan, -0.0, np.inf

    def f(x: Array) -> Array:
        pooled = lax.reduce_window(x, -np.inf, lax.max, (3, 1), (1, 1), "SAME")
        return pooled + jnp.pad(x[1:] - x[:-1], ((0, 1), (0, 0))) + 1 / x[5:6]

    exact(f, x, **tp(4, (ROWS,), ROWS))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.complex64])
@pytest.mark.parametrize("pulled", [False, True], ids=["value", "gradient"])
def test_zeros_have_the_signs_of_jaxs(pulled: bool, dtype: Any) -> None:
    """What `jnp.roll` moves keeps them, and its gradient adds 0.0 to it."""

    def f(x: Array) -> Array:
        roll = functools.partial(jnp.roll, shift=1, axis=0)
        return jax.vjp(roll, x)[1](x)[0] if pulled else roll(x)

    x = np.array([[-0.0], [0.0], [-1.0], [1.0]] * 4, dtype)
    hosted = jhost.jit(f, **tp(4, (ROWS,), ROWS))
    found, expected = (np.asarray(each(jnp.array(x))) for each in (hosted, jax.jit(f)))
    assert found.tobytes() == expected.tobytes()
