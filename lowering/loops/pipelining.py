"""What a stream gets: a pipeline with nothing left open, or none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeAlias

from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.pipelines import PipelineSpec
from jhost.lowering.ir.statements import PipelineKind
from jhost.lowering.streams.participation import Participation

Ways: TypeAlias = tuple[tuple[str, ...], ...]
"""One group of mesh axes along which chunks move, or two."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipelining:
    """What a stream gets.

    Attributes:
        spec: the pipeline, with nothing left open.
        reason: why it was chosen.
        participations: the nodes that work in chunks, by number.
        axes: the mesh axes along which a p2p pipeline moves its chunks.
        across: other axes along which some of its loops also move them (`skewed.py`).
        by_name: whether the user named the pipeline.  It is then kept even where
            nothing runs beside its transfers.
        beside: the numbers of the contractions over all chunks that stand beside
            transfers.
        fewer: what to say if there are fewer chunks than the user asked for.
    """

    spec: PipelineSpec
    reason: str
    participations: Mapping[int, Participation]
    axes: tuple[str, ...] = ()
    across: tuple[str, ...] = ()
    by_name: bool = True
    beside: frozenset[int] = frozenset()
    fewer: str = ""

    @property
    def pipeline(self) -> PipelineKind:
        return self.spec.pipeline or "off"

    @property
    def chunks(self) -> int:
        return self.spec.chunks or 1

    @property
    def ways(self) -> Ways:
        """The groups of axes along which chunks move."""
        return (self.axes, self.across) if self.across else (self.axes,)

    def owners(self, mesh: Mapping[str, int]) -> int:
        """The chunks of a p2p pipeline that cuts no shard into pieces."""
        return owners_along(self.ways, mesh)


def off(reason: str) -> Pipelining:
    """No pipeline."""
    spec = PipelineSpec(pipeline="off", chunks=1)
    return Pipelining(spec=spec, reason=reason, participations={})


def owners_along(ways: Ways, mesh: Mapping[str, int]) -> int:
    """The fewest chunks that cut the shards along each group evenly."""
    return math.lcm(*(axes_size(axes, mesh) for axes in ways))
