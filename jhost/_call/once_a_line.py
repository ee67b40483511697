"""jhost's warnings, each once for a line of the user's."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from jhost import errors
from jhost._jax import cached, programs_in, source_line
from jhost._primitives import stream_p
from jhost.lowering.ir.display_names import displayed_remarks
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import ReplicationReport, StreamReport

# Weak keys: facts about a jaxpr are dropped with its function.
_unread: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()


@cached(1)
def warned_lines() -> set[tuple[type[Warning], str]]:
    """The lines that were warned about, and their warnings."""
    return set()


def warn_of_program(program: Program, limit: int) -> None:
    """Warns about work that every device repeats, and marks with too few chunks.

    `limit` is from how many bytes on a repeated operation is worth a warning.
    """
    for report in displayed_remarks(program):
        match report:
            case ReplicationReport() if report.bytes >= limit:
                _warn_of_replication(program.name, report)
            case StreamReport() if report.fewer:
                text = f"{program.name}: jhost.stream at {report.where} makes "
                _warn(errors.StreamWarning, report.where, text + f"{report.fewer}.")
            case _:
                pass


def _warn_of_replication(name: str, report: ReplicationReport) -> None:
    line = report.where or f"{report.primitive} of {name}"
    text = (
        f"{name}: {report}. Shard another dim of its operand, or call it in a "
        f"jax.shard_map with specs for its operands. jhost.jit(replication_limit=...) "
        f"sets how many bytes are worth a warning."
    )
    _warn(errors.ReplicationWarning, line, text)


def warn_of_unread(name: str, traced: Any, call_jaxpr: Any) -> None:
    """Warns of marks in a traced function whose results nothing reads.

    JAX leaves them out of the `call_jaxpr` that is made of it.
    """
    lines = tuple(dict.fromkeys(unread_marks(traced)))
    if lines:
        _unread[call_jaxpr] = lines
    for line in lines:
        _warn(errors.StreamWarning, line, f"{name}: {_unread_text(line)}.")


def notes_of_unread(call_jaxpr: Any) -> Iterator[str]:
    """The same for `jhost.explain`."""
    return map(_unread_text, _unread.get(call_jaxpr, ()))


def _unread_text(line: str) -> str:
    return (
        f"jhost.stream at {line} marks nothing, because nothing reads its result: "
        "write x = jhost.stream(x, ...)"
    )


def unread_marks(jaxpr: Any) -> list[str]:
    """The lines of streams whose marked values are read, but whose results are not.

    What reads neither is not needed, and may lack its marks as well.  JAX's transforms
    make several marks of one, and may need only some of them.
    """
    marks: list[tuple[str, bool, bool]] = []
    for program in programs_in(jaxpr):
        atoms = [x for eqn in program.eqns for x in eqn.invars] + [*program.outvars]
        reads = Counter(map(id, atoms))
        marks += [
            (
                source_line(eqn),
                reads[id(eqn.outvars[0])] > 0,
                reads[id(*eqn.invars)] > 1,
            )
            for eqn in program.eqns
            if eqn.primitive is stream_p
        ]
    needed = {line for line, is_read, _ in marks if is_read}
    return [line for line, _, beside in marks if beside and line not in needed]


def _warn(category: type[Warning], line: str, text: str) -> None:
    # A layer that is written out many times has one line, and one warning.
    if (category, line) in warned_lines():
        return
    warned_lines().add((category, line))
    # The frames above this one are JAX's, from the call that lowers the function on.
    warnings.warn(f"{text}\n{errors.more_in_help(category)}", category, stacklevel=2)
