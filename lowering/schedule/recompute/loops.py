"""Cheap values that one loop would keep for a later loop are computed again there.

In a program with a derivative, the backward reads many values that the forward computes
element by element.  XLA fuses such values into their readers.  But a loop that makes
them for another loop has to write them to memory, chunk by chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Set as AbstractSet
from typing import TypeAlias, TypeGuard

from jhost._jax import fresh_var
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.marks import SerialMark
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import stream_choices
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.ir.statements import Buffer, Compute, Select, Stmt
from jhost.lowering.rules.elementwise import COMPUTED_AGAIN
from jhost.lowering.schedule.recompute.cut import least_cut

Cheap: TypeAlias = Compute | Select

_MOVED = frozenset({"pad", "slice"})
"""Primitives that move elements: what they need of neighbours is there already."""


def with_copies(program: Program) -> tuple[Program, set[str]]:
    """`program` with cheap values computed again where that keeps fewer bytes.

    A value may go into work, a contraction for example, and be read behind that work
    too.  It is then kept, or computed again from kept values, whichever takes fewer
    bytes.

    Returns:
        The program, and the names of the values to compute where they are first read.
    """
    # Without loops XLA itself computes such values where they are read.
    if all(mark.spec.pipeline == "off" for mark in stream_choices(program)):
        return program, set()
    flow = _Flow(program)
    again = flow.computed_again()
    return _with_copies(program, flow, again) if again else (program, set())


class _Flow:
    """Which statements read which values, and which values are cheap to make.

    The depth of a value is the largest number of works on a path from the params to it.
    A value is computed again from values of its own depth, and from values that are
    `kept_anyway`: params and results.
    """

    def __init__(self, program: Program) -> None:
        self.body = program.body
        self.kept_anyway = {b.name for b in (*program.params, *program.results)}
        self.depths = dict.fromkeys((b.name for b in program.params), 0)
        self.sizes: dict[str, int] = {}
        self.makers: dict[str, Cheap] = {}
        self.made_by: dict[str, int] = {}
        # Three sets of statements for each statement: all that it needs; those that it
        # needs through a heavy one; and its peers, which are itself and the statements
        # of its own depth that it needs through no heavy one.  A set is an integer with
        # a bit for each statement, because unions of such sets are all that is done.
        self.needs: list[int] = []
        self.past_heavy: list[int] = []
        self.peers: list[int] = []
        self.serial = {m.buffer for m in program.marks if isinstance(m, SerialMark)}
        for number, stmt in enumerate(program.body):
            self.add(number, stmt)

    def add(self, number: int, stmt: Stmt) -> None:
        """Note the next statement; the makers of its operands are known already."""
        reads, writes = reads_writes(stmt)
        depth = max((self.depths.get(b.name, 0) for b in reads), default=0)
        heavy = _is_heavy(stmt)
        needs, past_heavy, peers = 0, 0, 1 << number
        for name in {b.name for b in reads if b.name in self.made_by}:
            maker = self.made_by[name]
            needs |= self.needs[maker] | 1 << maker
            # If the maker is heavy, all that it needs is needed through heavy work.
            through = self.needs if _is_heavy(self.body[maker]) else self.past_heavy
            past_heavy |= through[maker]
            if self.depths[name] == depth and not heavy:
                peers |= self.peers[maker]
        self.needs.append(needs)
        self.past_heavy.append(past_heavy)
        self.peers.append(peers)
        for buffer in writes:
            self.made_by[buffer.name] = number
            self.depths[buffer.name] = depth + heavy
            self.sizes[buffer.name] = bytes_of(buffer)
            if is_cheap(stmt) and buffer.name not in self.serial:
                self.makers[buffer.name] = stmt

    def is_behind(self, number: int, name: str) -> bool:
        """Whether a statement is behind work that the value, or its peer, goes into.

        Peers count, because a derivative that the forward computes goes into no work of
        the forward, but the value that it is made of does.
        """
        maker = self.made_by.get(name)
        return maker is not None and bool(self.past_heavy[number] & self.peers[maker])

    def computed_again(self) -> set[str]:
        """The values that are computed again behind the work that they go into."""
        wanted = self._read_behind()
        again: set[str] = set()
        # Matmuls on both sides read such a value from memory, so it is written anyway,
        # and keeping it takes no more time.
        for name in self._read_by_work_on_both_sides():
            self.makers.pop(name, None)
        # From the deepest up: a value that a cut keeps is then wanted at its own depth,
        # which comes later.
        for depth in range(max(wanted, default=-1), -1, -1):
            at_depth = wanted.get(depth, set())
            made_of = self._made_of(at_depth, depth)
            if at_depth.isdisjoint(made_of):
                continue
            cut = least_cut(
                at_depth, made_of, functools.partial(self._bytes, wanted, depth)
            )
            for name in cut.kept:
                wanted.setdefault(self.depths[name], set()).add(name)
            again |= cut.again
        return again

    def _read_behind(self) -> dict[int, set[str]]:
        """The values that are read behind work that they go into, by their depth."""
        found: dict[int, set[str]] = {}
        for number, stmt in enumerate(self.body):
            for name in (buffer.name for buffer in reads_writes(stmt)[0]):
                if self.is_behind(number, name):
                    found.setdefault(self.depths[name], set()).add(name)
        return found

    def _read_by_work_on_both_sides(self) -> set[str]:
        """The values that work reads both before and behind the work they go into."""
        sides: tuple[set[str], set[str]] = set(), set()
        for number, stmt in enumerate(self.body):
            for buffer in reads_writes(stmt)[0] if _is_heavy(stmt) else ():
                sides[self.is_behind(number, buffer.name)].add(buffer.name)
        return sides[False] & sides[True]

    def _made_of(self, names: Iterable[str], depth: int) -> dict[str, list[str]]:
        """The operands of the cheap values among `names`, and the operands of these.

        Only values at `depth` count, and those made of params without work.
        """
        found: dict[str, list[str]] = {}
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            counts = self.depths[name] in (0, depth)
            if counts and name in self.makers and name not in found:
                found[name] = operands(self.makers[name])
                waiting += found[name]
        return found

    def _bytes(self, wanted: Mapping[int, set[str]], depth: int, name: str) -> int:
        """The bytes that keeping a value takes, in a cut at `depth`."""
        own = self.depths[name]
        if name in self.kept_anyway or (own < depth and name in wanted.get(own, ())):
            return 0
        return self.sizes[name]


def _is_heavy(stmt: Stmt) -> bool:
    """Whether a statement is work; elementwise statements and sums are not."""
    if not isinstance(stmt, Compute):
        return not isinstance(stmt, Select)
    rules = [each.rule for each in stmt.unit.eqns]
    return any(rule.contracts or rule.matmul or rule.is_closed for rule in rules)


def is_cheap(stmt: Stmt) -> TypeGuard[Cheap]:
    """Whether making the value takes less time than reading it from memory."""
    if not isinstance(stmt, Compute):
        return isinstance(stmt, Select)
    names = [each.eqn.primitive.name for each in stmt.unit.eqns]
    return len(names) == 1 and names[0] in COMPUTED_AGAIN | _MOVED


def operands(stmt: Cheap) -> list[str]:
    """The names of the values that a cheap statement reads."""
    return [buffer.name for buffer in reads_writes(stmt)[0]]


def made_by(stmt: Cheap) -> Buffer:
    """The value of a cheap statement."""
    (out,) = reads_writes(stmt)[1]
    return out


def renamed(stmt: Cheap, operands: Mapping[str, Buffer], out: Buffer) -> Cheap:
    """A cheap statement that makes `out` instead, with a variable of its own."""
    stmt = replace_buffers(stmt, operands)
    if isinstance(stmt, Select):
        return dataclasses.replace(stmt, out=out)
    assert isinstance(stmt, Compute)
    (each,) = stmt.unit.eqns
    outvars = tuple(fresh_var(var.aval) for var in stmt.unit.outvars)
    each = dataclasses.replace(each, eqn=each.eqn.replace(outvars=[*outvars]))
    unit = dataclasses.replace(stmt.unit, eqns=(each,), outvars=outvars)
    return dataclasses.replace(stmt, unit=unit, outs=(out,))


# --- The program with the copies ---------------------------------------------------- #


def _with_copies(
    program: Program, flow: _Flow, again: AbstractSet[str]
) -> tuple[Program, set[str]]:
    """`program` with a copy behind the maker of each value that is computed `again`.

    A value that is only read behind work is computed there, and needs no copy.
    """
    names, read_before = FreshNames.of(program), _read_before(program, flow, again)
    copies: dict[str, Buffer] = {}
    late: set[str] = set()
    body: list[Stmt] = []
    for number, stmt in enumerate(program.body):
        copied = [b.name for b in reads_writes(stmt)[0] if b.name in copies]
        behind = {n: copies[n] for n in copied if flow.is_behind(number, n)}
        if not is_cheap(stmt) or (out := made_by(stmt)).name not in again:
            body.append(replace_buffers(stmt, behind))
            continue
        # It is read before that work as well, so the later readers get a copy.
        if out.name in read_before:
            body.append(replace_buffers(stmt, behind))
            fresh = names.fresh(f"{out.name}_again")
            copies[out.name] = out = dataclasses.replace(out, name=fresh)
        # `compute_late.py` moves it to its first reader.
        late.add(out.name)
        body.append(renamed(stmt, {n: copies[n] for n in copied}, out))
    return dataclasses.replace(program, body=tuple(body)), late


def _read_before(
    program: Program, flow: _Flow, again: AbstractSet[str]
) -> AbstractSet[str]:
    """The names in `again` that are also read before all work they go into."""
    read = {result.name for result in program.results}
    for number in reversed(range(len(program.body))):
        reads, writes = reads_writes(program.body[number])
        waits = bool(writes) and all(b.name in again for b in writes)
        if not waits or any(b.name in read for b in writes):
            read |= {b.name for b in reads if not flow.is_behind(number, b.name)}
    return read
