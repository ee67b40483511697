"""Random numbers for flax layers in tests: XLA compiles those of JAX's default long."""

from __future__ import annotations

from typing import Any

import jax
import pytest

nnx: Any = pytest.importorskip("flax.nnx")


def rngs() -> Any:
    """The generators of a new layer, which draw the same each time."""
    return nnx.Rngs(quick_key())


def quick_key() -> jax.Array:
    """A key whose numbers XLA makes by itself, in one instruction."""
    return jax.random.key(0, impl="unsafe_rbg")
