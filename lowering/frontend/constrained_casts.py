"""Constraints of values that are only cast stand on the narrower side of the cast.

`constrain(table[tokens]).astype(bfloat16)` constrains a value in float32 that nothing
but its cast reads.  A cast keeps every dim, so the constraint holds for the result of
the cast just as well.  Then a transfer of the value may move the narrower one.  So may
one in the gradient, where the narrower value comes first.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from jhost._dtypes import bits
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.marks import Mark, ShardMark


def on_narrower(
    marks: Sequence[Mark], body: Sequence[ir.Stmt], results: Iterable[ir.Buffer]
) -> tuple[Mark, ...]:
    """The marks of a program, with constraints beside casts on the narrower value."""
    specs = {mark.buffer: mark.spec for mark in marks if isinstance(mark, ShardMark)}
    narrower = _narrower(body, results) if specs else {}

    def moved(mark: ShardMark) -> ShardMark:
        name = mark.buffer
        # Of two constraints that differ, each stays on its own side of the cast.
        while narrow := narrower.get(name):
            if specs.setdefault(narrow, mark.spec) != mark.spec:
                break
            name = narrow
        return dataclasses.replace(mark, buffer=name)

    each = (moved(mark) if isinstance(mark, ShardMark) else mark for mark in marks)
    # The value that is narrower may be constrained alike itself.
    return tuple({(type(mark), mark.buffer): mark for mark in each}.values())


def _narrower(body: Sequence[ir.Stmt], results: Iterable[ir.Buffer]) -> dict[str, str]:
    """By value that is only read by a cast, or made by one, the narrower one there.

    The wider of both is made here and read once, and a source is read by its cast only.
    """
    counts = Counter(b.name for stmt in body for b in reads_writes(stmt)[0])
    made = {b.name for stmt in body for b in reads_writes(stmt)[1]}
    inner = {name for name in made if counts[name] == 1} - {b.name for b in results}
    found: dict[str, str] = {}
    for stmt in body:
        if isinstance(stmt, ir.Compute) and _is_cast(stmt):
            (source,), (out,) = stmt.ins, stmt.outs
            narrow, wide = sorted((source, out), key=lambda b: bits(b.dtype))
            narrows = bits(narrow.dtype) < bits(wide.dtype)
            if narrows and {source.name, wide.name} <= inner:
                found[wide.name] = narrow.name
    return found


def _is_cast(stmt: ir.Compute) -> bool:
    (unit_eqn,) = stmt.unit.eqns
    return unit_eqn.eqn.primitive.name == "convert_element_type" and bool(stmt.ins)
