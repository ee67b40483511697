"""Parity group B with nvFuser: aliases, preallocated outputs, Host IR units.

One test for each row of nvFuser's tests; `check` runs every program by the interpreter
and as the emitted JAX program, and compares both with NumPy.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhost.errors import IndexRangeError, VerifyError
from jhost.lowering.interpret.program import Record
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import (
    Allocate,
    Buffer,
    Deallocate,
    GetCurrentStream,
    Set,
    SetCurrentStream,
    Stmt,
    Stream,
    Synchronize,
)
from jhost.lowering.verify.program import verify
from tests.lowering.hand_built import (
    MAIN,
    I,
    buffer,
    check,
    compute,
    integers,
    loop,
    mesh_of,
    program,
    select,
    stream,
    zeros,
)

Golden = Callable[..., None]
NO_MESH = mesh_of()


def single_device(
    params: Sequence[Buffer], results: Sequence[Buffer], *body: Stmt, name: str = "f"
) -> Program:
    return program(NO_MESH, params, results, *body, name=name)


# --- Aliases ------------------------------------------------------------------------ #


def test_alias_of_an_alias(golden: Golden) -> None:
    """Reads and writes land in the buffer at the end of the chain."""
    x, y = buffer("x: f32[2, 3]"), buffer("y: f32[8, 3]")
    half, quarter = buffer("half: f32[4, 3]"), buffer("quarter: f32[2, 3]")
    z = buffer("z: f32[4, 3]")
    host_ir = single_device(
        (x,),
        (y, z),
        *zeros(y),
        select(half, y, 0, 4, 4),
        select(quarter, half, 0, 2, 2),
        Set(out=quarter, source=x),
        compute(lambda a: a + 1, (half,), (z,)),
    )
    value = integers(2, 3)
    wanted = np.concatenate([np.zeros((6, 3), np.float32), value])
    check(host_ir, NO_MESH, (value,), wanted, wanted[4:] + 1)
    golden(str(host_ir))


def test_alias_of_an_input() -> None:
    x, y, part = buffer("x: f32[8, 3]"), buffer("y: f32[3]"), buffer("part: f32[3]")
    body = (select(part, x, 0, 5, drop=True), compute(lambda a: a * 2, (part,), (y,)))
    value = integers(8, 3)
    check(single_device((x,), (y,), *body), NO_MESH, (value,), value[5] * 2)


def test_an_alias_of_an_input_is_read_only() -> None:
    x, part = buffer("x: f32[8, 3]"), buffer("part: f32[8, 3]")
    write = compute(lambda a: a * 2, (part,), (part,))
    with pytest.raises(VerifyError, match="parameters and their aliases are only read"):
        verify(single_device((x,), (part,), select(part, x, 0, 0, 8), write))


def test_select_at_top_level() -> None:
    """The alias itself is the result (SelectHostIrTest, HirAliasSelectHostIrTest)."""
    x, y = buffer("x: f32[32, 32]"), buffer("y: f32[32]")
    value = integers(32, 32)
    host_ir = single_device((x,), (y,), select(y, x, 1, 3, drop=True))
    check(host_ir, NO_MESH, (value,), value[:, 3])


def test_slice_at_top_level() -> None:
    x, y = buffer("x: f32[32, 32]"), buffer("y: f32[32, 10]")
    value = integers(32, 32)
    host_ir = single_device((x,), (y,), select(y, x, 1, 3, 10))
    check(host_ir, NO_MESH, (value,), value[:, 3:13])


@pytest.mark.parametrize("index", [-1, 32])
def test_out_of_range_index_refuses(index: int) -> None:
    x, y = buffer("x: f32[32, 32]"), buffer("y: f32[32]")
    with pytest.raises(IndexRangeError, match=r"a part of \[0 : 32\] of x"):
        verify(single_device((x,), (y,), select(y, x, 1, index, drop=True)))


# --- Preallocated outputs ----------------------------------------------------------- #

OPERATIONS: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "Compute": (lambda x: jnp.maximum(x, 0) + 1, [(8, 4)]),
    "Add": (jnp.add, [(8, 4), (8, 4)]),
    "Sub": (jnp.subtract, [(8, 4), (8, 4)]),
    "Mul": (jnp.multiply, [(8, 4), (8, 4)]),
    "Div": (lambda x, y: x / (jnp.abs(y) + 1), [(8, 4), (8, 4)]),
    "Reduction": (lambda x: jnp.sum(x, axis=1), [(8, 3, 4)]),
    "Matmul": (jnp.matmul, [(8, 3), (3, 4)]),
    "Linear": (lambda x, w, b: x @ w.T + b[None], [(8, 3), (4, 3), (4,)]),
}


def dims_text(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))


@pytest.mark.parametrize("into", ["whole", "alias"])
@pytest.mark.parametrize("operation", [*OPERATIONS, "Set"])
def test_preallocated_outputs(operation: str, into: str) -> None:
    """The buffer given is the buffer written: the rest of it stays as it was."""
    fun, shapes = OPERATIONS.get(operation, (jnp.copy, [(8, 4)]))
    params = [buffer(f"x{k}: f32[{dims_text(s)}]") for k, s in enumerate(shapes)]
    args = [integers(*shape, seed=k) for k, shape in enumerate(shapes)]
    y, out = buffer("y: f32[8, 4]"), buffer("y: f32[8, 4]")
    make: tuple[Stmt, ...] = zeros(y)
    wanted = np.asarray(jax.jit(fun)(*args))
    if into == "alias":
        y, out = buffer("y: f32[8, 3, 4]"), buffer("part: f32[8, 4]")
        make = (
            *zeros(y),
            select(out, y, 1, 1, drop=True),
        )
        rest = np.zeros_like(wanted)
        wanted = np.stack([rest, wanted, rest], axis=1)
    work = compute(fun, params, (out,))
    if operation == "Set":
        work = Set(out=out, source=params[0])
    host_ir = single_device(params, (y,), *make, work)
    check(host_ir, NO_MESH, args, wanted)
    assert re.search(rf"^  {out.name} <- ", str(host_ir), flags=re.M)


# --- Loops and branches ------------------------------------------------------------- #


def test_for_loops(golden: Golden) -> None:
    """Start 1, stop 7, step 2, accumulated from 21: 21 + 1 + 3 + 5."""
    table, start = buffer("table: i32[7]"), buffer("start: i32[]")
    y, element = buffer("y: i32[]"), buffer("element: i32[]")
    host_ir = single_device(
        (table, start),
        (y,),
        Allocate(buffer=y),
        Set(out=y, source=start),
        loop(
            3,
            select(element, table, 0, I * 2 + 1, drop=True),
            compute(jnp.copy, (element,), (y,), reducer="sum"),
        ),
        name="ForLoops",
    )
    args = (np.arange(7, dtype=np.int32), np.int32(21))
    check(host_ir, NO_MESH, args, np.int32(30))
    golden(str(host_ir))


def test_inplace_update_in_loop() -> None:
    """x += 2 i + 1 for i < 3 makes 9."""
    x, odd = buffer("x: f32[2, 3]"), buffer("odd: f32[3]")
    y, step = buffer("y: f32[2, 3]"), buffer("step: f32[]")
    host_ir = single_device(
        (x, odd),
        (y,),
        Set(out=y, source=x),
        loop(
            3,
            select(step, odd, 0, I, drop=True),
            compute(jnp.add, (y, step), (y,)),
        ),
    )
    args = (np.zeros((2, 3), np.float32), np.array([1, 3, 5], np.float32))
    check(host_ir, NO_MESH, args, np.full((2, 3), 9, np.float32))


def test_add_in_loop() -> None:
    """[5, 6] in three chunks of columns, from the second on: the first stays zero."""
    x, y = buffer("x: f32[5, 6]"), buffer("y: f32[5, 6]")
    x_i, y_i = buffer("x_i: f32[5, 2]"), buffer("y_i: f32[5, 2]")
    at = (I + 1) * 2
    host_ir = single_device(
        (x,),
        (y,),
        *zeros(y),
        loop(
            2,
            select(x_i, x, 1, at, 2),
            select(y_i, y, 1, at, 2),
            compute(lambda x: x + x, (x_i,), (y_i,)),
        ),
    )
    value = integers(5, 6)
    wanted = value * 2
    wanted[:, :2] = 0
    check(host_ir, NO_MESH, (value,), wanted)


# --- Memory ------------------------------------------------------------------------- #

SIZE = 8 * 64 * 4


def peak(trace: Sequence[Record]) -> float:
    """The most memory held at once, in buffers of [8, 64]."""
    return max(record.live_bytes for record in trace) / SIZE


def test_allocation_inside_a_loop() -> None:
    """Each iteration has its own, and the memory of one."""
    x, y = buffer("x: f32[8, 64]"), buffer("y: f32[8, 64]")
    t = buffer("t: f32[8, 64]")
    body = (
        Allocate(buffer=t),
        compute(jnp.negative, (x,), (t,)),
        compute(jnp.copy, (t,), (y,), reducer="sum"),
        Deallocate(buffer=t),
    )
    host_ir = single_device((x,), (y,), Allocate(buffer=y), loop(4, *body))
    value = integers(8, 64)
    trace = check(host_ir, NO_MESH, (value,), -4 * value)
    assert peak(trace) == 3
    assert [r.text for r in trace].count("Deallocate(t)") == 4


def chain(*free: tuple[int, Buffer]) -> Program:
    """x -> a -> b -> c -> y, with buffers freed after the given steps."""
    names = ["x", "a", "b", "c", "y"]
    buffers = [buffer(f"{name}: f32[8, 64]") for name in names]
    body: list[Stmt] = []
    for step, (source, out) in enumerate(itertools.pairwise(buffers)):
        body.append(compute(lambda x: x + 1, (source,), (out,)))
        body += [Deallocate(buffer=b) for after, b in free if after == step]
    return single_device(buffers[:1], buffers[-1:], *body)


A, B, C = (buffer(f"{name}: f32[8, 64]") for name in "abc")


def test_deallocate() -> None:
    """The peak is three buffers, the input included; without, it is all five."""
    value = integers(8, 64)
    trace = check(chain((1, A), (2, B), (3, C)), NO_MESH, (value,), value + 4)
    assert peak(trace) == 3
    assert peak(check(chain(), NO_MESH, (value,), value + 4)) == 5


def test_a_leaked_buffer_refuses() -> None:
    with pytest.raises(VerifyError, match=r"expected a Deallocate\(b\), got none"):
        verify(chain((1, A), (3, C)))


def test_a_buffer_freed_twice_refuses() -> None:
    with pytest.raises(VerifyError, match="no buffer is freed twice"):
        verify(chain((1, A), (2, A), (2, B), (3, C)))


def test_a_freed_output_refuses() -> None:
    output = buffer("y: f32[8, 64]")
    with pytest.raises(VerifyError, match="a result is never deallocated"):
        verify(chain((1, A), (2, B), (3, C), (3, output)))


# --- Streams ------------------------------------------------------------------------ #


def streams_of(*body: Stmt) -> list[str]:
    """The streams that the computations of a program ran on, in order."""
    x, y = buffer("x: f32[4]"), buffer("y: f32[4]")
    host_ir = single_device((x,), (y,), Allocate(buffer=y), *body)
    trace = check(host_ir, NO_MESH, (integers(4),), integers(4) + 1)
    return [r.stream for r in trace if r.text.startswith("y <- ")]


STEP = compute(lambda x: x + 1, (buffer("x: f32[4]"),), (buffer("y: f32[4]"),))


def on(to: Stream, *body: Stmt) -> tuple[Stmt, ...]:
    return (SetCurrentStream(stream=to), *body)


def test_default_stream() -> None:
    assert streams_of(STEP) == ["the first stream"]


def test_set_stream() -> None:
    other, back = Stream(name="other"), on(MAIN)
    ran = streams_of(GetCurrentStream(stream=MAIN), STEP, *on(other, STEP), *back, STEP)
    assert ran == ["the first stream", "other", "the first stream"]


def test_get_current_stream() -> None:
    """A name for the current stream is that stream."""
    other, same = Stream(name="other"), Stream(name="same")
    ran = streams_of(
        GetCurrentStream(stream=MAIN),
        *on(other, GetCurrentStream(stream=same)),
        *on(MAIN, STEP),
        *on(same, STEP),
        *on(MAIN),
    )
    assert ran == ["the first stream", "other"]


def test_stream_by_index() -> None:
    """The same index is the same stream: 0, 1, 2, 0, 1, 2."""
    body = (*on(stream(I % 3), STEP), *on(MAIN))
    ran = streams_of(GetCurrentStream(stream=MAIN), loop(6, *body))
    assert ran == [f"stream[{i % 3}]" for i in range(6)]


def test_streams_are_restored_at_the_end() -> None:
    with pytest.raises(VerifyError, match="end on the stream that they began on"):
        streams_of(STEP, *on(stream(0)))


# --- Units -------------------------------------------------------------------------- #


def double_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(2 * x, axis=0)


def test_single_unit() -> None:
    x, y = buffer("x: f32[4, 8, 32]"), buffer("y: f32[8, 32]")
    host_ir = single_device((x,), (y,), compute(double_sum, (x,), (y,)))
    value = integers(4, 8, 32)
    check(host_ir, NO_MESH, (value,), 2 * value.sum(0))


def test_two_units(golden: Golden) -> None:
    x, h, y = buffer("x: f32[4, 8, 32]"), buffer("h: f32[8, 32]"), buffer("y: f32[32]")
    host_ir = single_device(
        (x,),
        (y,),
        compute(lambda x: jnp.sum(jax.lax.max(x, 0.0), axis=0), (x,), (h,), name="u0"),
        compute(double_sum, (h,), (y,), name="u1"),
        name="TwoFusions",
    )
    value = integers(4, 8, 32)
    check(host_ir, NO_MESH, (value,), 2 * np.maximum(value, 0).sum((0, 1)))
    golden(str(host_ir))


def test_three_units_in_a_diamond(golden: Golden) -> None:
    x, a, b = buffer("x: f32[4, 8]"), buffer("a: f32[4, 8]"), buffer("b: f32[8]")
    y = buffer("y: f32[4, 8]")
    host_ir = single_device(
        (x,),
        (y,),
        compute(lambda x: x * 2 + 1, (x,), (a,), name="u0"),
        compute(double_sum, (a,), (b,), name="u1"),
        compute(lambda a, b: a - b[None] * 3, (a, b), (y,), name="u2"),
        name="ThreeFusions",
    )
    value = integers(4, 8)
    a_value = value * 2 + 1
    check(host_ir, NO_MESH, (value,), a_value - 6 * a_value.sum(0))
    golden(str(host_ir))


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("iterations", [1, 8])
def test_one_unit_on_streams(streams: int, iterations: int) -> None:
    """Round robin, each iteration into its own part of the result."""
    x, y = buffer("x: f32[4, 8, 32]"), buffer(f"y: f32[{iterations}, 8, 32]")
    y_i = buffer("y_i: f32[8, 32]")
    work = (select(y_i, y, 0, I, drop=True), compute(double_sum, (x,), (y_i,)))
    on_stream = stream(I % streams)
    body = (*on(on_stream, *work), *on(MAIN), Synchronize(stream=on_stream))
    make = (Allocate(buffer=y), GetCurrentStream(stream=MAIN))
    host_ir = single_device((x,), (y,), *make, loop(iterations, *body))
    value = integers(4, 8, 32)
    wanted = np.stack([2 * value.sum(0)] * iterations)
    trace = check(host_ir, NO_MESH, (value,), wanted)
    ran = [r.stream for r in trace if r.text.startswith("y_i <- ")]
    assert ran == [f"stream[{i % streams}]" for i in range(iterations)]
