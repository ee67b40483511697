"""Host IR programs from JAX functions, and what tests ask of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh

import jhost
from jhost._call.execute import interpreting
from jhost.lowering.frontend.build import build
from jhost.lowering.frontend.inline_calls import inline_calls
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.layout import Layout, Partial
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note, Remark
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.ir.statements import (
    Communicate,
    Compute,
    For,
    Select,
    Set,
    SetCurrentStream,
    Stmt,
    Synchronize,
    walk,
)
from jhost.lowering.layouts.reshard import plan_reshard, step_bytes
from jhost.lowering.pipeline import passes, run_passes
from tests.lowering.hand_built import integers

_Remark = TypeVar("_Remark", bound=Remark)


def check(
    fun: Callable[..., Any], *args: Any, rtol: float = 0, **settings: Any
) -> Program:
    """By jhost `fun` gives what it gives without; returns its Host IR.

    Interpreted, and compiled as well, unless a program was whose equations are the same
    and whose statements are but for their sizes: XLA takes longest of all.
    """
    lowered = jhost.jit(fun, **settings).lower(*args)
    results = [lowered.interpret(*args)[0]]
    pattern = _pattern(lowered.host_ir)
    if pattern not in _compiled:
        _compiled.add(pattern)
        results.append(lowered.compile()(*args))
    wanted = plain(fun, *args)
    for given in results:
        chex.assert_trees_all_equal_shapes_and_dtypes(given, wanted)
        chex.assert_trees_all_close(given, wanted, rtol=rtol, atol=rtol)
    return lowered.host_ir


_compiled: set[str] = set()


def _pattern(program: Program) -> str:
    """A program without the sizes in its statements, which differ by the devices."""
    work = [stmt for stmt in statements(program) if isinstance(stmt, Compute)]
    params = [str(each.eqn.params) for stmt in work for each in stmt.unit.eqns]
    return re.sub(r"(?<!dim=)\d+", "n", str(program)) + "\n".join(params)


def plain(fun: Callable[..., Any], *args: Any) -> Any:
    """What `fun` gives under `jax.jit`, compiled once for all that are traced alike."""
    closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
    if closed.effects:
        return jax.jit(fun)(*args)
    values = (*closed.consts, *jax.tree.leaves(args))
    # In the text of a jaxpr numbers may be drawn in either order.
    key = jax.threefry_partitionable.value, str(closed), *map(_contents, values)
    if key not in _plain:
        _plain[key] = jax.jit(fun)(*args)
    return jax.tree.unflatten(jax.tree.structure(out), jax.tree.leaves(_plain[key]))


_plain: dict[tuple[Any, ...], Any] = {}


def _contents(value: Any) -> tuple[Any, ...]:
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        value = jax.random.key_data(value)
    return value.shape, str(value.dtype), np.asarray(value).tobytes()


def interpreted(fun: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """`fun` by the interpreter."""
    return by_statements(jhost.jit(fun, **settings))


def by_statements(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function that interprets the programs which `fun` would have XLA compile."""

    def run(*args: Any) -> Any:
        with interpreting():
            return fun(*args)

    return run


def array(*shape: int, seed: int = 0) -> Any:
    """Small integers as float32: sums and products of them are exact.

    It is of NumPy.  XLA compiles a program to move a `jax.Array` from one device to
    several, for each shape and layout, and one for each operation (JAX 0.10 to 0.12).
    """
    return integers(*shape, seed=seed)


def built(fun: Callable[..., Any], *args: Any, **mesh: int) -> Program:
    """The first program of `fun`, on a mesh of those axes, as no pass has seen it.

    An argument is a shape (of float32) or an array.
    """
    avals = [
        jax.ShapeDtypeStruct(a, jnp.float32) if isinstance(a, tuple) else a
        for a in args
    ]
    closed, results = jax.make_jaxpr(fun, return_shape=True)(*avals)
    count = len(jax.tree.leaves(results))
    return build(
        inline_calls(closed),
        name="f",
        mesh=AbstractMesh(tuple(mesh.values()), tuple(mesh)),
        param_names=[*"xwvabcde"[: len(args)]],
        result_names=["y", "z", "u", *(f"y{n}" for n in range(count))][:count],
    )


def asked(fun: Callable[..., Any], *args: Any, **mesh: int) -> Program:
    """What `built` gives, its marks as they are where nothing chooses for them."""
    return StreamDefaults().applied_to(built(fun, *args, **mesh))


def lowered(fun: Callable[..., Any], *args: Any, **mesh: int) -> Program:
    """The finished program of `fun`, which nothing runs."""
    sequence = passes(settings=StreamDefaults(), streams=4).all
    return run_passes(built(fun, *args, **mesh), sequence)


# --- Functions ---------------------------------------------------------------------- #

WHOLE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sort": lambda x: lax.sort(x, dimension=0),
    "cumsum": lambda x: lax.cumsum(x, axis=0),
    "rev": lambda x: lax.rev(x, (0,)),
    "slice": lambda x: lax.slice_in_dim(x, 1, 7),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "scan": lambda x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(4), x)[1],
}
"""Of arrays with 4 columns: each needs all rows together, and most cut columns."""

# --- What a program does ------------------------------------------------------------ #


def loops(program: Program) -> list[For]:
    """The loops that work, without those that only order streams."""
    return [
        stmt
        for stmt in program.body
        if isinstance(stmt, For)
        and not all(isinstance(s, SetCurrentStream | Synchronize) for s in stmt.body)
    ]


def work(body: Sequence[Stmt]) -> list[str]:
    """What is done, in order: primitives, communications, copies."""
    return [word for stmt in body for word in _words(stmt)]


def _words(stmt: Stmt) -> Iterator[str]:
    match stmt:
        case Compute(unit=unit):
            yield from (eqn.eqn.primitive.name for eqn in unit.eqns)
        case Communicate(kind=kind):
            yield kind
        case Set():
            yield "Set"
        case For(body=body) if any(True for _ in work(body)):
            yield f"loop({', '.join(work(body))})"
        case _:
            pass


def aliases(program: Program) -> dict[str, int]:
    """The buffers of which loops take chunks, each with the dim cut."""
    return {
        stmt.source.name: stmt.dim
        for loop in loops(program)
        for stmt in walk(loop.body)
        if isinstance(stmt, Select)
    }


def chunk_counts(program: Program) -> list[int]:
    """The iterations of each loop."""
    return [loop.extent for loop in loops(program)]


def remarks(program: Program, kind: type[_Remark]) -> list[_Remark]:
    """What the passes remarked."""
    return [remark for remark in program.remarks if isinstance(remark, kind)]


def notes(program: Program, about: str = "") -> list[str]:
    """The texts of the notes that have `about` in them, without the lines."""
    return [note.text for note in remarks(program, Note) if about in note.text]


def reshard_bytes(
    source: Layout,
    target: Layout,
    partial: Partial,
    shape: Sequence[int],
    itemsize: int,
    mesh: Mapping[str, int],
) -> int:
    """The bytes that each device receives on the way from `source` to `target`."""
    total = 0
    for step in plan_reshard(source, target, partial, mesh):
        total += step_bytes(step, source, shape, itemsize, mesh)
        source = step.layout
    return total
