"""The table of dim rules: complete, and right in every primitive that has a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

import jhost
from jhost._ragged.order import permuted
from jhost.lowering.rules.elementwise import ELEMENTWISE
from jhost.lowering.rules.properties import INLINED
from jhost.lowering.rules.rotate import rotate_p
from jhost.lowering.rules.table import known_primitives, opaque_reason, ruled_primitives

CheckRule: TypeAlias = Callable[..., set[str]]


def _ints(*shape: int) -> np.ndarray:
    """Small integers without a pattern."""
    return (np.arange(np.prod(shape), dtype=np.int32) * 7919 % 13 - 5).reshape(shape)


def _floats(*shape: int) -> np.ndarray:
    return _ints(*shape).astype(np.float32)


def _symmetric() -> np.ndarray:
    """A batch of positive definite matrices, each with eigenvalues of its own."""
    x = _floats(3, 2, 2) / 8
    return x @ x.swapaxes(1, 2) + np.diag(np.array([1, 2], np.float32))


def _bind(primitive: str, **params: Any) -> Callable[..., Any]:
    """A primitive that no public function binds alone."""
    return lambda *args: getattr(primitives, f"{primitive}_p").bind(*args, **params)


_POOL = {"window_dimensions": (1, 2), "window_strides": (1, 2)}
_SELECT = {"select_prim": primitives.ge_p, **_POOL, "padding": ((0, 0), (0, 0))}
_DILATION = {"base_dilation": (1, 1), "window_dilation": (1, 1)}


def _pool(x: Any, initial: Any, reducer: Callable[..., Any]) -> Any:
    return lax.reduce_window(x, initial, reducer, (1, 2), (1, 2), "VALID")


def _lookup(mode: str) -> Callable[..., Any]:
    return lambda x, index: x.at[index].get(mode=mode)


def _batched_update(x: Any, index: Any, update: Any) -> Any:
    return jax.vmap(lambda x, index, update: x.at[index].mul(update))(x, index, update)


# By primitive: a function with an equation of it, and arguments.
CASES: dict[str, tuple[Callable[..., Any], *tuple[Any, ...]]] = {
    # rules_contract.py
    "conv_general_dilated": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 2), "VALID"),
        _floats(2, 3, 4, 5),
        _floats(4, 3, 1, 2),
    ),
    "dot_general": (
        lambda x, y: lax.dot_general(x, y, (((3, 1), (0, 2)), ((0,), (3,)))),
        _ints(3, 4, 2, 5),
        _ints(5, 2, 4, 3),
    ),
    "permute_rows": (
        jax.vmap(permuted),
        _floats(2, 4, 3),
        np.array([[2, 0, 3, 1], [0, 1, 3, 2]], np.int32),
        np.array([[1, 3, 0, 2], [0, 1, 3, 2]], np.int32),
    ),
    "ragged_dot": (
        jhost.ragged_dot,
        _floats(6, 3),
        _floats(2, 3, 4),
        np.array([2, 4], np.int32),
    ),
    "ragged_dot_general": (
        lax.ragged_dot,
        _floats(6, 3),
        _floats(2, 3, 4),
        np.array([2, 4], np.int32),
    ),
    "reduce_and": (lambda x: lax.reduce_and(x, (1,)), _ints(3, 4)),
    "reduce_max": (lambda x: lax.reduce_max(x, (0, 2)), _ints(3, 4, 2)),
    "reduce_min": (lambda x: lax.reduce_min(x, (1,)), _ints(3, 4)),
    "reduce_or": (lambda x: lax.reduce_or(x, (1,)), _ints(3, 4) > 3),
    "reduce_prod": (lambda x: lax.reduce_prod(x, (1,)), _ints(3, 4)),
    "reduce_sum": (lambda x: lax.reduce_sum(x, (0, 2)), _ints(3, 4, 2)),
    # rules_along.py: along a dim
    "approx_top_k": (lambda x: lax.approx_max_k(x, 2), _floats(3, 5)),
    "argmax": (lambda x: lax.argmax(x, 1, np.int32), _ints(3, 4)),
    "argmin": (lambda x: lax.argmin(x, 0, np.int32), _ints(3, 4)),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), _floats(3, 4)),
    "cummax": (lambda x: lax.cummax(x, 0), _ints(3, 4)),
    "cummin": (lambda x: lax.cummin(x, 1), _ints(3, 4)),
    "cumprod": (lambda x: lax.cumprod(x, 1), _ints(3, 4)),
    "cumsum": (lambda x: lax.cumsum(x, 1, reverse=True), _ints(3, 4)),
    "reduce": (
        lambda x: lax.reduce(x, np.int32(1), lambda a, b: a * b + a, (1,)),
        _ints(3, 4),
    ),
    "reduce_xor": (lambda x: lax.reduce_xor(x, (1,)), _ints(3, 4)),
    "sort": (lambda x, y: lax.sort((x, y), dimension=1), _ints(3, 5), _ints(3, 5)),
    "top_k": (lambda x: lax.top_k(x, 2), _ints(3, 5)),
    # pooling.py
    "reduce_window": (lambda x: _pool(x, 1, lambda a, b: a * b + a), _ints(3, 4)),
    "reduce_window_max": (lambda x: _pool(x, -np.inf, lax.max), _floats(3, 4)),
    "reduce_window_min": (lambda x: _pool(x, np.inf, lax.min), _floats(3, 4)),
    "reduce_window_sum": (lambda x: _pool(x, 0, lax.add), _ints(3, 4)),
    "select_and_gather_add": (
        _bind("select_and_gather_add", **_SELECT, **_DILATION),
        _floats(3, 4),
        _floats(3, 4)[::-1],
    ),
    "select_and_scatter_add": (
        _bind("select_and_scatter_add", **_SELECT),
        _floats(3, 2),
        _floats(3, 4),
    ),
    # rules_along.py: over leading dims
    "bitcast_convert_type": (
        lambda x: lax.bitcast_convert_type(x, np.int8),
        _ints(3, 2),
    ),
    "cholesky": (
        lambda x: lax.linalg.cholesky(x, symmetrize_input=False),
        _symmetric(),
    ),
    "cholesky_update": (lax.linalg.cholesky_update, _symmetric()[0], _floats(2)),
    "eig": (lax.linalg.eig, _symmetric()),
    "eigh": (lambda x: lax.linalg.eigh(x, symmetrize_input=False), _symmetric()),
    "fft": (
        _bind("fft", fft_type=lax.FftType.RFFT, fft_lengths=(4,)),
        _floats(3, 4),
    ),
    "hessenberg": (lax.linalg.hessenberg, _symmetric()),
    "householder_product": (
        lax.linalg.householder_product,
        _symmetric(),
        _floats(3, 2),
    ),
    "lu": (lax.linalg.lu, _symmetric()),
    "lu_pivots_to_permutation": (
        lambda x: lax.linalg.lu_pivots_to_permutation(x, 4),
        np.array([[1, 1], [0, 2], [1, 3]], np.int32),
    ),
    "ormqr": (lax.linalg.ormqr, _symmetric(), _floats(3, 2), _floats(3, 2, 2)),
    "qr": (lax.linalg.qr, _symmetric()),
    "random_unwrap": (
        lambda x: jax.random.key_data(x),
        jax.random.split(jax.random.key(0), 3),
    ),
    "random_wrap": (jax.random.wrap_key_data, _ints(3, 2).astype(np.uint32)),
    "schur": (lax.linalg.schur, _symmetric()[:1]),
    "svd": (lax.linalg.svd, _symmetric()),
    "symmetric_product": (
        lax.linalg.symmetric_product,
        _floats(3, 2, 4),
        _floats(3, 2, 2),
    ),
    "triangular_solve": (lax.linalg.triangular_solve, _symmetric(), _floats(3, 5, 2)),
    "tridiagonal": (lax.linalg.tridiagonal, _symmetric()),
    "tridiagonal_solve": (
        lax.linalg.tridiagonal_solve,
        np.zeros((3, 4), np.float32),
        2 + np.zeros((3, 4), np.float32),
        np.zeros((3, 4), np.float32),
        _floats(3, 4, 2),
    ),
    # rules_elementwise.py
    "device_put": (
        lambda *xs: jax.device_put(xs, jax.memory.Space.Device),
        (_ints(3), _floats(2, 4)),
    ),
    "optimization_barrier": (lax.optimization_barrier, (_ints(3), _floats(2, 4))),
    # rules_index.py
    "dynamic_slice": (
        lambda x: lax.dynamic_slice(x, (1, 9), (2, 3)),
        _ints(4, 3),
    ),
    "dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(x, y, (9, 9)),
        _ints(4, 3),
        _ints(2, 3),
    ),
    "gather": (_lookup("fill"), _ints(5, 3), np.array([[1, 4, 9], [0, 2, -7]])),
    "scatter": (
        lambda x, index: x.at[index].set(7, mode="drop"),
        _ints(5, 3),
        np.array([1, 9]),
    ),
    "scatter-add": (
        lambda x, index: x.at[index].add(7, mode="clip"),
        _ints(5, 3),
        np.array([1, 9, 1]),
    ),
    "scatter-max": (lambda x: x.at[1].max(2), _ints(5, 3)),
    "scatter-min": (lambda x: x.at[:, 1].min(2), _ints(5, 3)),
    "scatter-mul": (_batched_update, _ints(3, 5), _ints(3, 2), _ints(3, 2)),
    "scatter-sub": (lambda x: x.at[1:3].subtract(2), _ints(5, 3)),
    # rules_random.py
    "random_bits": (lambda key: jax.random.bits(key, (4, 6)), jax.random.key(0)),
    "random_fold_in": (
        jax.vmap(jax.random.fold_in),
        jax.random.split(jax.random.key(0), 3),
        _ints(3),
    ),
    "random_seed": (jax.vmap(jax.random.key), _ints(3)),
    "random_split": (
        jax.vmap(lambda key: jax.random.split(key, (2, 2))),
        jax.random.split(jax.random.key(0), 3),
    ),
    # rules_shape.py
    "broadcast_in_dim": (
        lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (1, 2)),
        _ints(1, 4),
    ),
    "concatenate": (lambda x, y: lax.concatenate((x, y), 1), _ints(3, 2), _ints(3, 4)),
    "empty": (lambda: lax.empty((3, 2), np.float32),),
    "iota": (lambda: lax.broadcasted_iota(np.int8, (3, 4), 1),),
    "pad": (lambda x: lax.pad(x, 0, ((0, 0, 0), (1, -1, 2))), _ints(3, 4)),
    "reshape": (lambda x: lax.reshape(x, (10, 3, 4)), _ints(6, 5, 1, 4)),
    "rev": (lambda x: lax.rev(x, (1,)), _ints(3, 4)),
    "rotate": (lambda x: rotate_p.bind(x, dim=1, start=3), _ints(3, 4)),
    "slice": (lambda x: lax.slice(x, (0, 1), (3, 4), (1, 2)), _ints(3, 5)),
    "split": (lambda x: lax.split(x, (1, 3), axis=1), _ints(3, 4)),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), _ints(3, 1, 4)),
    "stack": (lambda x, y: lax.stack((x, y), axis=1), _ints(3, 4), _ints(3, 4)),
    "tile": (lambda x: lax.tile(x, (1, 2)), _ints(3, 4)),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), _ints(3, 4, 2)),
    "unstack": (lambda x: lax.unstack(x, axis=1), _ints(3, 4)),
}

# Those that other tests have, and three that no public module names.
_IN_OWN_TESTS = (
    "custom_partitioning",
    "edge",
    "iota_2x32_shape",
    "scaled_dot",
    "scaled_matmul",
    "scaled_matmul_wrapper",
    "window",
)
_CONSTRAINTS = ("reshard", "sharding_constraint")
_FACTORIZATIONS: dict[str, tuple[Any, ...]] = {
    "geqp3": (_symmetric(), np.zeros((3, 2), np.int32)),
    "geqrf": (_symmetric(),),
}


def test_every_primitive_of_this_jax_is_known(
    jax_primitives: dict[str, Primitive],
) -> None:
    assert not jax_primitives.keys() - known_primitives() - INLINED


def test_no_primitive_is_both_known_and_inlined() -> None:
    assert not known_primitives() & INLINED


def test_every_rule_has_a_case() -> None:
    elsewhere = {
        *ELEMENTWISE,
        *_CONSTRAINTS,
        *_FACTORIZATIONS,
        *_IN_OWN_TESTS,
        "shard_map",
    }
    missing = ruled_primitives() - CASES.keys() - elsewhere
    # test_attention.py has the kernels of attention and their wrappers, and
    # test_written_attention.py jhost's own.
    assert not [name for name in missing if "dot_product_attention" not in name]


@pytest.mark.parametrize("name", CASES)
def test_a_part_of_the_equation_gives_that_part_of_the_result(
    name: str, check_rule: CheckRule
) -> None:
    function, *args = CASES[name]
    assert name in check_rule(function, *args)


@pytest.mark.parametrize("name", _FACTORIZATIONS)
def test_a_batch_of_factorizations_can_be_cut(
    name: str, jax_primitives: dict[str, Primitive], check_rule: CheckRule
) -> None:
    params = {"use_magma": None} if name == "geqp3" else {}
    bind = jax_primitives[name].bind
    check_rule(lambda *args: bind(*args, **params), *_FACTORIZATIONS[name])


def test_positions_in_a_flattened_array_can_be_cut(
    jax_primitives: dict[str, Primitive], check_rule: CheckRule
) -> None:
    bind = jax_primitives["iota_2x32_shape"].bind
    check_rule(lambda: bind(shape=(3, 4)))


def test_an_opaque_primitive_says_why() -> None:
    assert "whole arrays" in opaque_reason("scan")
    assert "no dim rule" in opaque_reason("of_the_future")
