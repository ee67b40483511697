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
from benchmarks.cases import Case
from benchmarks.communication import Collectives, Communication, Ring


def collectives(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
    """One collective, one matmul, no chunks."""
    return [_built(case, mesh, backward, Collectives())]


def recipe(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
    """The unrolled ppermute loops of JAX's documentation."""
    if any(kind == "reduce" for kind, _ in case.moved(False)):
        raise Unavailable("the documentation has no all-reduce")
    return [_built(case, mesh, backward, Ring())]


def _built(case: Case, mesh: Mesh, backward: bool, comm: Communication) -> Built:
    def part(*operands: Any) -> Any:
        return case.run(comm, operands)

    # Collectives are checked: without that the transpose of a psum is another psum.
    check = isinstance(comm, Collectives)
    function = per_device(part, mesh, case.specs, case.out_spec, check=check)
    return Built(
        instance=forward_or_both(function, backward),
        operands=case_operands(case, backward),
    )
