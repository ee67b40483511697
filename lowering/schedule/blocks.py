"""The statements of a program in blocks, and which blocks may move."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.derived import derived
from jhost.lowering.ir.effects import Aliases, reads_writes, written
from jhost.lowering.ir.graph import makers_of
from jhost.lowering.ir.layout import bytes_in, bytes_of
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.queues import MAIN, OWN
from jhost.lowering.schedule.barriers import Barriers
from jhost.lowering.schedule.cheap import (
    can_wait,
    is_cheap,
    is_in_place,
    makers_and_along,
    may_go_along,
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StatementBlock:
    """A statement, or all statements from a switch of streams to the switch back.

    `reads` and `writes` have the names of its buffers, and for an alias also the name
    of the memory behind it.
    """

    stmts: tuple[ir.Stmt, ...]
    reads: frozenset[str]
    writes: frozenset[str]
    contracts: bool
    """Whether it has a matmul, or another kernel that sums products."""
    works: bool
    """Whether sums may run beside it: it contracts, or is a loop or branch."""
    can_wait: bool
    """Whether it is no work, and can run later without any effect but on values."""

    @property
    def stmt(self) -> ir.Stmt:
        return self.stmts[0]

    @property
    def compute(self) -> ir.Compute:
        """Its statement, if it is a computation."""
        assert isinstance(self.stmt, ir.Compute)
        return self.stmt


class StatementBlocks:
    """The blocks of a program, and which block makes each value."""

    def __init__(self, program: Program) -> None:
        self.results = {buffer.name for buffer in program.results}
        self.aliases = Aliases(program.body)
        self.barriers = Barriers()
        body = self.barriers.apart(program.body)
        self.all = [self._block(stmts) for stmts in in_blocks(body)]
        self.allocated = {
            stmt.buffer.name for stmt in program.body if isinstance(stmt, ir.Allocate)
        }
        self.maker = makers_of(block.writes for block in self.all)

    def _block(self, stmts: Sequence[ir.Stmt]) -> StatementBlock:
        reads, writes = set[str](), set[str]()
        for stmt in stmts:
            read, written = reads_writes(stmt)
            reads |= self._names(read)
            # An alias gives memory another name, and writes nothing to it.
            alias = isinstance(stmt, ir.Select)
            writes |= {stmt.out.name} if alias else self._names(written)
        product = contracts(stmts)
        return StatementBlock(
            stmts=tuple(stmts),
            reads=frozenset(reads),
            writes=frozenset(writes),
            contracts=product,
            works=product or any(isinstance(stmt, _LOOPS) for stmt in stmts),
            can_wait=not product and can_wait(stmts[0]),
        )

    def _names(self, buffers: Sequence[ir.Buffer]) -> set[str]:
        return self.aliases.memories(buffers) | {buffer.name for buffer in buffers}

    @functools.cached_property
    def transfers(self) -> Sequence[tuple[int, ir.Communicate]]:
        """The communications that have memory of their own, each with its block."""
        firsts = enumerate(block.stmt for block in self.all)
        return [
            (number, stmt)
            for number, stmt in firsts
            if isinstance(stmt, ir.Communicate) and self._is_whole(stmt.out)
        ]

    def _is_whole(self, buffer: ir.Buffer) -> bool:
        """Whether nothing else is written to the memory of a buffer."""
        memory = self.aliases.memory(buffer).name
        return memory == buffer.name and memory not in self.allocated

    def product(self, number: int) -> ir.Compute | None:
        """The statement of a block that is one product of values that stay as they are.

        Such a block can move to any place between its operands and its readers.
        """
        block = self.all[number]
        stmt = block.stmt
        if not isinstance(stmt, ir.Compute) or not block.contracts:
            return None
        names = {buffer.name for buffer in stmt.ins}, {out.name for out in stmt.outs}
        is_one = len(block.stmts) == 1 and (block.reads, block.writes) == names
        if not is_one or stmt.reducer or any(e.eqn.effects for e in stmt.unit.eqns):
            return None
        # The last block that writes a value is its maker here.
        stays = all(self.maker.get(name, number) <= number for name in block.reads)
        return stmt if stays else None

    # --- Before a transfer ---------------------------------------------------- #

    def before(self, stmt: ir.Communicate) -> tuple[set[int], list[int]]:
        """The blocks that make the source of a transfer, and the blocks along with it.

        The blocks along with it are cheap ones, behind all of the first kind.  They are
        issued with the transfer.
        """
        return makers_and_along(
            self._names([stmt.source]),
            self.maker,
            self.goes_along,
            lambda number: self.all[number].reads,
        )

    def waited_for(self, numbers: Iterable[int]) -> set[int]:
        """The blocks that others are made of by such as can wait."""
        found = set[int]()
        waiting = [number for number in numbers if self.all[number].can_wait]
        while waiting:
            for name in self.all[waiting.pop()].reads:
                number = self.maker.get(name)
                if number is not None and number not in found:
                    found.add(number)
                    waiting += [number] if self.all[number].can_wait else []
        return found

    def goes_along(self, number: int) -> bool:
        """Whether a block is cheap, and makes no more bytes than it reads."""
        stmt = self.all[number].stmt
        # Other statements write to the same memory, and their order must stay.
        alone = all(map(self._is_whole, reads_writes(stmt)[1]))
        return isinstance(stmt, ir.Select) or (alone and may_go_along(stmt))

    def makes(self, number: int) -> int:
        """The bytes that a block computes, or 0 if all that it computes is cheap.

        A slice that is written into a stack takes no memory but the stack's own.
        """
        stmt = self.all[number].stmt
        if not isinstance(stmt, ir.Compute):
            return 0
        if all(is_cheap(eqn) or is_in_place(eqn) for eqn in stmt.unit.eqns):
            return 0
        return bytes_in(stmt.outs)

    def fuses(self, number: int) -> bool:
        """Whether a block is cheap, so that XLA computes it where it is read."""
        stmt = self.all[number].stmt
        if isinstance(stmt, ir.Compute):
            return all(map(is_cheap, stmt.unit.eqns))
        return isinstance(stmt, ir.Select | ir.Wait)

    # --- Behind it ------------------------------------------------------------ #

    def reader(self, number: int, stmt: ir.Communicate) -> int:
        """The first block behind `number` that reads a transfer and cannot wait."""
        return self.first_reader(stmt, range(number + 1, len(self.all)))

    def first_reader(self, stmt: ir.Communicate, numbers: Iterable[int]) -> int:
        """The first of some blocks that reads a transfer and cannot wait.

        If none does, the number of all blocks.
        """
        # If a block can wait, its own readers read the transfer through it.
        found = {stmt.out.name}
        for number in numbers:
            block = self.all[number]
            if found.isdisjoint(block.reads):
                continue
            if not block.can_wait:
                return number
            found |= block.writes
        return len(self.all)

    def made_of(
        self, names: Iterable[str], numbers: Iterable[int]
    ) -> Iterator[tuple[int, frozenset[str]]]:
        """The blocks that are made of some values, in their order.

        With each block come the values, and all that was made of them before it.
        """
        made = frozenset(names)
        for number in numbers:
            block = self.all[number]
            if not made.isdisjoint(block.reads):
                yield number, made
                made |= block.writes

    def with_waits(self, numbers: Iterable[int], among: Iterable[int]) -> list[int]:
        """Some blocks and the waits for their communications, as they stand `among`."""
        some = {*numbers}
        stmts = (self.all[number].stmt for number in some)
        sent = {stmt.name for stmt in stmts if isinstance(stmt, ir.Communicate)}

        def ends(stmt: ir.Stmt) -> bool:
            return isinstance(stmt, ir.Wait) and stmt.communication in sent

        return [n for n in among if n in some or ends(self.all[n].stmt)]


@derived
def blocks_of(program: Program) -> StatementBlocks:
    """The blocks of a program, which several choices and passes ask for."""
    return StatementBlocks(program)


def has_moved(block: StatementBlock) -> bool:
    """Whether it is a product that was moved beside a transfer, and keeps its place."""
    first = block.stmt
    is_own = isinstance(first, ir.SetCurrentStream) and first.stream == OWN
    return is_own and isinstance(block.stmts[-2], ir.Compute)


def communication_of(stmt: ir.Stmt) -> str | None:
    """The name of the communication that a statement is, or waits for."""
    if isinstance(stmt, ir.Communicate):
        return stmt.name
    return stmt.communication if isinstance(stmt, ir.Wait) else None


def work_of(product: ir.Compute) -> int:
    """A number that is larger for a product that computes more.

    Of m by k times k by n, the bytes of the three grow as the square of m n k.
    """
    return math.prod(map(bytes_of, (*product.ins, *product.outs)))


_LOOPS = ir.For | ir.Scan | ir.While | ir.Cond


def in_blocks(body: Iterable[ir.Stmt]) -> Iterator[list[ir.Stmt]]:
    """The statements of a program, a list for each block."""
    stmts: list[ir.Stmt] = []
    away = False
    for stmt in body:
        if isinstance(stmt, ir.SetCurrentStream):
            # Statements on another stream are in order already, and move as one.
            away = stmt.stream != MAIN
        stmts.append(stmt)
        if not away:
            yield stmts
            stmts = []


def before_readers(
    parts: Sequence[ir.Stmt], body: Sequence[ir.Stmt]
) -> Iterator[ir.Stmt]:
    """`body` with each of some statements before the first block that reads it.

    Statements predicted to be one kernel have to stand together, as XLA fuses them.
    """
    left = [*parts]
    for stmts in in_blocks(body):
        read = {b.name for stmt in ir.walk(tuple(stmts)) for b in reads_writes(stmt)[0]}
        here = [part for part in left if read & {b.name for b in written(part)}]
        left = [part for part in left if part not in here]
        yield from (*here, *stmts)
    yield from left


def contracts(stmts: Sequence[ir.Stmt]) -> bool:
    """Whether some statement, in loops too, is a contraction."""
    return any(map(has_contraction, ir.walk(tuple(stmts))))
