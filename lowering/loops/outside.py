"""Blocks of statements outside of loops, and which of them are work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.program import Program
from jhost.lowering.loops.chunk import MAIN
from jhost.lowering.loops.collective import on_stream

TRANSFERS = ir.Stream(name="transfers")
"""The queue of what moves outside of loops."""

Block: TypeAlias = list[ir.Stmt]
"""A statement, or those from one switch of streams to the way back."""


def blocks_of(program: Program) -> Iterator[Block]:
    """The statements of a program, in blocks."""
    block: Block = []
    away = False
    for stmt in program.body:
        if isinstance(stmt, ir.SetCurrentStream):
            away = stmt.stream != MAIN
        block.append(stmt)
        if not away:
            yield block
            block = []


def works(block: Block) -> bool:
    """Whether transfers may run beside a block: it contracts, or is a loop."""
    loops = ir.For | ir.Scan | ir.While | ir.Cond
    return contracts(block) or any(isinstance(stmt, loops) for stmt in block)


def contracts(block: Block) -> bool:
    """Whether there is a matmul in a block, or another kernel that sums products."""
    return any(
        isinstance(stmt, ir.Compute)
        and any(eqn.rule.contracts for eqn in stmt.unit.eqns)
        for stmt in ir.walk(tuple(block))
    )


def on_transfers(stmts: Sequence[ir.Stmt]) -> list[ir.Stmt]:
    """Statements on the queue of transfers, once what is computed so far is."""
    moved = on_stream(TRANSFERS, [ir.Synchronize(stream=MAIN), *stmts])
    return [ir.GetCurrentStream(stream=MAIN), *moved]
