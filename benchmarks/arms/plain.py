"""What anybody writes without a library: `jax.jit` over `jax.shard_map`."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from benchmarks.arms.base import (
    Built,
    Unavailable,
    case_operands,
    forward_or_both,
    per_device,
)
from benchmarks.case import Case
from benchmarks.communication import Collectives, Exchanging, Ring

_NOT_IN_THE_RECIPE = {"reduce": "all-reduce", "exchange": "all-to-all"}


def collectives(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
    """One collective, one matmul, no chunks."""
    return [_built(case, mesh, backward, Collectives())]


def recipe(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
    """The unrolled ppermute loops of JAX's documentation."""
    for kind, _ in case.moved(False):
        if kind in _NOT_IN_THE_RECIPE:
            raise Unavailable(f"the documentation has no {_NOT_IN_THE_RECIPE[kind]}")
    return [_built(case, mesh, backward, Ring())]


def _built(case: Case, mesh: Mesh, backward: bool, comm: Exchanging) -> Built:
    def part(*operands: Any) -> Any:
        return case.run(comm, operands)

    # Collectives are checked: without that the transpose of a psum is another psum.
    check = isinstance(comm, Collectives)
    function = per_device(part, mesh, case.specs, case.out_spec, check=check)
    return Built(
        instance=forward_or_both(function, backward),
        operands=case_operands(case, backward),
    )
