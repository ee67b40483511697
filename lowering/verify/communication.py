"""Verification of communications: collectives and waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jhost.lowering.ir.index import Index
from jhost.lowering.ir.layout import swapped
from jhost.lowering.ir.queues import TRANSFERS
from jhost.lowering.ir.statements import (
    Communicate,
    CommunicationKind,
    Wait,
)
from jhost.lowering.ir.unit_printer import type_text
from jhost.lowering.verify.known import InFlight
from jhost.lowering.verify.state import State


@dataclasses.dataclass(frozen=True, slots=True)
class _Fields:
    """The fields that a kind of communication needs, and the dims that change size."""

    needs: tuple[str, ...]
    grows: str = ""
    shrinks: str = ""


_KINDS: Mapping[CommunicationKind, _Fields] = {
    "AllGather": _Fields(("dim",), grows="dim"),
    "AllReduce": _Fields(("reducer",)),
    "ReduceScatter": _Fields(("dim", "reducer"), shrinks="dim"),
    "AllToAll": _Fields(("dim", "source_dim"), grows="source_dim", shrinks="dim"),
    "CollectivePermute": _Fields(("shift",)),
    "SwapAxes": _Fields(()),
}


def check_communicate(state: State, stmt: Communicate) -> None:
    _check_fields(state, stmt)
    source = state.read(stmt.source)
    shape = _communicated_shape(state, stmt, source.shape)
    if stmt.out.dtype != stmt.source.dtype:
        state.fail(
            str(stmt.source.dtype),
            str(stmt.out.dtype),
            "a communication converts nothing",
        )
    _check_partial(state, stmt)
    if stmt.shift is None:
        _check_spread(state, stmt)
    out = state.write(stmt.out, shape)
    in_row = stmt.shift is None and state.current == state.stream_key(TRANSFERS)
    row = stmt.axes if in_row else ()
    _issue(state, stmt.name, InFlight((source,), (out,), row))


def _check_fields(state: State, stmt: Communicate) -> None:
    needs = _KINDS[stmt.kind].needs
    for field in ("dim", "source_dim", "reducer", "shift"):
        if (getattr(stmt, field) is not None) != (field in needs):
            state.fail(
                ", ".join(needs),
                f"{field} = {getattr(stmt, field)}",
                f"{stmt.kind} has these fields and no other",
            )
    _check_axes(state, stmt.axes)
    if stmt.kind == "SwapAxes":
        _check_swap(state, stmt.axes)
    if stmt.shift is not None:
        _check_targets(state, stmt.axes, stmt.shift)


def _check_targets(state: State, axes: Sequence[str], shift: Index) -> None:
    targets = state.ranks.targets(axes, state.value(shift))
    # A row for each position along `axes`, a column for each place along the others.
    for group in targets.T.tolist():
        if len(set(group)) < len(group):
            state.fail(
                "a permutation of devices",
                f"{shift}, by which they send to {group}",
                "in a permute each device sends to one that no other sends to",
            )


def _check_axes(state: State, axes: Sequence[str]) -> None:
    if (
        not axes
        or len(set(axes)) < len(axes)
        or not set(axes) <= set(state.ranks.sizes)
    ):
        state.fail(
            f"some of the mesh axes {list(state.ranks.sizes)}",
            f"{list(axes)}",
            "a communication is over distinct axes of the mesh",
        )


def _check_swap(state: State, axes: Sequence[str]) -> None:
    sizes = [state.ranks.sizes[axis] for axis in axes]
    if len(sizes) != 2 or sizes[0] != sizes[1]:
        state.fail(
            "two mesh axes of one size",
            ", ".join(f"{a} ({n})" for a, n in zip(axes, sizes, strict=True)),
            "two axes that are swapped have the same number of devices",
        )


def _communicated_shape(
    state: State, stmt: Communicate, shape: tuple[int, ...]
) -> tuple[int, ...]:
    sizes, devices = list(shape), state.ranks.extent(stmt.axes)
    fields = _KINDS[stmt.kind]
    for dim in (stmt.dim, stmt.source_dim):
        if dim is not None and not 0 <= dim < len(shape):
            state.fail(f"a dim below {len(shape)}", f"{dim}", "it names a dim")
    if fields.grows:
        sizes[getattr(stmt, fields.grows)] *= devices
    if fields.shrinks:
        dim = getattr(stmt, fields.shrinks)
        if sizes[dim] % devices:
            state.fail(
                f"a multiple of {devices}",
                f"{sizes[dim]} elements in dim {dim}",
                "the number of devices divides a dim that is scattered",
            )
        sizes[dim] //= devices
    return tuple(sizes)


def _check_partial(state: State, stmt: Communicate) -> None:
    left = tuple(
        (axis, reducer)
        for axis, reducer in stmt.source.partial
        if stmt.reducer is None or axis not in stmt.axes
    )
    reduced = {(axis, stmt.reducer) for axis in stmt.axes if stmt.reducer is not None}
    # As sets, because the order in which axes are reduced makes no difference.
    if not reduced <= set(stmt.source.partial) or set(left) != set(stmt.out.partial):
        state.fail(
            "a source partial over these axes and a result that no longer is",
            f"{type_text(stmt.source)} and {type_text(stmt.out)}",
            "a reduction reduces a partial source, and leaves its other axes partial",
        )


def _check_spread(state: State, stmt: Communicate) -> None:
    """A gathered dim loses its last axes, and a scattered dim gains axes at its end."""
    fields = _KINDS[stmt.kind]
    expected = [dim.axes for dim in stmt.source.dims]
    if stmt.kind == "SwapAxes":
        expected = list(swapped(tuple(expected), stmt.axes))
    if fields.grows:
        dim = getattr(stmt, fields.grows)
        # Shards along the minor axes are side by side in the whole.  Shards along a
        # major axis are not, so gathering them would reorder the elements.
        kept = len(expected[dim]) - len(stmt.axes)
        if kept < 0 or expected[dim][kept:] != stmt.axes:
            state.fail(
                f"dim {dim} of {stmt.source.name} spread over {', '.join(stmt.axes)}",
                type_text(stmt.source),
                "a gathered dim is spread over these axes, and they are its minor ones",
            )
        expected[dim] = expected[dim][:kept]
    if fields.shrinks:
        dim = getattr(stmt, fields.shrinks)
        # A scatter cuts the part that a device has, so its axes are the minor ones.
        expected[dim] = (*expected[dim], *stmt.axes)
    if expected != [dim.axes for dim in stmt.out.dims]:
        state.fail(
            f"{stmt.out.name} spread over {expected}",
            type_text(stmt.out),
            f"the dims of {stmt.kind}'s result follow from its source's",
        )


def _issue(state: State, name: str, flight: InFlight) -> None:
    if name in state.in_flight:
        state.fail(
            f"a Wait({name}) before",
            f"another communication {name}",
            "every communication is waited for exactly once",
        )
    state.in_flight[name] = flight


def check_wait(state: State, stmt: Wait) -> None:
    if stmt.communication not in state.in_flight:
        state.fail(
            "a communication in flight",
            stmt.communication,
            "every communication is waited for exactly once",
        )
    row = state.in_flight[stmt.communication].row
    first = next(n for n, each in state.in_flight.items() if each.row == row)
    if row and first != stmt.communication:
        state.fail(
            f"a Wait({first}) before",
            f"a Wait({stmt.communication}), which was issued later",
            "collectives over the same devices end in the order of their issue",
        )
    del state.in_flight[stmt.communication]
