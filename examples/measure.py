"""How far a function's results are from another's, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def difference(got: Any, want: Any) -> float:
    """The norm of what differs, relative to what is wanted: of the worst leaf.

    Raises:
      ValueError: It is more than roundings, of bfloat16 or TensorFloat-32, come to.
    """

    def of(a: jax.Array, b: jax.Array) -> float:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))

    worst = max(jax.tree.leaves(jax.tree.map(of, got, want)))
    if not worst < 2e-2:
        raise ValueError(f"the results differ by {worst:.1%}")
    return worst


def milliseconds(f: Callable[..., Any], *args: Any) -> float:
    """The shortest of five calls, after one that compiles."""
    times: list[float] = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(1e3 * (time.perf_counter() - start))
    return min(times[1:])
