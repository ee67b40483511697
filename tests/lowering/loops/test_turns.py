"""The turns of loops with windows."""

from __future__ import annotations

from hypothesis import given, strategies as st

from jhost.lowering.ir.graph import Node
from jhost.lowering.loops.turns import Halos, Turns
from jhost.lowering.streams.halos import ChunkHalo
from tests.lowering.hand_built import buffer


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Node], Halos]:
    """Nodes that read earlier ones, or values from outside, some of them in windows."""
    nodes, halos = list[Node](), dict[int, dict[int, ChunkHalo]]()
    for number in range(draw(st.integers(1, 5))):
        reads = draw(st.lists(st.integers(-1, number - 1), min_size=1, max_size=2))
        node = Node(
            stmts=(),
            reads=tuple(buffer(f"v{each % 9}: f32[8]") for each in reads),
            writes=(buffer(f"v{number}: f32[8]"),),
        )
        sides = st.integers(-1, 1)
        found = {n: ChunkHalo(0, draw(sides), draw(sides)) for n in range(len(reads))}
        halos[id(node)] = {n: halo for n, halo in found.items() if halo.most > 0}
        nodes.append(node)
    return nodes, {node: found for node, found in halos.items() if found}


@given(made=graphs(), devices=st.integers(2, 5), own=st.integers(1, 3))
def test_each_chunk_is_made_once_behind_all_that_it_needs(
    made: tuple[list[Node], Halos], devices: int, own: int
) -> None:
    nodes, halos = made
    chunks = devices * own
    turns = Turns.fewest(nodes, halos, chunks, own)
    runs = (
        (node, turn - turns.of(node).late)
        for each, active in turns.runs()
        for turn in each
        for node in active
    )
    done: set[tuple[str, int]] = set()
    forward = -1 if turns.turned else 1
    inside = {b.name for node in nodes for b in node.writes}
    for node, place in [*turns.head(), *runs, *turns.tail()]:
        for operand, read in enumerate(node.reads):
            halo = halos.get(id(node), {}).get(operand, ChunkHalo(0, 0, 0))
            beside = [0, *([-forward] if halo.before > 0 else [])]
            beside += [forward] if halo.after > 0 else []
            if read.name in inside:
                needed = {(read.name, (place + step) % chunks) for step in beside}
                assert needed <= done
        (written,) = node.writes
        assert (written.name, place) not in done
        done.add((written.name, place))
    assert len(done) == len(nodes) * chunks
