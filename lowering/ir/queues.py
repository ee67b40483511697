"""The streams that jhost itself puts work on, by name."""

from __future__ import annotations

from collections.abc import Sequence

from jhost.lowering.ir import statements as ir

MAIN = ir.Stream(name="main")
"""The stream that a program begins on, once `GetCurrentStream` has named it so."""

OWN = ir.Stream(name="own")
"""The queue of work that no transfer holds up: a device's own chunk, for one."""

TRANSFERS = ir.Stream(name="transfers")
"""The queue of what moves outside of loops."""


def on_stream(
    stream: ir.Stream, body: Sequence[ir.Stmt], back: ir.Stream = MAIN
) -> tuple[ir.Stmt, ...]:
    """`body` on `stream`, then `back` to another."""
    leave = ir.SetCurrentStream(stream=back)
    return (ir.SetCurrentStream(stream=stream), *body, leave)


def on_own(stmts: Sequence[ir.Stmt]) -> list[ir.Stmt]:
    """Statements of the main stream, on the stream for work that has an order."""
    own = on_stream(OWN, [ir.Synchronize(stream=MAIN), *stmts])
    return [ir.GetCurrentStream(stream=MAIN), *own, ir.Synchronize(stream=OWN)]


def inside_own(place: range) -> range:
    """The place of the statements, if `on_own` of them stands at `place`."""
    return place[3:-2]
