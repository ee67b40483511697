"""The difference between the results of two functions, and the time of a function."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def difference(got: Any, want: Any) -> float:
    """The norm of the error, divided by the norm of what is wanted, of the worst leaf.

    Raises:
      ValueError: The error is larger than roundings of bfloat16 or TensorFloat-32.
    """

    def of(a: jax.Array, b: jax.Array) -> float:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))

    worst = max(jax.tree.leaves(jax.tree.map(of, got, want)))
    if not worst < 2e-2:
        raise ValueError(f"the results differ by {worst:.1%}")
    return worst


def milliseconds(f: Callable[..., Any], *args: Any) -> float:
    """The time of the shortest of five calls, after a call that compiles."""
    times: list[float] = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(1e3 * (time.perf_counter() - start))
    return min(times[1:])
