"""What the cost model makes of programs: kernels, queues, and the host."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost._text import seconds_text
from jhost.lowering.cost.clock import ends_of
from jhost.lowering.cost.exposed import transfer_times
from jhost.lowering.cost.kernels import Kernel, kernels
from jhost.lowering.cost.rates import Link, Rates, known_kinds, rates_of
from jhost.lowering.cost.simulate import predict
from jhost.lowering.cost.task import Task
from jhost.lowering.cost.tasks import unrolled
from jhost.lowering.ir.index import LoopIndex, Rank
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import Reach
from jhost.lowering.ir.remarks import Prediction
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.ir.statements import CommunicationKind, Compute, walk
from jhost.lowering.pipeline import passes, run_passes
from jhost.lowering.units.make import unit_of
from tests.lowering.hand_built import buffer
from tests.lowering.rules.reference_attention import as_with_cudnn
from tests.lowering.traced import built, lowered

# Round numbers: a multiply-add, a byte in memory and a byte on the wire take 1 s.
LINK = Link(latency=0, bandwidth=1, host=0, beside_compute=True)
RATES = Rates(
    matmul=2,
    multiprocessors=1,
    tiles=((1, 1, 1.0),),
    memory=float("inf"),
    launch=0,
    host=0,
    permute=LINK,
    collective=dataclasses.replace(LINK, beside_compute=False),
    network=dataclasses.replace(LINK, beside_compute=False, network=True),
)
H200 = rates_of("NVIDIA H200")


def gathered(pipeline: Any, rows: int = 8) -> Program:
    """x [rows over tp, 4] gathered, times w [4, 12 over tp], on four devices."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = jhost.shard(x, P("tp", None)), jhost.shard(w, P(None, "tp"))
        y = jhost.stream(x @ w, axis=0, pipeline=pipeline)
        return jhost.shard(y, P(None, "tp"))

    return lowered(f, (rows, 4), (4, 12), tp=4)


def only_unit(program: Program) -> Compute:
    (unit,) = [stmt for stmt in program.body if isinstance(stmt, Compute)]
    return unit


def test_a_transfer_is_exposed_while_nothing_is_computed() -> None:
    """Three shards come, each in 32 s; the product of a shard takes 24 s."""
    (times,) = transfer_times(gathered("p2p"), RATES).values()
    assert (times.seconds, times.exposed) == (3 * 32, 3 * 32 - 3 * 24)


# --- Kernels ------------------------------------------------------------------------ #


def test_a_contraction_is_a_kernel_and_its_neighbours_fuse() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) * 2 + 1

    made = kernels(only_unit(lowered(f, (6, 4), (4, 10))), {}, {})
    assert made == [
        Kernel(4 * (24 + 40 + 60), (1, 6, 10, 4)),
        Kernel(4 * (60 + 60)),  # the product in, the result out, nothing in between
    ]


def test_a_product_adds_another_one() -> None:
    """It reads what it adds, and nothing writes or reads what it is added to."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w + jnp.tanh(x) @ w

    made = kernels(only_unit(lowered(f, (6, 4), (4, 10))), {}, {})
    product = Kernel(4 * (24 + 40 + 60), (1, 6, 10, 4))
    adding = dataclasses.replace(product, between=4 * 60)
    assert made == [adding, product, Kernel(4 * (24 + 24))]


@pytest.mark.parametrize(("causal", "blocks"), [(False, 0), (True, 4)])
def test_each_block_of_keys_is_a_choice_where_queries_see_only_some(
    causal: bool, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_with_cudnn(monkeypatch)

    def f(q: jax.Array, k: jax.Array, w: jax.Array) -> jax.Array:
        q, k = (jhost.shard(x, P(None, None, "tp")) for x in (q, k))
        mixed = jax.nn.dot_product_attention(
            q, k, k, is_causal=causal, implementation="cudnn"
        )
        rows = jnp.reshape(mixed, (*mixed.shape[:2], -1)) @ jhost.shard(w, P("tp"))
        rows = jhost.stream(rows, axis=1, pipeline="p2p")
        return jhost.shard(rows, P(None, "tp"))

    shapes = (2, 512, 4, 64), (2, 512, 4, 64), (256, 256)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    settings = StreamDefaults()
    every = passes(settings=settings, streams=4, rates=None).all
    program = run_passes(built(f, *types, tp=4), every)
    found = [
        kernel
        for stmt in walk(program.body)
        if isinstance(stmt, Compute) and stmt.chunk is not None
        for kernel in kernels(stmt, {"tp": 4}, {Rank("tp"): 1, LoopIndex("i"): 0})
    ]
    assert max(kernel.choices for kernel in found) == blocks
    waiting = [kernel.seconds(dataclasses.replace(RATES, choice=7)) for kernel in found]
    assert max(waiting) >= 7 * blocks


def test_a_barrier_costs_nothing() -> None:
    """What it hands on is not copied, and there when what it was given is."""

    def f(x: jax.Array, w: jax.Array, barrier: bool) -> jax.Array:
        x, w = jhost.shard(x, P("tp", None)), jhost.shard(w, P(None, "tp"))
        y = jnp.tanh(x @ w)
        if barrier:
            y, w = jax.lax.optimization_barrier((y, w))
        return jnp.sin(y @ w.T) @ w

    slow = dataclasses.replace(RATES, memory=1.0)
    # Several times: what depends on the order of addresses would not always be equal.
    predictions = {
        predict(
            lowered(functools.partial(f, barrier=each), (8, 4), (4, 12), tp=4), slow
        )
        for each in (False, True) * 5
    }
    assert len(predictions) == 1


def test_one_place_of_a_stack_is_read_and_written_alone() -> None:
    """Not the whole, however many layers lie there."""

    def f(stack: jax.Array, layers: jax.Array, i: jax.Array) -> jax.Array:
        layer = lax.dynamic_slice(layers, (i[0], 0), (1, 4)) * 2
        return lax.dynamic_update_slice(stack, layer, (i[0], 0))

    types = [jax.ShapeDtypeStruct((8, 4), jnp.float32)] * 2
    types.append(jax.ShapeDtypeStruct((1,), jnp.int32))
    unit = unit_of("f", f, *types)
    ins = [buffer("a: f32[8, 4]"), buffer("b: f32[8, 4]"), buffer("i: i32[1]")]
    made = Compute(unit=unit, ins=tuple(ins), outs=(buffer("c: f32[8, 4]"),))
    assert sum(each.traffic for each in kernels(made, {}, {})) <= 2 * 4 * 4 + 4


def test_kernels_have_the_sizes_of_one_device() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = jhost.shard(x, P("dp", None)), jhost.shard(w, P(None, "tp"))
        return jhost.shard(x @ w, P("dp", "tp"))

    unit = only_unit(lowered(f, (6, 4), (4, 10), dp=3, tp=2))
    (kernel,) = kernels(unit, {"dp": 3, "tp": 2}, {Rank("dp"): 0, Rank("tp"): 0})
    assert kernel.matmul == (1, 2, 5, 4)


def test_batches_and_several_contracted_dims_multiply() -> None:
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("bhqd,bhkd->bhqk", x, y)

    (kernel,) = kernels(only_unit(lowered(f, (2, 3, 5, 7), (2, 3, 11, 7))), {}, {})
    assert kernel.matmul == (6, 5, 11, 7)


def test_matmuls_take_a_wave_or_more_of_the_tiles_that_suit_them() -> None:
    rates = dataclasses.replace(
        RATES, matmul=8, multiprocessors=4, tiles=((2, 2, 1.0), (1, 1, 0.5))
    )
    # One tile of 2 x 2 on one of four processors, or four of 1 x 1 on all.
    assert rates.matmul_seconds(1, 2, 2, 1) == 2
    assert rates.matmul_seconds(1, 2, 2, 1) == rates.matmul_seconds(1, 1, 3, 1)
    assert rates.matmul_seconds(1, 4, 4, 1) == 4
    # Five tiles of 2 x 2: of the second wave only the one that there is.
    assert rates.matmul_seconds(1, 2, 10, 1) == 5


# --- Queues ------------------------------------------------------------------------- #


def test_without_a_pipeline_transfers_and_matmuls_add_up() -> None:
    predicted = predict(gathered("off"), RATES)
    assert predicted.compute == 8 * 3 * 4
    assert predicted.communication == 4 * 4 * (8 - 2)
    assert predicted.total == predicted.compute + predicted.communication


def test_what_runs_beside_matmuls_hides_behind_them() -> None:
    """Three permutes of 32 s behind four matmuls of 24 s: the first one hides none."""
    predicted = predict(gathered("p2p"), RATES)
    assert predicted.compute == 96
    assert predicted.communication == 96
    assert predicted.total == 3 * 32 + 24


def test_what_needs_the_same_processors_hides_nothing() -> None:
    rates = dataclasses.replace(RATES, permute=RATES.collective)
    predicted = predict(gathered("p2p"), rates)
    assert predicted.total == predicted.compute + predicted.communication


def test_a_program_is_as_slow_as_its_launches() -> None:
    slow = dataclasses.replace(RATES, permute=dataclasses.replace(LINK, host=1000))
    assert predict(gathered("p2p"), slow).total == 3000


def test_the_launching_threads_of_all_devices_meet_once() -> None:
    slow = dataclasses.replace(LINK, host=1000, meet=50)
    predicted = predict(gathered("p2p"), dataclasses.replace(RATES, permute=slow))
    assert predicted.host == 3 * 1000 + 4 * 50


def test_in_a_scan_they_meet_once_as_well() -> None:
    slow = dataclasses.replace(LINK, host=1000, meet=50)

    def f(x: jax.Array, w: jax.Array) -> Any:
        x, w = jhost.shard(x, P("tp", None)), jhost.shard(w, P(None, "tp"))

        def body(x: jax.Array, _: None) -> Any:
            y = jhost.stream(x, axis=0, pipeline="p2p") @ w
            return x, jhost.shard(y, P(None, "tp"))

        return lax.scan(body, x, None, length=5)[1]

    rates = dataclasses.replace(RATES, permute=slow)
    predicted = predict(lowered(f, (8, 4), (4, 4), tp=4), rates)
    assert predicted.host == 5 * 3 * 1000 + 4 * 50


def test_parts_of_arrays_are_copied_for_matmuls() -> None:
    """Four products are written into the result: in and out of memory once more."""
    rates = dataclasses.replace(RATES, memory=1e-3, matmul=1e12)
    whole, chunks = predict(gathered("off"), rates), predict(gathered("p2p"), rates)
    operands = 3 * 4 * 4 * 3  # w is read four times and not once
    assert chunks.compute - whole.compute == pytest.approx(
        1e3 * (2 * 4 * 8 * 3 + operands)
    )


def test_parts_of_an_all_to_all_are_cut_out_and_put_in_place() -> None:
    """Each of four, the own one as well: 2 x 8 x 4 floats are read and written.

    All are cut out before the first matmul; none is put before it has come, for which
    no matmul waits.
    """

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        there = jhost.shard(jhost.shard(x, P("tp")), P(None, "tp"))
        y = jnp.einsum("gecm,emf->gecf", there, w)
        return jhost.shard(jhost.stream(y, axis=0, pipeline="p2p"), P("tp"))

    program = lowered(f, (8, 4, 8, 4), (4, 4, 4), tp=4)
    part = 4 * 2 * 8 * 4
    slow = dataclasses.replace(RATES, memory=1.0)
    tasks = unrolled(program, slow, functools.partial(predict, rates=slow))
    copies = Counter((task.copy, task.seconds) for task in tasks if task.copy)
    assert copies == {("cut", 2 * part): 4, ("put", 2 * part): 4}
    made = predict(program, slow)
    assert made.communication == 6 * part
    assert made.total == made.compute


@given(
    rows=st.sampled_from([4, 8, 64]),
    latency=st.floats(0, 100),
    bandwidth=st.floats(0.1, 100),
)
def test_a_pipeline_is_bounded_by_its_queues(
    rows: int, latency: float, bandwidth: float
) -> None:
    link = dataclasses.replace(LINK, latency=latency, bandwidth=bandwidth)
    predicted = predict(gathered("p2p", rows), dataclasses.replace(RATES, permute=link))
    longest = max(predicted.compute, predicted.communication)
    assert longest <= predicted.total
    assert predicted.total <= predicted.compute + predicted.communication


def test_what_goes_over_the_network_takes_no_turns_with_permutes() -> None:
    """Two gathers are done when the longer is: one of them leaves the host."""

    def f(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, y = jhost.shard(x, P("dp")), jhost.shard(y, P("tp"))
        return jhost.shard(x, P()), jhost.shard(y, P())

    program = lowered(f, (8, 4), (8, 4), dp=2, tp=2)
    beside = dataclasses.replace(
        RATES, collective=LINK, network=dataclasses.replace(LINK, network=True)
    )

    def moved(rates: Rates, reach: Mapping[str, Reach]) -> float:
        return predict(program, dataclasses.replace(rates, reach=reach)).total

    same = moved(beside, {"dp": "host"})
    assert moved(beside, {}) == same > moved(beside, {"dp": "hosts"})
    # Of NCCL's kernels XLA has one under way at a time.
    assert moved(RATES, {}) == moved(RATES, {"dp": "hosts"})


# --- Transfers that XLA orders ------------------------------------------------------ #


def work(seconds: float, *after: int) -> Task:
    return Task(seconds=seconds, host=0, after=frozenset(after))


def moved(seconds: float, *after: int) -> Task:
    return dataclasses.replace(work(seconds, *after), transfer=True, unordered=True)


def early(seconds: float, *after: int, taken: float = 0.0) -> Task:
    return dataclasses.replace(moved(seconds, *after), early=True, taken=taken)


def ordered(seconds: float, *after: int) -> Task:
    return dataclasses.replace(work(seconds, *after), transfer=True)


def loop(seconds: float, *after: int) -> Task:
    return dataclasses.replace(work(seconds, *after), inside=Prediction(total=seconds))


def end_of(*tasks: Task) -> float:
    return max(ends_of(tasks).values())


@pytest.mark.parametrize(("between", "exposed"), [(0, 10), (8, 2), (12, 0)])
def test_a_transfer_starts_behind_the_kernel_that_it_is_issued_with(
    between: float, exposed: float
) -> None:
    """So nothing hides it, if its reader is the next kernel."""
    tasks = moved(1), moved(10), work(20, 0), work(between, 2), work(5, 1, 3)
    assert end_of(*tasks) == 1 + 20 + between + exposed + 5


def test_what_has_only_just_been_made_is_sent_before_the_next_kernel() -> None:
    assert end_of(work(20), moved(10, 0), work(15)) == 20 + 15


def test_one_transfer_is_under_way_and_the_first_that_is_read_comes_first() -> None:
    tasks = moved(10), moved(10), work(20, 1), work(5, 0, 2)
    ends = ends_of(tasks)
    assert ends[1] == 10
    # The other one is issued once this has ended, with the kernel that reads this.
    assert ends[0] == 10 + 20 + 10


@pytest.mark.parametrize(("read_by_a_loop", "exposed"), [(False, 0), (True, 10)])
def test_work_for_the_end_alone_stands_beside_nothing_that_a_loop_waits_for(
    read_by_a_loop: bool, exposed: float
) -> None:
    inside = Prediction(total=30, compute=30, communication=0, host=0)
    last = work(30, 3)
    if read_by_a_loop:
        last = dataclasses.replace(last, inside=inside)
    tasks = work(5), moved(10, 0), work(20), work(1, 1), last
    assert end_of(*tasks) == 5 + exposed + 20 + 1 + 30


def test_nothing_is_computed_while_the_first_kernel_waits_for_its_operand() -> None:
    assert end_of(moved(10), work(20, 0)) == 10 + 20


def test_with_options_all_begin_and_take_from_what_runs_beside_them() -> None:
    """They take turns in the order in which they are read."""
    tasks = early(10, taken=2), early(10, taken=2), work(20, 1), work(25, 0, 2)
    ends = ends_of(tasks)
    assert ends[1] == 10, "the first kernel waits for it"
    assert ends[2] == 10 + 20
    # The other one begins behind the kernel that it was issued with, and hides no more.
    assert ends[0] == 10 + 20 + 10
    assert end_of(*tasks) == 10 + 20 + 10 + 25
    assert end_of(early(10, taken=2), work(20), work(15), work(5, 0)) == 42


@pytest.mark.parametrize(("copied", "first"), [(False, 40), (True, 30)])
def test_a_transfer_that_is_needed_before_ordered_ones_is_not_behind_them(
    copied: bool, first: float
) -> None:
    """A program's first gather waits where it is issued, before gathers in order."""
    rest = [dataclasses.replace(ordered(30), copied=copied) for _ in range(2)]
    tasks = moved(10), *rest, work(5, 0), work(5, 1, 3), work(5, 2, 4)
    ends = ends_of(tasks)
    assert ends[0] == 10
    assert [ends[1], ends[2]] == [first, first + 30]


def test_a_scan_of_no_iterations_waits_for_no_transfer() -> None:
    assert end_of(moved(3), loop(0, 0), work(5)) == 5


@given(st.data())
def test_no_task_ends_before_what_it_waits_for(data: Any) -> None:
    """And the whole takes at least as long as its kernels, at most as all tasks."""
    tasks = list[Task]()
    for number in range(data.draw(st.integers(1, 12))):
        before = st.sets(st.integers(0, number - 1)) if number else st.just(set[int]())
        make = data.draw(st.sampled_from([work, moved, early, ordered, loop]))
        seconds = data.draw(st.integers(0, 9))
        tasks.append(make(seconds, *data.draw(before)))
    ends = ends_of(tasks)
    for number, task in enumerate(tasks):
        started = ends[number] - task.seconds
        assert all(ends[before] <= started for before in task.after)
    least = sum(task.seconds for task in tasks if not task.transfer)
    assert least <= max(ends.values()) <= sum(task.seconds for task in tasks)


# --- Rates -------------------------------------------------------------------------- #


def test_between_processes_permutes_are_collectives() -> None:
    assert H200 is not None
    assert H200.permute.beside_compute
    assert H200.link("CollectivePermute", ["tp"]) == H200.permute
    apart = rates_of("NVIDIA H200", {"dp": "hosts", "ep": "host"})
    assert apart is not None
    assert apart.link("CollectivePermute", ["tp"]) == H200.permute
    assert apart.link("CollectivePermute", ["ep"]) == H200.collective
    assert apart.link("AllGather", ["tp", "ep"]) == H200.collective
    assert apart.link("AllGather", ["tp", "dp"]) == H200.network


@pytest.mark.parametrize(
    ("kind", "devices", "seconds"),
    [("AllGather", 4, 1.5), ("AllGather", 2, 2.5), ("AllReduce", 2, 1.5)],
)
def test_two_devices_gather_more_slowly(
    kind: CommunicationKind, devices: int, seconds: float
) -> None:
    link = Link(latency=0.5, bandwidth=4, between_two=2, host=0, beside_compute=False)
    assert link.seconds(kind, 4, devices) == seconds


@pytest.mark.parametrize("kind", [k for k in known_kinds() if k.startswith("NVIDIA")])
def test_gpus_are_measured_or_estimated_from_the_one_that_was(kind: str) -> None:
    rates = rates_of(kind)
    assert rates is not None
    assert rates.estimated == (kind not in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    assert H200 is not None
    faster = [
        rates.matmul / H200.matmul,
        rates.memory / H200.memory,
        rates.permute.bandwidth / H200.permute.bandwidth,
    ]
    assert rates.permute.beside_compute
    assert 0.05 < min(faster) <= max(faster) < 2.5


def test_an_h100_moves_bytes_as_an_h200_does() -> None:
    h100 = rates_of("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    assert H200 is not None
    assert (h100.permute, h100.collective) == (H200.permute, H200.collective)
    assert h100.memory < H200.memory


def test_unknown_devices_have_no_rates() -> None:
    assert rates_of("an abacus") is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5, "1.5 s"), (0.00123456, "1.23 ms"), (7e-6, "7 us")]
)
def test_seconds_are_said_in_the_unit_that_suits_them(
    seconds: float, text: str
) -> None:
    assert seconds_text(seconds) == text


def test_a_prediction_says_its_parts() -> None:
    assert str(predict(gathered("p2p"), RATES)) == (
        "120 s (compute 96 s, communication 96 s, host 0 us)"
    )


def test_control_flow_and_accumulators_are_simulated() -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        x, w = jhost.shard(x, P("tp", None)), jhost.shard(w, P("tp", None))
        x = jhost.stream(x, axis=0, chunks=2)
        return jhost.shard(x.T @ w, P())

    program = lowered(f, (8, 4), (8, 6), tp=2)
    predicted = predict(program, RATES)
    assert predicted.compute == 4 * 4 * 6
    assert predicted.total == predicted.compute + predicted.communication


def test_a_scan_cuts_out_the_slices_that_it_sends() -> None:
    """And reads others in place, or as what is made of them."""

    def scanned(send_cast: bool) -> float:
        def layers(x: jax.Array, ws: jax.Array) -> jax.Array:
            def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                w = jnp.sin(w) if send_cast else w
                return x @ jhost.shard(w, P()), None

            ws = jhost.shard(ws, P(None, "dp"))
            return lax.scan(layer, jhost.shard(x, P("dp")), ws)[0]

        rates = dataclasses.replace(RATES, memory=1.0, matmul=float("inf"))
        program = lowered(layers, (8, 4), (3, 4, 4), dp=2)
        return predict(program, rates).compute

    shard = 4 * 4 * 4 // 2
    cut, cast = 3 * 2 * shard, 3 * 2 * shard  # read and written in each iteration
    assert scanned(False) - cut == scanned(True) - cast > 0


def test_in_a_body_collectives_run_beside_nothing_by_default() -> None:
    """What the gather could run beside is a matmul that does not need it."""

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        gathered = jhost.shard(jnp.sin(x), P())
        beside = jhost.shard(x @ w, P("tp", None))
        return gathered, jhost.shard(beside + gathered[:, :1], P("tp", None))

    def scanned(x: jax.Array, w: jax.Array) -> Any:
        x, w = jhost.shard(x, P("tp", None)), jhost.shard(w, P())
        return lax.scan(lambda x, _: (x, body(x, w)), x, length=5)

    def written(x: jax.Array, w: jax.Array) -> Any:
        return body(jhost.shard(x, P("tp", None)), jhost.shard(w, P()))

    once = predict(lowered(written, (8, 4), (4, 6), tp=2), RATES)
    assert once.total < once.compute + once.communication
    often = predict(lowered(scanned, (8, 4), (4, 6), tp=2), RATES)
    assert often.total == 5 * (once.compute + once.communication)
    early = predict(lowered(scanned, (8, 4), (4, 6), tp=2), RATES, early=True)
    assert early.total == 5 * once.total, "XLA has options to move them"
