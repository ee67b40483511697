"""The training step of `examples/llama.py`, for tests that compile or explain it."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh


@functools.cache
def _script(folder: str, name: str) -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[1] / folder / name))


def example() -> dict[str, Any]:
    """What the script defines."""
    return _script("examples", "llama.py")


def step_of(
    jit: Callable[..., Any], mesh: Mesh, **sizes: Any
) -> tuple[Any, tuple[Any, ...]]:
    """The step by that decorator on a model of those sizes, and its arguments' types.

    It is to be lowered under `jax.set_mesh(mesh)`, in JAX's standard type promotion.
    """
    llama = example()
    axes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    config = llama["Config"](mesh=axes, **sizes)
    return _script("benchmarks", "lowering_time.py")["trained"](llama, jit, config)
