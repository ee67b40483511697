"""The transfers of a body that another iteration can make.

They are the gathers for its first work, if their sources are known an iteration early,
and the sums with little work behind them, if no iteration reads what they make.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence, Set

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.border import body_ins, scan_ins, scan_outs
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.schedule.barriers import passed_on
from jhost.lowering.schedule.blocks import blocks_of, communication_of
from jhost.lowering.schedule.cycle import Counted, Cycle, Early, Late
from jhost.lowering.schedule.intervals import SUMS, IsOpen

_LITTLE = 1
"""So many works behind a sum do not hide it: it has two rounds on four devices."""


def cycle_of(
    scan: ir.Scan,
    found: MovableTransfers,
    work: Sequence[Late] = (),
    *,
    little: bool = True,
) -> Cycle | None:
    """The transfers of a scan that only another iteration can hide, and late `work`.

    Without `little` the sums stay that have a little work behind their terms.
    """
    of_work = {stmt.name for each in work for stmt in each.transfers}
    sums = (
        each
        for each in found.late()
        if (little or not each.little) and of_work.isdisjoint(_sent(each))
    )
    early, late = tuple(found.early()), (*sums, *work)
    if not (early or late):
        return None
    cycle = Cycle(scan, early, late, found.core(early, late), found.counted)
    # With no iteration left in the scan XLA sees straight lines.  It would merge what
    # the backward gathers again with what the forward gathered, and keep it from there.
    return cycle if cycle.inside else None


class MovableTransfers:
    """The transfers of a body that could belong to another iteration."""

    def __init__(self, loop: ir.Scan | ir.While, is_open: IsOpen) -> None:
        if isinstance(loop, ir.Scan):
            consts, carry, xs = scan_ins(loop, loop.body.params)
            ends, ys = scan_outs(loop, loop.body.results)
        else:
            (consts, carry), xs = body_ins(loop, loop.body.params), ()
            ends, ys = loop.body.results, ()
        self.is_open, self.body = is_open, loop.body
        self.blocks = blocks_of(loop.body)
        self.constant, self.sliced = _names(consts), _names(xs)
        self.ends, self.stacked = _names(ends), _names(ys)
        self.end_of = {p.name: end.name for p, end in zip(carry, ends, strict=True)}
        self.counted = self._counted(carry, [end.name for end in ends])

    def exposed(self) -> list[ir.Communicate]:
        """The transfers with no work, or little, beside them in their iteration."""
        gathers = [stmt for _, stmt in self.first_gathers()]
        return gathers + [stmt for _, stmt, _ in self.last_sums()]

    def bound(self) -> list[ir.Communicate]:
        """The exposed transfers that must stay in their iteration.

        An earlier iteration makes their source, or the next one needs their result.
        """
        gathers = [s for _, s in self.first_gathers() if self.before(s) is None]
        sums = ((n, s) for n, s, _ in self.last_sums() if self.goes_on(n, s))
        return gathers + [s for n, s in sums if self.made_of(n, {s.out.name}) is None]

    def early(self) -> Iterator[Early]:
        """The gathers for the first work whose sources are known an iteration early.

        A gathered value that is a result of the iteration stays in it.
        """
        for _, stmt in self.first_gathers():
            before = None if stmt.out.name in self.left else self.before(stmt)
            if before is not None:
                yield self.without_barriers(stmt, before)

    def first_gathers(self) -> Iterator[tuple[int, ir.Communicate]]:
        for number, stmt in self.blocks.transfers:
            if stmt.kind == "AllGather" and self.is_open(stmt):
                if self.is_first(number, stmt):
                    yield number, stmt

    def is_first(self, number: int, stmt: ir.Communicate) -> bool:
        """Whether the first work reads it, or a loop in front of that work."""
        blocks = self.blocks.all
        working = (n for n, block in enumerate(blocks) if block.contracts)
        start, reader = next(working, len(blocks)), self.blocks.reader(number, stmt)
        return reader == start or (reader < start and blocks[reader].works)

    def before(self, stmt: ir.Communicate) -> list[ir.Stmt] | None:
        """The statements that make a gather's source, if they can run early."""
        known = self.constant | self.sliced | self.counted.ends.keys()
        return self.made_of_known(stmt.source.name, known)

    def made_of_known(
        self, wanted: str, known: Collection[str]
    ) -> list[ir.Stmt] | None:
        """The statements that make a value; None if they are not cheap or not known."""
        found: dict[int, ir.Stmt] = {}
        waiting = [wanted]
        while waiting:
            name = waiting.pop()
            number = self.blocks.maker.get(name)
            if number is None:
                if name not in known:
                    return None
                continue
            (maker,) = self.blocks.all[number].stmts[:1]
            if (passed := passed_on(maker)) is not None:
                waiting.append(passed[name].name)
            elif self.blocks.goes_along(number):
                waiting += self.blocks.all[number].reads
            else:
                return None
            found[number] = maker
        return [found[number] for number in sorted(found)]

    def _counted(self, params: Sequence[ir.Buffer], ends: Sequence[str]) -> Counted:
        """The params whose next values, the `ends`, are known an iteration early."""
        known: dict[str, str] = {}
        found: dict[int, ir.Stmt] = {}
        for param, end in zip(params, ends, strict=False):
            # Scalars only: these statements run in both iterations, and counting costs
            # nothing.
            stmts = [] if param.name == end else None
            if not param.shape:
                stmts = self.made_of_known(end, self.constant | {param.name})
            if stmts is not None:
                known[param.name] = end
                found |= {id(stmt): stmt for stmt in stmts}
        return Counted(known, tuple(found.values()))

    def without_barriers(self, stmt: ir.Communicate, before: list[ir.Stmt]) -> Early:
        passed: dict[str, ir.Buffer] = {}
        issued: list[ir.Stmt] = []
        for each in (*before, stmt):
            if (passing := passed_on(each)) is None:
                issued.append(replace_buffers(each, passed))
            else:
                passed |= {n: passed.get(b.name, b) for n, b in passing.items()}
        return Early(stmt, tuple(before), tuple(issued))

    @property
    def left(self) -> set[str]:
        return self.ends | self.stacked

    def late(self) -> Iterator[Late]:
        """The sums that no iteration reads, with little work behind their terms."""
        for number, stmt, behind in self.last_sums():
            if (made_of := self.made_of(number, {stmt.out.name})) is not None:
                made = self.stmts_of(made_of)
                stmts = (stmt, ir.Wait(communication=stmt.name), *made)
                yield Late(stmts, (stmt.source,), little=bool(behind))

    def last_sums(self) -> Iterator[tuple[int, ir.Communicate, int]]:
        """Each sum with little work behind its terms, and how many works these are."""
        blocks = self.blocks
        for number, stmt in blocks.transfers:
            if stmt.kind in SUMS and self.is_open(stmt):
                made, along = blocks.before(stmt)
                ready = max([*made, *along], default=-1)
                behind = sum(block.works for block in blocks.all[ready + 1 :])
                if made and behind <= _LITTLE:
                    yield number, stmt, behind

    def made_of(
        self, number: int, made: Set[str], moving: Container[object] = ()
    ) -> list[int] | None:
        """The blocks behind one that are made of what it `made`, if all may be late.

        They are cheap, or transfers that are `moving`; they read nothing else that an
        iteration makes, and what they make goes into stacks and carried sums alone.
        """
        known = self.constant | self.sliced | self.end_of.keys()
        later, behind = range(number + 1, len(self.blocks.all)), list[int]()
        for each, before in self.blocks.made_of(made, later):
            block = self.blocks.all[each]
            can_wait = block.can_wait or communication_of(block.stmt) in moving
            if not can_wait or not block.reads <= before | known:
                return None
            behind.append(each)
        made = {*made}.union(*(self.blocks.all[each].writes for each in behind))
        behind = self.blocks.with_waits(behind, later)
        leaves = not made.isdisjoint(self.left)
        return behind if leaves and self.is_late(made, behind) else None

    def is_late(self, made: Set[str], behind: Sequence[int]) -> bool:
        """Whether blocks read a carried value just where they make its next value.

        Nothing else reads such a value, so it may be an iteration behind the others.
        """
        late = {name for name, end in self.end_of.items() if end in made}
        every = range(len(self.blocks.all))
        inside = set[str]().union(*(self.blocks.all[n].reads for n in behind))
        others = (self.blocks.all[n].reads for n in every if n not in behind)
        read = self.left.union(*others)
        return late.isdisjoint(read) and inside & self.end_of.keys() <= late

    def stmts_of(self, numbers: Iterable[int]) -> list[ir.Stmt]:
        return [stmt for number in numbers for stmt in self.blocks.all[number].stmts]

    def goes_on(self, number: int, stmt: ir.Communicate) -> bool:
        """Whether the next iteration gets a value that is made of a sum."""
        later = range(number + 1, len(self.blocks.all))
        made_of = self.blocks.made_of([stmt.out.name], later)
        made = {stmt.out.name}.union(*(self.blocks.all[n].writes for n, _ in made_of))
        return not made.isdisjoint(self.ends)

    def core(self, early: Sequence[Early], late: Sequence[Late]) -> tuple[ir.Stmt, ...]:
        """The statements of the body without what other iterations do."""
        gone = {each.stmt.name for each in early}
        gone |= {stmt.name for each in late for stmt in each.transfers}
        behind = {id(stmt) for each in late for stmt in each.stmts}
        before = {id(stmt) for each in early for stmt in each.before}
        read = self.left | {term.name for each in late for term in each.terms}
        left: list[ir.Stmt] = []
        for stmt in (
            s for block in reversed(self.blocks.all) for s in block.stmts[::-1]
        ):
            if id(stmt) in behind or communication_of(stmt) in gone:
                continue
            reads, writes = _named(stmt)
            # A statement before a gather stays if something else reads its value.
            if id(stmt) in before and writes.isdisjoint(read):
                continue
            read |= reads
            left.append(stmt)
        return tuple(self.blocks.barriers.together(left[::-1]))


def _names(buffers: Iterable[ir.Buffer]) -> set[str]:
    return {buffer.name for buffer in buffers}


def _sent(late: Late) -> set[str]:
    return {stmt.name for stmt in late.transfers}


def _named(stmt: ir.Stmt) -> tuple[set[str], set[str]]:
    reads, writes = reads_writes(stmt)
    return {b.name for b in reads}, {b.name for b in writes}
