"""Which pipeline a stream gets, how many chunks, and why."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Container, Mapping, Sequence, Set

import jax.numpy as jnp

from jhost import errors
from jhost._text import counted
from jhost.lowering.ir.graph import Graph, Node
from jhost.lowering.ir.layout import axes_size, layout_of, used_axes
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.statements import Communicate, Compute
from jhost.lowering.loops.pipelining import Pipelining, Ways, off, owners_along
from jhost.lowering.loops.windows_at_hand import with_windows_at_hand
from jhost.lowering.streams.halos import reads_others
from jhost.lowering.streams.participation import ONE, Participation

DEFAULT_CHUNKS = 4
"""The chunk count of a collective pipeline that was asked for without one."""


def choose_pipeline(
    mark: StreamChoice,
    extent: int,
    graph: Graph,
    parts: Mapping[int, Participation],
    mesh: Mapping[str, int],
) -> Pipelining:
    """The pipeline of one stream, whose loop could cut `extent` steps on a device.

    Raises:
        ChunksError: more chunks than steps, or a count that a p2p pipeline cannot have.
        PipelineError: a p2p pipeline where no communication moves the streamed dim.
    """
    if extent == 0:
        return off("the dim has size 0, so there is nothing to cut")
    # The chunks of a p2p pipeline are counted on all devices together, so they have
    # checks of their own.
    if mark.spec.pipeline == "p2p":
        return _p2p(mark, extent, graph, parts, mesh)
    if mark.spec.chunks is not None:
        count = mark.spec.chunks
        reason = mark.reason or f"{count} chunks, as asked"
    elif mark.spec.pipeline == "collective":
        count = min(DEFAULT_CHUNKS, extent)
        reason = f"{count} chunks, the default of a collective pipeline"
    else:
        return off(mark.reason or "auto, but jhost has no rates of the devices")
    _check_count(mark, count, extent)
    return _collective(mark, count, reason, extent, graph, parts)


def _collective(
    mark: StreamChoice,
    count: int,
    reason: str,
    extent: int,
    graph: Graph,
    parts: Mapping[int, Participation],
) -> Pipelining:
    """Chunks of one size, except the last; there may be fewer than `count` of them."""
    steps = -(-extent // count)
    chunks = -(-extent // steps)
    fewer = _fewer_text(chunks, count, extent) if chunks < count else ""
    if fewer:
        reason = f"{fewer}; {mark.reason}" if mark.reason else fewer
    if chunks == 1:
        return off("one chunk needs no loop")
    made = Pipelining(
        spec=dataclasses.replace(mark.spec, pipeline="collective", chunks=chunks),
        reason=reason,
        participations=parts,
        fewer="" if mark.reason else fewer,  # nobody asked for what jhost chose
    )
    kept = with_windows_at_hand(made, graph, extent, {})
    if parts and not kept.participations:
        reasons = (reads_others(graph[n].stmt) for n in parts)
        raise errors.PipelineError(
            "A collective pipeline has no elements of other chunks. Mark a value "
            'before or after, or ask for pipeline="p2p".',
            [f"axis={mark.dim} at {mark.where}: {each}" for each in reasons],
        )
    return kept


def _fewer_text(chunks: int, count: int, extent: int) -> str:
    """Says that there are fewer chunks than asked for, and how many there can be."""
    return (
        f"{counted(chunks, 'chunk')}, not the {count} asked for: "
        f"{counted(extent, 'step')} can be cut into {_possible(count, extent)}"
    )


def _possible(count: int, extent: int) -> str:
    """The nearest counts of chunks of one size, if the last may be smaller."""
    every = sorted({-(-extent // steps) for steps in range(1, extent + 1)})
    below = [each for each in every if each < count]
    above = [each for each in every if each > count]
    return f"{' or '.join(map(str, [*below[-1:], *above[:1]]))} chunks"


def _check_count(mark: StreamChoice, count: int, extent: int, devices: int = 1) -> None:
    """Refuse more chunks than steps, where each device has its part of the chunks."""
    if count // devices > extent:
        each = f", {count // devices} on a device," if devices > 1 else ""
        raise errors.ChunksError(
            f"{count} chunks were asked for{each} where a device has "
            f"{counted(extent, 'step')} to cut. Ask for fewer chunks, or stream "
            "another dim.",
            [f"axis={mark.dim} at {mark.where}"],
        )


def _p2p(
    mark: StreamChoice,
    extent: int,
    graph: Graph,
    parts: Mapping[int, Participation],
    mesh: Mapping[str, int],
) -> Pipelining:
    """One chunk for each device, or several equal pieces of it, as the count asks."""
    if math.prod(mesh.values()) == 1:
        return off("there is one device, and nothing moves")
    ways, kept = _ways(mark, graph, parts, mesh)
    axes = tuple(itertools.chain(*ways))
    devices = owners_along(ways, mesh)
    asked = mark.spec
    count = devices if asked.chunks is None else asked.chunks
    if count % devices:
        sizes = " x ".join(str(axes_size(group, mesh)) for group in ways)
        over = f"{' and '.join(axes)} ({sizes} devices)"
        raise _no_multiple(mark, count, over, devices, extent)
    _check_count(mark, count, extent, devices)
    sums = {number for number, part in kept.items() if _sums_up(graph[number], part)}
    # The contractions over all chunks then stand elsewhere: behind the loop, or beside
    # its transfers.
    if asked.sums != "in chunks":
        kept = {number: part for number, part in kept.items() if number not in sums}
    pieces = count // devices
    source = "one a device" if len(ways) == 1 else f"moved over {' and '.join(axes)}"
    source = source if asked.chunks is None else "as asked"
    reason = mark.reason or f"{count} chunks, {source}"
    fewer = ""
    if (made := -(-extent // -(-extent // pieces))) < pieces:
        fewer = reason = f"on each device {_fewer_text(made, pieces, extent)}"
    found = Pipelining(
        spec=dataclasses.replace(asked, chunks=count),
        reason=reason,
        participations=kept,
        axes=ways[0],
        across=() if len(ways) == 1 else ways[1],
        by_name=mark.by_name,
        beside=frozenset(sums if asked.sums == "beside transfers" else ()),
        fewer="" if mark.reason else fewer,
    )
    return with_windows_at_hand(found, graph, extent, mesh)


def _no_multiple(
    mark: StreamChoice, count: int, over: str, devices: int, extent: int
) -> errors.ChunksError:
    return errors.ChunksError(
        f"A p2p pipeline over {over} needs a multiple of {devices} chunks: "
        f"{_multiples(count, devices, extent)}, not {count}.",
        [f"axis={mark.dim} at {mark.where}"],
    )


def _multiples(count: int, devices: int, extent: int) -> str:
    """The nearest multiples of the devices, with at least one step in a chunk."""
    below = count // devices * devices
    near = [n for n in (below, below + devices) if 0 < n <= extent * devices]
    return " or ".join(map(str, near or [devices]))


def _sums_up(node: Node, part: Participation) -> bool:
    """Whether it contracts the dim in chunks, which one matmul over all can do too."""
    if not isinstance(node.stmt, Compute) or part.writes:
        return False
    (unit_eqn,) = node.stmt.unit.eqns
    return unit_eqn.rule.contracts and unit_eqn.rule.matmul is None


def _moves(
    ways: Ways,
    graph: Sequence[Node],
    parts: Mapping[int, Participation],
    mesh: Mapping[str, int],
) -> dict[int, tuple[str, ...]]:
    """The communications that move shards of the streamed dim, with their axes."""
    moves: dict[int, tuple[str, ...]] = {}
    for number, part in parts.items():
        stmt = graph[number].stmt
        if isinstance(stmt, Communicate) and part.ratio != 1 and stmt.axes in ways:
            # With more groups, a shard has several stretches and each has every chunk.
            whole = max(part.reads[0].groups, part.writes[0].groups)
            if whole == owners_along(ways, mesh):
                moves[number] = stmt.axes
    return moves


def _ways(
    mark: StreamChoice,
    graph: Sequence[Node],
    parts: Mapping[int, Participation],
    mesh: Mapping[str, int],
) -> tuple[Ways, dict[int, Participation]]:
    """The group of mesh axes along which most moves go, or two, and what moves so.

    In a loop along one group, the chunk of a step follows the device's rank there.  In
    a loop along two, the chunk follows both ranks: see `skewed.py`.
    """
    stmts = (graph[number].stmt for number in parts)
    every = dict.fromkeys(s.axes for s in stmts if isinstance(s, Communicate))
    pairs = [p for p in itertools.combinations(every, 2) if not set(p[0]) & set(p[1])]
    found: tuple[Ways, dict[int, Participation]] | None = None
    most = 0, 0
    for ways in (*((axes,) for axes in every), *pairs):
        moves = _moves(ways, graph, parts, mesh)
        if set(moves.values()) != {*ways}:
            continue
        kept = _moving(ways, moves, graph, parts, mesh)
        works = sum(isinstance(graph[n].stmt, Compute) for n in kept)
        # A second group must not take work out of the loop.
        if len(moves) > most[0] and (len(ways) == 1 or works >= most[1]):
            found, most = (ways, kept), (len(moves), works)
    if found is None:
        raise errors.PipelineError(
            "A p2p pipeline hands the shards of a dim from device to device. Shard the "
            "dim over the axis along which it is gathered, reduced and scattered, or "
            'exchanged for another dim, or ask for pipeline="collective".',
            [
                f"axis={mark.dim} at {mark.where}: no gather, reduce-scatter or "
                "all-to-all moves the dim"
            ],
        )
    return found


def _moving(
    ways: Ways,
    moves: Container[int],
    graph: Sequence[Node],
    parts: Mapping[int, Participation],
    mesh: Mapping[str, int],
) -> dict[int, Participation]:
    """The nodes that move with the loop; others stand before it or behind it."""
    axes, chunks = {*itertools.chain(*ways)}, owners_along(ways, mesh)
    return {
        number: part
        for number, part in parts.items()
        if number in moves or _rotates(graph[number], part, chunks, axes)
    }


def _rotates(node: Node, part: Participation, chunks: int, axes: Set[str]) -> bool:
    """Whether a node can work on another chunk on each device at the same time.

    Work on a device's own shard is written before the loop or after it.  A collective
    along the same axes would mix different chunks.  A float sum that all devices hold
    would differ from device to device, because they add chunks in different orders.
    """
    stmt = node.stmt
    if part.ratio is not ONE or part.groups != chunks:
        return False
    if isinstance(stmt, Communicate):
        return not set(stmt.axes) & axes
    sums = [buffer for i, buffer in enumerate(node.writes) if i not in part.writes]
    # Integers add up to the same in any order.
    exact = all(jnp.issubdtype(buffer.dtype, jnp.integer) for buffer in sums)
    return exact or all(used_axes(layout_of(b)) >= axes for b in sums)
