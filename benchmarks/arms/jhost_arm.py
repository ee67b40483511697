"""jhost, as a user writes it; one name that is not public tells options for XLA."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from jax.sharding import Mesh

import jhost
from benchmarks.arms.base import (
    Arm,
    Built,
    Unavailable,
    case_operands,
    constrained,
    forward_or_both,
)
from benchmarks.case import Case, types_of
from benchmarks.communication import Streamed
from jhost.lowering.ir.bodies import adds_up
from jhost.testing import programs

Pipeline: TypeAlias = Literal["p2p", "collective", "auto", "off"]


def pipeline(name: Pipeline) -> Arm:
    """The arm that asks for one pipeline, or leaves the choice to jhost."""

    def arm(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
        return [_built(case, mesh, backward, pipeline=name)]

    return arm


def nvfuser_chunks(count: int) -> Arm:
    """A collective pipeline in that many chunks, for the sizes of nvFuser's own."""

    def arm(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
        if not case.kind.startswith("nvfuser"):
            raise Unavailable("for nvFuser's own sizes")
        return [_built(case, mesh, backward, pipeline="collective", chunks=count)]

    return arm


def _built(case: Case, mesh: Mesh, backward: bool, **choice: Any) -> Built:
    def layer(*operands: Any) -> Any:
        return case.run(Streamed(), operands)

    by_name = choice["pipeline"] == "p2p"
    function = jhost.jit(
        layer,
        mesh=mesh,
        in_shardings=case.specs,
        out_shardings=case.out_spec,
        **choice,
    )
    if not backward:
        return Built(
            instance=function,
            operands=case.operands,
            options=jhost.compiler_options(between_processes=by_name),
            call=function,
            explain=lambda operands: jhost.explain(function, *operands),
        )
    instance = constrained(forward_or_both(function, True), case, mesh)
    operands = case_operands(case, True)
    # As one `jhost.jit` around all would have them: only where a loop adds up.  A scan
    # of stages adds up by itself, and took 42 ms with them on two H200s, and 33 ms
    # without them.
    sums = any(map(adds_up, programs(instance, *types_of(operands))))
    return Built(
        instance=instance,
        operands=operands,
        options=jhost.compiler_options(gradients=sums, between_processes=by_name),
    )
