"""What a Host IR program pipelines and communicates, and where streams stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jhost.lowering.cost.leave_to_xla import left_to_xla
from jhost.lowering.cost.rates import Rates
from jhost.lowering.explanation import ROWS, Explanation
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW, programs
from jhost.lowering.ir.display_names import displayed_remarks
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import Reach
from jhost.lowering.ir.remarks import (
    LayoutReport,
    Note,
    PermuteReport,
    Prediction,
    Remark,
    Search,
    StreamReport,
)
from jhost.lowering.steps import (
    communications_in,
    named_bodies,
    steps_of,
    takes_turns,
)


def joined(name: str, explanations: Sequence[Explanation]) -> Explanation:
    """One explanation of a function that calls jhost functions, from its programs'."""

    def rows(field: str) -> tuple[Any, ...]:
        return tuple(row for each in explanations for row in getattr(each, field))

    return Explanation(
        name=name,
        loops=sum(each.loops for each in explanations),
        streams=rows("streams"),
        layouts=rows("layouts"),
        communications=rows("communications"),
        permutes=rows("permutes"),
        notes=rows("notes"),
        # Programs of one function mostly get the same options: each is said once.
        options=tuple(dict.fromkeys(rows("options"))),
        programs=tuple(explanations),
        predicted=_summed(
            each.predicted and each.predicted * each.calls for each in explanations
        ),
        unpipelined=_summed(
            each.unpipelined and each.unpipelined * each.calls for each in explanations
        ),
        devices=explanations[0].devices if explanations else "",
        nothing_overlaps=any(each.nothing_overlaps for each in explanations),
        searches=rows("searches"),
    )


def _summed(predictions: Iterable[Prediction | None]) -> Prediction | None:
    """The sum, if all are known."""
    found = list(predictions)
    known = [each for each in found if each is not None]
    # A sum with an unknown part would be taken for the whole.
    return sum(known, Prediction()) if known and len(known) == len(found) else None


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The rates of the devices, if they are known, and how far each axis reaches."""

    rates: Rates | None = None
    reach: Mapping[str, Reach] = dataclasses.field(default_factory=dict[str, Reach])


def explain_program(
    program: Program, known: DeviceFacts = DeviceFacts()
) -> Explanation:
    """What `program` does, from its statements and from the remarks of passes."""
    explained = _explained(program, program.name, 1, known)
    left = left_to_xla(program)
    if left is None:
        return explained
    # XLA moves other values than these statements do, and its schedule lists them.
    notes = (str(left),)
    return dataclasses.replace(
        explained, notes=notes, layouts=(), communications=(), bodies=(), steps=()
    )


def _explained(
    program: Program, name: str, times: int, known: DeviceFacts
) -> Explanation:
    """What a program does, or a body that runs so many `times`."""
    remarks = displayed_remarks(program)
    # Once: communications are the steps that move something.
    steps = steps_of(program, times, known.rates, known.reach)
    return Explanation(
        name=name,
        loops=count_loops(program),
        streams=tuple(r for r in remarks if isinstance(r, StreamReport)),
        layouts=tuple(r for r in remarks if isinstance(r, LayoutReport)),
        communications=tuple(communications_in(steps)),
        permutes=tuple(r for r in remarks if isinstance(r, PermuteReport)),
        notes=tuple(_notes(remarks)),
        searches=tuple(r for r in remarks if isinstance(r, Search)),
        bodies=tuple(_bodies(program, times, known)),
        steps=steps,
    )


def _notes(remarks: Iterable[Remark]) -> Iterator[str]:
    for remark in remarks:
        if isinstance(remark, Note):
            yield str(remark)
        elif isinstance(remark, Search) and remark.left:
            yield remark.text


def _bodies(program: Program, times: int, known: DeviceFacts) -> Iterator[Explanation]:
    """Each body in a program that has something to say."""
    for stmt in program.body:
        if isinstance(stmt, CONTROL_FLOW):
            for name, body, often in named_bodies(stmt, times):
                found = _explained(body, name, often, known)
                # Most bodies have nothing to say: a `jnp` function with a loop has one,
                # for example.
                if found.loops or any(getattr(found, field) for field in ROWS.values()):
                    yield found


def count_loops(program: Program) -> int:
    """The loops of `program` over chunks."""
    found = 0
    for each in programs(program):
        begun = False
        for stmt in each.body:
            if isinstance(stmt, ir.GetCurrentStream):
                begun = False
            elif isinstance(stmt, ir.For) and takes_turns(stmt) and not begun:
                # Another one before streams begin anew is the rest of its turns.
                begun, found = True, found + 1
    return found


def puts(program: Program) -> bool:
    """Whether the permutes of `program` are to be NCCL's puts."""
    return any(
        isinstance(remark, PermuteReport) and remark.kind == "puts"
        for remark in program.remarks
    )
