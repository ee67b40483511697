"""What the emitted JAX program consists of: copies, slices and barriers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn, jaxprs_in_params
from jax.sharding import Mesh

from jhost.errors import VerifyError
from jhost.lowering.emit.program import emit
from jhost.lowering.interpret.program import interpret
from jhost.lowering.ir.index import Rank, as_index, minimum
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import (
    Allocate,
    Chunk,
    Compute,
    GetCurrentStream,
    Reshard,
    Set,
    SetCurrentStream,
    Stmt,
    Stream,
    Synchronize,
    Unit,
    UnitEqn,
    Wait,
)
from jhost.lowering.rules.dim_rule import shape_of
from jhost.lowering.rules.table import rule_of
from jhost.lowering.verify.program import verify
from tests.lowering.hand_built import (
    MAIN,
    I,
    buffer,
    check,
    communicate,
    compute,
    integers,
    loop,
    mesh_of,
    program,
    select,
    stream,
    zeros,
)
from tests.lowering.on_mesh import program_of

TP = Rank("tp")


def equations(host_ir: Program, mesh: Mesh, *args: Any) -> list[JaxprEqn]:
    """Every equation of the emitted program, in order."""
    return list(_inside(jax.make_jaxpr(emit(host_ir, mesh))(*args)))


def _inside(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _inside(inner)


def counts(host_ir: Program, mesh: Mesh, *args: Any) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in equations(host_ir, mesh, *args))


def barriers(eqns: Sequence[JaxprEqn]) -> list[list[tuple[int, ...]]]:
    """The shapes that go through each barrier."""
    return [
        [shape_of(v) for v in eqn.invars]
        for eqn in eqns
        if eqn.primitive.name == "optimization_barrier"
    ]


def rows(*, index: Any = I * 2, streams: int = 2) -> Program:
    """y = x @ w in four chunks of rows."""
    x, w, y = buffer("x: f32[8, 4]"), buffer("w: f32[4, 3]"), buffer("y: f32[8, 3]")
    x_i, y_i = buffer("x_i: f32[2, 4]"), buffer("y_i: f32[2, 3]")
    body: tuple[Stmt, ...] = (
        select(x_i, x, 0, index, 2),
        select(y_i, y, 0, index, 2),
        compute(jnp.matmul, (x_i, w), (y_i,)),
    )
    if streams > 1:
        leave = SetCurrentStream(stream=MAIN)
        body = (SetCurrentStream(stream=stream(I % streams)), *body, leave)
    return program(
        mesh_of(tp=4),
        (x, w),
        (y,),
        Allocate(buffer=y),
        GetCurrentStream(stream=MAIN),
        loop(4, *body),
    )


X, W = integers(8, 4), integers(4, 3, seed=1)


# --- Buffers -------------------------------------------------------------------- #


def test_static_pieces_are_put_together_by_one_concatenation() -> None:
    mesh = mesh_of(tp=4)
    check(rows(), mesh, (X, W), X @ W)
    found = counts(rows(), mesh, X, W)
    assert found["concatenate"] == 1
    assert not found["dynamic_update_slice"]
    assert not found["dynamic_slice"]


def test_pieces_in_any_order_are_put_together_by_one_concatenation() -> None:
    mesh, backwards = mesh_of(tp=4), rows(index=6 - I * 2)
    check(backwards, mesh, (X, W), X @ W)
    assert counts(backwards, mesh, X, W)["concatenate"] == 1


def test_pieces_at_a_rank_go_into_an_array_that_is_not_filled() -> None:
    mesh, ring = mesh_of(tp=4), rows(index=(TP + I) % 4 * 2)
    check(ring, mesh, (X, W), X @ W)
    found = counts(ring, mesh, X, W)
    assert found["dynamic_update_slice"] == 4
    assert found["empty"] == 1
    assert not found["broadcast_in_dim"]


def test_parts_at_a_rank_are_placed_before_the_next_step() -> None:
    """That may have to wait for a transfer, and the copy has the time."""
    eqns = equations(rows(index=(TP + I) % 4 * 2), mesh_of(tp=4), X, W)
    work = ("dot_general", "dynamic_update_slice")
    names = [eqn.primitive.name for eqn in eqns]
    assert [name for name in names if name in work] == [*work] * 4
    # The step's rows and the array so far, before the products that stand for steps.
    assert [shapes[:2] for shapes in barriers(eqns)] == [[(2, 4), (8, 3)]] * 3


def test_an_index_in_which_the_rank_cancels_is_static() -> None:
    found = counts(rows(index=(TP + I * 2 - TP)), mesh_of(tp=4), X, W)
    assert found["concatenate"] == 1
    assert not found["axis_index"]


def test_what_was_written_is_read_back_without_a_copy() -> None:
    """A second loop reads the chunks of the first; nothing is ever whole."""
    x, y = buffer("x: f32[8, 4]"), buffer("y: f32[8, 4]")
    x_i, y_i = buffer("x_i: f32[2, 4]"), buffer("y_i: f32[2, 4]")
    last, z = buffer("last: f32[2, 4]"), buffer("z: f32[2, 4]")
    at = (TP + I) % 4 * 2
    host_ir = program(
        mesh_of(tp=4),
        (x,),
        (z,),
        Allocate(buffer=y),
        Allocate(buffer=z),
        loop(
            4,
            select(x_i, x, 0, at, 2),
            select(y_i, y, 0, at, 2),
            compute(lambda a: a * 2, (x_i,), (y_i,)),
        ),
        loop(
            4,
            select(last, y, 0, at, 2),
            compute(jnp.copy, (last,), (z,), reducer="sum"),
        ),
    )
    mesh = mesh_of(tp=4)
    check(host_ir, mesh, (X,), 2 * X.reshape(4, 2, 4).sum(0))
    found = counts(host_ir, mesh, X)
    assert found["dynamic_slice"] == 4  # of x alone
    assert not found["dynamic_update_slice"]
    assert not found["concatenate"]


def test_the_first_sum_needs_no_zeros() -> None:
    x, y, x_i = buffer("x: f32[8, 4]"), buffer("y: f32[4]"), buffer("x_i: f32[4]")
    host_ir = program(
        mesh_of(),
        (x,),
        (y,),
        Allocate(buffer=y),
        loop(
            8,
            select(x_i, x, 0, I, drop=True),
            compute(jnp.square, (x_i,), (y,), reducer="sum"),
        ),
    )
    check(host_ir, mesh_of(), (X,), np.square(X).sum(0))
    found = counts(host_ir, mesh_of(), X)
    assert found["add"] == 7
    assert not found["broadcast_in_dim"]


def test_a_write_into_a_part_of_a_part_is_merged_into_one_update() -> None:
    x, y = buffer("x: f32[1, 4]"), buffer("y: f32[8, 4]")
    half, row = buffer("half: f32[4, 4]"), buffer("row: f32[1, 4]")
    host_ir = program(
        mesh_of(tp=4),
        (x,),
        (y,),
        *zeros(y),
        select(half, y, 0, 4, 4),
        select(row, half, 0, TP, 1),
        Set(out=row, source=x),
    )
    found = counts(host_ir, mesh_of(tp=4), X[:1])
    assert found["dynamic_update_slice"] == 1
    assert not found["dynamic_slice"]


def test_parts_of_grouped_parts() -> None:
    """The second chunk of each shard, then its last rows, then a column."""
    x, y = buffer("x: f32[8, 4]"), buffer("y: f32[8, 4]")
    a, b, c = buffer("a: f32[4, 4]"), buffer("b: f32[2, 4]"), buffer("c: f32[2]")
    ones = buffer("ones: f32[2]")
    host_ir = program(
        mesh_of(),
        (x, ones),
        (y, c),
        Set(out=y, source=x),
        select(a, y, 0, 2, 2, groups=2),  # rows 2 3 6 7
        select(b, a, 0, 2, 2),  # rows 6 7
        select(c, b, 1, 3, drop=True),
        Set(out=c, source=ones),
    )
    wanted = X.copy()
    wanted[6:, 3] = 9
    nines = np.full(2, 9, np.float32)
    check(host_ir, mesh_of(), (X, nines), wanted, nines)


def test_a_ragged_last_chunk() -> None:
    """Seven rows in chunks of three: the rules give the shapes of the last one."""
    x, w, y = buffer("x: f32[7, 4]"), buffer("w: f32[4, 3]"), buffer("y: f32[7, 3]")
    x_i, y_i = buffer("x_i: f32[3, 4]"), buffer("y_i: f32[3, 3]")
    t_i = buffer("t_i: f32[3, 3]")
    size = minimum(3, 7 - I * 3)
    chunk = Chunk(start=I * 3, size=size, extent=7)

    def streamed(fun: Any, ins: Any, out: Any, whole: Sequence[Any]) -> Compute:
        (eqn,) = jax.make_jaxpr(fun)(*whole).eqns
        rule = rule_of(eqn)
        axes = ((),) * len(rule.sizes)
        factor = rule.results[0][0]
        assert factor is not None
        unit_eqn = UnitEqn(eqn=eqn, rule=rule, axes=axes, stream=factor.factor)
        unit = Unit(
            name="u",
            eqns=(unit_eqn,),
            invars=tuple(eqn.invars),  # pyright: ignore[reportArgumentType]
            outvars=tuple(eqn.outvars),
        )
        return Compute(unit=unit, ins=ins, outs=(out,), chunk=chunk)

    full, weight = integers(7, 4), W
    iota = jax.eval_shape(lambda: jnp.zeros((7, 3), np.float32))
    host_ir = program(
        mesh_of(),
        (x, w),
        (y,),
        Allocate(buffer=y),
        loop(
            3,
            select(x_i, x, 0, I * 3, size),
            select(y_i, y, 0, I * 3, size),
            streamed(jax.lax.dot, (x_i, w), t_i, (full, weight)),
            streamed(jax.lax.sin, (t_i,), y_i, (iota,)),
        ),
    )
    check(host_ir, mesh_of(), (full, weight), np.asarray(jnp.sin(full @ weight)))


def test_random_keys_in_chunks() -> None:
    """Keys have no NumPy dtype; they go through slices and loops all the same."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = dataclasses.replace(buffer("x: f32[4]"), dtype=keys.dtype)
    k_i, k_out = (dataclasses.replace(x, name=n, shape=(2,)) for n in ("k_i", "k_out"))
    y = dataclasses.replace(x, name="y")
    host_ir = program(
        mesh_of(),
        (x,),
        (y,),
        Allocate(buffer=y),
        loop(
            2,
            select(k_i, x, 0, I * 2, 2),
            select(k_out, y, 0, 2 - I * 2, 2),
            Set(out=k_out, source=k_i),
        ),
    )
    verify(host_ir)
    (interpreted,), _ = interpret(host_ir, mesh_of(), (keys,))
    for result in (jax.jit(emit(host_ir, mesh_of()))(keys)[0], interpreted):
        assert (result == keys[np.array([2, 3, 0, 1])]).all()


# --- Order ---------------------------------------------------------------------- #


def test_each_chunk_waits_for_the_one_before() -> None:
    """The operand of step i and the result of step i - 1 go through one barrier."""
    eqns = equations(rows(streams=4), mesh_of(tp=4), X, W)
    assert barriers(eqns) == [[(2, 4), (2, 3)]] * 3
    dots = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    found = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    for previous, barrier, dot in zip(dots, found, dots[1:], strict=False):
        assert barrier.invars[1] is previous.outvars[0]
        assert dot.invars[0] is barrier.outvars[0]


def test_what_is_the_same_in_each_iteration_is_not_tied() -> None:
    shapes = barriers(equations(rows(), mesh_of(tp=4), X, W))
    assert shapes
    assert all((4, 3) not in barrier for barrier in shapes)


def test_a_step_all_of_whose_operands_are_the_same_is_tied() -> None:
    x, y, z = buffer("x: f32[8, 4]"), buffer("y: f32[8, 4]"), buffer("z: f32[8, 4]")
    host_ir = program(
        mesh_of(),
        (x,),
        (z,),
        Allocate(buffer=z),
        loop(
            3,
            compute(jnp.sin, (x,), (y,)),
            compute(jnp.add, (y, y), (z,), reducer="sum"),
        ),
    )
    # The second step of each iteration waits for the first by its operand.
    assert len(barriers(equations(host_ir, mesh_of(), X))) == 2


def test_nothing_is_ordered_outside_loops() -> None:
    x, y, z = buffer("x: f32[8, 4]"), buffer("y: f32[8, 4]"), buffer("z: f32[8, 4]")
    body = (compute(jnp.sin, (x,), (y,)), compute(jnp.cos, (x,), (z,)))
    host_ir = program(mesh_of(), (x,), (y, z), *body)
    assert not barriers(equations(host_ir, mesh_of(), X))


def test_a_product_for_what_stands_behind_a_scan_is_made_before_it() -> None:
    """Else XLA would keep what the product reads for all of the scan."""

    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept = (x.T @ x).astype(np.float32)
        ended, _ = lax.scan(lambda c, w: (c @ w, None), x, w)
        return ended, jnp.sin(kept)

    shapes = (4, 8), (3, 8, 8)
    args = [np.ones(shape, jnp.bfloat16) for shape in shapes]
    mesh = mesh_of(tp=2)
    eqns = equations(program_of(f, *args, mesh=mesh), mesh, *args)
    product = next(e for e in eqns if e.primitive.name == "dot_general")
    (scan,) = (e for e in eqns if e.primitive.name == "scan")
    (barrier,) = (e for e in eqns if e.primitive.name == "optimization_barrier")
    assert product.outvars[0] in barrier.invars
    assert not {*barrier.outvars}.isdisjoint(scan.invars)


def gathers(streams: int) -> Program:
    """Chunk by chunk: gather, wait, multiply."""
    x, w, y = buffer("x: f32[4@tp, 8]"), buffer("w: f32[8, 2]"), buffer("y: f32[16, 2]")
    x_i, g, y_i = (
        buffer("x_i: f32[1@tp, 8]"),
        buffer("g: f32[4, 8]"),
        buffer("y_i: f32[4, 2]"),
    )
    body = (
        SetCurrentStream(stream=stream(I % streams)),
        select(x_i, x, 0, I),
        communicate("AllGather", g, x_i, dim=0),
        Wait(communication="c"),
        select(y_i, y, 0, I, groups=4),
        compute(jnp.matmul, (g, w), (y_i,)),
        SetCurrentStream(stream=MAIN),
        Synchronize(stream=stream(I % streams)),
    )
    make = (Allocate(buffer=y), GetCurrentStream(stream=MAIN))
    return program(mesh_of(tp=4), (x, w), (y,), *make, loop(4, *body))


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_a_communication_waits_only_for_its_own_stream(streams: int) -> None:
    """With s streams the first s gathers start at once."""
    mesh, x, w = mesh_of(tp=4), integers(16, 8), integers(8, 2)
    check(gathers(streams), mesh, (x, w), x @ w)
    eqns = equations(gathers(streams), mesh, x, w)
    tied = {
        v for e in eqns if e.primitive.name == "optimization_barrier" for v in e.outvars
    }
    sources = [e.invars[0] for e in eqns if e.primitive.name == "all_gather"]
    assert [source in tied for source in sources] == [i >= streams for i in range(4)]


def test_what_stands_behind_a_wait_comes_after_the_communication() -> None:
    """Also a step that does not read what was received."""
    x, w = buffer("x: f32[1@tp, 8]"), buffer("w: f32[8, 2]")
    g, y = buffer("g: f32[4, 8]"), buffer("y: f32[8, 2]")
    steps = (
        communicate("AllGather", g, x, dim=0),
        Wait(communication="c"),
        compute(jnp.sin, (w,), (y,)),
    )
    body = (Allocate(buffer=g), Allocate(buffer=y), GetCurrentStream(stream=MAIN))
    mesh = mesh_of(tp=4)
    host_ir = program(mesh, (x, w), (g, y), *body, loop(1, *steps))
    found = equations(host_ir, mesh, integers(4, 8), integers(8, 2))
    named = {eqn.primitive.name: eqn for eqn in found}
    barrier = named["optimization_barrier"]
    assert named["all_gather"].outvars[0] in barrier.invars
    assert named["sin"].invars[0] in barrier.outvars


def beside_work() -> list[JaxprEqn]:
    """The equations of a transfer on its own stream, a sine beside it, and a reader."""
    own, moves = Stream(name="own"), Stream(name="moves")
    x, w = buffer("x: f32[1@tp, 8]"), buffer("w: f32[8, 2]")
    g, g_0, g_1 = (
        buffer("g: f32[2, 8]"),
        buffer("g_0: f32[1, 8]"),
        buffer("g_1: f32[1, 8]"),
    )
    v, y = buffer("v: f32[8, 2]"), buffer("y: f32[2, 2]")
    body = (
        GetCurrentStream(stream=MAIN),
        SetCurrentStream(stream=own),
        Synchronize(stream=MAIN),
        SetCurrentStream(stream=moves),
        Synchronize(stream=own),
        Allocate(buffer=g),
        select(g_0, g, 0, 0),
        Set(out=g_0, source=x),
        select(g_1, g, 0, 1),
        communicate("CollectivePermute", g_1, x, shift=1),
        SetCurrentStream(stream=own),
        Synchronize(stream=moves),
        compute(jnp.sin, (w,), (v,)),
        SetCurrentStream(stream=moves),
        Wait(communication="c"),
        SetCurrentStream(stream=own),
        Synchronize(stream=moves),
        compute(jnp.matmul, (g, w), (y,)),
        SetCurrentStream(stream=MAIN),
        Synchronize(stream=own),
    )
    mesh = mesh_of(tp=2)
    host_ir = program(mesh, (x, w), (y, v), *body)
    return equations(host_ir, mesh, integers(2, 8), integers(8, 2))


def test_a_part_that_came_is_put_in_place_behind_the_work_beside_its_transfer() -> None:
    """Else XLA would wait for the transfer before that work."""
    found = beside_work()
    (came,) = (e.outvars[0] for e in found if e.primitive.name == "ppermute")
    (worked,) = (e.outvars[0] for e in found if e.primitive.name == "sin")
    readers = [e for e in found if came in e.invars]
    assert {e.primitive.name for e in readers} == {"optimization_barrier"}
    assert any(worked in e.invars for e in readers)


def test_what_was_sent_is_in_no_barrier_behind_its_wait() -> None:
    """Else XLA would keep all that was ever sent until the last barrier."""
    found = beside_work()
    (permute,) = (e for e in found if e.primitive.name == "ppermute")
    barriers = [e for e in found if e.primitive.name == "optimization_barrier"]
    behind = [e for e in barriers if found.index(e) > found.index(permute)]
    (sent,), (came,) = permute.invars, permute.outvars
    first = next(n for n, e in enumerate(behind) if came in e.invars)
    assert not any(sent in e.invars for e in behind[first:])


def test_the_stream_that_synchronizes_goes_on_after_the_other() -> None:
    """Two steps on two streams, then one on the first that must come after both."""
    x, y = buffer("x: f32[8, 4]"), buffer("y: f32[8, 4]")
    a, b = buffer("a: f32[8, 4]"), buffer("b: f32[8]")
    steps = (
        compute(jnp.sin, (x,), (a,)),
        SetCurrentStream(stream=stream(1)),
        compute(lambda x: x[:, 0], (x,), (b,)),
        SetCurrentStream(stream=MAIN),
        Synchronize(stream=stream(1)),
        compute(jnp.cos, (x,), (y,)),
    )
    body = (GetCurrentStream(stream=MAIN), loop(1, *steps))
    host_ir = program(mesh_of(), (x,), (y,), Allocate(buffer=y), *body)
    assert barriers(equations(host_ir, mesh_of(), X))[-1] == [(8, 4), (8, 4), (8,)]


def test_xla_keeps_the_chunks_apart() -> None:
    text = jax.jit(emit(rows(), mesh_of(tp=4))).lower(X, W).compile().as_text()
    assert text is not None
    assert text.count(" dot(") + text.count("__onednn$matmul") == 4


# --- The whole -------------------------------------------------------------------- #


def test_without_mesh_axes_there_is_no_shard_map() -> None:
    x, y = buffer("x: f32[8, 4]"), buffer("y: f32[8, 4]")
    host_ir = program(mesh_of(), (x,), (y,), compute(jnp.sin, (x,), (y,)))
    assert not counts(host_ir, mesh_of(), X)["shard_map"]
    assert counts(rows(), mesh_of(tp=4), X, W)["shard_map"] == 1


def test_a_reshard_must_have_become_communication() -> None:
    x = buffer("x: f32[8, 4]")
    spread, moved = buffer("y: f32[2@tp, 4]"), buffer("z: f32[8, 1@tp]")
    mesh = mesh_of(tp=4)
    for source, out in ((x, spread), (spread, moved)):
        host_ir = program(mesh, (source,), (out,), Reshard(out=out, source=source))
        shape = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        with pytest.raises(VerifyError, match="it is made communication before"):
            jax.eval_shape(emit(host_ir, mesh), shape)


def test_a_chunk_of_several_stretches_knows_where_each_stands() -> None:
    """`iota` asks for the positions of its chunk."""
    y = buffer("y: i32[8]")
    (eqn,) = jax.make_jaxpr(lambda: jnp.arange(8, dtype=np.int32))().eqns
    rule = rule_of(eqn)
    unit_eqn = UnitEqn(eqn=eqn, rule=rule, axes=((),), stream=0)
    unit = Unit(name="u", eqns=(unit_eqn,), invars=(), outvars=tuple(eqn.outvars))
    y_i = buffer("y_i: i32[4]")

    def host_ir(groups: int) -> Program:
        steps = 4 // groups
        start, size = I * steps, as_index(steps)
        chunk = Chunk(start=start, size=size, extent=8 // groups, groups=groups)
        body = (
            select(y_i, y, 0, start, size, groups=groups),
            Compute(unit=unit, ins=(), outs=(y_i,), chunk=chunk),
        )
        return program(mesh_of(), (), (y,), Allocate(buffer=y), loop(2, *body))

    check(host_ir(1), mesh_of(), (), np.arange(8))
    check(host_ir(2), mesh_of(), (), np.arange(8))


def test_a_wide_accumulator_is_summed_in_its_dtype() -> None:
    """bfloat16 products, each added to float32 without being rounded."""
    x, w = buffer("x: bf16[8, 16]"), buffer("w: bf16[8, 16]")
    y, x_i, w_i = (
        buffer("y: f32[16, 16]"),
        buffer("x_i: bf16[2, 16]"),
        buffer("w_i: bf16[2, 16]"),
    )
    xs = integers(8, 16).astype(jnp.bfloat16) * jnp.bfloat16(1.0625)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, w, (((0,), (0,)), ((), ())))

    (eqn,) = jax.make_jaxpr(product)(xs, xs).eqns
    rule = rule_of(eqn)
    (factor,) = [f for f, reducer in enumerate(rule.reducers) if reducer]
    unit_eqn = UnitEqn(
        eqn=eqn,
        rule=rule,
        axes=((),) * len(rule.sizes),
        stream=factor,
        accumulators=(np.dtype(np.float32),),
    )
    variables = tuple(eqn.invars)
    unit = Unit(
        name="u",
        eqns=(unit_eqn,),
        invars=variables,  # pyright: ignore[reportArgumentType]
        outvars=tuple(eqn.outvars),
    )
    chunk = Chunk(start=I * 2, size=as_index(2), extent=8)
    body = (
        select(x_i, x, 0, I * 2, 2),
        select(w_i, w, 0, I * 2, 2),
        Compute(unit=unit, ins=(x_i, w_i), outs=(y,), chunk=chunk, reducer="sum"),
    )
    host_ir = program(mesh_of(), (x, w), (y,), Allocate(buffer=y), loop(4, *body))
    exact = np.asarray(xs, np.float32)
    check(host_ir, mesh_of(), (xs, xs), exact.T @ exact)
