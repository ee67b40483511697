"""What is cheap and kept from one loop for a later one is computed there again.

In a program with a derivative in it most of what the backward reads is computed element
by element where the forward is.  XLA computes such values where they are read; what a
loop makes for another one it has to write, chunk by chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypeGuard

from jhost._jax import fresh_var
from jhost.lowering.ir.effects import touched
from jhost.lowering.ir.layout import size_in_bytes
from jhost.lowering.ir.least_cut import least_cut, needed
from jhost.lowering.ir.marks import SerialMark
from jhost.lowering.ir.names import Names
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import stream_choices
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.ir.statements import Buffer, Compute, Select, Stmt
from jhost.lowering.rules.elementwise import COMPUTED_AGAIN

Cheap: TypeAlias = Compute | Select


def with_copies(program: Program) -> tuple[Program, set[str]]:
    """`program` with cheap values made anew where fewer bytes are kept then.

    The depth of a value is the most contractions and communications on a way to it.
    One that is read at its own depth and at others is kept for those, or computed
    again there from others that are, whatever takes fewer bytes.

    Returns:
        The program, and the names of what is to be computed where it is first read.
    """
    if all(mark.pipeline == "off" for mark in stream_choices(program)):
        return program, set()
    depths = _Depths(program)
    again = depths.computed_again()
    return _with_copies(program, depths.inner, again) if again else (program, set())


class _Depths:
    """How deep the values of a program lie, and which of them are cheap to make.

    `inner` is the depth of each statement's operands, and `there` what is kept anyway.
    """

    def __init__(self, program: Program) -> None:
        self.body = program.body
        self.there = {b.name for b in (*program.params, *program.results)}
        self.depths = dict.fromkeys((b.name for b in program.params), 0)
        self.sizes: dict[str, int] = {}
        self.inner: list[int] = []
        self.makers: dict[str, Cheap] = {}
        serial = {m.buffer for m in program.marks if isinstance(m, SerialMark)}
        for stmt in program.body:
            reads, writes = touched(stmt)
            inner = max((self.depths.get(b.name, 0) for b in reads), default=0)
            self.inner.append(inner)
            for buffer in writes:
                self.depths[buffer.name] = inner + _takes_long(stmt)
                size = size_in_bytes(buffer.shape, buffer.dtype.itemsize)
                self.sizes[buffer.name] = size
                if is_cheap(stmt) and buffer.name not in serial:
                    self.makers[buffer.name] = stmt

    def computed_again(self) -> dict[str, int]:
        """What is computed again, with its depth: deeper readers take the copy."""
        wanted = self._read_deeper()
        again: dict[str, int] = {}
        for depth in range(max(wanted, default=-1), -1, -1):
            here = wanted.get(depth, set())
            made_of = self._made_of(here, depth)
            if here.isdisjoint(made_of):
                continue
            kept = least_cut(
                here, made_of, functools.partial(self._bytes, wanted, depth)
            )
            for name in kept:
                wanted.setdefault(self.depths[name], set()).add(name)
            computed = set(needed(here, made_of, kept)) - kept
            again |= dict.fromkeys(computed, depth)
        return again

    def _read_deeper(self) -> dict[int, set[str]]:
        """By depth, the values that are read deeper."""
        found: dict[int, set[str]] = {}
        for stmt, inner in zip(self.body, self.inner, strict=True):
            for buffer in touched(stmt)[0]:
                depth = self.depths.get(buffer.name, 0)
                if depth < inner:
                    found.setdefault(depth, set()).add(buffer.name)
        return found

    def _made_of(self, names: Iterable[str], depth: int) -> dict[str, list[str]]:
        """The operands of what is cheap of `names` at `depth`, and those of these."""
        found: dict[str, list[str]] = {}
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in found or name not in self.makers or self.depths[name] != depth:
                continue
            found[name] = operands(self.makers[name])
            waiting += found[name]
        return found

    def _bytes(self, wanted: Mapping[int, set[str]], depth: int, name: str) -> int:
        """What it takes to keep a value for those deeper than `depth`."""
        own = self.depths[name]
        if name in self.there or (own < depth and name in wanted.get(own, ())):
            return 0
        return self.sizes[name]


def _takes_long(stmt: Stmt) -> bool:
    """Whether it is work to wait for: no computation element by element, or sum."""
    if not isinstance(stmt, Compute):
        return not isinstance(stmt, Select)
    rules = [each.rule for each in stmt.unit.eqns]
    return any(rule.contracts or rule.matmul or rule.is_closed for rule in rules)


def is_cheap(stmt: Stmt) -> TypeGuard[Cheap]:
    """Whether a statement takes less time than to read the value that it makes."""
    if not isinstance(stmt, Compute):
        return isinstance(stmt, Select)
    names = [each.eqn.primitive.name for each in stmt.unit.eqns]
    return len(names) == 1 and names[0] in COMPUTED_AGAIN


def operands(stmt: Cheap) -> list[str]:
    """The names of what a cheap statement makes its value of."""
    return [buffer.name for buffer in touched(stmt)[0]]


def made_by(stmt: Cheap) -> Buffer:
    """The value of a cheap statement."""
    (out,) = touched(stmt)[1]
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
    program: Program, inner: Sequence[int], again: Mapping[str, int]
) -> tuple[Program, set[str]]:
    """`program` with a copy behind the maker of each value that is computed `again`.

    What is only read deeper is computed there, and needs no copy.
    """
    names, here = Names.of(program), _read_here(program, inner, again)
    copies: dict[str, Buffer] = {}
    late: set[str] = set()
    body: list[Stmt] = []
    for stmt, depth in zip(program.body, inner, strict=True):
        there = [b for b in touched(stmt)[0] if b.name in copies]
        deeper = {b.name: copies[b.name] for b in there if again[b.name] < depth}
        if not is_cheap(stmt) or (out := made_by(stmt)).name not in again:
            body.append(replace_buffers(stmt, deeper))
            continue
        operands = {b.name: copies[b.name] for b in there}
        if out.name in here:
            body.append(replace_buffers(stmt, deeper))
            fresh = names.fresh(f"{out.name}_again")
            copies[out.name] = out = dataclasses.replace(out, name=fresh)
        late.add(out.name)
        body.append(renamed(stmt, operands, out))
    return dataclasses.replace(program, body=tuple(body)), late


def _read_here(
    program: Program, inner: Sequence[int], again: Mapping[str, int]
) -> set[str]:
    """What of `again` is read at its own depth as well."""
    read = {result.name for result in program.results}
    for stmt, depth in zip(reversed(program.body), reversed(inner), strict=True):
        reads, writes = touched(stmt)
        waits = bool(writes) and all(b.name in again for b in writes)
        if not waits or any(b.name in read for b in writes):
            read |= {b.name for b in reads if again.get(b.name, -1) >= depth}
    return read
