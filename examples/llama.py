"""Trains a small Llama in plain JAX, with one `jhost.jit` on the whole training step.

It is written as for GSPMD.  It has a `lax.scan` over layers with `jax.checkpoint`, a
scan over microbatches, float32 weights that are cast to bfloat16, AdamW, logits that
stay sharded over the vocabulary, donation, and checkpoints.  The mesh axes have any
sizes: `dp` (whole weights), `fsdp` (sharded weights) and `tp` (sharded matmuls).

JAX_NUM_CPU_DEVICES=8 python examples/llama.py

With `--plain` the step goes to `jax.jit`, where marks are the identity.  With
`--checkpoint FOLDER` the next command goes on where this one ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from tqdm import tqdm

import jhost

Params: TypeAlias = dict[str, Any]


class State(NamedTuple):
    params: Any  # in float32
    optimizer: optax.OptState


@dataclasses.dataclass(frozen=True)
class Config:
    """Each field is an option of the command."""

    mesh: str = "dp=2,fsdp=2,tp=2"
    layers: int = 4
    width: int = 128
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 384
    vocab: int = 256
    sequence: int = 128
    batch: int = 16  # sequences in a step
    microbatches: int = 2
    steps: int = 200
    lr: float = 3e-3
    seed: int = 0
    attention: Literal["xla", "cudnn"] = "xla"
    remat: str = "nothing_saveable"  # one of jax.checkpoint_policies
    checkpoint: str = ""  # a folder
    every: int = 50  # steps from one checkpoint to the next
    keep: int = 2  # checkpoints


# --- Shardings ---------------------------------------------------------------------- #

BATCH = ("dp", "fsdp")
TOKENS = P(BATCH, "tp", None)  # between matmuls: sequences over tp
FEATURES = P(BATCH, None, "tp")  # within: heads, hidden features or the vocabulary
MICROBATCHES = P(None, BATCH, None)

PARAMS: Params = {
    "embedding": P("tp", "fsdp"),
    "layers": {
        **dict.fromkeys(("query", "key", "value", "gate", "up"), P(None, "fsdp", "tp")),
        **dict.fromkeys(("out", "down"), P(None, "tp", "fsdp")),
        **dict.fromkeys(("attention_norm", "mlp_norm"), P()),
    },
    "norm": P(),
    "logits": P("fsdp", "tp"),
}


def mesh_of(sizes: str) -> Mesh:
    """The mesh of "dp=2,tp=4".  Axes that it does not name have one device."""
    given = dict(size.split("=") for size in sizes.split(","))
    shape = tuple(int(given.pop(axis, 1)) for axis in ("dp", "fsdp", "tp"))
    if given:
        raise SystemExit(f"A mesh has dp, fsdp and tp, but not {', '.join(given)}.")
    return jax.make_mesh(shape, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)


# --- Model -------------------------------------------------------------------------- #


def first_params(config: Config, key: jax.Array) -> Params:
    """Drawn with the variance that keeps activations' own; layers are stacked."""
    layers, width, hidden = config.layers, config.width, config.hidden
    shared = width // config.heads * config.kv_heads  # by groups of queries
    keys = iter(jax.random.split(key, 9))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    return {
        "embedding": normal(config.vocab, width),
        "layers": {
            "attention_norm": jnp.ones((layers, width)),
            "query": normal(layers, width, width),
            "key": normal(layers, width, shared),
            "value": normal(layers, width, shared),
            "out": normal(layers, width, width),
            "mlp_norm": jnp.ones((layers, width)),
            "gate": normal(layers, width, hidden),
            "up": normal(layers, width, hidden),
            "down": normal(layers, hidden, width),
        },
        "norm": jnp.ones(width),
        "logits": normal(width, config.vocab),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return normal.astype(x.dtype) * scale


def rotary(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Turns the halves of each head by angles that grow with the position."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attention(config: Config, x: jax.Array, w: Params) -> jax.Array:
    """Causal, with several heads of queries for one of keys and values."""

    def heads(weight: jax.Array) -> jax.Array:
        projected = constrain(jhost.stream(x @ weight, axis=1), FEATURES)
        return projected.reshape(*x.shape[:2], -1, config.width // config.heads)

    q, k, v = (heads(w[name]) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(
        rotary(q), rotary(k), v, is_causal=True, implementation=config.attention
    )
    mixed = constrain(mixed.reshape(*x.shape[:2], -1), FEATURES)
    return constrain(jhost.stream(mixed @ w["out"], axis=1), TOKENS)


def swiglu(x: jax.Array, w: Params) -> jax.Array:
    hidden = constrain(jax.nn.silu(x @ w["gate"]) * (x @ w["up"]), FEATURES)
    return constrain(jhost.stream(hidden @ w["down"], axis=1), TOKENS)


def logits_of(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """The logits of the token after each."""

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        x = x + attention(config, rms_norm(x, w["attention_norm"]), w)
        return x + swiglu(rms_norm(x, w["mlp_norm"]), w), None

    policy = getattr(jax.checkpoint_policies, config.remat)
    layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    x = constrain(params["embedding"][tokens], TOKENS)
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = jhost.stream(rms_norm(x, params["norm"]) @ params["logits"], axis=1)
    return constrain(logits.astype(jnp.float32), FEATURES)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """A sum over the vocabulary for each token, and never a gather of its logits."""
    vocabulary = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    target = jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target)


# --- Training ----------------------------------------------------------------------- #


def optimizer_of(config: Config) -> optax.GradientTransformation:
    rate = optax.warmup_constant_schedule(config.lr / 10, config.lr, 10)
    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def first_state(config: Config) -> State:
    params = first_params(config, jax.random.key(config.seed))
    return State(params, optimizer_of(config).init(params))


def specs_of(config: Config) -> State:
    """The shardings of a state: moments have those of their parameters."""
    moments = optax.tree_map_params(
        optimizer_of(config),
        lambda _, spec: spec,
        jax.eval_shape(functools.partial(first_state, config)).optimizer,
        PARAMS,
        transform_non_params=lambda _: P(),
    )
    return State(PARAMS, moments)


def train_step(config: Config, state: State, batch: jax.Array) -> tuple[State, Any]:
    """The next state and the loss; gradients of microbatches add up in float32."""
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state.params)

    def loss_of(weights: Params, tokens: jax.Array) -> jax.Array:
        return cross_entropy(logits_of(config, weights, tokens[:, :-1]), tokens[:, 1:])

    def add(total: Any, tokens: jax.Array) -> tuple[Any, None]:
        loss, grads = jax.value_and_grad(loss_of)(weights, tokens)
        new = loss, constrain(grads, PARAMS)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, new), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
    total, _ = jax.lax.scan(add, zeros, batch)
    loss, grads = jax.tree.map(lambda t: t / config.microbatches, total)
    updates, kept = optimizer_of(config).update(grads, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), kept), loss


def standard_library() -> np.ndarray:
    """The sources of all modules.  A token is a byte."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8)


def batch_at(position: dict[str, int], text: np.ndarray, config: Config) -> np.ndarray:
    """Sequences of the text with the tokens that follow, by seed and step."""
    rng = np.random.default_rng((position["seed"], position["step"]))
    each = config.microbatches, config.batch // config.microbatches, 1
    starts = rng.integers(len(text) - config.sequence, size=each)
    return text[starts + np.arange(config.sequence + 1)].astype(np.int32)


def manager_of(config: Config) -> Any:
    """Keeps checkpoints.  A state is saved before the next step reuses its memory."""
    every, keep = config.every, config.keep
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=every, max_to_keep=keep, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager(Path(config.checkpoint).resolve(), options=options)


def train(config: Config, mesh: Mesh, plain: bool) -> list[float]:
    """The losses of the steps that were left to take."""
    specs = specs_of(config)
    state = jax.jit(functools.partial(first_state, config), out_shardings=specs)()
    position = {"seed": config.seed, "step": 0}
    manager = manager_of(config) if config.checkpoint else None
    if manager is not None and manager.latest_step() is not None:
        like = ocp.args.StandardRestore((state, position))
        state, position = manager.restore(manager.latest_step(), args=like)

    jit = jax.jit if plain else functools.partial(jhost.jit, mesh=mesh)
    step: Any = jit(
        functools.partial(train_step, config),
        in_shardings=(specs, MICROBATCHES),
        out_shardings=(specs, P()),
        donate_argnums=0,
    )
    text, losses = standard_library(), list[float]()
    steps = range(position["step"], config.steps)
    for number in (bar := tqdm(steps, initial=steps.start, total=steps.stop)):
        begin = time.perf_counter()
        batch = batch_at(position, text, config)
        batch = jax.device_put(batch, NamedSharding(mesh, MICROBATCHES))
        state, loss = step(state, batch)
        losses.append(float(loss))
        speed = config.batch * config.sequence / (time.perf_counter() - begin)
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s")
        position["step"] = number + 1
        if manager is not None:
            kept = ocp.args.StandardSave((state, position))
            manager.save(number + 1, args=kept, force=number + 1 == config.steps)
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="train by jax.jit alone")
    for name, default in dataclasses.asdict(Config()).items():
        option, text = "--" + name.replace("_", "-"), f"default: {default}"
        parser.add_argument(option, type=type(default), default=default, help=text)
    given = vars(parser.parse_args(argv))
    plain, mesh = given.pop("plain"), mesh_of(given["mesh"])
    with jax.set_mesh(mesh):
        return train(Config(**given), mesh, plain)


if __name__ == "__main__":
    main()
