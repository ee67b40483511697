"""Parity group C with nvFuser: segmentation, and resharding apart from it.

nvFuser's pull request 4145 hands the merge rule to its segmenter; the rows are the
rule, its default, and the lowering of resharding as a pass of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost.lowering.emit.program import emit
from jhost.lowering.ir.graph import Group, ShouldMerge
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Compute, Reshard
from jhost.lowering.layouts.convert_to_communications import ConvertToCommunications
from jhost.lowering.layouts.delay_reductions import DelayReductions
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts
from jhost.lowering.pipeline import run_passes
from jhost.lowering.units.segment import Segment
from tests.lowering.traced import array, built, work

Golden = Callable[..., None]
MakeMesh = Callable[..., Mesh]


def segmented(
    fun: Callable[..., Any], *args: Any, should_merge: ShouldMerge | None = None
) -> Program:
    """`fun` on two devices, its communications explicit, in units."""
    segment = Segment() if should_merge is None else Segment(should_merge=should_merge)
    layouts = PropagateLayouts(), DelayReductions()
    sequence = (*layouts, ConvertToCommunications(), segment)
    return run_passes(built(fun, *args, tp=2), sequence)


def units(program: Program) -> list[list[str]]:
    """The primitives of each unit, in order; a communication stands by its kind."""
    return [work([stmt]) for stmt in program.body if work([stmt])]


def never(one: Group, other: Group) -> bool:
    return False


ELEMENTWISE = {"add", "mul", "max", "tanh"}


def elementwise(one: Group, other: Group) -> bool:
    """Only elementwise computations merge; matmuls stand alone, as in nvFuser."""
    stmts = [node.stmt for node in (*one, *other)]
    names = {word for stmt in stmts for word in work([stmt])}
    return all(isinstance(s, Compute) for s in stmts) and names <= ELEMENTWISE


# --- The merge predicate ------------------------------------------------------------ #


def mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    x = jhost.shard(x, P("tp", None))
    w, v = jhost.shard(w, P(None, "tp")), jhost.shard(v, P("tp", None))
    y = jnp.maximum(jnp.tanh(x @ w) * 2, 0) @ v
    return jhost.shard(y, P("tp", None))


MLP = ((4, 6), (6, 12), (12, 6))


def test_by_default_everything_between_communications_is_one_unit(
    golden: Golden,
) -> None:
    program = segmented(mlp, *MLP)
    assert units(program) == [
        ["AllGather"],
        ["dot_general", "tanh", "mul", "max", "dot_general"],
        ["ReduceScatter"],
    ]
    golden(str(program))


def test_a_predicate_may_keep_every_computation_alone(golden: Golden) -> None:
    program = segmented(mlp, *MLP, should_merge=never)
    assert all(len(unit) == 1 for unit in units(program))
    golden(str(program))


def test_a_predicate_may_merge_elementwise_computations_only(golden: Golden) -> None:
    program = segmented(mlp, *MLP, should_merge=elementwise)
    assert units(program) == [
        ["AllGather"],
        ["dot_general"],
        ["tanh", "mul", "max"],
        ["dot_general"],
        ["ReduceScatter"],
    ]
    golden(str(program))


@pytest.mark.parametrize("should_merge", [None, never, elementwise])
def test_units_change_no_number(
    should_merge: ShouldMerge | None, make_mesh: MakeMesh
) -> None:
    program = segmented(mlp, *MLP, should_merge=should_merge)
    args = [array(*shape, seed=seed) / 8 for seed, shape in enumerate(MLP)]
    (given,) = jax.jit(emit(program, make_mesh((2,), ("tp",))))(*args)
    np.testing.assert_allclose(given, mlp(*args), rtol=1e-5, atol=1e-5)


# --- Convexity ---------------------------------------------------------------------- #


def diamond(x: jax.Array) -> jax.Array:
    """One branch communicates, the other does not."""
    y = jnp.tanh(jhost.shard(x, P("tp", None)))
    far = jhost.shard(y * 2, P(None, "tp"))
    near = y + y
    return jhost.shard(far, P("tp", None)) + near


def test_a_diamond_through_a_communication_is_two_units(golden: Golden) -> None:
    """What is after the communication cannot join what is before it."""
    program = segmented(diamond, (4, 4))
    assert units(program) == [
        ["tanh", "mul", "add"],
        ["AllToAll"],
        ["AllToAll"],
        ["add"],
    ]
    golden(str(program))


def test_what_no_path_ties_is_one_unit_across_a_communication() -> None:
    """Maximal: the two halves that no communication separates run together."""

    def f(x: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(jhost.shard(x, P("tp")))
        gathered = jhost.shard(jhost.shard(jnp.copy(y), P("tp")), P())
        return gathered, jnp.tanh(jhost.shard(z, P("tp"))) + y

    program = segmented(f, (4,), (4,))
    computes = [unit for unit in units(program) if "tanh" in unit]
    assert computes == [["tanh", "tanh", "add"]]


def test_a_unit_gives_only_what_others_read() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        a = jnp.tanh(x)
        b = a * 2
        return b + a, b

    (stmt,) = segmented(f, (4,)).body
    assert isinstance(stmt, Compute)
    assert [out.name for out in stmt.outs] == ["z", "y"]
    assert [source.name for source in stmt.ins] == ["x"]


# --- Resharding apart from segmentation --------------------------------------------- #


def test_resharding_is_lowered_by_a_pass_of_its_own() -> None:
    """Before it there are only `Reshard`s, after it only communications."""
    before = PropagateLayouts().apply(built(mlp, *MLP, tp=2))
    after = ConvertToCommunications().apply(before)
    moves = [type(s) for s in before.body if isinstance(s, Reshard | Communicate)]
    assert moves == [Reshard, Reshard]
    kinds = [s.kind for s in after.body if isinstance(s, Communicate)]
    assert kinds == ["AllGather", "ReduceScatter"]
    assert not [s for s in after.body if isinstance(s, Reshard)]


def dumped(folder: Path) -> list[Path]:
    """The files of the first lowering; on JAX 0.10 `lower` does it twice."""
    paths = sorted(folder.iterdir())
    first = paths[0].name.split(".")[1]
    return [path for path in paths if path.name.split(".")[1] == first]


def test_every_pass_is_dumped_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_mesh: MakeMesh
) -> None:
    monkeypatch.setenv("JHOST_DUMP", "passes")
    monkeypatch.setenv("JHOST_DUMP_DIR", str(tmp_path))

    def f(x: jax.Array) -> jax.Array:
        return jhost.shard(jnp.tanh(jhost.shard(x, P("tp"))), P())

    jhost.jit(f, mesh=make_mesh((2,), ("tp",))).lower(array(4))
    paths = dumped(tmp_path)
    assert [re.sub(r"\.\d+\.", ".", path.name, count=1) for path in paths] == [
        "f.00_build.txt",
        "f.01_in_blocks.txt",
        "f.02_pad_uneven.txt",
        "f.03_split_axes.txt",
        "f.04_choose_pipelines.txt",
        "f.05_choose_layouts.txt",
        "f.06_find_streams.txt",
        "f.07_propagate_layouts.txt",
        "f.08_carry_partial_sums.txt",
        "f.09_delay_reductions.txt",
        "f.10_convert_to_communications.txt",
        "f.11_split_all_reduces.txt",
        "f.12_leave_idle_marks.txt",
        "f.13_combine_small.txt",
        "f.14_compute_late.txt",
        "f.15_lower_streams.txt",
        "f.16_order_by_steps.txt",
        "f.17_choose_schedule.txt",
        "f.18_segment.txt",
        "f.19_schedule_loops.txt",
        "f.20_insert_deallocations.txt",
        "f.21_choose_permutes.txt",
    ]
    texts = [path.read_text() for path in paths]
    assert "Reshard(" in texts[7]
    assert "AllGather(" not in texts[7]
    assert "AllGather(" in texts[10]
    assert all(text.startswith("program f") for text in texts)


def test_the_finished_program_is_dumped_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JHOST_DUMP", "host_ir")
    monkeypatch.setenv("JHOST_DUMP_DIR", str(tmp_path))

    def f(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    lowered = jhost.jit(f).lower(array(4))
    (path,) = dumped(tmp_path)
    assert path.name.endswith(".host_ir.txt")
    assert path.read_text() == f"{lowered.host_ir}\n"


def test_what_was_merged_once_is_merged_for_all_programs() -> None:
    """Candidates differ in a few statements; facts about a unit hold for all."""
    layouts = PropagateLayouts(), DelayReductions(), ConvertToCommunications()

    def f(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(x) * 2, jnp.sum(jhost.shard(y, P())) * 2

    program = run_passes(built(f, (8, 4), (8, 4), tp=2), layouts)
    segment = Segment()
    made, other = segment.change(program), segment.change(program)
    pairs = [
        (one.unit, again.unit)
        for one, again in zip(made.body, other.body, strict=True)
        if isinstance(one, Compute) and isinstance(again, Compute)
    ]
    assert str(made) == str(other)
    assert any(len(unit.eqns) > 1 for unit, _ in pairs)
    assert all(unit.derived is again.derived for unit, again in pairs)
    # What others read of a unit is a part of what is remembered.
    fewer = dataclasses.replace(program, results=program.results[:1])
    assert str(segment.change(fewer)) == str(Segment().change(fewer))
