"""What a case is: a layer function, its operands with their layouts, its work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.communication import AXIS, Exchanging, Recorder, Whole
from benchmarks.layers import Layer, Model

ROWS, COLUMNS, WHOLE = P(AXIS, None), P(None, AXIS), P()


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


@dataclasses.dataclass(frozen=True)
class Case:
    """One function at one size, over `devices` devices.

    Its name is that of the whole size, also where a CPU gets a small one.
    """

    name: str
    model: Model
    tokens: int
    devices: int
    layer: Layer
    operands: tuple[Operand, ...]
    out_spec: P
    exact_integers: bool = True

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

    def cotangent(self) -> Operand:
        """What a backward pass starts from."""
        return Operand(
            "cotangent", self.result_shape(), self.out_spec, nonzeros=2.0, scale=1.0
        )

    def moved(self, backward: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Each communication, by kind and whole shape, in order."""
        recorder = Recorder()
        jax.eval_shape(lambda *xs: self.run(recorder, xs), *self.abstract())
        if not backward:
            return tuple(recorder.moved)
        back = {"gather": "scatter", "scatter": "gather", "exchange": "exchange"}
        transposed = [(back[k], s) for k, s in reversed(recorder.moved) if k in back]
        return (*recorder.moved, *transposed)

    def bytes_moved(self, backward: bool) -> int:
        """Bytes that each device has to receive."""
        share = Fraction(1, self.devices)  # what a device has of what is exchanged
        passes = {"gather": 1, "scatter": 1, "reduce": 2, "exchange": share}
        elements = sum(passes[k] * math.prod(s) for k, s in self.moved(backward))
        return int(2 * elements * (1 - share))

    def flops(self, backward: bool) -> int:
        """Operations of the matmuls of each device."""

        def run(*operands: jax.Array) -> Any:
            result, pull = jax.vjp(lambda *xs: self.run(Whole(), xs), *operands)
            return (result, pull(result)) if backward else result

        jaxpr = jax.make_jaxpr(run)(*self.abstract())
        return _matmul_flops(jaxpr.jaxpr) // self.devices

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the operands."""
        return [jax.ShapeDtypeStruct(o.shape, jnp.bfloat16) for o in self.operands]


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
            total += _matmul_flops(inside) if hasattr(inside, "eqns") else 0
    return total
