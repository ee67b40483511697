"""The spec of a stream's loop, which marks, tunings and loops all hold."""

from __future__ import annotations

from typing import Literal, TypeAlias

from jhost.lowering.ir.statements import PipelineKind, node

SumsPosition: TypeAlias = Literal["in chunks", "whole", "beside transfers"]
"""Where contractions over all chunks stand: in the loop, which adds them up, behind it,
or beside transfers, in the place of its chunks."""


@node
class PipelineSpec:
    """How a stream is pipelined, as far as that is said.

    Records of one choice hold one of these, so what can be chosen is listed here alone.

    Attributes:
        pipeline: "p2p", "collective" or "off"; None where none was asked for or chosen.
        chunks: how many; None for the default of the pipeline.
        streams: on how many queues iterations take turns at most; None for jhost's
            default.
        zigzag: whether causal loops work on sequences in zigzag order where they can.
        sums: where contractions over all chunks stand, such as weights' gradients.
    """

    pipeline: PipelineKind | None
    chunks: int | None
    streams: int | None = None
    zigzag: bool = True
    sums: SumsPosition = "in chunks"

    @property
    def is_complete(self) -> bool:
        """Whether it leaves neither the pipeline nor its chunks open."""
        known = self.pipeline is not None and self.chunks is not None
        return known or self.pipeline == "off"
