"""XLA's schedule, read from its text: each spelling by hand, then what XLA writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost import errors
from jhost.runtime.profile.schedule import (
    Schedule,
    ScheduledCommunication,
    parse_schedule,
    with_streams,
)

HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=4\n"

# What the instructions below call.
PARTS = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%product (p: f32[8,16], q: f32[16,16]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %q = f32[16,16]{1,0} parameter(1)
  %r = f32[8,16]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = f32[8,16]{1,0} tanh(%r)
}

%scatter (p.1: f32[8,16]) -> f32[2,16] {
  %p.1 = f32[8,16]{1,0} parameter(0)
  ROOT %rs = f32[2,16]{1,0} reduce-scatter(%p.1), replica_groups={}, to_apply=%add
}

%sliced_scatter (p.2: f32[16,16]) -> f32[2,16] {
  %p.2 = f32[16,16]{1,0} parameter(0)
  %s = f32[8,16]{1,0} slice(%p.2), slice={[0:8], [0:16]}
  ROOT %rs.2 = f32[2,16]{1,0} reduce-scatter(%s), replica_groups={}, to_apply=%add
}
"""

GEMM = "%gemm = f32[8,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%product"
CUBLAS = (
    "%lib = (f32[8,16]{1,0}, s8[512]{0}) custom-call(%x, %w), "
    'custom_call_target="__cublas$lt$matmul"'
)
COPY = "%copy = f32[8,16]{0,1} copy(%x)"
START = (
    "%ag = ((f32[8,16]{1,0}), f32[32,16]{1,0}) all-gather-start(%x), "
    "replica_groups=[1,4]<=[4], dimensions={0}, "
    'metadata={op_name="jit(f)/all_gather"}, '
    'backend_config={"collective_backend_config":{"is_sync":false}}'
)
DONE = "%ag_done = f32[32,16]{1,0} all-gather-done(%ag)"


def module(*instructions: str, parts: str = "") -> str:
    """The text of a scheduled module that issues these, of an x and a w."""
    lines = [
        "%x = f32[8,16]{1,0} parameter(0)",
        "%w = f32[16,16]{1,0} parameter(1)",
        *instructions,
        "ROOT %result = (f32[8,16]{1,0}, /*index=1*/f32[16,16]{1,0}) tuple(%x, %w)",
    ]
    body = "\n".join(f"  {line}" for line in lines)
    return f"{HEADER}{PARTS}{parts}\nENTRY %main (x: f32[8,16]) -> () {{\n{body}\n}}\n"


def schedule(*instructions: str, parts: str = "") -> Schedule:
    return parse_schedule(module(*instructions, parts=parts))


def only(*instructions: str, parts: str = "") -> ScheduledCommunication:
    (communication,) = schedule(*instructions, parts=parts).communications
    return communication


# --- Asynchronous and synchronous --------------------------------------------------- #


def test_what_is_issued_between_start_and_done_runs_beside() -> None:
    found = schedule(COPY, START, GEMM, CUBLAS, COPY.replace("%c", "%c2"), DONE)
    (gather,) = found.communications
    assert gather == ScheduledCommunication(
        name="ag",
        operation="jit(f)/all_gather",
        kind="AllGather",
        computation="",
        bytes=3 * 8 * 16 * 4,
        values=1,
        asynchronous=True,
        matmuls=("gemm", "lib"),
        others=("c2opy",),
    )
    assert (found.matmuls, found.others) == (("gemm", "lib"), ("copy", "c2opy"))


def test_a_pair_with_nothing_between_has_nothing_beside() -> None:
    gather = only(GEMM, START, "%y = f32[128]{0} bitcast(%x)", DONE, COPY)
    assert gather.asynchronous
    assert gather.matmuls == gather.others == ()


def test_synchronous_ones_have_two_spellings() -> None:
    plain = '%ag = f32[32,16]{1,0} all-gather(%x), backend_config={"is_sync":true}'
    sync_start = START.replace("false", " true")
    for gather in (
        only(plain, GEMM),
        only(plain.split(", backend")[0], GEMM),  # as on CPU
        only(sync_start, DONE, GEMM),
    ):
        assert not gather.asynchronous
        assert gather.matmuls == gather.others == ()
        assert (gather.name, gather.kind, gather.bytes) == ("ag", "AllGather", 1536)


def test_asynchronous_computations_wrap_a_collective() -> None:
    """`async-update` goes on with what `async-start` started."""
    scatter = only(
        "%rs-start = ((f32[8,16]), f32[2,16], u32[]) async-start(%x), calls=%scatter",
        GEMM,
        "%rs-update = ((f32[8,16]), f32[2,16], u32[]) async-update(%rs-start)",
        CUBLAS,
        "%rs-done = f32[2,16]{1,0} async-done(%rs-update), calls=%scatter",
        COPY,
    )
    assert (scatter.kind, scatter.bytes) == ("ReduceScatter", 8 * 16 * 4 * 3 // 4)
    assert scatter.asynchronous
    assert scatter.matmuls == ("gemm", "lib")


def test_a_fusion_may_hold_a_collective() -> None:
    wide = "%wide = f32[16,16]{1,0} fusion(%w), kind=kCustom, calls=%sliced_scatter"
    found = schedule(wide, GEMM)
    (scatter,) = found.communications
    assert (scatter.kind, scatter.bytes) == ("ReduceScatter", 8 * 16 * 4 * 3 // 4)
    assert not scatter.asynchronous
    assert found.others == ()


def test_what_only_names_memory_is_no_kernel() -> None:
    memory = '%empty = f32[8,16] custom-call(), custom_call_target="AllocateBuffer"'
    view = "%y = f32[128]{0} bitcast(%x)"
    found = schedule(START, memory, view, DONE)
    assert found.others == found.communications[0].others == ()


def test_two_may_be_under_way() -> None:
    first, second = schedule(
        START, GEMM, START.replace("%ag", "%two"), CUBLAS, DONE, COPY,
        DONE.replace("%ag", "%two"),
    ).communications  # fmt: skip
    assert (first.matmuls, first.others) == (("gemm", "lib"), ())
    assert (second.matmuls, second.others) == (("lib",), ("copy",))


def test_a_communication_is_no_kernel_beside_another() -> None:
    plain = "%ag.2 = f32[32,16]{1,0} all-gather(%x), replica_groups={}"
    first, second = schedule(START, plain, DONE).communications
    assert first.others == second.others == ()


# --- Combined ones ------------------------------------------------------------------ #


def test_combined_ones_are_told() -> None:
    gather = only(
        "%ag = ((f32[8,16], f32[16,16]), (f32[32,16], f32[64,16])) "
        "all-gather-start(%x, %w), replica_groups={{0,1,2,3}}",
        "%ag-done = (f32[32,16], f32[64,16]) all-gather-done(%ag)",
    )
    assert (gather.values, gather.bytes) == (2, 3 * (8 + 16) * 16 * 4)


def test_an_exchange_of_parts_is_one_value() -> None:
    """Of an all-to-all without a dim each operand is for one device."""
    parts = [f"%x{i} = f32[2,16]{{1,0}} slice(%x), slice={{[0:2]}}" for i in range(4)]
    shape = ", ".join(["f32[2,16]{1,0}"] * 4)
    operands = ", ".join(f"%x{i}" for i in range(4))
    exchange = only(
        *parts, f"%aa = ({shape}) all-to-all({operands}), replica_groups={{}}"
    )
    assert (exchange.values, exchange.bytes) == (1, 3 * 2 * 16 * 4)


# --- Bytes -------------------------------------------------------------------------- #


@pytest.mark.parametrize(
    ("groups", "devices"),
    {
        "no list is all": ("{}", 4),
        "lists": ("{{0,1},{2,3}}", 2),
        "rows": ("[2,2]<=[4]", 2),
        "transposed rows": ("[2,2]<=[2,2]T(1,0)", 2),
        "axes": ("mesh['dp'=2,'tp'=2] {'tp'}", 2),
        "all axes": ("mesh['dp'=2,'tp'=2] {'dp','tp'}", 4),
        "a part of an axis": ("mesh['tp'=4] {'tp':(1)2}", 2),
    }.values(),
)
def test_bytes_follow_the_size_of_the_groups(groups: str, devices: int) -> None:
    text = f"%ar = f32[8,16] all-reduce(%x), replica_groups={groups}, to_apply=%add"
    assert only(text).bytes == 2 * 8 * 16 * 4 * (devices - 1) // devices


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bf16", 256), ("f8e4m3fn", 128), ("s4", 64), ("pred", 128), ("c64", 1024)],
)
def test_bytes_follow_the_dtype(dtype: str, size: int) -> None:
    permute = only(
        f"%y = {dtype}[8,16]{{1,0:T(8,128)}} convert(%x)",
        f"%cp = {dtype}[8,16] collective-permute(%y), source_target_pairs={{{{0,1}}}}",
    )
    assert (permute.kind, permute.bytes) == ("CollectivePermute", size)


# --- Loops and calls ---------------------------------------------------------------- #

LOOP = f"""
%body (s: (f32[8,16], f32[16,16])) -> (f32[8,16], f32[16,16]) {{
  %s = (f32[8,16]{{1,0}}, f32[16,16]{{1,0}}) parameter(0)
  %x = f32[8,16]{{1,0}} get-tuple-element(%s), index=0
  %w = f32[16,16]{{1,0}} get-tuple-element(%s), index=1
  {START}
  {GEMM}
  {DONE}
  ROOT %next = (f32[8,16]{{1,0}}, f32[16,16]{{1,0}}) tuple(%gemm, %w)
}}

%condition (s: (f32[8,16], f32[16,16])) -> pred[] {{
  ROOT %go = pred[] constant(true)
}}
"""
WHILE = (
    "%loop = (f32[8,16]{1,0}, f32[16,16]{1,0}) while(%init), "
    "condition=%condition, body=%body"
)


def test_loops_show_one_round() -> None:
    found = schedule(CUBLAS, WHILE, parts=LOOP)
    (gather,) = found.communications
    assert (gather.computation, gather.matmuls) == ("body", ("gemm",))
    assert found.matmuls == ("lib", "gemm")
    assert str(found).endswith("beside 1 matmul, in body")


def test_a_loop_runs_beside_what_was_started_before_it() -> None:
    outer, inner = schedule(START, WHILE, DONE, parts=LOOP).communications
    assert outer.matmuls == inner.matmuls == ("gemm",)


def test_a_start_without_done_goes_on_into_the_next_round() -> None:
    (gather,) = schedule(WHILE, parts=LOOP.replace(DONE, COPY)).communications
    assert (gather.matmuls, gather.others) == (("gemm",), ("copy",))


def test_calls_and_branches_are_followed() -> None:
    branch = LOOP.replace("%body", "%other")
    found = schedule(
        "%called = (f32[8,16]{1,0}) call(%init), to_apply=%body",
        "%either = (f32[8,16]{1,0}) conditional(%x, %init, %init), "
        "branch_computations={%body, %other}",
        parts=LOOP + branch,
    )
    where = [communication.computation for communication in found.communications]
    assert where == ["body", "body", "other"]
    assert len(found.matmuls) == 3


# --- The table ---------------------------------------------------------------------- #


def test_the_table_reads_well(golden: Callable[..., None]) -> None:
    combined = (
        "%both = (f32[32,16], f32[64,16]) all-gather(%x, %w), replica_groups={}",
    )
    bare = START.replace("%ag", "%bare"), DONE.replace("%ag", "%bare")
    golden(str(schedule(START, GEMM, COPY, CUBLAS, DONE, *combined, *bare)))


def test_streams_are_of_what_is_asynchronous_in_order() -> None:
    found = schedule(START, DONE, "%ar = f32[16,16] all-reduce(%w), replica_groups={}")
    assert found.streams == ()
    told = with_streams(found, [3])
    assert [each.stream for each in told.communications] == [3, None]
    assert told.streams == (3,)
    assert "beside nothing, queue 3" in str(told)
    for unknown in (None, [], [1, 2]):
        assert with_streams(found, unknown) == found


def test_a_program_that_communicates_nothing_has_a_line() -> None:
    assert str(schedule(GEMM)) == (
        "schedule: 0 communications, 1 matmul, 0 other kernels"
    )


def test_the_fields_are_for_tools() -> None:
    gather = only(START, DONE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        gather.bytes = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("text", "what"),
    [("", "no text"), (module().replace("true", "false"), "jit_f has no is_scheduled")],
)
def test_only_a_scheduled_module_has_a_schedule(text: str, what: str) -> None:
    with pytest.raises(errors.ScheduleError, match=what):
        parse_schedule(text)


# --- What XLA writes ---------------------------------------------------------------- #


@pytest.fixture
def compiled(make_mesh: Callable[[Sequence[int], Sequence[str]], Mesh]) -> Any:
    @jhost.jit(
        mesh=make_mesh((2, 4), ("dp", "tp")),
        in_shardings=(P(("dp", "tp")), P(None, "tp"), P("tp")),
        out_shardings=P(("dp", "tp")),
        pipeline="collective",
        chunks=2,
    )
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.stream(jnp.maximum(x @ up, 0) @ down, axis=0)

    arrays = jnp.ones((64, 16)), jnp.ones((16, 64)), jnp.ones((64, 16))
    return block.lower(*arrays).compile()


def test_what_xla_compiles_for_a_cpu_is_synchronous(compiled: jhost.Compiled) -> None:
    found = compiled.schedule()
    kinds = sorted(communication.kind for communication in found.communications)
    assert kinds == ["AllGather"] * 2 + ["ReduceScatter"] * 2
    assert not any(c.asynchronous or c.computation for c in found.communications)
    assert {c.operation.rpartition("/")[2] for c in found.communications} == {
        "all_gather",
        "reduce_scatter",
    }
    assert len(found.matmuls) == 4


def test_it_moves_the_bytes_that_explain_says(compiled: jhost.Compiled) -> None:
    told = sum(row.bytes for row in compiled.explain().communications)
    assert sum(c.bytes for c in compiled.schedule().communications) == told


def test_explain_of_what_is_compiled_has_the_schedule(compiled: jhost.Compiled) -> None:
    explanation = compiled.explain()
    assert explanation.schedule == str(compiled.schedule())
    *_, title, _, _, _, _ = explanation.text.splitlines()
    assert title.startswith("  schedule: 4 communications, 4 matmuls, ")
    assert title in str(explanation).splitlines()


def test_a_backend_may_give_no_text(
    compiled: jhost.Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "as_text", lambda: None)
    with pytest.raises(errors.ScheduleError, match="no text"):
        compiled.schedule()
    assert (
        compiled.explain().schedule
        == "schedule: this backend does not give the text of what it compiled"
    )
