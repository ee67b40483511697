"""Pallas' own collective matmul, the best of a few tilings."""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.arms.base import Built, Unavailable, need_gpus, per_device
from benchmarks.case import Case
from benchmarks.communication import AXIS

_MODULE = "jax.experimental.pallas.ops.gpu.collective_matmul_mgpu"


def all_gather_matmul(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
    """A kernel that sends each tile of rows to the next device while it uses it."""
    need_gpus(mesh)
    if case.axes.batch:
        raise Unavailable("addresses the devices of one axis")
    if case.kind not in ("ag_qkv", "ag_up", "nvfuser_ag", "pallas_ag"):
        raise Unavailable("gathers rows for one weight, nothing else")
    if backward:
        raise Unavailable("has no gradients")
    kernels = _module()
    variants = [
        functools.partial(
            kernels.all_gather_lhs_matmul,
            axis_name=AXIS,
            config=config,
            dtype=jnp.bfloat16,
        )
        for config in _tilings(case, kernels)
    ]
    if not variants:
        raise Unavailable("no tiling divides the shapes")
    return [
        Built(
            instance=per_device(variant, mesh, case.specs, case.out_spec, check=False),
            operands=case.operands,
        )
        for variant in variants
    ]


def _module() -> Any:
    try:
        return importlib.import_module(_MODULE)
    except ImportError as error:
        raise Unavailable(f"this JAX cannot import it: {error}") from error


def _tilings(case: Case, kernels: Any) -> list[Any]:
    """The part of the module's own sweep that fits: 2 warpgroups along m or along n."""
    dimension = kernels.MatmulDimension
    (tokens, _), (_, columns) = (operand.shape for operand in case.operands)
    rows, columns = tokens // case.axes.tp, columns // case.axes.tp
    choices = itertools.product((dimension.N, dimension.M), (dimension.N, dimension.M))
    return [
        kernels.TuningConfig(
            tile_m=128,
            tile_n=128,
            tile_k=64,
            max_concurrent_steps=4,
            grid_minor_dim=minor,
            grid_tile_width=8,
            wg_dimension=groups,
        )
        for groups, minor in choices
        if rows % (256 if groups == dimension.M else 128) == 0
        and columns % (256 if groups == dimension.N else 128) == 0
    ]
