"""Trains a Llama-style character model on the sources of Python's standard library.

It trains twice, with jhost and with `jax.jit`, over data- and tensor-parallel devices.
Both draw the same parameters and batches, so the losses agree.  Into `--out` it writes
`losses.json`, `loss.png` and checkpoints.  `--resume` goes on from a checkpoint.

JAX_NUM_CPU_DEVICES=8 python examples/train_transformer.py
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jhost
import jhost.nnx

State: TypeAlias = tuple[Any, optax.OptState]
"""Parameters, and what the optimizer keeps of them."""

Block: TypeAlias = Callable[[Any, jax.Array], jax.Array]

# Older flaxes have no rotary positions; causal attention learns to do without.
ROPE = 10_000.0 if hasattr(nnx, "RoPE") else None

CHARACTERS = 128  # ASCII; every other character is a question mark
BATCH, TOKENS = P("dp", None), P("dp", "tp")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the model and its training.  `batch` is a number of sequences."""

    features: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    sequence: int
    batch: int
    steps: int
    rate: float
    dtype: Any

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.sequence


SMALL = Config(32, 64, 8, 4, 2, 32, 8, 20, 1e-2, jnp.float32)
LARGE = Config(2048, 5632, 16, 8, 8, 1024, 64, 400, 3e-4, jnp.bfloat16)


# --- Text --------------------------------------------------------------------------- #


def standard_library() -> np.ndarray:
    """All sources as one line of characters, the same on every run."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    text = "\n".join(path.read_text(errors="replace") for path in files)
    return np.frombuffer(text.encode("ascii", errors="replace"), np.uint8)


def batch_of(text: np.ndarray, config: Config, step: int) -> np.ndarray:
    """Sequences from anywhere in `text`, each with the character that follows."""
    rng = np.random.default_rng(step)
    starts = rng.integers(0, len(text) - config.sequence, config.batch)
    return text[starts[:, None] + np.arange(config.sequence + 1)].astype(np.int32)


# --- Model -------------------------------------------------------------------------- #


class Transformer(nnx.Module):
    """Stacked blocks, so that all blocks share one program."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        @nnx.vmap(in_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def stacked(rngs: nnx.Rngs) -> jhost.nnx.TransformerBlock:
            return jhost.nnx.TransformerBlock(
                config.features,
                config.heads,
                config.hidden,
                num_kv_heads=config.kv_heads,
                rope_theta=ROPE,
                dtype=config.dtype,
                rngs=rngs,
            )

        width = config.features
        self.embed = nnx.Embed(CHARACTERS, width, dtype=config.dtype, rngs=rngs)
        self.blocks = stacked(rngs.fork(split=config.layers))
        self.norm = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(width, CHARACTERS, use_bias=False, rngs=rngs)

    def __call__(self, block: Block, tokens: jax.Array) -> jax.Array:
        """Logits, by `block`, which applies a block to activations."""
        x = constrained(self.embed(constrained(tokens)))
        graph, params = nnx.split(self.blocks)

        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            return block(nnx.merge(graph, params), x), None

        x, _ = jax.lax.scan(layer, x, params)
        return self.head(self.norm(x).astype(jnp.float32))


def apply(block: Any, x: jax.Array) -> jax.Array:
    """Applies a block without jhost."""
    return constrained(block(x))


def constrained(x: jax.Array) -> jax.Array:
    """A batch over dp, its sequences over tp."""
    return jax.lax.with_sharding_constraint(x, TOKENS)


def blocks_by_jhost(mesh: Mesh, **options: Any) -> Block:
    """The same block, its communication pipelined."""
    return jhost.jit(
        apply, mesh=mesh, in_shardings=(None, TOKENS), out_shardings=TOKENS, **options
    )


# --- Training ----------------------------------------------------------------------- #


def optimizer_of(config: Config) -> optax.GradientTransformation:
    """AdamW, warmed up and cooled down."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.rate, max(config.steps // 20, 1), config.steps
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def first_state(config: Config) -> tuple[Any, State]:
    """The model's structure, and its parameters where they belong."""

    @jax.jit
    def parameters() -> Any:
        return nnx.state(Transformer(config, nnx.Rngs(0)))

    graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))
    params = parameters()
    return graph, (params, optimizer_of(config).init(params))


def step_of(config: Config, graph: Any, block: Block) -> Any:
    """A step: the new state, and the loss in bits per character."""
    optimizer = optimizer_of(config)

    def bits(params: Any, batch: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(block, batch[:, :-1])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return jnp.mean(nats) / math.log(2)

    options = jhost.compiler_options(gradients=True)

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=options)
    def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        params, kept = state
        value, grads = jax.value_and_grad(bits)(params, batch)
        updates, kept = optimizer.update(grads, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    return step


@dataclasses.dataclass
class Run:
    """The results of a training so far."""

    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def tokens_per_second(self, config: Config) -> float:
        """Tokens per second of the median step, without the steps that compile."""
        return config.tokens / float(np.median(self.seconds[2:] or self.seconds))


def train(
    config: Config,
    mesh: Mesh,
    text: np.ndarray,
    block: Block,
    last: int,
    checkpoints: Checkpoints | None,
) -> Run:
    """Trains up to a step, from the last checkpoint if there is one."""
    graph, state = first_state(config)
    step, run, first = step_of(config, graph, block), Run(), 0
    if checkpoints is not None:
        first, state, run.losses = checkpoints.latest(state)
    for number in range(first, last):
        batch = batch_of(text, config, number)
        batch = jax.device_put(batch, NamedSharding(mesh, BATCH))
        begin = time.perf_counter()
        state, value = step(state, batch)
        run.losses.append(float(value))
        run.seconds.append(time.perf_counter() - begin)
        if checkpoints is not None:
            checkpoints.save(number + 1, state, run.losses)
        if number % max(config.steps // 20, 1) == 0 or number + 1 == last:
            print(f"  step {number}: {run.losses[-1]:.3f} bits", flush=True)
    return run


class Checkpoints:
    """The last two states of a training, with the losses so far, kept by orbax."""

    def __init__(self, folder: Path, every: int) -> None:
        import orbax.checkpoint as ocp  # checkpoints are optional

        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, save_interval_steps=every, enable_async_checkpointing=False
        )
        self.args: Any = ocp.args
        self.manager: Any = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, step: int, state: State, losses: list[float]) -> None:
        """Saves a checkpoint, if it is due at this step."""
        if self.manager.should_save(step):
            args = self.args.Composite(
                state=self.args.StandardSave(state), losses=self.args.JsonSave(losses)
            )
            self.manager.save(step, args=args)

    def latest(self, state: State) -> tuple[int, State, list[float]]:
        """The last checkpoint.  Its arrays have the shardings of those in `state`."""
        step = self.manager.latest_step()
        if step is None:
            return 0, state, []
        args = self.args.Composite(
            state=self.args.StandardRestore(state), losses=self.args.JsonRestore()
        )
        found = self.manager.restore(step, args=args)
        return step, found.state, found.losses


# --- Results ------------------------------------------------------------------------ #


def draw(out: Path) -> None:
    """The loss of each training by step."""
    import matplotlib.pyplot as plt

    losses = json.loads((out / "losses.json").read_text())
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=False):
        axes.plot(values, style, label=f"{name}: {values[-1]:.2f} at the end")
    axes.set(xlabel="step", ylabel="bits per character", ylim=(0, None))
    axes.legend()
    figure.savefig(out / "loss.png", dpi=150)
    plt.close(figure)


def check_installed(arguments: argparse.Namespace) -> None:
    """Ends at once if a package is missing, and not only after the training."""
    for package, needed, otherwise in (
        ("orbax", arguments.checkpoint_every, "--checkpoint-every 0"),
        ("matplotlib", arguments.picture, "--no-picture"),
    ):
        if needed and importlib.util.find_spec(package) is None:
            raise SystemExit(f"{package} is not installed. Do so, or give {otherwise}.")


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--large", action="store_true", help="the size for GPUs")
    parser.add_argument("--steps", type=int, help="to train for; default: by size")
    parser.add_argument(
        "--stop-after", type=int, help="steps, before the last: --resume goes on"
    )
    parser.add_argument("--tp", type=int, help="tensor-parallel devices; default: 4")
    parser.add_argument(
        "--pipeline", help="as for jhost.jit; default: p2p, and auto with --large"
    )
    parser.add_argument("--only", choices=["jhost", "jax.jit"], help="train one way")
    parser.add_argument("--out", type=Path, default=Path("train_transformer"))
    parser.add_argument(
        "--checkpoint-every", type=int, default=100, help="steps; 0 keeps none"
    )
    parser.add_argument("--resume", action="store_true", help="from what is in --out")
    parser.add_argument("--draw", action="store_true", help="only draw losses.json")
    parser.add_argument("--no-picture", dest="picture", action="store_false")
    arguments = parser.parse_args(argv)
    if arguments.resume and not arguments.checkpoint_every:
        parser.error(
            "--resume goes on from checkpoints: leave out --checkpoint-every 0"
        )
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Trains with and without jhost, and compares."""
    arguments = parsed(argv)
    out: Path = arguments.out
    if arguments.draw:
        draw(out)
        return
    check_installed(arguments)
    config = LARGE if arguments.large else SMALL
    config = dataclasses.replace(config, steps=arguments.steps or config.steps)
    last = min(arguments.stop_after or config.steps, config.steps)

    pipeline = arguments.pipeline or ("auto" if arguments.large else "p2p")
    devices = jax.device_count()
    tp = arguments.tp or math.gcd(devices, 4)
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((devices // tp, tp), ("dp", "tp"), axis_types=auto)
    text = standard_library()
    print(f"{len(text):,} characters; mesh {dict(mesh.shape)}; {config.steps} steps")

    ways: dict[str, Block] = {
        "jhost": blocks_by_jhost(mesh, pipeline=pipeline),
        "jax.jit": apply,
    }
    runs: dict[str, Run] = {}
    out.mkdir(parents=True, exist_ok=True)
    for name, block in ways.items():
        if arguments.only in (None, name):
            print(name)
            kept = kept_in(out / f"checkpoints-{name}", arguments)
            with jax.set_mesh(mesh):
                runs[name] = train(config, mesh, text, block, last, kept)
            losses = {name: run.losses for name, run in runs.items()}
            (out / "losses.json").write_text(json.dumps(losses))
    report(config, runs)
    if arguments.picture:
        draw(out)


def kept_in(folder: Path, arguments: argparse.Namespace) -> Checkpoints | None:
    """The checkpoints in a folder.  Old ones are refused without `--resume`."""
    if not arguments.checkpoint_every:
        return None
    if not arguments.resume and folder.exists() and any(folder.iterdir()):
        raise SystemExit(
            f"{folder} has checkpoints. Go on from them with --resume, or give another "
            "--out."
        )
    return Checkpoints(folder, arguments.checkpoint_every)


def report(config: Config, runs: dict[str, Run]) -> None:
    """Prints the end of each training, and the difference of the losses."""
    for name, run in runs.items():
        last = float(np.mean(run.losses[-10:]))
        speed = f"{run.tokens_per_second(config):,.0f}" if run.seconds else "no"
        print(f"{name}: {last:.3f} bits per character, {speed} tokens/s")
    if len(runs) == 2:
        one, other = (np.array(run.losses) for run in runs.values())
        print(f"the losses differ by {np.max(np.abs(one - other)):.4f} at most")


if __name__ == "__main__":
    main()
