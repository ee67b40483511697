"""The programs that are measured: layers, a loss, and the gradients of everything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks import layers
from benchmarks.axes import FSDP, Axes
from benchmarks.case import Operand, types_of
from benchmarks.communication import AXIS, Communication
from benchmarks.layers import MODELS, Model

LAYERS = {"written": 4, "scan": 6, "written-checkpoint": 4, "scan-checkpoint": 6}
"""The forms of a program, and how many layers each has unless it is told."""


class StepCommunication(Communication, Protocol):
    """What layer functions ask for, and a step for them."""

    def weight(self, shard: jax.Array, dim: int) -> jax.Array:
        """A weight that is whole along `dim`, of the shards over fsdp."""
        ...


@dataclasses.dataclass(frozen=True)
class Step:
    """Layers of a model, written out or in a scan, over the devices of a mesh."""

    model: Model
    form: str
    layers: int
    sequences: int
    axes: Axes

    @property
    def name(self) -> str:
        return f"{self.model.name}/{self.form}"

    @property
    def tokens(self) -> int:
        return self.sequences * self.model.sequence

    @property
    def scans(self) -> bool:
        return self.form.startswith("scan")

    @property
    def checkpoints(self) -> bool:
        return self.form.endswith("checkpoint")

    def tokens_per_s(self, milliseconds: float) -> float:
        return 1e3 * self.tokens / milliseconds

    @property
    def operands(self) -> tuple[Operand, ...]:
        """x, then the weights: one after another, or those of all layers stacked."""
        x = Operand("x", (self.tokens, self.model.hidden), self.axes.rows)
        if self.scans:
            return (x, *(_stacked(w, self.layers) for w in self.weights))
        return (x, *self.weights * self.layers)

    @property
    def weights(self) -> tuple[Operand, ...]:
        """The weights of one layer, in the order in which `layers.layer` takes them."""
        return _weights(self.model, self.axes.shards)

    @property
    def specs(self) -> tuple[P, ...]:
        return tuple(operand.spec for operand in self.operands)

    def types(self) -> list[jax.ShapeDtypeStruct]:
        return types_of(self.operands)

    def loss(self, comm: StepCommunication, *operands: jax.Array) -> jax.Array:
        """The sum of squares, so that the backward pass starts from the result."""
        x, *weights = operands
        result = self._layers(comm)(x, tuple(weights))
        return jnp.sum(result.astype(jnp.float32) ** 2)

    def function(self, comm: StepCommunication, backward: bool) -> Callable[..., Any]:
        """The loss; with its gradients by all operands if both passes are wanted."""
        loss = functools.partial(self.loss, comm)
        everything = tuple(range(len(self.operands)))
        return jax.value_and_grad(loss, everything) if backward else loss

    def out_specs(self, backward: bool) -> Any:
        return (P(), self.specs) if backward else P()

    def _layers(self, comm: StepCommunication) -> Callable[..., jax.Array]:
        specs = [operand.spec for operand in self.weights]

        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            whole = [
                comm.weight(w, spec.index(FSDP)) if FSDP in spec else w
                for w, spec in zip(weights, specs, strict=True)
            ]
            return layers.layer(comm, self.model, (x, *whole)), None

        if self.axes.shards:
            layer = jax.checkpoint(layer, policy=_kept, prevent_cse=not self.scans)
        if self.checkpoints:
            layer = jax.checkpoint(layer, prevent_cse=not self.scans)
        if self.scans:
            return lambda x, weights: lax.scan(layer, x, weights)[0]

        def written(x: jax.Array, weights: Any) -> jax.Array:
            each = len(weights) // self.layers
            for start in range(0, len(weights), each):
                x, _ = layer(x, weights[start : start + each])
            return x

        return written


def _kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether the backward has a value: all but weights, which it gathers again."""
    return primitive.name not in ("all_gather", "concatenate", "optimization_barrier")


def _weights(model: Model, shards: str | None) -> tuple[Operand, ...]:
    hidden, attended = model.hidden, model.heads * model.head
    gain = functools.partial(Operand, shape=(hidden,), spec=P(None))
    return (
        gain("first_gain"),
        _matrix("qkv", (hidden, model.qkv), P(shards, AXIS)),
        _matrix("out", (attended, hidden), P(AXIS, shards)),
        gain("second_gain"),
        _matrix("gate", (hidden, model.ffn), P(shards, AXIS)),
        _matrix("up", (hidden, model.ffn), P(shards, AXIS)),
        _matrix("down", (model.ffn, hidden), P(AXIS, shards)),
    )


def _matrix(name: str, shape: tuple[int, int], spec: P) -> Operand:
    return Operand(name, shape, spec, scale=shape[0] ** -0.5)


def _stacked(weight: Operand, count: int) -> Operand:
    return dataclasses.replace(
        weight, shape=(count, *weight.shape), spec=P(None, *weight.spec)
    )


SHRINK = 64
"""For CPUs, where no time means anything."""


def sized(name: str, length: int, on_gpu: bool) -> Model:
    """A model of `MODELS` with sequences of that length, and small on a CPU."""
    whole = dataclasses.replace(MODELS[name], sequence=length)
    small = whole.shrunk(1 if on_gpu else SHRINK)
    return dataclasses.replace(small, attention="cudnn" if on_gpu else "xla")


def steps(
    models: Mapping[str, Model],
    forms: Mapping[str, int],
    sequences: int,
    axes: Axes,
) -> list[Step]:
    """Each model in each form.

    Raises:
        ValueError: sequences that a mesh does not divide.
    """
    if sequences % axes.groups:
        raise ValueError(
            f"{sequences} sequences cannot be split over {axes.groups} devices"
        )
    return [
        Step(model, form, count, sequences, axes)
        for model in models.values()
        for form, count in forms.items()
    ]
