"""Benchmarks as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tests.xla_flags import QUICKLY


def in_two_processes(module: str, path: Path, *options: str) -> dict[str, Any]:
    """The run that two processes have measured, of which one writes and prints."""
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(
        [*command, "--processes", "2", "--json", str(path)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICKLY},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"written: {path.name}") == 1
    return json.loads(path.read_text())


def numpy_maker(
    operands: tuple[Any, ...], mesh: Mesh, *, integers: bool
) -> Callable[[int], tuple[jax.Array, ...]]:
    """Operands as benchmarks have them, which XLA compiles longer than most arms."""

    def values(rng: np.random.Generator, operand: Any) -> np.ndarray:
        if not integers:
            return rng.standard_normal(operand.shape) * operand.scale
        wanted = operand.nonzeros or np.inf
        density = min(1.0, wanted / operand.shape[operand.along])
        signs = rng.choice([-1.0, 1.0], operand.shape)
        return (rng.random(operand.shape) < density) * signs * operand.unit

    def made(seed: int) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(seed)
        return tuple(
            jax.device_put(
                values(rng, operand).astype(jnp.bfloat16),
                NamedSharding(mesh, operand.spec),
            )
            for operand in operands
        )

    return made
