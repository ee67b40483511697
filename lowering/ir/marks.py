"""Marks: what a user asks for values of a program, and what jhost chose."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

from jhost.lowering.ir.pipelines import PipelineSpec
from jhost.lowering.ir.statements import PipelineKind, node

Wish: TypeAlias = Literal["chunks", "pipeline"]
"""What a function's settings can say for marks that leave it open."""


@node
class OnLines:
    """What stands on some lines of the user's."""

    lines: tuple[str, ...]

    @property
    def where(self) -> str:
        return ", ".join(self.lines)


@node
class StreamRequest(OnLines):
    """`jhost.stream` on a buffer's dim, as it was written.

    A field that it leaves open (None) comes from the settings of the function.  "auto"
    leaves it to jhost whatever the settings say, which a `PipelineSpec` cannot express.
    `wished` has the fields that come from a called function and not from the mark.
    """

    buffer: str
    dim: int
    chunks: int | Literal["auto"] | None
    pipeline: PipelineKind | Literal["auto"] | None
    wished: tuple[Wish, ...] = ()


@node
class StreamChoice(OnLines):
    """What a request for a stream comes to: `choose_pipelines` makes one of each.

    Attributes:
        lines: the user's lines, as `model.py:12 (mlp)`.
        buffer: the name of the marked value.
        dim: the dim of it that is cut.
        spec: how its stream is pipelined; without a pipeline, the value joins a stream
            that reaches it.
        unpipelined: whether its loop is not made, whatever stream reaches it, because
            no loop is predicted to be better.
        by_name: whether the user named the pipeline, which is then kept even where it
            gains nothing.
        reason: why this was chosen.
        predicted: each candidate with its predicted seconds, the chosen one first.
        measured: each candidate with its measured seconds, the chosen one first.
        wished: which of `chunks` and `pipeline` come from a function's settings, and
            not from the mark; a wish that cannot be met is left open.
        unmet: the wishes that cannot be met, with the reasons.
        numbers: the places of the marks among those of the program and its bodies.
        found: whether jhost found the stream, and nobody marked it.
        spares: whether it was found because its loops would spare transfers of weights.
    """

    buffer: str
    dim: int
    spec: PipelineSpec
    unpipelined: bool = False
    # False only of a candidate: it is to go where it gains nothing.
    by_name: bool = True
    reason: str = ""
    predicted: tuple[tuple[str, float], ...] = ()
    measured: tuple[tuple[str, float], ...] = ()
    wished: tuple[Wish, ...] = ()
    unmet: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    found: bool = False
    spares: bool = False

    def with_spec(self, **said: Any) -> StreamChoice:
        """The choice with another spec, which is its own but for the fields `said`."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **said))

    def without_loop(self) -> StreamChoice:
        """The choice of no loop; itself if it is that already."""
        if self.unpipelined and self.spec.pipeline is None:
            return self
        return dataclasses.replace(self.with_spec(pipeline=None), unpipelined=True)


@node
class SerialMark:
    """No stream reaches this buffer: `jhost.serial`, or whatever else the reason is."""

    buffer: str
    reason: str = "jhost.serial"


@node
class ShardMark:
    """A sharding the user gave: mesh axes a dim, or None where jhost may choose."""

    buffer: str
    spec: tuple[tuple[str, ...] | None, ...]
    where: str


@node
class BarrierMark:
    """A buffer that one barrier hands on, together with its other operands.

    The barrier passes on none of its `operands` before all are there.  So a value that
    `jax.checkpoint` computes again is computed when its cotangent has come, and is not
    kept until then.
    """

    buffer: str
    operands: tuple[str, ...]


Mark: TypeAlias = StreamRequest | StreamChoice | SerialMark | ShardMark | BarrierMark
