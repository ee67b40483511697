"""The layers as a cycle written by hand: what an expert does without jhost.

A `custom_vjp` around scans in `jax.shard_map`.  Beside each layer the weights of the
next one are gathered, and the gradients of the one before are summed and scattered.
Layers are computed again in the backward, as `jax.checkpoint` has them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from benchmarks.step.whole.model import (
    Layer,
    Layers,
    Params,
    layer_of,
    specs_of_layer,
)
from benchmarks.step.whole.sizes import Case

_AXIS = "fsdp"


def layers(case: Case, mesh: Mesh) -> Layers:
    """All layers of a case on what they are given and the stacks of their weights.

    Raises:
        ValueError: weights lie over more than fsdp, or the case is no scan of layers
            that are computed again.
    """
    if [axis for axis, size in case.axes if size > 1] != [_AXIS]:
        raise ValueError("the cycle by hand shards weights over fsdp alone")
    if not (case.scans and case.checkpoints) or case.cast != "layer":
        raise ValueError("the cycle by hand is a scan with checkpoint, cast in layers")
    cycle = _Cycle(case.layers, layer_of(case, _Here()), specs_of_layer(case))
    rows, stacked = case.rows, {n: P(None, *s) for n, s in cycle.specs.items()}
    saved = P(None, *rows)
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    forward = on_mesh(cycle.forward, in_specs=(rows, stacked), out_specs=(rows, saved))
    backward = on_mesh(
        cycle.backward, in_specs=(saved, stacked, rows), out_specs=(rows, stacked)
    )

    @jax.custom_vjp
    def run(x: jax.Array, weights: Params) -> jax.Array:
        return forward(x, weights)[0]

    def kept(x: jax.Array, weights: Params) -> Any:
        y, given = forward(x, weights)
        return y, (given, weights)

    def pulled(kept: Any, cotangent: jax.Array) -> Any:
        given, weights = kept
        return backward(given, weights, cotangent)

    run.defvjp(kept, pulled)
    return run


class _Here:
    """A device has all of a layer's weights, and whole sequences."""

    def gathered(self, x: jax.Array) -> jax.Array:
        return x

    def mark(self, product: jax.Array) -> jax.Array:
        return product

    def features(self, x: jax.Array) -> jax.Array:
        return x

    def rows(self, product: jax.Array) -> jax.Array:
        return product

    def weight(self, w: jax.Array, spec: P) -> jax.Array:
        return w

    def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        return table[tokens]


class _State(NamedTuple):
    """What a layer of the backward hands to the one in front of it."""

    cotangent: jax.Array
    weights: Params
    """Gathered, of the layer that is next."""
    unsent: Params
    """Gradients of the layer behind, still to be summed."""
    sent: Params
    """The stacks of those that are."""


@dataclasses.dataclass(frozen=True)
class _Cycle:
    """What one device does: `layer` takes whole weights, and gives a pair."""

    count: int
    layer: Layer
    specs: Mapping[str, P]

    # --- Forward -------------------------------------------------------------- #

    def forward(self, x: jax.Array, shards: Params) -> tuple[jax.Array, jax.Array]:
        """What the last layer gives, and what each is given."""
        stack = jnp.zeros((self.count, *x.shape), x.dtype)

        def step(state: Any, number: jax.Array) -> tuple[Any, None]:
            x, weights, stack = state
            ahead = self.gathered(shards, number + 1)
            stack = _stored(stack, x, number)
            return (self.layer(x, weights)[0], ahead, stack), None

        first = x, self.gathered(shards, 0), stack
        # The last layer gathers for none.
        last = self.count - 1
        (x, weights, stack), _ = lax.scan(step, first, jnp.arange(last))
        return self.layer(x, weights)[0], _stored(stack, x, last)

    def gathered(self, shards: Params, number: Any) -> Params:
        """The weights of a layer, in bfloat16."""
        return {name: self._gathered(name, shards[name], number) for name in shards}

    def _gathered(self, name: str, stack: jax.Array, number: Any) -> jax.Array:
        shard = lax.dynamic_index_in_dim(stack, number, keepdims=False)
        shard = shard.astype(jnp.bfloat16)
        if _AXIS not in self.specs[name]:
            return shard
        dim = self.specs[name].index(_AXIS)
        return lax.all_gather(shard, _AXIS, axis=dim, tiled=True)

    # --- Backward ------------------------------------------------------------- #

    def backward(
        self, given: jax.Array, shards: Params, cotangent: jax.Array
    ) -> tuple[jax.Array, Params]:
        """The gradients of what the first layer is given, and of all weights."""
        last = self.count - 1
        empty = jax.tree.map(jnp.zeros_like, shards)
        state = _State(cotangent, self.gathered(shards, last), {}, empty)

        def step(state: _State, number: jax.Array) -> tuple[_State, None]:
            state = self.summed(state, number + 1)
            ahead = self.gathered(shards, number - 1)
            return self.pulled(state, given, number, ahead), None

        if last == 0:
            state = self.pulled(state, given, 0, {})
        else:
            # The last layer has no sums to make, and the first one gathers for none.
            ahead = self.gathered(shards, last - 1)
            state = self.pulled(state, given, last, ahead)
            inner = jnp.arange(1, last)
            state, _ = lax.scan(step, state, inner, reverse=True)
            state = self.pulled(self.summed(state, 1), given, 0, {})
        state = self.summed(state, 0)
        return state.cotangent, state.sent

    def pulled(
        self, state: _State, given: jax.Array, number: Any, ahead: Params
    ) -> _State:
        """One layer computed again, and its gradients."""
        x = lax.dynamic_index_in_dim(given, number, keepdims=False)
        _, pull = jax.vjp(lambda x, w: self.layer(x, w)[0], x, state.weights)
        cotangent, gradients = pull(state.cotangent)
        return _State(cotangent, ahead, gradients, state.sent)

    def summed(self, state: _State, number: Any) -> _State:
        """The unsent gradients, which are a layer's of that number, into the stacks."""
        sums = {n: self._summed(n, g) for n, g in state.unsent.items()}
        sent = {n: _stored(s, sums[n], number) for n, s in state.sent.items()}
        return state._replace(unsent={}, sent=sent)

    def _summed(self, name: str, gradient: jax.Array) -> jax.Array:
        if _AXIS not in self.specs[name]:
            return lax.psum(gradient, _AXIS)
        dim = self.specs[name].index(_AXIS)
        return lax.psum_scatter(gradient, _AXIS, scatter_dimension=dim, tiled=True)


def _stored(stack: jax.Array, value: jax.Array, number: Any) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), number, 0)
