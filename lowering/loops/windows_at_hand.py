"""Which windows chunks of a pipeline have at hand: those of chunks beside theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jhost.lowering.ir.graph import Graph
from jhost.lowering.loops.all_reduce import ways_back
from jhost.lowering.loops.pipelining import Pipelining
from jhost.lowering.streams.halos import halos_of, reads_others
from jhost.lowering.streams.participation import Participation


def with_windows_at_hand(
    made: Pipelining, graph: Graph, extent: int, mesh: Mapping[str, int]
) -> Pipelining:
    """A pipeline without the nodes that read what no chunk has at hand."""
    lost = out_of_reach(made, graph, made.participations, extent, mesh)
    if not lost:
        return made
    kept = {n: part for n, part in made.participations.items() if n not in lost}
    # Without a contraction its sums may go back in pieces, and others have none either.
    made = dataclasses.replace(made, participations=kept)
    return with_windows_at_hand(made, graph, extent, mesh)


def out_of_reach(
    made: Pipelining,
    graph: Graph,
    parts: Mapping[int, Participation],
    extent: int,
    mesh: Mapping[str, int],
) -> dict[int, str]:
    """The nodes whose windows chunks of a pipeline do not have at hand, and why."""
    halos = {
        number: found
        for number, part in parts.items()
        if (found := halos_of(graph[number].stmt, part.factor))
    }
    if not halos:
        return {}
    if lacks := _lacks(made, graph, extent, mesh):
        return {number: reads_others(graph[number].stmt, lacks) for number in halos}
    # A step keeps the edges of its chunk for those that work on the chunks beside it.
    pieces = made.chunks // made.owners(mesh)
    return {
        number: reads_others(graph[number].stmt, "not only of those beside it")
        for number, found in halos.items()
        if any(
            halo.most * pieces * parts[number].groups
            > graph[number].reads[operand].shape[halo.dim]
            for operand, halo in found.items()
        )
    }


def _lacks(made: Pipelining, graph: Graph, extent: int, mesh: Mapping[str, int]) -> str:
    """Why steps of a pipeline lack elements of the chunks beside theirs, or ""."""
    # Elements beside a slice of each shard are in other iterations.
    if made.pipeline == "collective":
        return "and a collective pipeline has none"
    if made.across:
        return "and they move along several axes"
    if extent % (made.chunks // made.owners(mesh)):
        return "and pieces of a shard differ in size"
    # Their loop has the pieces outermost, and a chunk's neighbours in other pieces.
    return "and sums of it go back in pieces" if ways_back(graph, made, mesh) else ""
