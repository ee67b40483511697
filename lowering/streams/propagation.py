"""Streams spread from the marked values through a graph, to a fixed point."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Set
from fractions import Fraction

from jhost.lowering.ir.graph import Graph, Node
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.requests import merge_choices
from jhost.lowering.ir.statements import Buffer
from jhost.lowering.streams.few_steps import out_of_reach, too_few
from jhost.lowering.streams.found_weights import is_product
from jhost.lowering.streams.participation import (
    ONE,
    Access,
    Participation,
    divided,
    largest_shared,
    participation_of,
    rule_of,
    times,
    undivided,
)
from jhost.lowering.streams.stream_plan import (
    Admitted,
    Answer,
    Met,
    StreamPlan,
    too_few_for,
)


class Propagation:
    """The spreading of streams.

    `known` has, from an earlier plan, the parts of some nodes, or the reasons why they
    take no part.
    """

    def __init__(
        self,
        graph: Graph,
        serial: Mapping[str, str],
        mesh: Mapping[str, int],
        known: Mapping[int, Participation | str] | None = None,
    ) -> None:
        self.graph = graph
        self.serial = serial
        self.mesh = mesh
        self.known = known or {}
        self.values: dict[str, tuple[str, Access]] = {}
        self.participations: dict[int, Participation] = {}
        self.steps: dict[str, Fraction] = {}
        self.offered: dict[str, Fraction] = {}
        self.declined: dict[int, str] = {}
        self.marks: dict[str, StreamChoice] = {}
        self.merged: dict[str, str] = {}
        self.pairs: list[tuple[str, str]] = []
        self.answers: list[Answer] = []
        self.queue: deque[str] = deque()

    def seed(self, stream: str, mark: StreamChoice) -> None:
        self.marks.setdefault(stream, mark)
        self.values[mark.buffer] = stream, self.start(stream, mark)
        self.queue.append(mark.buffer)

    def start(self, stream: str, mark: StreamChoice) -> Access:
        """How a stream reaches its marked value: as known parts around it say."""
        for number, writes, position in self.graph.touching.get(mark.buffer, ()):
            part = self.known.get(number)
            if isinstance(part, Participation) and part.stream == self.root(stream):
                access = (part.writes if writes else part.reads).get(position)
                if access is not None:
                    return access
        return Access(mark.dim, ONE)

    def take_merged(
        self, streams: Mapping[str, StreamChoice], plan: StreamPlan
    ) -> None:
        """Merge the streams that an earlier plan merged, and take over its extents."""
        self.marks |= streams
        for kept, taken in plan.merged:
            mark = merge_choices(self.marks[kept], self.marks[taken])
            assert mark is not None, "they went together when the plan was made"
            self.merge(kept, taken, mark)
        self.answers += plan.answers
        self.offered |= {s: Fraction(extent) for s, extent in plan.extents.items()}

    def run(self) -> None:
        """Visit values breadth first, so that the nearest mark wins."""
        while self.queue:
            name = self.queue.popleft()
            stream, access = self.values[name]
            for number, writes, position in self.graph.touching.get(name, ()):
                self.visit(number, writes, position, self.root(stream), access)

    def visit(
        self, number: int, writes: bool, position: int, stream: str, access: Access
    ) -> None:
        """Let a node join `stream`, which reached one of its buffers by `access`."""
        node = self.graph[number]
        joined = self.participations.get(number)
        if joined is not None:
            own = (joined.writes if writes else joined.reads).get(position)
            self.meet(stream, access, joined.stream, own)
            return
        part = self.known.get(number)
        if part is None:
            part = participation_of(node, stream, writes, position, access, self.mesh)
            if isinstance(part, Participation):
                part = self.admit(node, part)
        if isinstance(part, str):
            # The first reason counts, because it belongs to the nearest mark.
            self.declined.setdefault(number, part)
            return
        # Admitting the node may have merged its stream with another.
        if self.root(part.stream) != (stream := self.root(stream)):
            return  # a known node is of the stream that reached it first
        self.participations[number] = part
        self.steps[stream] = self.common_steps(stream, part)
        for buffers, accesses in ((node.reads, part.reads), (node.writes, part.writes)):
            for index, new in accesses.items():
                self.reach(buffers[index], stream, new)

    def admit(self, node: Node, part: Participation) -> Participation | str:
        """`part`, unless a result belongs to another stream or is serial."""
        for position, buffer in enumerate(node.writes):
            if buffer.name in self.serial:
                return f"{self.serial[buffer.name]} keeps it whole"
            if buffer.name in self.values:
                access = part.writes.get(position)
                # A statement works on chunks of a single stream.
                if not self.meet(part.stream, access, *self.values[buffer.name]):
                    return "one of its results is in another stream"
        stream = self.root(part.stream)
        if self.marks[stream].found:
            if _cuts_seen(node, part):
                return "queries in chunks see different keys on each device"
            if _compares_rows(node, part, self.graph.of_products):
                return "it is a product of rows with rows"
        own = part.steps
        known = self.steps.get(stream, own)
        steps = _gcd(known, own)
        # In a loop the chunks of all parts begin at the same steps.
        if steps is not own and steps not in (own, known):
            return "its chunks could not begin where those of the stream do"
        count = too_few_for(self.marks[stream], steps)
        self.answers.append(Admitted(stream, steps, count))
        if count is not None:
            self.offered[stream] = max(steps, self.offered.get(stream, steps))
            return too_few(steps, count)
        return part

    def common_steps(self, stream: str, part: Participation) -> Fraction:
        """The steps of a loop whose chunks all parts can follow."""
        own = part.steps
        return _gcd(self.steps.get(stream, own), own)

    def reach(self, buffer: Buffer, stream: str, access: Access) -> None:
        if buffer.name in self.serial:
            return
        if buffer.name not in self.values:
            self.values[buffer.name] = stream, access
            self.queue.append(buffer.name)
        else:
            self.meet(stream, access, *self.values[buffer.name])

    # --- Streams that meet ---------------------------------------------------- #

    def root(self, stream: str) -> str:
        while stream in self.merged:
            stream = self.merged[stream]
        return stream

    def meet(
        self, stream: str, access: Access | None, other: str, by: Access | None
    ) -> bool:
        """Merge two streams if they cut a value alike; return whether they are one.

        The stream reaches the value by `access`, and the `other` stream by `by`.
        """
        if stream != other:  # most streams meet themselves
            stream, other = self.root(stream), self.root(other)
        if access is None or by is None or access.dim != by.dim:
            return False
        # Each stream has counted its groups from 1 at its own mark, so the other's
        # groups are brought to the scale of this one.
        scale = ONE
        if access.groups is not by.groups and access.groups != by.groups:
            scale = divided(access.groups, by.groups)
        if stream == other:
            return scale is ONE
        kept, taken = sorted((stream, other))
        # Marks that ask for different things stay apart, and streams end between them.
        mark = merge_choices(self.marks[kept], self.marks[taken])
        merges = mark is not None and self.rescale(other, scale)
        self.answers.append(Met(kept, taken, mark is not None, merges))
        if merges:
            assert mark is not None
            self.merge(kept, taken, mark)
        return merges

    def merge(self, kept: str, taken: str, mark: StreamChoice) -> None:
        """Merge two streams; `mark` asks for both."""
        self.merged[taken] = kept
        self.pairs.append((kept, taken))
        self.marks[kept] = mark
        if taken in self.steps:
            steps = self.steps.pop(taken)
            self.steps[kept] = _gcd(self.steps.get(kept, steps), steps)

    def rescale(self, stream: str, scale: Fraction) -> bool:
        """Scale the groups of `stream`, if they still divide all sizes."""
        mine = {
            n: p
            for n, p in self.participations.items()
            if self.root(p.stream) == stream
        }
        scaled = {number: part.scaled(scale) for number, part in mine.items()}
        if any(part.size % part.groups.numerator for part in scaled.values()):
            return False
        if scale == 1:
            return True
        self.participations |= scaled
        for name, (owner, access) in self.values.items():
            if self.root(owner) == stream:
                access = Access(access.dim, times(access.groups, scale))
                self.values[name] = owner, access
        if stream in self.steps:
            self.steps[stream] = divided(self.steps[stream], scale)
        return True

    # --- The finished plan ---------------------------------------------------- #

    def finish(self, streams: Mapping[str, StreamChoice]) -> StreamPlan:
        """The plan, with groups scaled up until all numbers of them are whole."""
        marks = {s: self.marks[s] for s in streams if s not in self.merged}
        parts: dict[int, Participation] = {}
        of_stream: dict[str, dict[int, Participation]] = {
            stream: {} for stream in marks
        }
        for number, part in self.participations.items():
            stream = self.root(part.stream)
            parts[number] = of_stream[stream][number] = part.of_stream(stream)
        uncut: dict[int, Participation] = {}
        extents: dict[str, int] = {}
        for stream, mine in of_stream.items():
            factor = _common_denominator(mine.values())
            if factor is not ONE:  # seldom
                mine = {n: part.scaled(factor) for n, part in mine.items()}
                parts |= mine
            for number in self.without_whole_steps(mine):
                uncut[number] = mine.pop(number)
                del parts[number]
            if factor is not ONE:
                for number in self.with_too_few(stream, mine):
                    del mine[number], parts[number]
            offered = self.offered.get(stream, ONE) / factor
            every = [part.steps for part in mine.values()] or [offered]
            steps = functools.reduce(_gcd, every)
            extents[stream] = int(steps) if steps.denominator == 1 else 1
        return StreamPlan(
            marks, parts, extents, self.declined, self.pairs, uncut, self.answers
        )

    def with_too_few(self, stream: str, parts: Mapping[int, Participation]) -> set[int]:
        """The parts that cannot be cut as often as asked, and what only they reach.

        They joined before it was known how many groups a later gather makes.
        """
        counts = dict[int, int | None]()
        for number, part in parts.items():
            counts[number] = too_few_for(self.marks[stream], part.steps)
            self.answers.append(Admitted(stream, part.steps, counts[number]))
        # Streams that met have marks on both sides.
        met = any(kept == stream for kept, _ in self.pairs)
        if met or not any(counts.values()):
            return set()
        left_out, why = out_of_reach(
            self.graph, self.marks[stream].buffer, parts, counts
        )
        self.declined |= {**why, **self.declined}
        return left_out

    def without_whole_steps(self, parts: Mapping[int, Participation]) -> list[int]:
        """The parts whose steps are no whole number in each group; they are left out.

        The stream ends at those that touch a value of a part that stays.
        """
        # They joined before it was known how many groups a later gather makes.
        left_out = [n for n, part in parts.items() if part.steps.denominator != 1]
        reached = {
            buffer.name
            for number in parts.keys() - set(left_out)
            for buffer in (*self.graph[number].reads, *self.graph[number].writes)
        }
        for number in left_out:
            node = self.graph[number]
            if reached & {b.name for b in (*node.reads, *node.writes)}:
                self.declined.setdefault(number, undivided(parts[number].size))
        return left_out


def _cuts_seen(node: Node, part: Participation) -> bool:
    """Whether a part cuts queries that do not see all keys.

    It chooses on each device, block by block, which keys its queries see.  That costs
    more than the loop hides: two such loops made a step of Llama 8B over four H200s
    3 % slower than the same with attention whole.
    """
    rule = rule_of(node)
    window = rule and rule.window
    return window is not None and part.factor == window.queries


def _compares_rows(node: Node, part: Participation, made: Set[str]) -> bool:
    """Whether a part cuts rows that are multiplied by rows, batch by batch.

    Attention that is written out does so.  One of its operands is whole, and a loop
    ends there.  What stands before it in the loop, such as weights of a softmax, would
    be written chunk by chunk.
    """
    rule = rule_of(node)
    if rule is None or not rule.contracts or rule.matmul is not None:
        return False
    of_rows = all(buffer.name in made for buffer in node.reads)
    cuts_batch = len(part.reads) > 1 and part.writes
    if not of_rows or cuts_batch or part.factor in rule.unsharded:
        return False
    return not is_product(node.stmt)


def _common_denominator(parts: Iterable[Participation]) -> Fraction:
    """The factor by which all groups have to be scaled to be whole numbers."""
    denominators = [
        access.groups.denominator
        for part in parts
        for access in (*part.reads.values(), *part.writes.values())
    ]
    common = math.lcm(*denominators)
    return ONE if common == 1 else Fraction(common)


def _gcd(share: Fraction, other: Fraction) -> Fraction:
    """The largest fraction that both are multiples of."""
    # The most frequent case first.
    return share if share is other else largest_shared(share, other)
