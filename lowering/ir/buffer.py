"""Buffers, and how their dims are spread."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np

from jhost.lowering.rules.reducers import Reducer

_T = TypeVar("_T")


# pyright does not follow a decorator that is `dataclass(...)` under another name.
@dataclass_transform(frozen_default=True, kw_only_default=True)
def node(cls: type[_T]) -> type[_T]:
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


@node
class Dim:
    """How one dim of a buffer is spread: over mesh axes (major first) and in chunks."""

    axes: tuple[str, ...] = ()
    stream: str | None = None


@node
class Buffer:
    """Memory on one device, or an alias of a part of it; `shape` is the local one.

    `partial` lists the mesh axes over which the buffer still has to be reduced, each
    with its reducer.  `memory_space` is a `jax.memory.Space`: the host's for what a
    policy of `jax.checkpoint` offloads.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    dims: tuple[Dim, ...]
    partial: tuple[tuple[str, Reducer], ...] = ()
    memory_space: Any = jax.memory.Space.Device
