"""Check a sharding against the value and the mesh that it is for.

`jax.shard_map` is the model: every offender is gathered, then one error is raised that
names the value, its shape, the mesh axis and the arithmetic that fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, TypeAlias

from jhost import errors
from jhost._primitives import Spec
from jhost.lowering.ir.layout import axes_size, repeated_axes, spec_text

SpecProblem: TypeAlias = tuple[type[errors.JhostError], str]

_HELP: Mapping[type[errors.JhostError], str] = {
    errors.SpecRankError: "Give at most one entry per dim.",
    errors.UnknownAxisError: "Use the mesh's own axis names.",
    errors.DuplicateAxisError: "Shard one dim by an axis, or use another axis.",
    errors.DivisibilityError: "Leave the dim unsharded (None), or pad it; jhost.shard "
    "inside the function pads by itself.",
}


def check_spec(
    spec: Spec, shape: Sequence[int], mesh: Mapping[str, int], uneven: bool = False
) -> Iterator[SpecProblem]:
    """Why `spec` does not fit a value of `shape`, in words.

    The axes of an `uneven` one need not divide the dims, which are padded.
    """
    if len(spec) > len(shape):
        yield (
            errors.SpecRankError,
            f"{spec_text(spec)} has {len(spec)} entries for {len(shape)} dims",
        )
        return
    problems = list(check_axes(spec, mesh))
    yield from problems
    # An axis that the mesh lacks has no size to divide by.
    if not problems and not uneven:
        yield from _check_sizes(spec, shape, mesh)


def check_axes(spec: Spec, mesh: Mapping[str, int]) -> Iterator[SpecProblem]:
    """Why the axes that `spec` names fit no value at all."""
    known = ", ".join(f"{axis!r} ({size})" for axis, size in mesh.items()) or "none"
    axes = [axis for dim in spec for axis in dim or ()]
    for axis in axes:
        if axis not in mesh:
            text = f"{spec_text(spec)} names axis {axis!r}; the mesh has {known}"
            yield errors.UnknownAxisError, text
    for axis in repeated_axes(axes):
        yield errors.DuplicateAxisError, f"{spec_text(spec)} uses axis {axis!r} twice"


def _check_sizes(
    spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]
) -> Iterator[SpecProblem]:
    for dim, (axes, size) in enumerate(zip(spec, shape, strict=False)):
        devices = axes_size(axes or (), mesh)
        if size % devices:
            over = " and ".join(f"{axis!r} ({mesh[axis]})" for axis in axes or ())
            yield (
                errors.DivisibilityError,
                f"{spec_text(spec)} shards dim {dim} of size {size} over mesh axis "
                f"{over}, but {devices} does not divide {size} "
                f"({size} = {size // devices} * {devices} + {size % devices})",
            )


def raise_problems(what: str, problems: Sequence[tuple[str, SpecProblem]]) -> None:
    """Raise one error for all `problems`, each with the name of its value.

    The first problem decides the class; problems of other classes are listed as well.
    """
    if problems:
        _raise(what, problems)


def _raise(what: str, problems: Sequence[tuple[str, SpecProblem]]) -> NoReturn:
    # One class, as an exception has one.  Whoever catches it sees all the others
    # listed.
    kind = problems[0][1][0]
    offenders = [f"{name}: {text}" for name, (_, text) in problems]
    raise kind(f"{what} cannot be laid out as asked. {_HELP[kind]}", offenders)
