"""Every change of a layout has a remark: of what, from where to where, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.layout import axes_size, layout_of
from jhost.lowering.ir.remarks import LayoutReport, ReplicationReport
from jhost.lowering.ir.statements import Reshard, Scan
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts
from tests.lowering.traced import asked, built, remarks, reshard_bytes

shard = jhost.shard


def said(fun: Callable[..., Any], *args: Any, **mesh: int) -> list[str]:
    program = PropagateLayouts().apply(asked(fun, *args, **mesh))
    return [report.text for report in remarks(program, LayoutReport)]


def rows_and_columns(x: jax.Array, w: jax.Array) -> jax.Array:
    return shard(x, P("tp", None)) @ shard(w, P(None, "tp"))


def test_an_axis_claimed_twice_says_what_the_other_way_would_take() -> None:
    assert said(rows_and_columns, (8, 8), (8, 16), tp=4) == [
        "x: P('tp', None) -> P(None, None) for dot_general: 192 bytes a device; "
        "if dim 0 stayed sharded over tp, each device would receive 384 bytes for this "
        "operation"
    ]


def test_a_tie_says_that_the_larger_operand_stays() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return shard(x, P("tp", None)) + shard(w, P(None, "tp"))

    assert said(f, (8, 1), (8, 4), tp=4) == [
        "x: P('tp', None) -> P(None, None) for add: 24 bytes a device; "
        "if dim 0 stayed sharded over tp, as many bytes would move, but of a larger "
        "operand",
    ]


def test_a_tie_says_that_there_would_be_more_communications() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return shard(rows_and_columns(x, w), P("tp", None))

    assert said(f, (8, 4), (4, 16), tp=4) == [
        "w: P(None, 'tp') -> P(None, None) for dot_general: 192 bytes a device; "
        "if dim 1 stayed sharded over tp, as many bytes would move in more transfers",
    ]


def test_what_a_pipeline_hides_is_told_from_what_it_does_not() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(rows_and_columns(x, w), 0, pipeline="p2p")

    assert said(f, (16, 8), (8, 8), tp=4) == [
        "x: P('tp', None) -> P(None, None) for dot_general: 384 bytes a device in a "
        "pipeline; if dim 0 stayed sharded over tp, each device would receive 192 "
        "bytes for this operation, and no pipeline would hide them"
    ]


def test_a_partial_sum_is_reduced_for_its_readers_or_as_constrained() -> None:
    def f(x: jax.Array, w: jax.Array, spec: P | None) -> jax.Array:
        y = shard(x, P(None, "tp")) @ shard(w, P("tp", None))
        return y if spec is None else shard(y, spec)

    whole = (
        ": partial sum over tp by dot_general -> P(None, None): 384 bytes a device; "
    )
    assert said(lambda x, w: jnp.sin(f(x, w, None)), (8, 8), (8, 8), tp=4) == [
        "v" + whole + "reduced once for all its readers"
    ]
    assert said(lambda x, w: f(x, w, None), (8, 8), (8, 8), tp=4) == [
        "y"
        + whole
        + "reduced onto all devices, because neither out_shardings= nor jhost.shard "
        "asks for less"
    ]
    assert said(lambda x, w: f(x, w, P("tp")), (8, 8), (8, 8), tp=4) == [
        "y: partial sum over tp by dot_general -> P('tp', None): 192 bytes a device; "
        "as constrained"
    ]


def test_two_constraints_in_a_row_are_said_to_be() -> None:
    def f(x: jax.Array) -> jax.Array:
        return shard(shard(x, P("tp", None)), P(None, "tp"))

    assert said(f, (8, 8), tp=4) == [
        "x: P('tp', None) -> P(None, 'tp') of f32[8, 8]: 48 bytes a device; "
        "as constrained"
    ]


def test_a_dim_that_must_be_whole_is_named() -> None:
    (sort,) = said(lambda x: jnp.sort(shard(x, P("tp")), axis=0), (8, 8), tp=4)
    assert sort.endswith("; sort needs dim 0 whole")

    def scan(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(8), x)[1]

    (text,) = said(lambda x: scan(shard(x, P("tp"))), (8, 8), tp=4)
    assert text.endswith("; each iteration of the scan takes a part of dim 0")


def test_a_dim_that_its_axes_do_not_divide_shows_the_arithmetic() -> None:
    def gathered(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.reshape(shard(x, P("tp")), (2, 12)), axis=0)

    (text,) = said(gathered, (24,), tp=4)
    assert text.endswith("72 bytes a device; 2 does not divide over tp (4)")

    def cut(x: jax.Array) -> jax.Array:
        return shard(jnp.reshape(x, (24,)), P("tp"))

    (text,) = said(cut, (6, 4), tp=4)
    assert text.endswith(
        "0 bytes a device; as constrained; 6 does not divide over tp (4)"
    )


def test_a_dim_left_whole_is_said_even_where_nothing_moves() -> None:
    """y is cut only where it is read: the reshape makes all of it everywhere."""

    def f(x: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.reshape(x, (24,)) + shard(v, P("tp"))

    (text,) = said(f, (6, 4), (24,), tp=4)
    assert "by reshape -> P(None): 0 bytes a device" in text
    assert text.endswith("6 does not divide over tp (4)")


def test_where_nothing_moves_nothing_is_said() -> None:
    assert said(lambda x: jnp.tanh(shard(x, P("tp"))), (8, 8), tp=4) == []
    assert said(lambda x, w: x @ shard(w, P(None, "tp")), (8, 8), (8, 8), tp=4) == []


def test_a_value_gathered_for_several_readers_is_said_once() -> None:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w, v = shard(x, P("tp")), shard(w, P(None, "tp")), shard(v, P(None, "tp"))
        return x @ w, x @ v

    (text,) = said(f, (4, 8), (8, 64), (8, 64), tp=4)
    assert text.startswith("x: ")


def block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    w, v = shard(w, P("dp", "tp")), shard(v, P("tp", "dp"))
    y = jnp.maximum(shard(x, P(("dp", "tp"))) @ w, 0) @ v
    return jnp.sum(shard(y, P("dp", "tp")) ** 2)


def bytes_of(stmt: Reshard, mesh: dict[str, int]) -> int:
    source, shards = stmt.source, [axes_size(d.axes, mesh) for d in stmt.source.dims]
    shape = [size * n for size, n in zip(source.shape, shards, strict=True)]
    have, want = layout_of(source), layout_of(stmt.out)
    return reshard_bytes(have, want, source.partial, shape, source.dtype.itemsize, mesh)


@pytest.mark.parametrize(
    "fun", [block, jax.grad(block, argnums=(1, 2))], ids=["forward", "backward"]
)
def test_the_remarks_account_for_every_byte_that_moves(fun: Any) -> None:
    program = built(fun, (16, 8), (8, 32), (32, 8), dp=2, tp=2)
    program = PropagateLayouts().apply(program)
    mesh = dict(program.mesh.shape)
    moved = sum(bytes_of(s, mesh) for s in program.body if isinstance(s, Reshard))
    reports = remarks(program, LayoutReport)
    assert sum(report.bytes for report in reports) == moved > 0


def test_a_remark_has_the_line_of_the_operation_or_of_the_constraint() -> None:
    program = PropagateLayouts().apply(built(rows_and_columns, (8, 8), (8, 16), tp=4))
    (remark,) = remarks(program, LayoutReport)
    assert remark.where.startswith("test_remarks.py:")
    assert remark.where.endswith("(rows_and_columns)")


def test_what_is_carried_says_that_it_has_one_layout() -> None:
    def f(x: jax.Array) -> jax.Array:
        def layer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return shard(jnp.tanh(shard(c, P(None, None))), P("tp", None)), None

        return lax.scan(layer, x, None, length=3)[0]

    program = PropagateLayouts().apply(asked(f, (8, 8), tp=4))
    (scan,) = [stmt for stmt in program.body if isinstance(stmt, Scan)]
    texts = [report.text for report in remarks(scan.body, LayoutReport)]
    assert any("a carried value has one layout in all iterations" in t for t in texts)


def test_what_is_gathered_ahead_is_named_with_what_needs_it_whole() -> None:
    """Its cast would move twice the bytes, so that comes behind the gather."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.fft.fft(shard(x, P("tp", None)), axis=0)

    program = PropagateLayouts().apply(asked(f, (8, 4), tp=4))
    (report,) = remarks(program, ReplicationReport)
    assert (report.primitive, report.bytes) == ("fft", 96)


def test_what_a_contraction_gathers_is_not_repeated() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sort(jnp.tanh(rows_and_columns(x, w)), axis=0)

    program = PropagateLayouts().apply(asked(f, (8, 8), (8, 64), tp=4))
    assert not remarks(program, ReplicationReport)
