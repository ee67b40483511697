"""Small transfers of one kind become one, where nothing has to be read in between.

A transfer of few bytes takes its latency.  The norm of all gradients is a sum of one
number for each gradient, and the gradients of norms' gains are vectors.  XLA's own
combiner would join such transfers.  On GPUs it is off, because it would also join
chunks, and weights that are gathered early.

Values are put side by side in one vector, so each element is reduced as before.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import ClassVar, TypeAlias

import jax.numpy as jnp

from jhost._dtypes import bits
from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.graph import Node, graph_of
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.requests import stream_choices
from jhost.lowering.ir.statements import (
    Buffer,
    Communicate,
    Compute,
    Stmt,
)
from jhost.lowering.ir.transfers import larger_side
from jhost.lowering.loops.combined_writer import CombinedWriter
from jhost.lowering.streams.plan import plan_program, with_plan_of

SMALL = 1 << 16
"""A transfer of at most so many bytes is small; larger ones should run beside work."""

_TOGETHER = 1 << 18
"""The most bytes of a combined transfer, which still takes about one latency."""

JOINED_BY_XLA = frozenset({"cpu"})
"""The kinds of devices on which small transfers stay apart.

XLA (of JAX 0.12) joins small sums there itself.  A part of a vector begins at a place
of its own, so on CPUs each reader of one would be a kernel that LLVM compiles alone:
alike layers of a Llama had 292 kernels for 204.
"""

_KINDS = ("AllReduce", "AllGather", "ReduceScatter")

_SAID = "{{}}: {} small transfers over {} are one {}"

CombinedGroups: TypeAlias = Sequence[Sequence[Communicate]]


@dataclasses.dataclass(frozen=True, slots=True)
class CombineSmall(EachProgram):
    """Small collectives of one kind, over the same axes -> one of all their values.

    Collectives that a stream may take into its loop are left alone.

    Attributes:
        device_kind: JAX's name for the kind of devices.
    """

    name: ClassVar[str] = "combine_small"

    device_kind: str = "unknown"

    def sees(self, program: Program) -> object:
        _, small = _small_ones(program)
        return small

    def change(self, program: Program) -> Program:
        if self.device_kind in JOINED_BY_XLA:
            return program
        graph, small = _small_ones(program)
        if len(small) < 2:
            return program
        groups = _CombiningWalk(graph, small).groups
        together = {
            stmt.name: number for number, each in enumerate(groups) for stmt in each
        }
        if not together:
            return program
        writer = CombinedWriter(program)
        body = _CombiningWalk(graph, together.keys(), writer).body
        remarks = (*program.remarks, *map(_note, groups))
        combined = dataclasses.replace(program, body=tuple(body), remarks=remarks)
        return with_plan_of(program, combined)


def _small_ones(program: Program) -> tuple[Sequence[Node], set[str]]:
    """The nodes of a program, and the communications that may be combined, by name."""
    if stream_choices(program):
        graph, plan = plan_program(program)
        streamed = plan.participations.keys()
    else:
        graph, streamed = graph_of(program), ()
    return graph, {
        node.stmt.name
        for number, node in enumerate(graph)
        if isinstance(node.stmt, Communicate)
        and number not in streamed
        and _is_small(node)
    }


def _is_small(node: Node) -> bool:
    stmt = node.stmt
    assert isinstance(stmt, Communicate)
    # A number of 4 bits is half a byte, and a PRNG key cannot be put into a vector of
    # numbers.
    whole_bytes = bits(stmt.out.dtype) >= 8 if _is_number(stmt.out) else False
    largest = larger_side(stmt)
    fits = 0 < largest <= SMALL
    return stmt.kind in _KINDS and len(node.stmts) == 2 and whole_bytes and fits


def _is_number(buffer: Buffer) -> bool:
    return jnp.issubdtype(buffer.dtype, jnp.number)


# --- Which ones ------------------------------------------------------------------- #


@dataclasses.dataclass(slots=True)
class _Open:
    """Communications of one kind that others may still join."""

    kind: Hashable
    bit: int
    members: list[Communicate] = dataclasses.field(default_factory=list[Communicate])

    def has_room(self, stmt: Communicate) -> bool:
        return _bytes([*self.members, stmt]) <= _TOGETHER


def _bytes(stmts: Iterable[Communicate]) -> int:
    return sum(map(larger_side, stmts))


class _CombiningWalk:
    """Goes through a program and puts small communications off until one is read.

    Small computations that read them wait too.  With a `writer`, `body` has the
    statements in their new order, with one statement for each group.
    """

    def __init__(
        self,
        graph: Sequence[Node],
        small: Iterable[str],
        writer: CombinedWriter | None = None,
    ) -> None:
        self.small = frozenset(small)
        self.writer = writer
        self.body: list[Stmt] = []
        self.closed: list[_Open] = []
        self.open: list[_Open] = []
        self.waiting: list[Node] = []
        self.behind: dict[str, int] = {}
        """For each value, the groups that it waits for, with a bit for each group."""
        self.bits = itertools.count()
        for node in graph:
            self.take(node)
        self.close(-1)

    @property
    def groups(self) -> CombinedGroups:
        """The groups of more than one communication."""
        return [each.members for each in self.closed if len(each.members) > 1]

    def take(self, node: Node) -> None:
        stmt, needed = node.stmt, self.needed(node)
        if isinstance(stmt, Communicate) and stmt.name in self.small:
            # Its source is made of what these groups bring, so it cannot join them.
            self.close(needed)
            self.behind[stmt.out.name] = self.joined(stmt).bit
        elif not needed:
            self.body += node.stmts
        elif _can_wait(node):
            self.waiting.append(node)
            self.behind.update((buffer.name, needed) for buffer in node.writes)
        else:
            self.close(needed)
            self.body += node.stmts

    def needed(self, node: Node) -> int:
        """The open groups that a node waits for."""
        if not self.open:  # most often
            return 0
        needed, still_open = 0, sum(each.bit for each in self.open)
        for name in (*(buffer.name for buffer in node.reads), *node.barrier):
            needed |= self.behind.get(name, 0)
        return needed & still_open

    def joined(self, stmt: Communicate) -> _Open:
        """The open group of a communication's kind, or a new one, which it joins."""
        kind = _kind(stmt)
        for each in self.open:
            if each.kind == kind:
                if each.has_room(stmt):
                    each.members.append(stmt)
                    return each
                self.close(each.bit)
                break
        self.open.append(_Open(kind, 1 << next(self.bits), [stmt]))
        return self.open[-1]

    def close(self, bits: int) -> None:
        """Write the groups of these bits, and the nodes that waited only for them."""
        closing = [each for each in self.open if each.bit & bits]
        if not closing:
            return  # all that waits would wait on
        self.open = [each for each in self.open if not each.bit & bits]
        self.closed += closing
        for each in closing if self.writer else ():
            assert self.writer is not None
            self.body += self.writer.written(each.members)
        still, self.waiting = self.waiting, []
        for node in still:
            if self.needed(node):
                self.waiting.append(node)
            else:
                self.body += node.stmts


def _kind(stmt: Communicate) -> Hashable:
    """A key that is equal for communications that can become one."""
    reduces = stmt.kind == "AllReduce"
    # A gather puts parts in the order of the axes, a sum has no order.
    axes = tuple(sorted(stmt.axes)) if reduces else stmt.axes
    return stmt.kind, axes, stmt.reducer, stmt.out.dtype


def _can_wait(node: Node) -> bool:
    """Whether a node is a computation of small values, and waits for nothing else."""
    stmt = node.stmt
    return (
        isinstance(stmt, Compute)
        and not node.barrier
        and not any(e.eqn.effects or e.rule.is_closed for e in stmt.unit.eqns)
        and all(bytes_of(buffer) <= SMALL for buffer in (*node.reads, *node.writes))
    )


def _note(stmts: Sequence[Communicate]) -> Note:
    first = stmts[0]
    form = _SAID.format(len(stmts), " and ".join(first.axes), first.kind)
    return Note(form=form, values=tuple(stmt.out.name for stmt in stmts))
