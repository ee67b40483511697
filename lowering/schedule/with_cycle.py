"""Writes a scan as a cycle: what stands before it, itself, and what stands behind it.

What the scan slices is read by index, and what it stacks is written in place: a
concatenation behind it would take two passes over all of that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import lax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.schedule.copied import copied
from jhost.lowering.schedule.cycle import Cycle
from jhost.lowering.units.make import unit_of


def with_cycle(program: Program, cycle: Cycle) -> Program:
    """`program` with a scan of its own as a cycle."""
    names = FreshNames.of(program)
    body: list[ir.Stmt] = []
    replaced: Mapping[str, ir.Buffer] = {}
    for stmt in program.body:
        if stmt is cycle.scan:
            stmts, replaced = _Writer.outside(cycle, names).statements()
            body += stmts
        else:
            body.append(replace_buffers(stmt, replaced))
    results = tuple(replaced.get(each.name, each) for each in program.results)
    return dataclasses.replace(program, body=tuple(body), results=results)


@dataclasses.dataclass(frozen=True, slots=True)
class _Carried:
    """What one iteration hands to the next.

    `came` has what was gathered for it, `terms` those of sums that are still to be
    made, and `stacks` has all that is stacked so far.
    """

    carry: tuple[ir.Buffer, ...]
    came: tuple[ir.Buffer, ...]
    terms: tuple[ir.Buffer, ...]
    stacks: Mapping[str, ir.Buffer]

    @property
    def all(self) -> tuple[ir.Buffer, ...]:
        return (*self.carry, *self.came, *self.terms, *self.stacks.values())


class _Writer:
    """Writes the parts of a cycle into `body`, a program's or that of the scan.

    There `consts` and `stacks` are what the scan's body reads as they are, and what it
    reads slices of, by the names of its params.
    """

    def __init__(
        self,
        cycle: Cycle,
        names: FreshNames,
        consts: Mapping[str, ir.Buffer],
        stacks: Mapping[str, ir.Buffer],
    ) -> None:
        scan = cycle.scan
        first = len(scan.consts)
        last = first + len(scan.carry)
        self.cycle, self.scan, self.core = cycle, scan, cycle.core
        self.names, self.consts, self.stacks = names, dict(consts), dict(stacks)
        self.carried = scan.body.params[first:last]
        self.sliced = scan.body.params[last:]
        self.results = scan.body.results[len(scan.carried) :]
        self.body: list[ir.Stmt] = []

    @classmethod
    def outside(cls, cycle: Cycle, names: FreshNames) -> _Writer:
        """Into the program that has the scan."""
        scan = cycle.scan
        params = [param.name for param in scan.body.params]
        consts = dict(zip(params, scan.consts, strict=False))
        sliced = params[len(scan.consts) + len(scan.carry) :]
        return cls(cycle, names, consts, dict(zip(sliced, scan.xs, strict=True)))

    def inside(self) -> _Writer:
        """Into the scan's body, where the same things have names of its own."""
        names = FreshNames.of(self.scan.body)
        own = {param.name: param for param in self.scan.body.params}
        return _Writer(
            self.cycle,
            names,
            {name: own[name] for name in self.consts},
            {name: _fresh(stack, names) for name, stack in self.stacks.items()},
        )

    def statements(self) -> tuple[list[ir.Stmt], Mapping[str, ir.Buffer]]:
        """The statements, and what stands for each value that the scan gave."""
        cycle, scan = self.cycle, self.scan
        count = self.start()
        stacks = {y.name: self.filled(y) for y in scan.ys}
        state = _Carried(scan.carry, (), (), stacks)
        if cycle.early:
            state = dataclasses.replace(state, came=self.gathered(count))
        if cycle.late:
            state, count = self.iteration(state, count), self.next(count)
        state, count = self.loop(state, count)
        if cycle.early:
            state = self.iteration(state, count, is_last=True)
            count = self.next(count)
        if cycle.late:
            state = self.summed(state, count)
        ends = zip(scan.carried, state.carry, strict=True)
        stacks = {y: self.written(stack) for y, stack in state.stacks.items()}
        return self.body, {end.name: now for end, now in ends} | stacks

    def iteration(
        self, state: _Carried, count: ir.Buffer, *, is_last: bool = False
    ) -> _Carried:
        """An iteration, with what it does for those before and behind it."""
        if self.cycle.late and state.terms:
            state = self.summed(state, count)
        ahead = self.cycle.early and not is_last
        came = self.gathered(count, 1) if ahead else ()
        return dataclasses.replace(self.computed(state, count), came=came)

    def loop(self, state: _Carried, start: ir.Buffer) -> tuple[_Carried, ir.Buffer]:
        """The scan itself: what it hands on, and how many iterations are done then."""
        inside = self.inside()
        before = _Carried(
            self.carried,
            tuple(each.stmt.out for each in self.cycle.early),
            tuple(_fresh(each, inside.names) for each in state.terms),
            {y: _fresh(stack, inside.names) for y, stack in state.stacks.items()},
        )
        count = _fresh(start, inside.names)
        after = inside.iteration(before, count)
        results = (inside.next(count), *after.all)
        outs = tuple(_fresh(buffer, self.names) for buffer in (start, *state.all))
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
        after, count = _like(state, outs[1:]), outs[0]
        return after, self.once(after.all[0], count)

    @property
    def reads(self) -> tuple[ir.Buffer, ...]:
        """All that is read and not carried."""
        return (*self.consts.values(), *self.stacks.values())

    # --- The parts of an iteration --------------------------------------------- #

    def gathered(self, count: ir.Buffer, ahead: int = 0) -> tuple[ir.Buffer, ...]:
        """What is gathered for the iteration `ahead` of one."""
        found: list[ir.Buffer] = []
        for each in self.cycle.early:
            stmts = (*each.issued, ir.Wait(communication=each.stmt.name))
            known = self.consts | self.read(stmts, count, ahead)
            made = self.add(stmts, known)
            found.append(made[each.stmt.out.name])
        return tuple(found)

    def computed(self, state: _Carried, count: ir.Buffer) -> _Carried:
        """The work of an iteration, and what it stacks itself."""
        gathers = (each.stmt.out.name for each in self.cycle.early)
        known = {
            **self.consts,
            **self.read(self.core, count),
            **{p.name: b for p, b in zip(self.carried, state.carry, strict=True)},
            **dict(zip(gathers, state.came, strict=True)),
        }
        made = known | self.add(self.core, known)
        stacks = dict(state.stacks)
        for result, y in zip(self.results, self.scan.ys, strict=True):
            if result.name in made:
                stacks[y.name] = self.stored(stacks[y.name], made[result.name], count)
        ends = self.scan.body.results[: len(self.scan.carried)]
        terms = (each.stmt.source.name for each in self.cycle.late)
        return _Carried(
            tuple(made[end.name] for end in ends),
            (),
            tuple(made[name] for name in terms),
            stacks,
        )

    def summed(self, state: _Carried, count: ir.Buffer) -> _Carried:
        """The sums of the iteration before one, into their stacks."""
        stacks = dict(state.stacks)
        for each, terms in zip(self.cycle.late, state.terms, strict=True):
            stmts = (each.stmt, ir.Wait(communication=each.stmt.name), *each.behind)
            made = self.add(stmts, self.consts | {each.stmt.source.name: terms})
            for result, y in zip(self.results, self.scan.ys, strict=True):
                if result.name in made and result.name != each.stmt.source.name:
                    stacks[y.name] = self.stored(
                        stacks[y.name], made[result.name], count, -1
                    )
        return dataclasses.replace(state, terms=(), stacks=stacks)

    # --- Statements ------------------------------------------------------------ #

    def add(
        self, stmts: Sequence[ir.Stmt], known: Mapping[str, ir.Buffer]
    ) -> dict[str, ir.Buffer]:
        """Append a copy of statements that reads what is known; what it makes."""
        stmts, made = copied(stmts, known, self.names)
        self.body += stmts
        return made

    def read(
        self, stmts: Sequence[ir.Stmt], count: ir.Buffer, ahead: int = 0
    ) -> dict[str, ir.Buffer]:
        """The slices of an iteration that statements read, or that leave it."""
        found: dict[str, ir.Buffer] = {}
        wanted = _reads(stmts) | {each.name for each in self.scan.body.results}
        for param in self.sliced:
            if param.name not in wanted:
                continue
            whole = self.stacks[param.name]
            out = _fresh(param, self.names)
            found[param.name] = out
            self.at(_sliced, [whole], out, count, ahead)
        return found

    def stored(
        self, stack: ir.Buffer, value: ir.Buffer, count: ir.Buffer, ahead: int = 0
    ) -> ir.Buffer:
        out = _fresh(stack, self.names)
        self.at(_written, [stack, value], out, count, ahead)
        return out

    def at(
        self,
        fun: Callable[..., jax.Array],
        ins: Sequence[ir.Buffer],
        out: ir.Buffer,
        count: ir.Buffer,
        ahead: int,
    ) -> None:
        """A computation at the place of an iteration in stacks."""
        last = self.scan.length - 1

        def at_place(count: jax.Array, *args: jax.Array) -> jax.Array:
            when = count + ahead
            return fun(last - when if self.scan.reverse else when, *args)

        self.compute(at_place, [count, *ins], out)

    def filled(self, stack: ir.Buffer) -> ir.Buffer:
        out = _fresh(stack, self.names)
        self.compute(lambda: lax.full(stack.shape, 0, stack.dtype), [], out)
        return out

    def written(self, stack: ir.Buffer) -> ir.Buffer:
        """A stack in which the last place is written before anything reads another.

        XLA would fuse the write with each reader, and keep the stack as it was before.
        """
        out = _fresh(stack, self.names)
        self.compute(lax.optimization_barrier, [stack], out)
        return out

    def start(self) -> ir.Buffer:
        """The count of the first iteration."""
        out = ir.Buffer(
            name=self.names.fresh("count"), shape=(), dtype=np.dtype(np.int32), dims=()
        )
        # A scalar by itself would be a literal, which is no value of a program.
        self.compute(lambda: lax.squeeze(lax.full((1,), 0, np.int32), [0]), [], out)
        return out

    def once(self, there: ir.Buffer, count: ir.Buffer) -> ir.Buffer:
        """A count that is known once another value is there.

        XLA knows how far a loop counts.  By a place that it knows it would read from
        the stack before another place was written, and so keep both stacks; and it
        would cast the weights of the first and the last iteration at one time.
        """
        out = _fresh(count, self.names)
        self.compute(
            lambda count, there: lax.optimization_barrier((count, there))[0],
            [count, there],
            out,
        )
        return out

    def next(self, count: ir.Buffer) -> ir.Buffer:
        out = _fresh(count, self.names)
        self.compute(lambda count: count + 1, [count], out)
        return out

    def compute(
        self, fun: Callable[..., jax.Array], ins: Sequence[ir.Buffer], out: ir.Buffer
    ) -> None:
        types = [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in ins]
        unit = unit_of(self.names.fresh("cycle"), fun, *types)
        self.body.append(ir.Compute(unit=unit, ins=tuple(ins), outs=(out,)))


def _reads(stmts: Iterable[ir.Stmt]) -> set[str]:
    return {
        buffer.name
        for stmt in ir.walk(tuple(stmts))
        for buffer in reads_writes(stmt)[0]
    }


def _fresh(buffer: ir.Buffer, names: FreshNames) -> ir.Buffer:
    return dataclasses.replace(buffer, name=names.fresh(buffer.name))


def _like(state: _Carried, buffers: Sequence[ir.Buffer]) -> _Carried:
    """A state of other buffers."""
    left = iter(buffers)
    carry, came, terms = (
        tuple(next(left) for _ in part)
        for part in (state.carry, state.came, state.terms)
    )
    return _Carried(carry, came, terms, dict(zip(state.stacks, left, strict=True)))


def _sliced(place: jax.Array, stack: jax.Array) -> jax.Array:
    starts = (place, *[np.int32(0)] * (stack.ndim - 1))
    sizes = (1, *stack.shape[1:])
    part = lax.dynamic_slice(stack, starts, sizes, allow_negative_indices=False)
    return lax.squeeze(part, [0])


def _written(place: jax.Array, stack: jax.Array, value: jax.Array) -> jax.Array:
    starts = (place, *[np.int32(0)] * (stack.ndim - 1))
    return lax.dynamic_update_slice(
        stack, lax.expand_dims(value, [0]), starts, allow_negative_indices=False
    )
