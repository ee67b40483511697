"""Random bodies of scans, by hand: transfers that are moved bring the same numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

import hypothesis
import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st
from jax import lax

from jhost.lowering.cost.choose_cycles import ChooseCycles, moving_all
from jhost.lowering.cost.choose_forms import ChooseForms
from jhost.lowering.interpret.program import interpret
from jhost.lowering.ir.bodies import all_remarks
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer, Communicate, Scan, Stmt, Wait
from jhost.lowering.schedule.scheduled_transfer import TransferForm
from jhost.lowering.verify.program import verify
from tests import sums
from tests.lowering.hand_built import buffer, communicate, compute, mesh_of, program

MESH = mesh_of(d=2)

TYPES = {"rows": "2@d, 4", "whole": "4, 4", "terms": "4, 4"}
"""Of values: split over the devices, the same on all, and still to be added up."""

ONES: dict[str, Callable[[Any], Any]] = {
    "neg": lax.neg,
    "square": lambda x: x * x,
    "one more": lambda x: lax.transpose(x + np.int32(1), (0, 1)),
}


def kind_of(value: Buffer) -> str:
    if value.partial:
        return "terms"
    return "rows" if value.dims[0].axes else "whole"


class _Body:
    """Statements at random, on values of those types."""

    def __init__(self, draw: st.DrawFn, given: Sequence[Buffer]) -> None:
        self.draw = draw
        self.stmts: list[Stmt] = []
        self.values = {kind: list[Buffer]() for kind in TYPES}
        self.count = 0
        for each in given:
            self.values[kind_of(each)].append(each)
        # As layers do it, with other steps between: the rows, and what only leaves.
        self.some_steps(self.gather, self.product)
        self.rows = self.values["rows"][-1]
        self.some_steps(self.outer, self.scatter)

    def some_steps(self, *steps: Callable[[], None]) -> None:
        for step in (*steps, None):
            for _ in range(self.draw(st.integers(0, 2))):
                self.draw(st.sampled_from(self.steps()))()
            if step is not None:
                step()

    def steps(self) -> list[Callable[[], None]]:
        steps = [self.gather, self.product, self.product, self.outer, self.cheap]
        of_terms = [self.scatter, self.reduce] if self.values["terms"] else []
        return [*steps, self.barrier, *of_terms]

    def any(self, *kinds: str) -> Buffer:
        """One of those kinds, often the one that was made last."""
        there = [value for kind in kinds for value in self.values[kind]]
        last = self.values[kinds[0]][-1:] * len(there)
        return self.draw(st.sampled_from(last + there))

    def leaving(self) -> Buffer:
        """What is stacked: of rows most often the last."""
        rows, whole = self.values["rows"], self.values["whole"]
        return self.draw(st.sampled_from([*rows[-1:] * 3, *rows, *whole]))

    def next(self, param: Buffer, number: int) -> Buffer:
        """What follows a carried value: rows of the layer, or often a sum."""
        if not number and self.draw(st.booleans()):
            return self.rows
        others = self.values[kind_of(param)]
        other = self.draw(st.sampled_from([*others[-1:] * len(others), *others]))
        if self.draw(st.booleans()):
            self.compute(lax.add, [param, other], kind_of(param))
            return others[-1]
        return other

    def new(self, kind: str) -> Buffer:
        self.count += 1
        partial: Any = {"d": "sum"} if kind == "terms" else None
        made = buffer(f"v{self.count}: i32[{TYPES[kind]}]", partial)
        self.values[kind].append(made)
        return made

    # --- What it may do ------------------------------------------------------- #

    def gather(self) -> None:
        self.moved("AllGather", self.any("rows"), "whole", dim=0)

    def scatter(self) -> None:
        self.moved("ReduceScatter", self.any("terms"), "rows", dim=0, reducer="sum")

    def reduce(self) -> None:
        self.moved("AllReduce", self.any("terms"), "whole", reducer="sum")

    def moved(self, what: Any, source: Buffer, kind: str, **how: Any) -> None:
        name = f"c{self.count}"
        issued = communicate(what, self.new(kind), source, ("d",), name=name, **how)
        self.stmts += [issued, Wait(communication=name)]

    def compute(self, f: Callable[..., Any], ins: Sequence[Buffer], kind: str) -> None:
        name = f"u{self.count}"
        self.stmts.append(compute(f, ins, [self.new(kind)], name=name))

    def product(self) -> None:
        self.compute(jnp.dot, [self.any("rows"), self.any("whole")], "rows")

    def outer(self) -> None:
        ins = [self.any("rows"), self.any("rows")]
        self.compute(lambda x, y: jnp.dot(x.T, y), ins, "terms")

    def cheap(self) -> None:
        one = self.any(*TYPES)
        kind = kind_of(one)
        if kind == "terms" or self.draw(st.booleans()):
            other = self.draw(st.sampled_from(self.values[kind]))
            self.compute(lax.add, [one, other], kind)
        else:
            self.compute(ONES[self.draw(st.sampled_from(sorted(ONES)))], [one], kind)

    def barrier(self) -> None:
        ins = [self.any(*TYPES) for _ in range(self.draw(st.integers(1, 3)))]
        outs = [self.new(kind_of(each)) for each in ins]
        barrier = compute(lambda *args: lax.optimization_barrier(args), ins, outs)
        self.stmts.append(barrier)


@st.composite
def scans(draw: st.DrawFn) -> Program:
    """A program of one scan."""
    kinds = st.lists(st.sampled_from(["rows", "whole"]), max_size=2)
    consts, carried, sliced = (
        [*first, *draw(kinds)] for first in (["whole", "rows"], ["rows"], ["rows"])
    )
    own = [
        buffer(f"{name}{n}: i32[{TYPES[kind]}]")
        for name, every in (("c", consts), ("x", carried), ("w", sliced))
        for n, kind in enumerate(every)
    ]
    first, last = len(consts), len(consts) + len(carried)
    given = draw(st.permutations(own))
    if draw(st.booleans()):  # what moves first then depends on the iteration before
        given = sorted(given, key=lambda each: each is own[first])
    body = _Body(draw, given)
    ends = [body.next(param, n) for n, param in enumerate(own[first:last])]
    stacked = [body.leaving() for _ in range(draw(st.sampled_from([1, 2, 3, 0])))]
    length = draw(st.sampled_from([3, 2, 4, 1, 0]))

    def outside(name: str, values: Sequence[Buffer], stack: str = "") -> list[Buffer]:
        texts = (f"i32[{stack}{TYPES[kind_of(value)]}]" for value in values)
        return [buffer(f"{name}{n}: {text}") for n, text in enumerate(texts)]

    ins = [*outside("p", own[:last]), *outside("s", own[last:], f"{length}, ")]
    carry_out, ys = outside("e", ends), outside("y", stacked, f"{length}, ")
    scan = Scan(
        body=program(MESH, own, [*ends, *stacked], *body.stmts, is_body=True),
        consts=tuple(ins[:first]),
        carry=tuple(ins[first:last]),
        xs=tuple(ins[last:]),
        carried=tuple(carry_out),
        ys=tuple(ys),
        length=length,
        reverse=draw(st.booleans()),
    )
    return program(MESH, ins, [*carry_out, *ys], scan)


def arguments(host_ir: Program) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    sizes = (zip(param.shape, param.dims, strict=True) for param in host_ir.params)
    shapes = [[2 * n if dim.axes else n for n, dim in each] for each in sizes]
    return [random.integers(-9, 9, shape).astype(np.int32) for shape in shapes]


def how_often(host_ir: Program) -> Counter[str]:
    """Each kind of transfer is made."""
    count = Counter[str]()
    for stmt in host_ir.body:
        if isinstance(stmt, Communicate):
            count[stmt.kind] += 1
        if isinstance(stmt, Scan):
            for kind, times in how_often(stmt.body).items():
                count[kind] += times * stmt.length
    return count


@given(
    scans(),
    st.sampled_from(get_args(TransferForm)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_moved_transfers_bring_the_same_and_none_more_often(
    host_ir: Program, way: TransferForm, work: bool, within: bool, little: bool
) -> None:
    verify(host_ir)
    transfers = ChooseForms()
    with sums.moving(way, work, within, little):
        changed = ChooseCycles(transfers, moving_all(transfers)).apply(host_ir)
        ordered = transfers.apply(changed)
    for note in {
        re.sub(r"\b[vyews]\w*\d+,? ?|\d", "", str(r)) for r in all_remarks(ordered)
    }:
        hypothesis.event(note)
    hypothesis.note(f"{host_ir}\n{changed}\n{ordered}")
    verify(ordered)
    assert how_often(changed) <= how_often(host_ir)
    args = arguments(host_ir)
    wanted, _ = interpret(host_ir, MESH, args)
    given, _ = interpret(ordered, MESH, args)
    for one, other in zip(given, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
