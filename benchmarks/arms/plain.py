"""What anybody writes without a library: `jax.jit` over `jax.shard_map`."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh

import jhost
from benchmarks.arms.base import (
    Arm,
    Built,
    Unavailable,
    case_operands,
    forward_or_both,
    per_device,
)
from benchmarks.case import Case
from benchmarks.cases import RING
from benchmarks.communication import Around, Collectives, Exchanging, Ring

_NOT_IN_THE_RECIPE = {
    "reduce": "all-reduce",
    "exchange": "all-to-all",
    "send": "stages",
}


def collectives(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
    """One collective, one matmul, no chunks."""
    return [_built(case, mesh, backward, Collectives())]


def recipe(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
    """The unrolled ppermute loops of JAX's documentation."""
    if case.kind == RING:
        raise Unavailable("the documentation has no attention")
    for kind, _ in case.moved(False):
        if kind in _NOT_IN_THE_RECIPE:
            raise Unavailable(f"the documentation has no {_NOT_IN_THE_RECIPE[kind]}")
    return [_built(case, mesh, backward, Ring())]


def ring_attention(zigzag: bool) -> Arm:
    """Keys and values go from neighbour to neighbour by ppermute.

    With jhost's options for XLA: by XLA's own few of the transfers are asynchronous.
    """

    def arm(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
        if case.kind != RING:
            raise Unavailable("for keys that go around")
        built = _built(case, mesh, backward, Around(zigzag))
        return [dataclasses.replace(built, options=jhost.compiler_options())]

    return arm


def _built(case: Case, mesh: Mesh, backward: bool, comm: Exchanging) -> Built:
    def part(*operands: Any) -> Any:
        return case.run(comm, operands)

    # Collectives are checked: without that the transpose of a psum is another psum.
    # Attention by hand has its transposes written by hand.
    check = isinstance(comm, Collectives) and case.kind != RING
    function = per_device(part, mesh, case.specs, case.out_spec, check=check)
    return Built(
        instance=forward_or_both(function, backward),
        operands=case_operands(case, backward),
    )
