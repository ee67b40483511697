"""Functions on a mesh of devices: run exactly, and what each device then does."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import jax
import pytest
from jax.extend.core import Jaxpr

import jhost
from jhost._call.source import Source
from jhost.lowering.emit.program import emit
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer, Communicate, walk
from tests import budget
from tests.lowering.hand_built import mesh_of
from tests.lowering.traced import check

every_size = budget.first_is_quick("devices", [4, 2, 8])
"""For a mechanism that depends on how many devices there are, as doubling does.

What 4 do first, is compiled for them.
"""

each_size = pytest.mark.parametrize(
    "devices", [4, pytest.param(2, marks=pytest.mark.slow)]
)
"""For a test that devices pass as 4 do, however many there are.

Not of 8, which take XLA longest: what has a step or a neighbour more, has so of 4.
"""
sizes_and_counts = pytest.mark.parametrize(
    ("devices", "count"), [(4, 1), (4, 2), (4, 5), (2, 5), (8, 2)]
)
"""For a mechanism of `every_size` with so many layers, each with each only of 4."""


def tp(devices: int, ins: Any, outs: Any, **more: Any) -> dict[str, Any]:
    """Settings of `jhost.jit` on that many devices along one axis, tp."""
    return on({"tp": devices}, ins, outs, **more)


def on(axes: Mapping[str, int], ins: Any, outs: Any, **more: Any) -> dict[str, Any]:
    """Settings of `jhost.jit` on a mesh of those axes."""
    return {
        "mesh": mesh_of(**axes),
        "in_shardings": ins,
        "out_shardings": outs,
        # LLVM's optimizations would take most of the time.
        "compiler_options": {"xla_backend_optimization_level": 0},
        **more,
    }


def exact(fun: Callable[..., Any], *args: Any, **settings: Any) -> Program:
    """By jhost `fun` gives exactly what it gives without; returns its Host IR."""
    return check(fun, *args, **settings)


@contextlib.contextmanager
def on_streams(count: int) -> Generator[None]:
    """Iterations take turns on `count` streams, in what is lowered in the block."""
    config = Source.config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Source,
            "config",
            lambda source, key: dataclasses.replace(config(source, key), streams=count),
        )
        yield


def program_of(fun: Callable[..., Any], *args: Any, **settings: Any) -> Program:
    """The Host IR of `fun`, which nothing runs."""
    return jhost.jit(fun, **settings).lower(*args).host_ir


def communications(program: Program) -> list[str]:
    """Each communication in short: kind, mesh axes, dims, reducer."""
    return [_text(stmt) for stmt in walk(program.body) if isinstance(stmt, Communicate)]


def _text(stmt: Communicate) -> str:
    text = f"{stmt.kind} {','.join(stmt.axes)}"
    text += "" if stmt.source_dim is None else f" {stmt.source_dim} to"
    text += "" if stmt.dim is None else f" {stmt.dim}"
    return text + (f" {stmt.reducer}" if stmt.reducer else "")


# --- What is emitted ---------------------------------------------------------------- #

COLLECTIVES = ("all_gather", "all_to_all", "ppermute", "psum", "reduce_scatter")


def calls(program: Program, *names: str) -> Counter[str]:
    """The equations that one device runs, with their shapes there, counted.

    They are the matmuls and the collectives of the emitted jaxpr, or those of `names`:
    `dot_general 4x8 8x16`, `all_gather 4x8`.
    """
    mesh = dict(program.mesh.shape)
    avals = [_global(param, mesh) for param in program.params]
    closed = jax.make_jaxpr(emit(program, mesh_of(**mesh)))(*avals)
    wanted = names or ("dot_general", *COLLECTIVES)
    return Counter(_equations(closed.jaxpr, wanted))


def _equations(jaxpr: Jaxpr, names: tuple[str, ...]) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names:
            shapes = ["x".join(map(str, atom.aval.shape)) for atom in eqn.invars]  # pyright: ignore[reportAttributeAccessIssue]
            yield " ".join([eqn.primitive.name, *shapes])
        for inner in eqn.params.values():
            inner = getattr(inner, "jaxpr", inner)  # a closed one, or one of its own
            if isinstance(inner, Jaxpr):
                yield from _equations(inner, names)


def _global(buffer: Buffer, mesh: dict[str, int]) -> jax.ShapeDtypeStruct:
    shards = [math.prod(mesh[axis] for axis in dim.axes) for dim in buffer.dims]
    shape = [size * n for size, n in zip(buffer.shape, shards, strict=True)]
    return jax.ShapeDtypeStruct(shape, buffer.dtype)
