"""Host IR programs by hand, and the two ways to run them, for tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jhost.lowering.emit.program import emit
from jhost.lowering.interpret.program import Record, interpret
from jhost.lowering.ir.index import Index, IndexLike, LoopIndex, as_index
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import (
    Allocate,
    Buffer,
    Chunk,
    Communicate,
    CommunicationKind,
    Compute,
    Dim,
    For,
    Select,
    Stmt,
    Stream,
)
from jhost.lowering.rules.reducers import Reducer
from jhost.lowering.units.make import unit_of
from jhost.lowering.verify.program import verify

I = LoopIndex("i")  # noqa: E741
J = LoopIndex("j")
MAIN = Stream(name="main")

_DTYPES = {"f32": np.float32, "bf16": jnp.bfloat16, "i32": np.int32, "bool": np.bool_}


def mesh_of(**axes: int) -> Mesh:
    """A mesh of the first devices, all axes Auto."""
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def buffer(text: str, partial: dict[str, Reducer] | None = None) -> Buffer:
    """A buffer as the printer writes it: `x: f32[2@tp, 8~s0]`."""
    match = re.fullmatch(r"(\w+): (\w+)\[(.*)\]", text)
    assert match, text
    name, dtype, dims = match.groups()
    parsed = [_dim(dim) for dim in re.findall(r"(?:\([^)]*\)|[^,])+", dims)]
    return Buffer(
        name=name,
        shape=tuple(size for size, _ in parsed),
        dtype=np.dtype(_DTYPES[dtype]),
        dims=tuple(dim for _, dim in parsed),
        partial=tuple((partial or {}).items()),
    )


def _dim(text: str) -> tuple[int, Dim]:
    size, _, stream = text.strip().partition("~")
    size, _, axes = size.partition("@")
    names = tuple(axis.strip() for axis in axes.strip("()").split(",") if axis)
    return int(size), Dim(axes=names, stream=stream or None)


def program(
    mesh: Mesh,
    params: Sequence[Buffer],
    results: Sequence[Buffer],
    *body: Stmt,
    name: str = "f",
    is_body: bool = False,
) -> Program:
    return Program(
        name=name,
        mesh=mesh.abstract_mesh,
        params=tuple(params),
        results=tuple(results),
        body=body,
        is_body=is_body,
    )


def compute(
    fun: Callable[..., Any],
    ins: Sequence[Buffer],
    outs: Sequence[Buffer],
    *,
    chunk: Chunk | None = None,
    reducer: Reducer | None = None,
    name: str = "u",
) -> Compute:
    """`fun` of `ins` into `outs`."""
    avals = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in ins]
    return Compute(
        unit=unit_of(name, fun, *avals),
        ins=tuple(ins),
        outs=tuple(outs),
        chunk=chunk,
        reducer=reducer,
    )


def zeros(buffer: Buffer) -> tuple[Stmt, ...]:
    """Makes a buffer that holds zeros."""
    made = compute(lambda: jnp.zeros(buffer.shape, buffer.dtype), (), (buffer,))
    return Allocate(buffer=buffer), made


def select(
    out: Buffer,
    source: Buffer,
    dim: int,
    index: IndexLike,
    size: IndexLike = 1,
    *,
    groups: int = 1,
    drop: bool = False,
) -> Select:
    return Select(
        out=out,
        source=source,
        dim=dim,
        index=as_index(index),
        size=as_index(size),
        groups=groups,
        drop=drop,
    )


def communicate(
    kind: CommunicationKind,
    out: Buffer,
    source: Buffer,
    axes: tuple[str, ...] = ("tp",),
    *,
    name: str = "c",
    dim: int | None = None,
    source_dim: int | None = None,
    reducer: Reducer | None = None,
    shift: IndexLike | None = None,
) -> Communicate:
    return Communicate(
        name=name,
        kind=kind,
        out=out,
        source=source,
        axes=axes,
        dim=dim,
        source_dim=source_dim,
        reducer=reducer,
        shift=None if shift is None else as_index(shift),
    )


def loop(extent: int, *body: Stmt, index: LoopIndex = I) -> For:
    return For(index=index.name, extent=extent, body=body)


def stream(index: Index | int) -> Stream:
    return Stream(index=as_index(index))


def check(
    host_ir: Program, mesh: Mesh, args: Sequence[Any], *wanted: Any
) -> list[Record]:
    """The program is valid; emitted and interpreted it gives exactly `wanted`.

    Returns the interpreter's trace.
    """
    verify(host_ir)
    emitted = jax.jit(emit(host_ir, mesh))(*args)
    interpreted, trace = interpret(host_ir, mesh, args)
    for given in (emitted, interpreted):
        assert len(given) == len(wanted)
        for value, expected in zip(given, wanted, strict=True):
            assert value.shape == expected.shape
            np.testing.assert_array_equal(np.asarray(value), expected)
    return trace


def integers(*shape: int, seed: int = 0) -> np.ndarray:
    """Small integers as float32: sums and products of them are exact."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)
