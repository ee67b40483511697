"""Compiles patterns for H200s, and holds what XLA made of them to what is promised."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding

import jhost
from jhost.lowering.explain import explain_program
from jhost.runtime.compiler_options import overlap_options
from jhost.runtime.profile.schedule import parse_schedule
from tests.jhost.derived import programs, vjp

QUICKLY: Mapping[str, Any] = {"xla_gpu_autotune_level": 0}
"""For programs that take long to compile.

There is no GPU to try kernels on, and which one a matmul gets changes neither the order
nor the memory of a program.
"""

MakeH200s = Callable[[Mapping[str, int]], Mesh]
"""Makes a mesh of such axes, of H200s that are not there."""


@dataclass(frozen=True)
class Moves:
    """What is promised of the communications of one kind: so many, and all hidden.

    But for those that `exposed` names, with the reason, by their number in the order of
    their starts.  Hidden ones are asynchronous, and have a matmul beside them.
    """

    count: int
    exposed: Mapping[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True)
class Case:
    """How a pattern is pipelined, how many matmuls that makes, and what it moves."""

    how: Mapping[str, Any]
    matmuls: int
    moves: Mapping[str, Moves]


def each(**cases: Case) -> pytest.MarkDecorator:
    """For a test of a pattern, once in each of its cases."""
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


def check(
    mesh: Mesh,
    case: Case,
    fun: Callable[..., Any],
    shapes: Sequence[Sequence[int]],
    ins: Any,
    outs: Any,
    never: str | None = None,
) -> None:
    """`fun` of bfloat16 arrays, compiled for `mesh`, is what is promised of it.

    The chunks' matmuls are all there, none merged; so are the communications, none
    combined, with no byte more than `explain` says; and no value has the shape `never`.
    """
    types = [jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16) for shape in shapes]
    settings = {"mesh": mesh, "in_shardings": ins, "out_shardings": outs}
    compiled = (
        jhost.jit(fun, **settings, **case.how).lower(*types).compile(dict(QUICKLY))
    )
    hold(case, compiled.schedule(), [compiled.explain()])
    assert never is None or never not in (compiled.as_text() or "")


def check_both_ways(
    mesh: Mesh,
    case: Case,
    fun: Callable[..., Any],
    shapes: Sequence[Sequence[int]],
    ins: Sequence[Any],
    out: Any,
) -> None:
    """The same of `fun` and its gradients by all arguments, in one program.

    What the backward gathers as the forward did, XLA gathers once.  Sums over chunks
    are added to in place: no value of float32 is copied.
    """
    settings = {"mesh": mesh, "in_shardings": ins, "out_shardings": out}
    both, types, text = compile_both_ways(
        jhost.jit(fun, **settings, **case.how), mesh, shapes, ins, out
    )
    told = [explain_program(p) for p in programs(both, *types)]
    hold(case, parse_schedule(text), told, once=True)
    assert not re.findall(r"%(\S+) = f32\S+ copy\(", text)


def compile_both_ways(
    fun: Callable[..., Any],
    mesh: Mesh,
    shapes: Sequence[Sequence[int]],
    ins: Sequence[Any],
    out: Any,
) -> tuple[Callable[..., Any], Sequence[jax.ShapeDtypeStruct], str]:
    """`fun` with its gradients by all arguments: function, operands, what XLA made."""
    both = vjp(fun)
    *sides, side = (NamedSharding(mesh, spec) for spec in (*ins, out))
    types = [
        jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16, sharding=sharding)
        for shape, sharding in zip(shapes, sides, strict=True)
    ]
    types.insert(0, jax.eval_shape(fun, *types).update(sharding=side))
    outer = jax.jit(
        both,
        out_shardings=(side, tuple(sides)),
        compiler_options=overlap_options(mesh, adds_up=True),
    )
    return both, types, outer.lower(*types).compile(dict(QUICKLY)).as_text() or ""


def hold(
    case: Case,
    schedule: jhost.Schedule,
    explanations: Sequence[jhost.Explanation],
    once: bool = False,
) -> None:
    """The schedule has what is promised, and moves what is explained.

    With `once`, not more than that: what is explained twice may be done once.
    """
    table = "\n".join(["", str(schedule), *map(str, explanations)])
    assert len(schedule.matmuls) == case.matmuls, table
    counts = Counter(c.kind for c in schedule.communications)
    assert counts == {kind: moves.count for kind, moves in case.moves.items()}, table
    assert {c.values for c in schedule.communications} == {1}, table
    told = sum(row.bytes for e in explanations for row in e.communications)
    moved = sum(c.bytes for c in schedule.communications)
    assert moved == told or (once and moved < told), table
    for kind, moves in case.moves.items():
        found = exposed(schedule, kind)
        more, fewer = found - set(moves.exposed), set(moves.exposed) - found
        assert not more, f"no matmul is beside these {kind}: {sorted(more)}{table}"
        assert not fewer, f"take these {kind} off the list: {sorted(fewer)}{table}"


def exposed(schedule: jhost.Schedule, kind: str) -> set[int]:
    """Which communications of a kind have no matmul beside them."""
    found = [c for c in schedule.communications if c.kind == kind]
    return {number for number, c in enumerate(found) if not c.matmuls}


def exposed_in_bodies(schedule: jhost.Schedule, least: int = 1_000_000) -> list[str]:
    """The transfers in loops, of so many bytes at least, that no matmul is beside."""
    return [
        f"{each.name} in {each.computation}"
        for each in schedule.communications
        if each.computation and each.bytes >= least and not each.matmuls
    ]
