"""What a run ran on: versions, devices, clocks, options."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any

import jax

import jhost
from jhost._packages import installed

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "numpy",
    "torch",
    "triton",
)

_VARIABLES = ("XLA_", "NCCL_", "TORCH_SYMM_MEM_", "JAX_", "CUDA_DEVICE_MAX_")

_QUERY = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"


def describe() -> dict[str, Any]:
    """Everything that holds for a whole run."""
    device = jax.devices()[0]
    return {
        "versions": {"jhost": jhost.__version__, **installed(_PACKAGES)},
        "python": platform.python_version(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "processes": jax.process_count(),
        "jhost_options": {k: str(v) for k, v in jhost.compiler_options().items()},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and "/" not in value
        },
    }


def clocks() -> list[dict[str, str]] | None:
    """What nvidia-smi says of each GPU now; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    names = _QUERY.split(",")
    rows = [line.split(", ") for line in answer.stdout.splitlines()]
    return [dict(zip(names, row, strict=False)) for row in rows]
