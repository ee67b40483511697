"""All-gathers by permutes, each beside what is computed before it is read.

The shards of a weight are there from the start.  A collective would still run alone:
NCCL's kernel starts when the running matmul ends, and XLA has the next one wait for it.
So each device sends its shard to all others by permutes, which copy engines move while
the work before the weight's reader is computed.

That work stands on a stream of its own, which sets the time.  Permutes set out when the
work before is done, and are waited for when the work beside them is.  Two gathers are
under way, or there and not yet read.

On two H100s four layers of Llama 8B with sharded weights, forward and backward, take
45.0 ms so, and 48.9 by collectives.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterator, Sequence

import jax
from jax import lax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import Aliases, reads_writes
from jhost.lowering.ir.index import Constant
from jhost.lowering.ir.program import Program
from jhost.lowering.loops.by_permutes import ByPermutes
from jhost.lowering.loops.chunk import MAIN
from jhost.lowering.loops.collective import on_stream
from jhost.lowering.loops.outside import (
    TRANSFERS,
    Block,
    blocks_of,
    contracts,
    on_transfers,
)
from jhost.lowering.loops.p2p import OWN
from jhost.lowering.units.make import unit_of

_AHEAD = 2
"""How many gathers set out before the work that reads the first of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Gather:
    """A gather that sets out before block `start`, and that `reader` reads first."""

    stmt: ir.Communicate
    start: int
    reader: int


def gathers_beside_work(program: Program) -> list[ir.Communicate]:
    """The all-gathers that have work between their source and what reads them."""
    return [each.stmt for each in _gathers(program, None)]


def with_gathers_early(program: Program, chosen: Container[str]) -> Program:
    """`program` with those of `gathers_beside_work`, by name, beside work before."""
    writer = _Writer(program)
    gathers = _gathers(program, chosen)
    gone = {each.stmt.name for each in gathers}
    body: list[ir.Stmt] = []
    for number, block in enumerate(blocks_of(program)):
        coming = [each for each in gathers if each.start == number]
        read = [each for each in gathers if each.reader == number]
        body += [*writer.ends(read), *writer.begins(coming)]
        # While permutes are under way, work stands on a stream as well: its tokens say
        # when they set out and when they are waited for.
        if any(each.start <= number < each.reader for each in gathers):
            block = _on_own(block)
        if _name_of(block[0]) not in gone:
            body += block
    return dataclasses.replace(program, body=tuple(body))


def _name_of(stmt: ir.Stmt) -> str | None:
    """The communication that a statement is, or waits for."""
    if isinstance(stmt, ir.Communicate):
        return stmt.name
    return stmt.communication if isinstance(stmt, ir.Wait) else None


def _on_own(block: Block) -> Block:
    """A block that is work on the main stream, on that of such work."""
    # Loops have streams already, and what is no work hides nothing.
    if not (isinstance(block[0], ir.Compute) and contracts(block)):
        return block
    own = on_stream(OWN, [ir.Synchronize(stream=MAIN), *block])
    return [ir.GetCurrentStream(stream=MAIN), *own, ir.Synchronize(stream=OWN)]


# --- Which, and when ------------------------------------------------------------- #


def _gathers(program: Program, chosen: Container[str] | None) -> list[_Gather]:
    """The gathers by reader; each sets out when the one two before it is read."""
    blocks = [*blocks_of(program)]
    working = [number for number, block in enumerate(blocks) if contracts(block)]
    memory = Aliases(program.body).memory
    made = {memory(b).name: n for n, block in enumerate(blocks) for b in _writes(block)}
    found: list[_Gather] = []
    readers: list[int] = []
    for reader, stmt in _read(blocks):
        ready = made.get(memory(stmt.source).name, -1) + 1
        # This bounds what is gathered and not yet read, and with it memory.
        turn = readers[-_AHEAD] if len(readers) >= _AHEAD else 0
        readers.append(reader)
        # Before a block of work: permutes need something to run beside.
        start = next((n for n in working if n >= max(ready, turn)), reader)
        if start < reader and (chosen is None or stmt.name in chosen):
            found.append(_Gather(stmt, start, reader))
    return found


def _read(blocks: Sequence[Block]) -> Iterator[tuple[int, ir.Communicate]]:
    """The all-gathers, each behind the number of the first block that reads it."""
    gathers = {
        block[0].out.name: block[0]
        for block in blocks
        if isinstance(block[0], ir.Communicate) and block[0].kind == "AllGather"
    }
    for number, block in enumerate(blocks):
        for stmt in block:
            for buffer in reads_writes(stmt)[0]:
                if gather := gathers.pop(buffer.name, None):
                    yield number, gather


def _writes(block: Block) -> Iterator[ir.Buffer]:
    return itertools.chain.from_iterable(reads_writes(stmt)[1] for stmt in block)


# --- Statements ------------------------------------------------------------------ #


class _Writer(ByPermutes):
    """Writes what a gather is: permutes that set out, and what puts parts together."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.permutes: dict[str, list[ir.Communicate]] = {}

    def begins(self, gathers: Sequence[_Gather]) -> list[ir.Stmt]:
        """The permutes of some gathers, beside what comes next."""
        permutes = [p for each in gathers for p in self.sent(each.stmt)]
        return on_transfers(permutes) if permutes else []

    def sent(self, stmt: ir.Communicate) -> list[ir.Communicate]:
        """The permutes: each device gets a shard from the next, the one after, ..."""
        devices = self.devices(stmt)
        self.permutes[stmt.name] = [
            self.permute(stmt, stmt.source, Constant(devices - step))
            for step in range(1, devices)
        ]
        return self.permutes[stmt.name]

    def ends(self, gathers: Sequence[_Gather]) -> list[ir.Stmt]:
        """Waits for the permutes of some gathers, and puts what came in its place."""
        stmts = [each.stmt for each in gathers]
        waits = [
            ir.Wait(communication=permute.name)
            for stmt in stmts
            for permute in self.permutes[stmt.name]
        ]
        if not waits:
            return []
        placed = [each for stmt in stmts for each in self.placed(stmt)]
        return [*on_transfers(waits), ir.Synchronize(stream=TRANSFERS), *placed]

    def placed(self, stmt: ir.Communicate) -> Iterator[ir.Stmt]:
        """The device's own shard and what came, each in its place of the whole.

        Not before all is there: XLA would make room for the whole when a program
        begins, and put the shard there.
        """
        shards = [stmt.source, *(permute.out for permute in self.permutes[stmt.name])]
        there = [
            dataclasses.replace(shard, name=self.names.fresh(shard.name))
            for shard in shards
        ]
        types = [jax.ShapeDtypeStruct(shard.shape, shard.dtype) for shard in shards]
        name = self.names.fresh("there")
        unit = unit_of(name, lambda *args: lax.optimization_barrier(args), *types)
        yield ir.Compute(unit=unit, ins=tuple(shards), outs=tuple(there))
        yield ir.Allocate(buffer=stmt.out)
        for step, shard in enumerate(there):
            part = self.part(stmt, step)
            yield part
            yield ir.Set(out=part.out, source=shard)
