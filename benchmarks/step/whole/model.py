"""The step that is measured: embedding, Llama layers, loss, clipping and AdamW.

A `Placement` says where a device's part is spread and brought together again.  So the
step alone on each device is the same code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.layers import EPSILON
from benchmarks.step.whole.sizes import Case

Params: TypeAlias = dict[str, Any]
Layer: TypeAlias = Callable[[jax.Array, Params], tuple[jax.Array, None]]
Layers: TypeAlias = Callable[[jax.Array, Any], jax.Array]

LEARNING_RATE = 3e-4


class State(NamedTuple):
    """What a step takes, is given for good, and returns."""

    params: Any  # in float32
    optimizer: Any


class Placement(Protocol):
    """Where values lie, of shape `[sequences, tokens, features]`."""

    def gathered(self, x: jax.Array) -> jax.Array:
        """All tokens of x, of which a device has its own between matmuls."""
        ...

    def mark(self, product: jax.Array) -> jax.Array:
        """A product of all tokens, as it is."""
        ...

    def features(self, x: jax.Array) -> jax.Array:
        """x, of which a device has some features."""
        ...

    def rows(self, product: jax.Array) -> jax.Array:
        """A product that is summed over tp; a device keeps its tokens."""
        ...

    def weight(self, w: jax.Array, spec: P) -> jax.Array:
        """A weight in bfloat16, whole over fsdp."""
        ...

    def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """The table's rows for a device's own tokens, in the table's dtype."""
        ...


# --- State -------------------------------------------------------------------------- #


def specs_of_layer(case: Case) -> Params:
    inwards = dict.fromkeys(("query", "key", "value", "gate", "up"), ("fsdp", "tp"))
    outwards = dict.fromkeys(("out", "down"), ("tp", "fsdp"))
    matrices = {name: case.spec(*dims) for name, dims in (inwards | outwards).items()}
    return matrices | {"attention_norm": P(), "mlp_norm": P()}


def specs_of_params(case: Case) -> Params:
    """Layers of a scan are stacked, and those written out in a list."""
    layer = specs_of_layer(case)
    stacked = {name: P(None, *spec) for name, spec in layer.items()}
    return {
        "embedding": case.spec("tp", "fsdp"),
        "layers": stacked if case.scans else [layer] * case.layers,
        "norm": P(),
        "logits": case.spec("fsdp", "tp"),
    }


def specs_of_state(case: Case) -> State:
    """Moments lie where their parameters do."""
    params = specs_of_params(case)
    moments = optax.tree_map_params(
        _optimizer(),
        lambda _, spec: spec,
        jax.eval_shape(functools.partial(first_state, case)).optimizer,
        params,
        transform_non_params=lambda _: P(),
    )
    return State(params, moments)


def first_params(case: Case) -> Params:
    model, keys = case.model, iter(jax.random.split(jax.random.key(0), 1024))
    stack = (case.layers,) if case.scans else ()

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    def layer() -> Params:
        hidden, ffn = model.hidden, model.ffn
        queries, shared = model.heads * model.head, model.kv_heads * model.head
        return {
            "query": normal(*stack, hidden, queries),
            "key": normal(*stack, hidden, shared),
            "value": normal(*stack, hidden, shared),
            "out": normal(*stack, queries, hidden),
            "gate": normal(*stack, hidden, ffn),
            "up": normal(*stack, hidden, ffn),
            "down": normal(*stack, ffn, hidden),
            "attention_norm": jnp.ones((*stack, hidden)),
            "mlp_norm": jnp.ones((*stack, hidden)),
        }

    return {
        "embedding": jax.random.normal(next(keys), (case.vocabulary, model.hidden)),
        "layers": layer() if case.scans else [layer() for _ in range(case.layers)],
        "norm": jnp.ones(model.hidden),
        "logits": normal(model.hidden, case.vocabulary),
    }


def first_state(case: Case) -> State:
    params = first_params(case)
    return State(params, _optimizer().init(params))


def tokens_of(case: Case) -> jax.Array:
    """Random sequences, each with the token that follows."""
    shape = case.sequences, case.model.sequence + 1
    return jax.random.randint(jax.random.key(1), shape, 0, case.vocabulary)


def _optimizer() -> optax.GradientTransformation:
    adamw = optax.adamw(LEARNING_RATE, b2=0.95, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


# --- Step --------------------------------------------------------------------------- #


def train_step(
    case: Case,
    place: Placement,
    state: State,
    tokens: jax.Array,
    layers: Layers | None = None,
) -> tuple[State, jax.Array]:
    """The next state, and the loss before it; `layers` stand for the case's own."""
    loss_of = functools.partial(_loss, case, place, layers or _layers(case, place))
    loss, gradients = jax.value_and_grad(loss_of)(state.params, tokens)
    updates, kept = _optimizer().update(gradients, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), kept), loss


def _loss(
    case: Case, place: Placement, layers: Layers, params: Params, tokens: jax.Array
) -> jax.Array:
    specs = specs_of_params(case)
    if case.cast == "before":
        params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    x = place.lookup(params["embedding"], tokens[:, :-1]).astype(jnp.bfloat16)
    x = layers(x, params["layers"])
    x = place.gathered(_normalized(x, params["norm"]))
    logits = place.mark(x @ place.weight(params["logits"], specs["logits"]))
    logits = place.features(logits.astype(jnp.float32))
    return _cross_entropy(logits, tokens[:, 1:])


def _layers(case: Case, place: Placement) -> Layers:
    layer = layer_of(case, place)
    if case.checkpoints:
        layer = jax.checkpoint(layer, prevent_cse=not case.scans)
    if case.scans:
        return lambda x, weights: lax.scan(layer, x, weights)[0]
    return lambda x, weights: functools.reduce(lambda x, w: layer(x, w)[0], weights, x)


def layer_of(case: Case, place: Placement) -> Layer:
    """One layer, as a scan takes it."""
    specs = specs_of_layer(case)

    def layer(x: jax.Array, masters: Params) -> tuple[jax.Array, None]:
        w = {name: place.weight(masters[name], specs[name]) for name in masters}
        x = x + _attention(case, place, _normalized(x, w["attention_norm"]), w)
        return x + _swiglu(place, _normalized(x, w["mlp_norm"]), w), None

    return layer


def _normalized(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normal = (wide * lax.rsqrt(mean + EPSILON)).astype(x.dtype)
    return normal * gain.astype(x.dtype)


def _attention(case: Case, place: Placement, x: jax.Array, w: Params) -> jax.Array:
    """Causal, with several heads of queries for one of keys and values."""
    x = place.gathered(x)

    def heads(weight: jax.Array) -> jax.Array:
        projected = place.features(place.mark(x @ weight))
        return projected.reshape(*projected.shape[:2], -1, case.model.head)

    q, k, v = (heads(w[name]) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(
        _rotated(q),
        _rotated(k),
        v,
        is_causal=True,
        implementation=case.model.attention or "xla",
    )
    # Said of what attention gives, or GSPMD gathers weights for its gradient.
    mixed = place.features(mixed.reshape(*mixed.shape[:2], -1))
    return place.rows(mixed @ w["out"])


def _rotated(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """The halves of each head, turned by angles that grow with the position."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _swiglu(place: Placement, x: jax.Array, w: Params) -> jax.Array:
    x = place.gathered(x)
    hidden = place.features(jax.nn.silu(x @ w["gate"]) * (x @ w["up"]))
    return place.rows(hidden @ w["down"])


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """A sum over the vocabulary for each token, and never a gather of its logits."""
    vocabulary = lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    target = jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target)
