"""What jhost finds by itself against marks and against no chunks: seconds predicted.

    python -m benchmarks.step.found [--part 1/8] [--models 8b]

A row a program: single layers, and layers one after another or in a scan, with
`jax.checkpoint` or without, of the forward alone and of both passes.  GPUs are H200s,
and need not be there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

import jhost
from benchmarks import cases, report
from benchmarks.axes import FSDP, Axes, along_tp
from benchmarks.case import Case, types_of
from benchmarks.communication import AXIS, Streamed, Unmarked
from benchmarks.layers import MODELS
from benchmarks.run_file import separated
from benchmarks.step.arms import hosted
from benchmarks.step.predicted import SEQUENCES, as_with_cudnn, milliseconds
from benchmarks.step.programs import LAYERS, Step

MESHES = (along_tp(2), along_tp(4), Axes(((FSDP, 2), (AXIS, 2))))
PASSES = {"forward": False, "both passes": True}
HEAD = ("program", "GPUs", "off, ms", "marked, ms", "found, ms", "found / marked")
MOST = 1.02
"""The most time that found streams may take, as a share of the time of marked ones."""

T = TypeVar("T")


class Subject(NamedTuple):
    """A program to predict: `make` takes whether it is marked, a pipeline, a mesh."""

    name: str
    axes: Axes
    make: Callable[[bool, Any, Any], Any]
    types: Callable[[], Sequence[Any]]


class Times(NamedTuple):
    """Milliseconds: without chunks, by the better of two ways to mark, and found."""

    off: float
    marked: float
    found: float

    @property
    def holds(self) -> bool:
        """Whether found streams are about as fast as marks, and no slower than off."""
        return self.found <= MOST * self.marked and self.found <= self.off


def subjects(models: Sequence[str]) -> Iterator[Subject]:
    """All programs of these models on all meshes."""
    for axes in MESHES:
        yield from steps(models, axes)
    for devices in (2, 4):
        yield from layers(models, along_tp(devices))


def steps(models: Sequence[str], axes: Axes) -> Iterator[Subject]:
    for model, form, passes in itertools.product(models, LAYERS, PASSES):
        sizes = dataclasses.replace(MODELS[model], attention="cudnn")
        step = Step(sizes, form, LAYERS[form], SEQUENCES, axes)
        make = functools.partial(_step, step, PASSES[passes])
        yield Subject(f"{step.name}, {passes}", axes, make, step.types)


def _step(step: Step, backward: bool, marked: bool, how: Any, mesh: Any) -> Any:
    return hosted(how, marked=marked)(step, mesh, backward)


def layers(models: Sequence[str], axes: Axes) -> Iterator[Subject]:
    for case in cases.all_cases(axes, small=False, models=models):
        for passes in PASSES:
            make = functools.partial(_layer, case, PASSES[passes])
            types = functools.partial(_types, case, PASSES[passes])
            yield Subject(f"{case.name}, {passes}", axes, make, types)


def _types(case: Case, backward: bool) -> Sequence[Any]:
    more = [case.cotangent()] if backward else []
    return types_of((*case.operands, *more))


def _layer(case: Case, backward: bool, marked: bool, how: Any, mesh: Any) -> Any:
    """The layer, or its result and what it pulls back."""

    def layer(*operands: Any) -> Any:
        return case.run(Streamed() if marked else Unmarked(), operands)

    def both(*operands: Any) -> Any:
        result, pull = jax.vjp(layer, *operands[:-1])
        return result, pull(operands[-1])

    ins, out = case.specs, case.out_spec
    return jhost.jit(
        both if backward else layer,
        mesh=mesh,
        in_shardings=(*ins, out) if backward else ins,
        out_shardings=(out, ins) if backward else out,
        pipeline=how,
    )


def times(subject: Subject) -> Times:
    """What is predicted for a program."""
    off, auto, p2p, found = (
        milliseconds(
            functools.partial(subject.make, marked, how), subject.axes, subject.types()
        )
        for marked, how in (
            (False, "off"),
            (True, "auto"),
            (True, "p2p"),
            (False, "auto"),
        )
    )
    return Times(off, min(auto, p2p), found)


def row(subject: Subject, found: Times) -> list[str]:
    """A row of the table."""
    ratio = f"{found.found / found.marked:.3f}{'' if found.holds else ' !'}"
    return [subject.name, str(subject.axes), *(f"{t:.2f}" for t in found), ratio]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a row for each program as soon as it is known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=separated(str), default=["8b", "70b"])
    add_part(parser)
    arguments = parser.parse_args(argv)
    print(report.table(HEAD, ()))
    with as_with_cudnn():
        for subject in arguments.part([*subjects(arguments.models)]):
            print(report.row_text(row(subject, times(subject))), flush=True)


def add_part(parser: argparse.ArgumentParser) -> None:
    """Add `--part`; its value takes the part from all subjects."""
    parser.add_argument(
        "--part", type=_part, default="1/1", help="such as 2/8: every eighth"
    )


def _part(text: str) -> Callable[[list[T]], list[T]]:
    part, parts = map(int, text.split("/"))
    return lambda every: every[part - 1 :: parts]


if __name__ == "__main__":
    main()
