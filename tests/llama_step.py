"""The training step of `examples/llama.py`, for tests that compile or explain it."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P


@functools.cache
def example() -> dict[str, Any]:
    """What the script defines."""
    path = Path(__file__).parents[1] / "examples" / "llama.py"
    return runpy.run_path(str(path))


def step_of(
    jit: Callable[..., Any], mesh: Mesh, **sizes: Any
) -> tuple[Any, tuple[Any, ...]]:
    """The step by that decorator on a model of those sizes, and its arguments' types.

    It is to be lowered under `jax.set_mesh(mesh)`, in JAX's standard type promotion.
    """
    llama = example()
    axes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    config = llama["Config"](mesh=axes, **sizes)
    specs = llama["specs_of"](config)
    step = jit(
        functools.partial(llama["train_step"], config),
        in_shardings=(specs, llama["MICROBATCHES"]),
        out_shardings=(specs, P()),
        donate_argnums=0,
    )
    state = jax.eval_shape(functools.partial(llama["first_state"], config))
    rows = config.batch // config.microbatches
    tokens = (config.microbatches, rows, config.sequence + 1)
    return step, (state, jax.ShapeDtypeStruct(tokens, np.int32))
