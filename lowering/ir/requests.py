"""What `jhost.stream` marks ask for: with the function's settings, and in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from jhost import errors
from jhost.lowering.ir.bodies import all_marks, all_remarks, programs, with_marks
from jhost.lowering.ir.graph import graph_of
from jhost.lowering.ir.marks import (
    Mark,
    StreamChoice,
    StreamRequest,
    Wish,
)
from jhost.lowering.ir.pipelines import PipelineSpec
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import UnmetWish
from jhost.lowering.ir.statements import Compute, PipelineKind

REFUSALS = (errors.StreamDimError, errors.ChunksError, errors.PipelineError)
"""The errors that say that a mark cannot be followed."""

WISHES: tuple[Wish, ...] = ("chunks", "pipeline")


@dataclasses.dataclass(frozen=True, slots=True)
class StreamDefaults:
    """What holds for requests that do not say: arguments of `jhost.jit`.

    They are wishes: those that are `unmet` were found to be impossible.  In programs
    without any request jhost `finds` streams.
    """

    chunks: int | Literal["auto"] = "auto"
    pipeline: PipelineKind | Literal["auto"] = "auto"
    unmet: tuple[UnmetWish, ...] = ()
    finds: bool = True

    def applied(self, request: StreamRequest, number: int = 0) -> StreamChoice:
        """The request with these settings; what both leave open is None."""
        asked: dict[Wish, Any] = {}
        wished: list[Wish] = []
        for wish in WISHES:
            own = getattr(request, wish)
            value = getattr(self, wish) if own is None else own
            asked[wish] = None if value == "auto" else value
            # A nested function has written its settings on its marks, as wishes still.
            if asked[wish] and (own is None or wish in request.wished):
                wished.append(wish)
        choice = StreamChoice(
            buffer=request.buffer,
            dim=request.dim,
            spec=PipelineSpec(**asked),
            lines=request.lines,
            wished=tuple(wished),
            numbers=(number,),
        )
        for unmet in self.unmet:
            if number in unmet.numbers:
                choice = without_wish(choice, unmet.wish, unmet.reason)
        return choice

    def applied_to(self, program: Program) -> Program:
        """`program` with a choice for each request, in bodies too."""
        marks = [
            self.applied(mark, number) if isinstance(mark, StreamRequest) else mark
            for number, mark in enumerate(all_marks(program))
        ]
        return with_marks(program, marks)


def without_wish(mark: StreamChoice, wish: Wish, reason: str) -> StreamChoice:
    """`mark` with what it was wished to have left open, and why."""
    value = getattr(mark.spec, wish)
    said = f'"{value}"' if isinstance(value, str) else value
    left = tuple(other for other in mark.wished if other != wish)
    unmet = (*mark.unmet, f"{wish}={said} of jhost.jit cannot be: {reason}")
    return dataclasses.replace(mark.with_spec(**{wish: None}), wished=left, unmet=unmet)


def unmet_wishes(program: Program) -> tuple[UnmetWish, ...]:
    """The wishes that marks of a lowered program cannot follow."""
    return tuple(r for r in all_remarks(program) if isinstance(r, UnmetWish))


def stream_choices(program: Program) -> list[StreamChoice]:
    """The choices among the marks of a program."""
    return [mark for mark in program.marks if isinstance(mark, StreamChoice)]


def without_stream_choices(program: Program) -> Program:
    """The same without these marks, but with the marks of its bodies."""
    marks = tuple(m for m in program.marks if not isinstance(m, StreamChoice))
    same = len(marks) == len(program.marks)
    return program if same else dataclasses.replace(program, marks=marks)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The way that was measured fastest for a mark; no pipeline where it says none."""

    spec: PipelineSpec
    reason: str = ""
    measured: tuple[tuple[str, float], ...] = ()

    def choice_for(self, mark: StreamChoice) -> StreamChoice:
        """`mark` asking for that, as if by name: it stands where it was measured."""
        return dataclasses.replace(
            mark,
            spec=self.spec,
            unpipelined=self.spec.pipeline is None,
            by_name=True,
            reason=self.reason,
            measured=self.measured,
            wished=(),
        )


Tunings: TypeAlias = Mapping[str, Mapping[int, Tuned]]
"""By fingerprint of a program and number of a mark among all of the program's."""

_Stream = TypeVar("_Stream", StreamRequest, StreamChoice)


def merge_marks(first: _Stream, second: _Stream) -> _Stream | None:
    """What two marks ask for together, or None where they contradict each other."""
    merged: dict[str, Any] = {}
    wished: list[Wish] = []
    for wish in WISHES:
        saying = [mark for mark in (first, second) if _asked(mark, wish) is not None]
        asked = {_asked(mark, wish) for mark in saying}
        if len(asked) > 1:
            return None
        merged[wish] = asked.pop() if asked else None
        if saying and all(wish in mark.wished for mark in saying):
            wished.append(wish)
    lines = tuple(dict.fromkeys((*first.lines, *second.lines)))
    # The reason for a choice goes with the choice.
    pair = (first, second)
    says = next((m for m in pair if any(_asked(m, wish) for wish in WISHES)), first)
    if isinstance(says, StreamChoice):
        says = says.with_spec(**merged)
    else:
        says = dataclasses.replace(says, **merged)
    return dataclasses.replace(
        says, buffer=first.buffer, dim=first.dim, lines=lines, wished=tuple(wished)
    )


def _asked(mark: StreamRequest | StreamChoice, wish: Wish) -> Any:
    """What a mark says of a wish; None where it leaves that open."""
    return getattr(mark if isinstance(mark, StreamRequest) else mark.spec, wish)


def merge_choices(first: StreamChoice, second: StreamChoice) -> StreamChoice | None:
    """The choice for two marks of one stream; an unpipelined one has no say."""
    numbers = (*first.numbers, *second.numbers)
    if first.unpipelined != second.unpipelined:
        said = second if first.unpipelined else first
        return dataclasses.replace(
            said, buffer=first.buffer, dim=first.dim, numbers=numbers
        )
    merged = merge_marks(first, second)
    # If the two differ, the one that is not the default was chosen.
    sums = first.spec.sums if second.spec.sums == "in chunks" else second.spec.sums
    return merged and dataclasses.replace(merged.with_spec(sums=sums), numbers=numbers)


def asked_of_streams(program: Program) -> list[tuple[object, ...]]:
    """The fields of a program's choices that streams depend on; reasons are none."""
    return [
        (m.buffer, m.dim, m.spec.pipeline, m.spec.chunks, m.unpipelined)
        for m in stream_choices(program)
    ]


def unpipelined_values(program: Program) -> frozenset[str]:
    """The values whose loops are not to be made."""
    return frozenset(
        mark.buffer for mark in stream_choices(program) if mark.unpipelined
    )


# --- Those that leave something open ----------------------------------------------- #


def open_marks(program: Program) -> dict[int, StreamChoice]:
    """The stream marks that leave something open, by their number in `all_marks`."""
    return {
        number: mark
        for number, mark in enumerate(all_marks(program))
        if isinstance(mark, StreamChoice) and not mark.spec.is_complete
    }


def marks_alike(program: Program) -> list[tuple[int, ...]]:
    """The open marks by number; marks of equal values that one line makes go together.

    So the layers of a model, written one after another by a loop, have one choice.  A
    body's marks have one of their own.
    """
    makers = [
        (place, maker)
        for place, each in enumerate(programs(program))
        for maker in _makers(each)
    ]
    groups: dict[Any, list[int]] = {}
    for number, mark in open_marks(program).items():
        place, maker = makers[number]
        # Layers' values have names of their own, but what makes them is alike.
        made = maker and (
            maker.unit.eqns[0].eqn.primitive.name,
            *(buffer.shape for buffer in (*maker.ins, *maker.outs)),
        )
        asked = mark.spec.pipeline, mark.spec.chunks, mark.wished
        key = (place, mark.lines, mark.dim, asked, made)
        groups.setdefault(key, []).append(number)
    return [tuple(numbers) for numbers in groups.values()]


def _makers(program: Program) -> Iterator[Compute | None]:
    """The computation that makes the value of each mark of one program."""
    graph = graph_of(program)
    for mark in program.marks:
        number = graph.makers.get(mark.buffer)
        stmt = None if number is None else graph[number].stmt
        yield stmt if isinstance(stmt, Compute) else None


def set_choice(marks: list[Mark], numbers: Sequence[int], choice: StreamChoice) -> None:
    """Give the choice for one mark to all marks alike."""
    for number in numbers:
        mark = marks[number]
        assert isinstance(mark, StreamChoice)
        # A wish that a mark cannot follow is reported for the mark's own line only.
        marks[number] = dataclasses.replace(
            choice, buffer=mark.buffer, unmet=mark.unmet, numbers=mark.numbers
        )
