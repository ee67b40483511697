"""The p2p pipeline of nodes that read windows: `turns.py` says what works when."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Node, written_by
from jhost.lowering.ir.index import Constant, Index
from jhost.lowering.ir.queues import MAIN, OWN, on_stream
from jhost.lowering.loops.chunk import LoopSpec
from jhost.lowering.loops.collective import INDEX
from jhost.lowering.loops.edges import Edges, halos_in, widest_edges
from jhost.lowering.loops.p2p import P2PLoop
from jhost.lowering.loops.turns import PlacedNode, Turns
from jhost.lowering.streams.halos import ChunkHalo
from jhost.lowering.streams.participation import Access, Participation


class WindowedLoop(P2PLoop):
    """A loop in turns; the first and the last ones, with fewer nodes, stand around it.

    Chunks have numbers, in the order of steps and, in a step, of pieces.
    """

    def __init__(self, spec: LoopSpec) -> None:
        super().__init__(spec)
        halos = halos_in(spec.nodes, spec.participation)
        every = self.devices * self.pieces
        self.turns = Turns.fewest(spec.nodes, halos, every, self.pieces)
        # What is read in a later turn is written as if something outside read it.
        kept = spec.leaving | self.turns.kept()
        self.spec = dataclasses.replace(spec, leaving=kept)
        self.edges = Edges(
            every, widest_edges(spec.nodes, halos), spec.names, self.allocate
        )
        self.read_in_windows = {
            node.reads[operand].name: (node.reads[operand], part.reads[operand])
            for node in spec.nodes
            for part in [spec.participation(node)]
            for operand in halos.get(id(node), ())
        }
        self.number: Index = Constant(0)
        self.at_hand = _nothing_at_hand()
        self.windows: dict[tuple[str, ChunkHalo, Index], ir.Buffer] = {}

    @property
    def ends_alone(self) -> bool:
        return self.sends and self.turns.is_own(self.turns.tail()[-1])

    def statements(self) -> list[ir.Stmt]:
        used = min(self.turns.chunks - self.pieces, self.streams)
        head = self.head()
        loops = [self.loop(*run, used) for run in self.turns.runs()]
        tail = [*self.tail(used)]
        first = ir.Stream(index=INDEX)
        wait = on_stream(first, [ir.Synchronize(stream=MAIN)])
        return [
            *self.before,
            ir.GetCurrentStream(stream=MAIN),
            ir.For(index=INDEX.name, extent=used, body=wait),
            *self.on_own_stream([ir.Synchronize(stream=MAIN), *head]),
            *(self.wait_for_own_chunk(used) if head else ()),
            *loops,
            *tail,
            ir.Synchronize(stream=OWN),
            *self.totals(),
            *self.after,
        ]

    # --- Turns ---------------------------------------------------------------- #

    def head(self) -> list[ir.Stmt]:
        """The work on the device's own chunks before all others."""
        self.body = []
        for place in range(self.pieces):
            self.keep_outside(self.number_at(Constant(place)))
        self.work((node, Constant(place)) for node, place in self.turns.head())
        return self.body

    def loop(self, turns: range, nodes: Sequence[Node], used: int) -> ir.For:
        """A loop over turns in which chunks of other devices come."""
        self.forget_others()
        self.keep_outside(self.number_at(INDEX + turns.start))
        self.work((n, INDEX + (turns.start - self.turns.of(n).late)) for n in nodes)
        return self.in_turns(turns, used)

    def in_turns(self, turns: range, used: int) -> ir.For:
        """A loop of the body so far; the turns take turns on `used` streams."""
        first = turns.start - self.pieces
        index = INDEX + first
        within = first + len(turns) <= used
        stream = ir.Stream(index=index if within else index % used)
        work = (*on_stream(stream, self.body), ir.Synchronize(stream=stream))
        return ir.For(index=INDEX.name, extent=len(turns), body=work)

    def tail(self, used: int) -> Iterator[ir.Stmt]:
        """The last turns, with the device's own chunks beside what is sent."""
        runs = itertools.groupby(self.turns.tail(), self.turns.is_own)
        runs = [(own, [*works]) for own, works in runs]
        turn = self.turns.chunks
        for number, (own, works) in enumerate(runs):
            if own:
                self.body = []
                beside = self.beside if number + 1 == len(runs) else ()
                self.work(_constant(works))
                yield from self.on_own_stream([*beside, *self.body])
            else:
                self.forget_others()
                self.work(_constant(works))
                yield self.in_turns(range(turn, turn + 1), used)
                turn += 1

    def work(self, works: Iterable[tuple[Node, Index]]) -> None:
        """Append the work of nodes on the chunks at some places."""
        for node, place in works:
            self.at(self.number_at(place))
            self.node(node)
            for buffer in node.writes:
                self.keep_edges(buffer.name)

    def at(self, number: Index) -> None:
        """Work on the chunk of that number from now on."""
        self.number = number
        self.step = number // self.pieces
        self.piece = number % self.pieces if self.pieces > 1 else Constant(0)
        self.chunks = self.at_hand[number]

    def number_at(self, place: Index) -> Index:
        """The number of the chunk at a place of the ring."""
        if not self.turns.turned:
            return place
        # The device's own chunks come first in this direction too.
        last = Constant(self.pieces - 1)
        if isinstance(place, Constant) and place.value < self.pieces:
            return last - place
        return last + self.turns.chunks - place

    def forget_others(self) -> None:
        """Begin a loop, which has only the device's own chunks at hand."""
        own = {n: chunks for n, chunks in self.at_hand.items() if self.is_own(n)}
        self.at_hand = _nothing_at_hand() | own
        self.body, self.windows = [], {}

    def is_own(self, number: Index) -> bool:
        return isinstance(number, Constant) and number.value < self.pieces

    # --- What chunks need of their neighbours --------------------------------- #

    def operand(self, node: Node, number: int, part: Participation) -> ir.Buffer:
        chunk = super().operand(node, number, part)
        halo = self.turns.halos.get(id(node), {}).get(number)
        if halo is None:
            return chunk
        buffer = node.reads[number]
        key = buffer.name, halo, self.number
        if key not in self.windows:
            place = self.chunk_of(part)
            made = [*self.edges.window(buffer, chunk, halo, self.number, place)]
            self.body += made
            assert isinstance(made[-1], ir.Compute)
            (self.windows[key],) = made[-1].outs
        return self.windows[key]

    def keep_outside(self, number: Index) -> None:
        """Keep the edges of a chunk of each value that is there before the loop."""
        self.at(number)
        made = written_by(self.spec.nodes)
        for name in self.read_in_windows.keys() - made:
            self.keep_edges(name)

    def keep_edges(self, name: str) -> None:
        """Keep the edges of the chunk at hand, if windows read the value."""
        if name in self.read_in_windows:
            buffer, access = self.read_in_windows[name]
            chunk = self.read(buffer, access)
            self.body += self.edges.keep(buffer, chunk, access.dim, self.number)


def _nothing_at_hand() -> dict[Index, dict[tuple[str, Access], ir.Buffer]]:
    return collections.defaultdict(dict)


def _constant(works: Iterable[PlacedNode]) -> Iterator[tuple[Node, Index]]:
    return ((node, Constant(place)) for node, place in works)
