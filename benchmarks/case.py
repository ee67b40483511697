"""What a case is: a layer function, its operands with their layouts, its work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.axes import Axes
from benchmarks.communication import AXIS, Exchanging, Recorder, Whole
from benchmarks.layers import Layer, Model

ROWS, COLUMNS, WHOLE = P(AXIS, None), P(None, AXIS), P()
"""The layouts of weights; `Axes` has those of activations."""

Moved = tuple[str, tuple[int, ...]]
"""A communication's kind, and the whole shape that it moves for a group along tp."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array to make: its layout, and the scale of its random values.

    Its integer values are -unit, 0 and unit, with `nonzeros` nonzeros to be expected
    along dim `along`, or all of them: few enough that every sum stays within the 256
    integers that bfloat16 holds exactly.
    """

    name: str
    shape: tuple[int, ...]
    spec: P
    scale: float = 1.0
    nonzeros: float | None = None
    unit: float = 1.0
    along: int = 0


def types_of(operands: Iterable[Operand]) -> list[jax.ShapeDtypeStruct]:
    """The types of the arrays that are made for some operands."""
    return [jax.ShapeDtypeStruct(o.shape, jnp.bfloat16) for o in operands]


@dataclasses.dataclass(frozen=True)
class Case:
    """One function at one size, over the devices of `axes`.

    Its name is that of the whole size, also where a CPU gets a small one.
    """

    name: str
    model: Model
    tokens: int
    axes: Axes
    layer: Layer
    operands: tuple[Operand, ...]
    out_spec: P
    exact_integers: bool = True
    kernel_flops: int = 0
    """Operations forward of matmuls inside of kernels, which have 5 for 2 backward."""

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def specs(self) -> tuple[P, ...]:
        return tuple(operand.spec for operand in self.operands)

    def run(self, comm: Exchanging, operands: Sequence[jax.Array]) -> jax.Array:
        return self.layer(comm, self.model, operands)

    def result_shape(self) -> tuple[int, ...]:
        return jax.eval_shape(lambda *xs: self.run(Whole(), xs), *self.abstract()).shape

    def written_out(self) -> Case:
        """Without kernels, which take 16 bits alone: for a reference."""
        model = dataclasses.replace(self.model, attention="")
        return dataclasses.replace(self, model=model)

    def cotangent(self) -> Operand:
        """What a backward pass starts from."""
        return Operand(
            "cotangent", self.result_shape(), self.out_spec, nonzeros=2.0, scale=1.0
        )

    def moved(self, backward: bool) -> tuple[Moved, ...]:
        """Each communication, in order; a "sum" is a gradient's, over the groups."""
        recorder = Recorder()
        jax.eval_shape(lambda *xs: self.run(recorder, xs), *self.abstract())
        groups = self.axes.groups
        forward = [(k, (rows // groups, *rest)) for k, (rows, *rest) in recorder.moved]
        if not backward:
            return tuple(forward)
        back = {"gather": "scatter", "scatter": "gather"}
        back |= {kind: kind for kind in ("exchange", "send")}
        transposed = [(back[k], s) for k, s in reversed(forward) if k in back]
        return (*forward, *transposed, *self._summed())

    def _summed(self) -> list[Moved]:
        """A device's part of each gradient that is summed over the groups."""
        if self.axes.groups == 1:
            return []
        weights = [o for o in self.operands if self.axes.unnamed(o.spec)]
        return [("sum", self.axes.part(o.shape, o.spec)) for o in weights]

    def bytes_moved(self, backward: bool) -> int:
        """Bytes that each device has to receive."""
        return int(2 * sum(self._received(k, s) for k, s in self.moved(backward)))

    def _received(self, kind: str, shape: Sequence[int]) -> Fraction:
        """Elements."""
        if kind == "send":
            return Fraction(math.prod(shape))
        of = self.axes.groups if kind == "sum" else self.axes.tp
        share = Fraction(1, of)  # what a device has of what is exchanged
        passes = {"reduce": 2, "sum": 2, "exchange": share}
        return passes.get(kind, 1) * math.prod(shape) * (1 - share)

    def flops(self, backward: bool) -> int:
        """Operations of the matmuls of each device."""

        def run(*operands: jax.Array) -> Any:
            result, pull = jax.vjp(lambda *xs: self.run(Whole(), xs), *operands)
            return (result, pull(result)) if backward else result

        if self.kernel_flops:
            return self.kernel_flops * (7 if backward else 2) // (2 * self.axes.devices)
        jaxpr = jax.make_jaxpr(run)(*self.abstract())
        return _matmul_flops(jaxpr.jaxpr) // self.axes.devices

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the operands."""
        return types_of(self.operands)


def _matmul_flops(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            inner = math.prod(shape[dim] for dim in contracted)
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * inner
        for value in eqn.params.values():
            inside = getattr(value, "jaxpr", value)
            times = eqn.params.get("length", 1)  # of a scan
            total += times * _matmul_flops(inside) if hasattr(inside, "eqns") else 0
    return total
