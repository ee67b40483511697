"""Wishes for pipelines that cannot be had: they are left out, and notes say why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jhost import errors
from jhost.lowering.ir.graph import Graph
from jhost.lowering.ir.marks import StreamChoice, Wish
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note, UnmetWish
from jhost.lowering.ir.requests import without_wish
from jhost.lowering.loops.legality import choose_pipeline
from jhost.lowering.streams.stream_plan import StreamPlan


def wishes_that_fail(
    graph: Graph, plan: StreamPlan, mesh: Mapping[str, int]
) -> Iterator[UnmetWish]:
    """The settings of a function that streams cannot follow, at most one a stream."""
    wishing = {stream: mark for stream, mark in plan.marks.items() if mark.wished}
    idle = dict(streams_without_work(graph, plan)) if wishing else {}
    for stream, mark in wishing.items():
        wish, reason = None, idle.get(stream, "")
        if reason:
            wish = _wish_among(mark, "chunks")
        else:
            parts = plan.participations_of(stream)
            try:
                choose_pipeline(mark, plan.extents[stream], graph, parts, mesh)
            except errors.PipelineError as refusal:
                wish, reason = _wish_among(mark, "pipeline"), _in_short(refusal)
            except errors.ChunksError as refusal:
                wish = _wish_among(mark, "chunks", "pipeline")
                reason = _in_short(refusal)
        if wish is not None:
            yield UnmetWish(numbers=mark.numbers, wish=wish, reason=reason)


def _wish_among(mark: StreamChoice, *wishes: Wish) -> Wish | None:
    """The first of `wishes` that the mark has from settings, so it can be left open."""
    return next((wish for wish in wishes if wish in mark.wished), None)


def _in_short(refusal: errors.JhostError) -> str:
    """What the refusal says of the mark, or its first sentence, without advice."""
    _, _, said = refusal.offenders[0].partition(": ")
    return said or errors.first_line(refusal).partition(". ")[0].rstrip(".")


def without_wishes(program: Program, unmet: Sequence[UnmetWish]) -> Program:
    """`program` with the unmet wishes left open, and remarks that say so."""
    marks = list(program.marks)
    for each in unmet:
        for place, mark in enumerate(marks):
            if isinstance(mark, StreamChoice) and set(mark.numbers) & {*each.numbers}:
                marks[place] = without_wish(mark, each.wish, each.reason)
    remarks = (*program.remarks, *unmet)
    return dataclasses.replace(program, marks=tuple(marks), remarks=remarks)


def unmet_notes(marks: Sequence[StreamChoice]) -> Iterator[Note]:
    """Notes on the wishes that marks could not follow, in the user's names."""
    for mark in marks:
        for said in mark.unmet:
            form = f"stream on axis {mark.dim} of {{}}: {said}; jhost chooses instead"
            yield Note(form=form, values=(mark.buffer,), where=mark.where)


def streams_without_work(graph: Graph, plan: StreamPlan) -> Iterator[tuple[str, str]]:
    """The streams that ask for chunks without any work in chunks, and why."""
    for stream, mark in plan.marks.items():
        asked = mark.spec.chunks not in (None, 1)
        if not asked or plan.participations_of(stream) or plan.extents[stream] > 1:
            continue
        for number, reason in plan.declined.items():
            reads_writes = (*graph[number].reads, *graph[number].writes)
            if mark.buffer in {buffer.name for buffer in reads_writes}:
                yield stream, reason
