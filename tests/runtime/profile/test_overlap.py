"""The report's numbers, worked out by hand from profiles of a few events."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from jhost import errors
from jhost.lowering.ir.remarks import Prediction
from jhost.runtime.profile.hlo_text import parse_module
from jhost.runtime.profile.origins import Operations
from jhost.runtime.profile.report import OverlapReport, overlap_report
from jhost.runtime.profile.timeline import Timeline, timeline
from jhost.runtime.profile.trace import read_trace
from tests.runtime.profile.profiles import Lines, Ran, kernel, profile

# Two chunks: each is received, multiplied, and XLA adds a copy of its own.  The second
# matmul is a fusion with a slice in it; the loop around a kernel does nothing itself.
TEMPLATE = """HloModule jit_f, is_scheduled=true, num_partitions=2

%multiply (p: f32[8,16], q: f32[16,16]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %q = f32[16,16]{1,0} parameter(1)
  %s = f32[8,16]{1,0} slice(%p), metadata={op_name="host_ir.0[0].part/slice"}
  ROOT %d = f32[8,16]{1,0} dot(%s, %q), metadata={op_name="host_ir.2[1].y_i/dot"}
}

%body (r: f32[8,16]) -> f32[8,16] {
  %r = f32[8,16]{1,0} parameter(0)
  ROOT %inner = f32[8,16]{1,0} tanh(%r), metadata={op_name="host_ir.3.z/tanh"}
}

ENTRY %main (x: f32[8,16], w: f32[16,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[16,16]{1,0} parameter(1)
  %start.0 = f32[8,16]{1,0} collective-permute-start(%x), METADATA_0
  %done.0 = f32[8,16]{1,0} collective-permute-done(%start.0), METADATA_0
  %start.1 = f32[8,16]{1,0} collective-permute-start(%x), METADATA_1
  %done.1 = f32[8,16]{1,0} collective-permute-done(%start.1), METADATA_1
  %gemm.0 = f32[8,16] dot(%done.0, %w), metadata={op_name="host_ir.2[0].y_i/dot"}
  %gemm.1 = f32[8,16]{1,0} fusion(%done.1, %w), kind=kLoop, calls=%multiply
  %copy.7 = f32[8,16]{0,1} copy(%gemm.1)
  ROOT %loop = f32[8,16]{1,0} while(%copy.7), condition=%body, body=%body
}
"""
RECEIVE = "jit(f)/shard_map/host_ir.1[{}].x_i/ppermute"
MODULE = functools.reduce(
    lambda text, chunk: text.replace(
        f"METADATA_{chunk}", f'metadata={{op_name="{RECEIVE.format(chunk)}"}}'
    ),
    (0, 1),
    TEMPLATE,
)

STATEMENTS = ("part = Select(x)", "x_i = Permute(x)", "y_i <- dot_general(x_i, w)", "z")

COMPUTE, COPIES = "Stream #13(Memset,Compute)", "Stream #20(MemcpyP2P)"


def receive(chunk: int, start: int, end: int) -> Ran:
    """A copy by engine: the name is of an instruction that the text does not show."""
    ran = kernel(f"ppermute.{chunk}.1", start, end, op_name=RECEIVE.format(chunk))
    return dataclasses.replace(ran, name="MemcpyP2P")


FIRST: Lines = {
    COMPUTE: [kernel("gemm.0", 110, 130), kernel("gemm.1", 150, 180)],
    COPIES: [receive(0, 120, 145), receive(1, 140, 160)],
}
SECOND: Lines = {
    COMPUTE: [kernel("gemm.0", 115, 135), kernel("copy.7", 180, 190)],
    COPIES: [receive(0, 115, 125)],
}
US = 1e-6


def report_of(
    planes: dict[str, Lines], prediction: Prediction | None = None
) -> OverlapReport:
    return overlap_report(
        timeline_of(planes), mesh="tp=2", device_kind="GPU", prediction=prediction
    )


def timeline_of(planes: dict[str, Lines], number: int = 1) -> Timeline:
    module = parse_module(MODULE)
    return timeline(
        read_trace(profile(planes)),
        Operations(module),
        calls=number,
        name="f",
        module=module.name,
        statements=STATEMENTS,
    )


def one_call(**devices: Lines) -> dict[str, Lines]:
    """One call on devices gpu0, gpu1, ..."""
    return {name.replace("gpu", "/device:GPU:"): ran for name, ran in devices.items()}


# --- Sums ------------------------------------------------------------------------- #


def test_hidden_exposed_idle_and_efficiency() -> None:
    """From 110 to 190; permutes cover 120 to 160, matmuls 110 to 130, 150 to 180."""
    report = report_of(one_call(gpu0=FIRST, gpu1=SECOND))
    first, second = report.devices
    assert (first.device, second.device) == ("gpu 0", "gpu 1")
    assert first.total == second.total == pytest.approx(80 * US)
    assert first.computation == pytest.approx(50 * US)
    assert first.communication == pytest.approx(40 * US)
    assert first.exposed == pytest.approx(20 * US)
    assert first.hidden == pytest.approx(20 * US)
    assert first.idle == pytest.approx(10 * US)
    assert first.efficiency == pytest.approx(20 / 40)
    assert second.communication == second.hidden == pytest.approx(10 * US)
    assert second.efficiency == pytest.approx(1.0)
    assert report.mean.communication == pytest.approx(25 * US)
    assert report.mean.exposed == pytest.approx(10 * US)


def test_without_idle_time_efficiency_is_the_benchmarks() -> None:
    """(computation + communication - total) / the shorter of the two."""
    ran = {
        COMPUTE: [kernel("gemm.0", 100, 160)],
        COPIES: [receive(0, 130, 180)],
    }
    (overlap,) = report_of(one_call(gpu0=ran)).devices
    assert overlap.idle == 0
    assert overlap.efficiency == pytest.approx((60 + 50 - 80) / 50)


def test_statements_have_the_sums_of_their_spans() -> None:
    """On a device in the mean, so half of each; a slice in a fusion does not count."""
    report = report_of(one_call(gpu0=FIRST, gpu1=SECOND))
    received, multiplied, own = report.statements
    assert (received.number, received.text) == (1, "x_i = Permute(x)")
    assert (received.activity, received.times) == ("communication", 2)
    assert received.seconds == pytest.approx((25 + 20 + 10) / 2 * US)
    assert received.exposed == pytest.approx((15 + 10) / 2 * US)
    assert (multiplied.number, multiplied.times) == (2, 2)
    assert multiplied.seconds == pytest.approx((20 + 30 + 20) / 2 * US)
    assert multiplied.exposed == 0
    assert (own.number, own.text) == (None, "(of no statement)")


def test_spans_know_their_chunks_and_what_of_them_is_exposed() -> None:
    spans = timeline_of(one_call(gpu0=FIRST)).spans
    found = {
        span.operation: (span.stream, span.iterations, span.exposed) for span in spans
    }
    assert found["gemm.0"] == ("queue 13", (0,), ())
    assert found["gemm.1"] == ("queue 13", (1,), ())
    stream, chunk, ((start, end),) = found["ppermute.0.1"]
    assert (stream, chunk) == ("queue 20", (0,))
    assert (start, end) == (pytest.approx(20 * US), pytest.approx(35 * US))


@pytest.mark.parametrize("operation", ["", "command_buffer_6"])
def test_fills_in_the_first_call_begin_no_others(operation: str) -> None:
    """Three in the first of three calls, as a library or a graph may have them."""
    ran = [
        *(kernel("gemm.0", start, start + 30) for start in (100, 200, 300)),
        *(kernel(operation, 130 + n, 131 + n) for n in range(3)),
    ]
    found = timeline_of(one_call(gpu0={COMPUTE: ran}), number=3)
    assert found.calls == pytest.approx((33 * US, 30 * US, 30 * US))


def test_the_prediction_is_split_in_the_same_way() -> None:
    predicted = Prediction(
        total=100 * US, compute=70 * US, communication=50 * US, host=40 * US
    )
    found = report_of(one_call(gpu0=FIRST), predicted).predicted
    assert found is not None
    assert found.exposed == pytest.approx(30 * US)
    assert found.hidden == pytest.approx(20 * US)
    assert found.idle == 0


def test_a_host_that_is_late_is_predicted_as_idle_time() -> None:
    late = Prediction(
        total=100 * US, compute=30 * US, communication=20 * US, host=100 * US
    )
    found = report_of(one_call(gpu0=FIRST), late).predicted
    assert found is not None
    assert (found.exposed, found.hidden) == (pytest.approx(20 * US), 0)
    assert found.idle == pytest.approx(50 * US)


# --- Which call, which events ----------------------------------------------------- #


def test_the_median_call_is_taken() -> None:
    """Three calls of 30, 10 and 20 microseconds."""
    times = (100, 30), (200, 10), (300, 20)
    ran = [kernel("gemm.0", start, start + time) for start, time in times]
    found = timeline_of({"/device:GPU:0": {COMPUTE: ran}}, 3)
    assert found.calls == pytest.approx((30 * US, 10 * US, 20 * US))
    assert found.total == pytest.approx(20 * US)
    (span,) = found.spans
    assert (span.start, span.end) == (0, pytest.approx(20 * US))


def test_a_device_may_be_in_another_call_than_the_next() -> None:
    """The second begins its second call after the first device has ended its own."""
    first = [kernel("gemm.0", 100, 110), kernel("gemm.0", 120, 130)]
    second = [kernel("gemm.0", 105, 115), kernel("gemm.0", 150, 160)]
    found = timeline_of(
        {"/device:GPU:0": {COMPUTE: first}, "/device:GPU:1": {COMPUTE: second}}, 2
    )
    assert found.calls == pytest.approx((15 * US, 40 * US))


def test_loops_that_turn_as_often_as_they_like_stay_in_their_call() -> None:
    ran = [
        *(kernel("gemm.0", start, start + 5) for start in (100, 200)),
        *(kernel("inner", start, start + 5) for start in (110, 120, 130, 210)),
    ]
    found = timeline_of({"/device:GPU:0": {COMPUTE: ran}}, 2)
    assert found.calls == pytest.approx((35 * US, 15 * US))
    assert [span.operation for span in found.spans] == ["gemm.0", "inner"]


def test_calls_of_nothing_but_loops_are_told_apart() -> None:
    """Two calls of three rounds each: 100 to 130, 200 to 240."""
    starts = (100, 110, 120, 200, 210, 230)
    ran = [kernel("inner", start, start + 10) for start in starts]
    found = timeline_of({"/device:GPU:0": {COMPUTE: ran}}, 2)
    assert found.calls == pytest.approx((30 * US, 40 * US))


def test_what_is_of_another_module_is_left_out() -> None:
    ran = [kernel("gemm.0", 100, 130), kernel("copy.7", 140, 190, module="jit_copy")]
    found = timeline_of(one_call(gpu0={COMPUTE: ran}))
    assert [span.operation for span in found.spans] == ["gemm.0"]


def test_lines_that_sum_up_streams_are_left_out() -> None:
    ran = {
        COMPUTE: [kernel("gemm.0", 100, 130)],
        "XLA Ops": [kernel("gemm.0", 100, 130)],
    }
    assert len(timeline_of(one_call(gpu0=ran)).spans) == 1


def test_loops_hold_what_works_and_do_not_count() -> None:
    ran = {COMPUTE: [kernel("loop", 100, 150), kernel("inner", 110, 120)]}
    report = report_of(one_call(gpu0=ran))
    (statement,) = report.statements
    assert (statement.number, statement.times) == (3, 1)
    assert report.mean.computation == pytest.approx(10 * US)
    assert report.mean.total == pytest.approx(10 * US)


@pytest.mark.parametrize(
    ("name", "activity"),
    [
        (
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "communication",
        ),
        ("MemcpyP2P", "communication"),
        ("MemcpyD2D", "computation"),
        ("nvjet_tst_128x256", "computation"),
    ],
)
def test_what_has_no_instruction_is_told_by_its_name(name: str, activity: str) -> None:
    found = timeline_of(one_call(gpu0={COMPUTE: [Ran(name, 100, 110)]}))
    assert [span.activity for span in found.spans] == [activity]
    assert found.text_of(found.spans[0]) == "(of no statement)"


def test_a_profile_without_devices_is_refused() -> None:
    with pytest.raises(
        errors.ProfileError, match=r"f has no event(.|\n)*CUPTI(.|\n)*0 ev"
    ):
        timeline_of({"/host:CPU": {"python": [Ran("call", 100, 200)]}})


def test_a_profile_that_has_lost_events_is_refused() -> None:
    ran = [kernel("gemm.0", start, start + 5) for start in (100, 200)]
    with pytest.raises(errors.ProfileError, match=r"device 0: 2 events of 3 calls"):
        timeline_of({"/device:GPU:0": {COMPUTE: ran}}, 3)


# --- CPU devices ------------------------------------------------------------------ #


def thunk(operation: str, start: int, end: int, device: int) -> Ran:
    stats = {"hlo_op": operation, "hlo_module": "jit_f", "device_ordinal": device}
    return Ran(operation, start, end, stats)


def test_threads_of_the_cpu_become_lanes_of_its_devices() -> None:
    """A device's events wander between threads; two at once need two lanes."""
    threads: Lines = {
        "worker/1": [thunk("gemm.0", 100, 120, 0), thunk("permute.0", 120, 150, 1)],
        "worker/2": [thunk("permute.0", 110, 130, 0), thunk("gemm.1", 130, 140, 0)],
        "worker/3": [Ran("end: gemm.0", 120, 121), Ran("Execute", 100, 200)],
    }
    found = timeline_of({"/host:CPU": threads})
    assert found.platform == "cpu"
    lanes = {(s.device, s.operation): s.stream for s in found.spans}
    assert lanes == {
        (0, "gemm.0"): "lane 0",
        (0, "permute.0"): "lane 1",
        (0, "gemm.1"): "lane 0",
        (1, "permute.0"): "lane 0",
    }
    assert found.streams(0) == ("lane 0", "lane 1")
