"""Host IR as text: a program that an engineer can review in a pull request.

`name: type = ...` makes a buffer or an alias exist, `name <- ...` writes into one that
exists, `name += ...` combines.  A dim reads `2@tp` (2 elements here, spread over axis
tp) or `8~s0` (cut into chunks by stream s0).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import written
from jhost.lowering.ir.layout import spec_text
from jhost.lowering.ir.marks import (
    BarrierMark,
    Mark,
    SerialMark,
    StreamChoice,
    StreamRequest,
)
from jhost.lowering.ir.unit_printer import (
    INDENT,
    eqn_text,
    is_inline,
    shared_units,
    type_text,
    unit_lines,
)

if TYPE_CHECKING:
    from jhost.lowering.ir.program import Program

_COMBINE = {
    "sum": "+=",
    "prod": "*=",
    "max": "max=",
    "min": "min=",
    "and": "&=",
    "or": "|=",
    "softmax": "softmax=",
}


def program_lines(
    header: str,
    params: Sequence[ir.Buffer],
    marks: Sequence[Mark],
    body: tuple[ir.Stmt, ...],
    results: Sequence[ir.Buffer],
) -> Iterator[str]:
    """The lines of a program: its marks, statements, results and larger units."""
    yield header
    yield from (f"{INDENT}{_typed(buffer)}" for buffer in params)
    yield from (f"{INDENT}{_mark_text(mark)}" for mark in marks)
    yield ""
    yield from _body_lines(body, {buffer.name for buffer in params}, INDENT)
    yield f"{INDENT}return {_names(results)}".rstrip()
    for unit in shared_units(body):
        yield ""
        yield from unit_lines(unit)


def _inner_lines(what: str, program: Program, indent: str) -> Iterator[str]:
    """The lines of a body of control flow: `what` it is, and all that it does."""
    params = ", ".join(map(_typed, program.params))
    inner = indent + INDENT
    yield f"{indent}{what}({params}):"
    yield from (f"{inner}{_mark_text(mark)}" for mark in program.marks)
    known = {buffer.name for buffer in program.params}
    yield from _body_lines(program.body, known, inner)
    yield f"{inner}return {_names(program.results)}".rstrip()
    for unit in shared_units(program.body):
        yield from (f"{inner}{line}" for line in unit_lines(unit))


def statement_text(stmt: ir.Stmt, known: Collection[str]) -> str:
    """One statement on one line; `known` are the buffers that exist before it."""
    match stmt:
        case ir.Allocate(buffer=buffer):
            return f"{_typed(buffer)} = Allocate()"
        case ir.Deallocate(buffer=buffer):
            return f"Deallocate({buffer.name})"
        case ir.Select():
            return f"{_typed(stmt.out)} = Select({', '.join(_select_parts(stmt))})"
        case ir.Set(out=out, source=source):
            return f"{_target([out], known)} Set({source.name})"
        case ir.Reshard(out=out, source=source):
            return f"{_target([out], known)} Reshard({source.name})"
        case ir.Neighbours(out=out, sources=sources, dim=dim, axes=axes):
            over, read = ", ".join(axes), ", ".join(source.name for source in sources)
            parts = f"{read}, dim={dim}, axes=({over})"
            return f"{_target([out], known)} Neighbours({parts})"
        case ir.Compute():
            return _compute_text(stmt, known)
        case ir.Communicate():
            return _communicate_text(stmt, known)
        case ir.Wait(communication=name):
            return f"Wait({name})"
        case ir.GetCurrentStream(stream=stream):
            return f"{stream_text(stream)} = GetCurrentStream()"
        case ir.SetCurrentStream(stream=stream):
            return f"SetCurrentStream({stream_text(stream)})"
        case ir.Synchronize(stream=stream):
            return f"Synchronize({stream_text(stream)})"
        case ir.For():
            return _loop_text(stmt)
        case ir.NextStage():
            return "NextStage()"
        case ir.Scan() | ir.While() | ir.Cond():
            return _control_text(stmt, known)


def stream_text(stream: ir.Stream) -> str:
    """A stream by its name, or by the number it has at run time."""
    return stream.name or f"stream[{stream.index}]"


# --- Statements --------------------------------------------------------------- #


def _body_lines(body: Sequence[ir.Stmt], known: set[str], indent: str) -> Iterator[str]:
    for stmt in body:
        yield indent + statement_text(stmt, known)
        known |= {buffer.name for buffer in written(stmt)}
        inner = indent + INDENT
        match stmt:
            case ir.For(body=loop_body):
                # What a body makes exists for one iteration: behind the loop it is new
                # again.
                yield from _body_lines(loop_body, set(known), inner)
            case ir.Scan(body=program):
                yield from _inner_lines("body", program, inner)
            case ir.While(condition=condition, body=program):
                yield from _inner_lines("condition", condition, inner)
                yield from _inner_lines("body", program, inner)
            case ir.Cond(branches=branches):
                for number, program in enumerate(branches):
                    yield from _inner_lines(f"branch {number}", program, inner)
            case _:
                pass


def _select_parts(stmt: ir.Select) -> Iterator[str]:
    yield stmt.source.name
    yield f"dim={stmt.dim}"
    yield f"index={stmt.index}"
    yield f"size={stmt.size}"
    if stmt.groups > 1:
        yield f"groups={stmt.groups}"
    if stmt.drop:
        yield "drop"


def _compute_text(stmt: ir.Compute, known: Collection[str]) -> str:
    ins = [buffer.name for buffer in stmt.ins]
    # A program that breaks this is printed all the same: the verifier's note.
    if is_inline(stmt.unit) and len(ins) == len(stmt.unit.invars):
        names = dict(zip(stmt.unit.invars, ins, strict=True))
        call = eqn_text(stmt.unit.eqns[0].eqn, names)
    else:
        call = f"compute {stmt.unit.name}({', '.join(ins)})"
    target = _target(stmt.outs, known, stmt.reducer and _COMBINE[stmt.reducer])
    chunk = _chunk_text(stmt.chunk) if stmt.chunk else ""
    devices = max((each.zigzag for each in stmt.unit.eqns), default=1)
    order = f" in zigzag order over {devices}" if devices > 1 else ""
    return f"{target} {call}{chunk}{order}"


def _loop_text(loop: ir.For) -> str:
    stages = " ".join(f"{iteration}.{stage}" for iteration, stage in loop.order)
    order = f" in stages {stages}" if stages else ""
    return f"for {loop.index} in range({loop.extent}){order}:"


def _control_text(stmt: ir.ControlFlow, known: Collection[str]) -> str:
    match stmt:
        case ir.Scan(consts=consts, carry=carry, xs=xs):
            parts = [f"{stmt.length} times", *_named("consts", consts)]
            parts += [*_named("carry", carry), *_named("xs", xs)]
            parts += ["reverse"] if stmt.reverse else []
        case ir.While(consts=consts, carry=carry):
            parts = [*_named("condition_consts", stmt.condition_consts)]
            parts += [*_named("consts", consts), *_named("carry", carry)]
        case ir.Cond(index=index, operands=operands):
            parts = [index.name, *_named("operands", operands)]
    kind = type(stmt).__name__
    return f"{_target(stmt.outs, known)} {kind}({', '.join(parts)}):".lstrip()


def _named(name: str, buffers: Sequence[ir.Buffer]) -> list[str]:
    return [f"{name}=[{_names(buffers)}]"] if buffers else []


def _chunk_text(chunk: ir.Chunk) -> str:
    # The size shows in the types.
    text = f" at {chunk.start} of {chunk.extent}"
    return f"{text} in {chunk.groups} groups" if chunk.groups > 1 else text


def _communicate_text(stmt: ir.Communicate, known: Collection[str]) -> str:
    parts = [stmt.source.name]
    for name in ("dim", "source_dim", "reducer", "shift"):
        value = getattr(stmt, name)
        if value is not None:
            parts.append(f"{name}={value}")
    parts.append(f"axes=({', '.join(stmt.axes)})")
    call = f"{stmt.kind}({', '.join(parts)})"
    return f"{_target([stmt.out], known)} {call} as {stmt.name}"


def _target(
    outs: Sequence[ir.Buffer], known: Collection[str], combine: str | None = None
) -> str:
    """The left side: new buffers with their types, others by their names."""
    names = [b.name if b.name in known else _typed(b) for b in outs]
    exist = bool(outs) and all(buffer.name in known for buffer in outs)
    return f"{', '.join(names)} {combine or ('<-' if exist else '=')}".lstrip()


def _mark_text(mark: Mark) -> str:
    if isinstance(mark, StreamRequest | StreamChoice):
        asked = mark if isinstance(mark, StreamRequest) else mark.spec
        chunks = "" if asked.chunks is None else f", chunks={asked.chunks}"
        pipeline = "" if asked.pipeline is None else f", pipeline={asked.pipeline}"
        return f"jhost.stream({mark.buffer}, axis={mark.dim}{chunks}{pipeline})"
    if isinstance(mark, SerialMark):
        return f"jhost.serial({mark.buffer})"
    if isinstance(mark, BarrierMark):
        return f"{mark.buffer} behind a barrier for {', '.join(mark.operands)}"
    return f"jhost.shard({mark.buffer}, {spec_text(mark.spec)})"


def _typed(buffer: ir.Buffer) -> str:
    return f"{buffer.name}: {type_text(buffer)}"


def _names(buffers: Sequence[ir.Buffer]) -> str:
    return ", ".join(buffer.name for buffer in buffers)
