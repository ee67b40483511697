"""XLA's own: it partitions the global function, and may window the einsums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from benchmarks.arms.base import (
    Arm,
    Built,
    Unavailable,
    case_operands,
    constrained,
    forward_or_both,
    need_gpus,
)
from benchmarks.case import Case
from benchmarks.communication import Whole

WINDOWED: Mapping[str, Any] = {"xla_gpu_threshold_for_windowed_einsum_mib": 0}
WINDOWED_MULTI: Mapping[str, Any] = {
    **WINDOWED,
    "xla_gpu_multi_streamed_windowed_einsum": True,
}


def partitioned(options: Mapping[str, Any]) -> Arm:
    """The arm of `jax.jit` of the global function, with these options."""

    def arm(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
        if options:
            need_gpus(mesh)
        if case.model.attention == "cudnn":
            raise Unavailable(
                "JAX does not partition cuDNN's attention along sequences"
            )

        def function(*operands: Any) -> Any:
            return case.run(Whole(), operands)

        return [
            Built(
                instance=constrained(forward_or_both(function, backward), case, mesh),
                operands=case_operands(case, backward),
                options=options,
            )
        ]

    return arm
