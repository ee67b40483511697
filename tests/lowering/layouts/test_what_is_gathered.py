"""The table of docs/performance.md: each row gathers, and it has all that do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jhost.lowering.frontend.inline_calls import inline_calls
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.remarks import LayoutReport, ReplicationReport
from jhost.lowering.ir.statements import Communicate
from jhost.lowering.padding.in_blocks import BLOCKWISE
from jhost.lowering.rules.dim_rule import shape_of
from jhost.lowering.rules.table import (
    known_primitives,
    opaque_reason,
    rule_of,
    ruled_primitives,
)
from tests.lowering.on_mesh import program_of, tp
from tests.lowering.rules.test_rules import CASES
from tests.lowering.traced import remarks

_PAGE = Path(__file__).parents[3] / "docs" / "performance.md"
_X = np.ones((64, 3), np.float32)  # of 4 devices none has columns


def _position(x: Any) -> Any:
    return x[0, 0].astype(int)


def _kernel(x: Any) -> Any:
    numbers = ("NTC", "TIO", "NTC")
    signal, kernel = jnp.ones((1, 100, 1)), x[:, None]
    return lax.conv_general_dilated(
        signal, kernel, (1,), "SAME", dimension_numbers=numbers
    )


def _update(x: Any) -> Any:
    return lax.dynamic_update_slice(jnp.zeros((256, 3)), x, (_position(x), 0))


def _tiled(x: Any) -> Any:
    return jax.grad(lambda x: (jnp.tile(x, (3, 1)) ** 2).sum())(x)


def _shifted(x: Any) -> Any:
    return lax.dynamic_slice_in_dim(x.astype(jnp.float8_e4m3fn), _position(x), 4)


_ROWS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "sorts": (lambda x: jnp.sort(x, 0), lambda x: jnp.median(x, 0)),
    "`lax.top_k`": (
        lambda x: lax.top_k(x.T, 16)[0],
        lambda x: lax.approx_max_k(x.T, 4)[0],
    ),
    "FFTs": (lambda x: jnp.fft.fft(x, axis=0).real, lambda x: jnp.linalg.qr(x)[0]),
    "`lax.dynamic_slice`": (
        lambda x: lax.dynamic_slice_in_dim(x, _position(x), 40),
        _shifted,
    ),
    "`jnp.roll`": (lambda x: jnp.roll(x, _position(x), 0),),
    "concatenations": (lambda x: jnp.concatenate([x] * 33), _tiled),
    "`lax.reduce`": (
        lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (0,)),
        lambda x: lax.reduce_xor(x.astype(int), (0,)),
    ),
    "reshapes": (lambda x: jnp.reshape(x.T, (-1,)),),
    "`searchsorted": (lambda x: jnp.searchsorted(x[:, 0], jnp.ones(3), method="sort"),),
    "a `lax.scan`": (
        lambda x: lax.scan(lambda c, row: (c + row, row * 2), x[0], x)[1],
        lambda x: lax.unstack(x)[1],
    ),
    "the kernel": (_kernel, _update),
    "lookups": (lambda x: x[jnp.arange(64) * _position(x)],),
    "`lax.platform_dependent`": (
        lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    ),
    "`random.gamma`": (lambda x: jax.random.gamma(jax.random.key(0), x),),
    "callbacks": (lambda x: jax.pure_callback(np.sin, x, x),),
}
"""By the first word of each row: functions that it means, of rows over 4 devices."""


_ONLY_EXPLAINED = "`jnp.roll`", "a `lax.scan`", "lookups"
"""Rows with a first function that no `ReplicationWarning` names, only `explain`."""


def test_each_row_has_its_functions() -> None:
    text = _PAGE.read_text().split("### What is gathered")[1].split("\n## ")[0]
    rows = [line[2:] for line in text.splitlines() if line.startswith("| ")][1:]
    for row, begin in zip(rows, _ROWS, strict=True):
        assert row.startswith(begin)


@pytest.mark.parametrize("row", _ROWS)
def test_what_is_said_to_be_gathered_is(row: str) -> None:
    for fun in _ROWS[row]:
        program = program_of(fun, _X, **tp(4, (P("tp"),), None))
        found = [s.out for s in statements(program) if isinstance(s, Communicate)]
        # A column for each one that is read.
        assert max(math.prod(out.shape) for out in found) >= len(_X)
        is_warned_of = fun not in [_ROWS[row][0] for row in _ONLY_EXPLAINED]
        kind = ReplicationReport if is_warned_of else LayoutReport
        assert remarks(program, kind)
        assert is_warned_of or not remarks(program, ReplicationReport)


_WHOLE: dict[str, str] = {
    "sorts": "sort",
    "`lax.top_k`": "approx_top_k",
    "FFTs": (
        "cholesky cholesky_update eig eigh fft hessenberg householder_product lu "
        "lu_pivots_to_permutation ormqr qr schur svd symmetric_product "
        "triangular_solve tridiagonal tridiagonal_solve"
    ),
    "`lax.reduce`": "reduce reduce_xor",
    "reshapes": "reshape",
    "a `lax.scan`": "unstack",
    "the kernel": "conv_general_dilated dynamic_update_slice scatter scatter-sub",
}
"""By row: the primitives that keep a dim whole, in the cases of the table of rules."""

_NOT_SAID = {
    "permute_rows": "jhost's own, of rows that are sorted by group",
    "ragged_dot": "its sizes are one number a group",
    "ragged_dot_general": "its sizes are one number a group",
    "random_wrap": "a key is a few words",
    "split": "it becomes slices",
}

_REASONS = {
    "a `lax.scan`": ("its body was traced",),
    "`random.gamma`": ("the bits drawn",),
    "callbacks": (
        "a reference names",
        "the callback",
        "the call has a meaning",
        "the indices of a sparse array",
        "the kernel does not say",
        "the kernel works on whole sequences",
    ),
}
"""By row: why its primitives have no rule."""

_NO_WORK = (
    "it stands for a derivative that JAX has not taken",
    "no function of JAX leaves",
    "it has a meaning only in the body of",
    "it moves arrays between hosts",
    "the check is",
    "only the extended dtype",
    "its result is the size",
    "it says where",
    "it orders",
)
"""Why others have none, which make no array, or which users do not write."""


def _whole() -> Iterator[str]:
    for fun, *args in CASES.values():
        for eqn in inline_calls(jax.make_jaxpr(fun)(*args)).eqns:
            rule = rule_of(eqn)
            shapes = map(shape_of, eqn.invars)
            for shape, dims in zip(shapes, rule.operands, strict=True):
                if any(d is None and n > 1 for d, n in zip(dims, shape, strict=True)):
                    yield eqn.primitive.name


def test_no_primitive_that_keeps_a_dim_whole_is_missing() -> None:
    said = {name for names in _WHOLE.values() for name in names.split()}
    assert _WHOLE.keys() <= _ROWS.keys()
    assert {*_whole()} - BLOCKWISE.keys() == said | _NOT_SAID.keys()


def test_no_reason_for_whole_arrays_is_missing() -> None:
    known = (*_NO_WORK, *(begin for each in _REASONS.values() for begin in each))
    reasons = {opaque_reason(p) for p in known_primitives() - ruled_primitives()}
    assert _REASONS.keys() <= _ROWS.keys()
    assert not {reason for reason in reasons if not reason.startswith(known)}
    assert all(any(r.startswith(begin) for r in reasons) for begin in known)
