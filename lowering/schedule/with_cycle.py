"""Writes a scan as a cycle: statements before it, the scan, and statements behind it.

Slices are read by index, and stacks are written in place.  Otherwise the iterations
outside of the scan would have to be concatenated to its stacks, which takes two passes
over all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.border import scan_border, scan_ins, scan_outs
from jhost.lowering.ir.display_names import display_name
from jhost.lowering.ir.effects import read_and_made, reads_writes
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.queues import on_own
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.schedule.blocks import before_readers, contracts
from jhost.lowering.schedule.carried import Carried
from jhost.lowering.schedule.copied import copied
from jhost.lowering.schedule.cycle import Cycle, Late
from jhost.lowering.schedule.stacks import Stacks, fresh
from jhost.lowering.schedule.written_cycle import WrittenCycle


def with_cycle(program: Program, cycle: Cycle, known: list[WrittenCycle]) -> Program:
    """`program` with the scan written as a cycle.

    `known` has how the same cycle was written into other programs.  It is the same
    here but for some names, and passes know what stays the same.
    """
    names = FreshNames.of(program)
    before = next((each for each in known if each.fits(cycle.scan)), None)
    if before is not None:
        written = before.again(cycle.scan, names)
    else:
        writer = _Writer.outside(cycle, names)
        stmts, replaced = writer.statements()
        asked = tuple(names.asked)
        written = WrittenCycle(cycle.scan, stmts, replaced, writer.said, asked)
        known.append(written)
    place = next(n for n, stmt in enumerate(program.body) if stmt is cycle.scan)
    replaced = written.replaced
    behind = (replace_buffers(stmt, replaced) for stmt in program.body[place + 1 :])
    return dataclasses.replace(
        program,
        body=(*program.body[:place], *written.stmts, *behind),
        results=tuple(replaced.get(each.name, each) for each in program.results),
        display_names={**program.display_names, **written.said},
    )


class _Writer:
    """Writes the parts of a cycle into `body`, for the program or the scan's own body.

    `consts` and `stacks` have the buffers there that the scan's body reads whole, and
    those that it reads slices of, by the names of the body's params.
    """

    def __init__(
        self,
        cycle: Cycle,
        names: FreshNames,
        consts: Mapping[str, ir.Buffer],
        stacks: Mapping[str, ir.Buffer],
    ) -> None:
        scan = cycle.scan
        self.cycle, self.scan, self.core = cycle, scan, cycle.core
        self.names, self.consts, self.stacks = names, dict(consts), dict(stacks)
        _, self.carried, self.sliced = scan_ins(scan, scan.body.params)
        self.ends, self.results = scan_outs(scan, scan.body.results)
        late = (stmt for each in cycle.late for stmt in each.stmts)
        self.late = {buffer.name for s in late for buffer in reads_writes(s)[1]}
        """The names of what an iteration leaves to the next to make."""
        self.body: list[ir.Stmt] = []
        self.said: dict[str, str] = {}
        """What messages call the values that are written: as in the scan's body."""
        self.make = Stacks.of(scan, names, self.body)

    @classmethod
    def outside(cls, cycle: Cycle, names: FreshNames) -> _Writer:
        """A writer into the program that has the scan."""
        border = scan_border(cycle.scan)
        consts = {inside.name: outside for outside, inside in border.consts}
        stacks = {inside.name: outside for outside, inside in border.xs}
        return cls(cycle, names, consts, stacks)

    def inside(self) -> _Writer:
        """A writer into the scan's body, which has its own names for the buffers."""
        names = FreshNames.of(self.scan.body)
        own = {param.name: param for param in self.scan.body.params}
        return _Writer(
            self.cycle,
            names,
            {name: own[name] for name in self.consts},
            {name: fresh(stack, names) for name, stack in self.stacks.items()},
        )

    def statements(self) -> tuple[list[ir.Stmt], Mapping[str, ir.Buffer]]:
        """The statements of the cycle, and the new buffers of the scan's results."""
        cycle, scan = self.cycle, self.scan
        count = self.make.first_count()
        stacks = {y.name: self.make.filled(y) for y in scan.ys}
        state = Carried(scan.carry, (), {}, stacks)
        if cycle.early:
            state = dataclasses.replace(state, came=self.gathered(scan.carry, count))
        # The first iteration has none before it to work for.  If the body multiplied by
        # placeholders instead, one NaN among its operands would reach all gradients.
        if cycle.late:
            state = self.iteration(state, count, is_first=True)
            count = self.make.next(count)
        if cycle.inside:
            state, count = self.border(state, count)
            state, count = self.loop(state, count)
            state, count = self.border(state, count)
        if cycle.last_outside:
            state = self.iteration(state, count, is_last=True)
            count = self.make.next(count)
        if cycle.late:
            state = self.made_late(cycle.late, state, count)
        ends = zip(scan.carried, state.carry, strict=True)
        stacks = {y: self.make.finished(stack) for y, stack in state.stacks.items()}
        return self.body, {end.name: now for end, now in ends} | stacks

    def iteration(
        self,
        state: Carried,
        count: ir.Buffer,
        *,
        is_first: bool = False,
        is_last: bool = False,
    ) -> Carried:
        """An iteration, with what it does for those before and behind it."""
        late = () if is_first else self.cycle.late
        # Sums of the iteration before stand first, so all work of this one is beside
        # them.
        sums = [each for each in late if each.before is None]
        state = self.made_late(sums, state, count)
        gathers = bool(self.cycle.early) and not is_last
        ahead = self.gathered(state.carry, count, 1) if gathers else ()
        work = [each for each in late if each.before is not None]
        return dataclasses.replace(self.computed(state, count, work), came=ahead)

    def loop(self, state: Carried, start: ir.Buffer) -> tuple[Carried, ir.Buffer]:
        """Write the scan; its final state, and the count of iterations done by then."""
        inside = self.inside()
        before = Carried(
            self.carried,
            tuple(each.stmt.out for each in self.cycle.early),
            {n: fresh(each, inside.names) for n, each in state.terms.items()},
            {y: fresh(stack, inside.names) for y, stack in state.stacks.items()},
        )
        count = fresh(start, inside.names)
        after = inside.iteration(before, count)
        results = (inside.make.next(count), *after.all)
        outs = tuple(fresh(buffer, self.names) for buffer in (start, *state.all))
        scan = dataclasses.replace(
            self.scan,
            body=dataclasses.replace(
                self.scan.body,
                params=(*inside.reads, count, *before.all),
                results=results,
                body=(*inside.body,),
            ),
            consts=self.reads,
            carry=(start, *state.all),
            xs=(),
            carried=outs,
            ys=(),
            length=len(self.cycle.inside),
        )
        self.body.append(scan)
        behind = state.like(outs[1:])
        return behind, self.make.known_behind(behind.all[0], outs[0])

    def border(self, state: Carried, count: ir.Buffer) -> tuple[Carried, ir.Buffer]:
        """What a scan of one iteration carries, before or behind it.

        XLA writes such a scan out, and no border then bounds what is under way: the sum
        of an iteration would be added up when all others have run.
        """
        if len(self.cycle.inside) > 1 or not self.cycle.late:
            return state, count
        count, *there = self.make.together((count, *state.all))
        return state.like(there), count

    @property
    def reads(self) -> tuple[ir.Buffer, ...]:
        """The buffers that are read and not carried."""
        return (*self.consts.values(), *self.stacks.values())

    # --- The parts of an iteration --------------------------------------------- #

    def gathered(
        self, carry: Sequence[ir.Buffer], count: ir.Buffer, ahead: int = 0
    ) -> tuple[ir.Buffer, ...]:
        """Gather for iteration `count + ahead`; iteration `count` has that `carry`."""
        counts = self.counts(carry, ahead)
        found: list[ir.Buffer] = []
        for each in self.cycle.early:
            stmts = (*each.issued, ir.Wait(communication=each.stmt.name))
            known = self.consts | counts | self.read(stmts, count, ahead)
            made = self.add(stmts, known)
            found.append(made[each.stmt.out.name])
        return tuple(found)

    def counts(self, carry: Sequence[ir.Buffer], ahead: int) -> dict[str, ir.Buffer]:
        """The carried values of the iteration `ahead` that gathers may read."""
        now = {p.name: each for p, each in zip(self.carried, carry, strict=True)}
        counted = self.cycle.counted
        issued = [stmt for each in self.cycle.early for stmt in each.issued]
        if not ahead or _reads(issued).isdisjoint(counted.ends):
            return now
        known = self.consts | now
        made = known | self.add(counted.stmts, known)
        return {name: made[end] for name, end in counted.ends.items()}

    def computed(
        self, state: Carried, count: ir.Buffer, late: Sequence[Late]
    ) -> Carried:
        """The work of an iteration, some of the one before, and what it stacks."""
        gathers = (each.stmt.out.name for each in self.cycle.early)
        begin = len(self.body)
        slices = self.read(self.core, count)
        core = len(self.body)
        known = {
            **self.consts,
            **slices,
            **{p.name: b for p, b in zip(self.carried, state.carry, strict=True)},
            **dict(zip(gathers, state.came, strict=True)),
        }
        copies, made = self.copied(self.core, known)
        for stmt, copy in zip(self.core, copies, strict=True):
            work = [each for each in late if each.before is stmt]
            state = self.made_late(work, state, count, beside=True)
            self.body.append(copy)
        # XLA reads a slice in place only in the fusion of its reader, so a slice moves
        # there.
        self.body[begin:] = before_readers(self.body[begin:core], self.body[core:])
        made = known | made
        ends = zip(self.ends, state.carry, strict=True)
        return Carried(
            # Late products have been added to their carried sums already.
            tuple(b if end.name in self.late else made[end.name] for end, b in ends),
            (),
            {name: made[name] for name in self.cycle.terms},
            self.stacked(state.stacks, made, count),
        )

    def made_late(
        self,
        late: Iterable[Late],
        state: Carried,
        count: ir.Buffer,
        *,
        beside: bool = False,
    ) -> Carried:
        """What the iteration before left to be made, into stacks and carried sums."""
        stacks, carry = state.stacks, state.carry
        for each in late:
            slices = self.slices(_reads(each.stmts), count, -1)
            sums = {p.name: b for p, b in zip(self.carried, carry, strict=True)}
            known = {**self.consts, **slices, **sums, **state.terms}
            copies, made = self.copied(each.stmts, known)
            for copy in copies:
                # XLA keeps the place of work among others only where streams have it.
                of_its_own = beside and contracts([copy])
                self.body += on_own([copy]) if of_its_own else [copy]
            ends = zip(self.ends, carry, strict=True)
            carry = tuple(made.get(end.name, value) for end, value in ends)
            stacks = self.stacked(stacks, made, count, -1)
        return dataclasses.replace(state, carry=carry, stacks=stacks)

    def stacked(
        self,
        stacks: Mapping[str, ir.Buffer],
        made: Mapping[str, ir.Buffer],
        count: ir.Buffer,
        ahead: int = 0,
    ) -> Mapping[str, ir.Buffer]:
        """The stacks with those results of iteration `count + ahead` that are made."""
        found = dict(stacks)
        for result, y in zip(self.results, self.scan.ys, strict=True):
            if (value := made.get(result.name)) is not None:
                found[y.name] = self.make.written(found[y.name], value, count, ahead)
        return found

    # --- Statements ------------------------------------------------------------ #

    def add(
        self, stmts: Sequence[ir.Stmt], known: Mapping[str, ir.Buffer]
    ) -> dict[str, ir.Buffer]:
        """Append a copy of statements that reads what is known; what it makes."""
        copies, made = self.copied(stmts, known)
        self.body += copies
        return made

    def copied(
        self, stmts: Sequence[ir.Stmt], known: Mapping[str, ir.Buffer]
    ) -> tuple[list[ir.Stmt], dict[str, ir.Buffer]]:
        """A copy of each statement that reads what is known; what they make."""
        copies, made = copied(stmts, known, self.names)
        for name, buffer in made.items():
            self.said[buffer.name] = display_name(self.scan.body, name)
        return copies, made

    def read(
        self, stmts: Sequence[ir.Stmt], count: ir.Buffer, ahead: int = 0
    ) -> dict[str, ir.Buffer]:
        """The slices of an iteration that statements read, or that leave it."""
        leaving = {each.name for each in self.scan.body.results}
        return self.slices(_reads(stmts) | leaving, count, ahead)

    def slices(
        self, wanted: Collection[str], count: ir.Buffer, ahead: int
    ) -> dict[str, ir.Buffer]:
        """Those slices of an iteration whose names are wanted."""
        found: dict[str, ir.Buffer] = {}
        for param in self.sliced:
            if param.name not in wanted:
                continue
            stack = self.stacks[param.name]
            found[param.name] = self.make.read(stack, param, count, ahead)
            name = found[param.name].name
            self.said[name] = display_name(self.scan.body, param.name)
        return found


def _reads(stmts: Sequence[ir.Stmt]) -> set[str]:
    return {*read_and_made(stmts)[0]}
