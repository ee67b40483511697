"""Pipeline parallelism: microbatches go through a Llama's layers, on devices by stage.

It is written as in praxis and MaxText: `vmap` over the stages, and a scan in which
`jnp.roll` along the sharded dim of stages gives each stage's results to the next one.

JAX_NUM_CPU_DEVICES=8 python examples/pipeline.py --mesh stage=4,tp=2

With `--repeats 2` the schedule is circular: microbatches go around twice, and a stage
has two groups of layers, so the bubble is half as long.  With `--delay` a result moves
for a whole tick, beside the work of that tick, and the bubble is longer.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import small_llama as llama
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from measure import difference, milliseconds
from small_llama import LARGE, SMALL, Params, Sizes

import jhost

Stage: TypeAlias = Callable[[Any, jax.Array], jax.Array]

AXES = "stage", "dp", "tp"
# The weights of layers are [repeats, stages, layers of a stage, ...].
COLUMNS, ROWS = P(None, "stage", None, None, "tp"), P(None, "stage", None, "tp")
PARAMS: Params = {
    "embedding": P(),
    "layers": {
        **dict.fromkeys(("query", "key", "value", "gate", "up"), COLUMNS),
        **dict.fromkeys(("out", "down"), ROWS),
        **dict.fromkeys(("attention_norm", "mlp_norm"), P(None, "stage")),
    },
    "norm": P(),
    "logits": P(None, "tp"),
}
TOKENS = P(None, "dp")  # [microbatches, sequences, tokens]


def mesh_of(sizes: str) -> Mesh:
    """The mesh of "stage=4,tp=2".  Axes that it does not name have one device."""
    given = dict(size.split("=") for size in sizes.split(","))
    shape = tuple(int(given.pop(axis, 1)) for axis in AXES)
    if given:
        raise SystemExit(f"A mesh has {', '.join(AXES)}, but not {', '.join(given)}.")
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


# --- The schedule ------------------------------------------------------------------- #


def pipeline(
    stage: Stage, weights: Any, xs: jax.Array, *, delay: bool = False
) -> jax.Array:
    """The results of the last stage for the microbatches `xs`.

    Dims 0 and 1 of the weights are the repeats and the stages.  With one repeat this is
    GPipe.  With several, as many microbatches go around together as there are places.
    """
    repeats, stages = jax.tree.leaves(weights)[0].shape[:2]
    way = 2 if delay else 1  # ticks from a stage to the next
    places = way * stages
    count, *shape = xs.shape
    together = places if repeats > 1 else count
    if count % together:
        raise ValueError(f"{count} microbatches do not come in rounds of {places}")

    def of_stages(x: jax.Array) -> jax.Array:
        return x.reshape(stages, *(1,) * len(shape))

    @jax.checkpoint
    def work(weights: Any, repeat: jax.Array, x: jax.Array) -> jax.Array:
        def pick(w: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(w, repeat, keepdims=False)

        return stage(jax.tree.map(pick, weights), x)

    def tick(carry: Any, given: Any) -> tuple[Any, jax.Array]:
        (before, done), (time, entering) = carry, given
        moved = constrain(jnp.roll(done, 1, axis=0), P("stage", "dp"))
        repeat = (time - way * jnp.arange(stages)) // places % repeats
        enters = (jnp.arange(stages) == 0) & (repeat == 0)
        x = jnp.where(of_stages(enters), entering, before if delay else moved)
        run = jax.vmap(work, in_axes=(1, 0, 0), spmd_axis_name="stage")
        done = constrain(run(weights, repeat, x), P("stage", "dp"))
        return (moved if delay else None, done), done

    ticks = count * repeats + way * (stages - 1)
    first = jnp.zeros((stages, *shape), xs.dtype)
    entering = _at_first_stage(xs, ticks, repeats, stages, together)
    given = jnp.arange(ticks), constrain(entering, P(None, "stage", "dp"))
    _, done = jax.lax.scan(tick, (first if delay else None, first), given)
    # Microbatches leave the last stage in their last round.
    left = done[way * (stages - 1) :, -1]
    return left.reshape(-1, repeats, together, *shape)[:, -1].reshape(xs.shape)


def _at_first_stage(
    xs: jax.Array, ticks: int, repeats: int, stages: int, together: int
) -> jax.Array:
    """What enters each stage by tick: microbatches at the first, zeros elsewhere."""
    count, *shape = xs.shape

    def behind(x: jax.Array, dim: int, more: int) -> jax.Array:
        return jnp.pad(x, [(0, more if d == dim else 0) for d in range(x.ndim)])

    rounds = xs.reshape(-1, 1, together, *shape)
    entering = behind(rounds, 1, repeats - 1).reshape(-1, 1, *shape)
    return behind(behind(entering, 0, ticks - count * repeats), 1, stages - 1)


def one_by_one(stage: Stage, weights: Any, xs: jax.Array) -> jax.Array:
    """The same without a pipeline."""

    def layers(xs: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return jax.vmap(stage, in_axes=(None, 0))(weights, xs), None

    in_order = jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), weights)
    return jax.lax.scan(layers, xs, in_order)[0]


# --- The model ---------------------------------------------------------------------- #


def staged(params: Params, repeats: int, stages: int) -> Params:
    """The parameters with layers by repeat and stage."""

    def by_stage(w: jax.Array) -> jax.Array:
        return w.reshape(repeats, stages, -1, *w.shape[1:])

    return params | {"layers": jax.tree.map(by_stage, params["layers"])}


def loss_of(
    through: Callable[[Stage, Params, jax.Array], jax.Array],
    sizes: Sizes,
    params: Params,
    tokens: jax.Array,
) -> jax.Array:
    """The mean cross-entropy.  `through` takes microbatches through the layers."""

    def stage(weights: Params, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
            return llama.layer(sizes, x, w), None

        return jax.lax.scan(layer, x, weights)[0]

    x = through(stage, params["layers"], params["embedding"][tokens[..., :-1]])
    # Each stage takes some microbatches on from here.
    x = constrain(x, P("stage", "dp"))
    logits = llama.rms_norm(x, params["norm"]) @ params["logits"]
    return llama.cross_entropy(logits, tokens[..., 1:])


def main(argv: Sequence[str] | None = None) -> jhost.Explanation:
    """Compares loss and gradients of a pipeline with those of the same model without.

    Returns:
        The explanation of the pipeline.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", default="stage=2,tp=2")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--delay", action="store_true")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=1, help="of a stage, each repeat")
    parser.add_argument("--large", action="store_true", help="Llama-3 8B's, for GPUs")
    arguments = parser.parse_args(argv)

    mesh, repeats = mesh_of(arguments.mesh), arguments.repeats
    stages = mesh.shape["stage"]
    sizes, sequence = (LARGE, 2048) if arguments.large else (SMALL, 16)
    sizes = sizes.with_layers(repeats * stages * arguments.layers)
    through = functools.partial(pipeline, delay=arguments.delay)

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree)

    @functools.partial(jax.jit, out_shardings=specs(PARAMS))
    def first(key: jax.Array) -> Params:
        return staged(llama.first_params(sizes, key), repeats, stages)

    params = first(jax.random.key(0))
    shape = arguments.microbatches, 2 * mesh.shape["dp"], sequence + 1
    tokens = jax.random.randint(jax.random.key(1), shape, 0, sizes.vocab)
    tokens = jax.device_put(tokens, specs(TOKENS))

    with jax.set_mesh(mesh):
        step = jhost.jit(
            jax.value_and_grad(functools.partial(loss_of, through, sizes)),
            mesh=mesh,
            in_shardings=(PARAMS, TOKENS),
            out_shardings=(P(), PARAMS),
        )
        plain = jax.jit(
            jax.value_and_grad(functools.partial(loss_of, one_by_one, sizes)),
            out_shardings=specs((P(), PARAMS)),
        )
        explanation = jhost.explain(step, params, tokens)
        print(explanation)
        loss, gradients = step(params, tokens)
        off = difference((loss, gradients), plain(params, tokens))
        print(
            f"loss {loss:.4f}; without stages it and its gradients differ by {off:.0e}"
        )
        print(f"{milliseconds(step, params, tokens):.2f} ms")
    return explanation


if __name__ == "__main__":
    main()
