"""The CPU's devices taken for GPUs of several processes, as far as passes ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax

from jhost._call import program


@contextmanager
def in_processes() -> Generator[None]:
    """Inside, every device is in a process of its own."""
    known = program.devices_of

    def apart(mesh: Any) -> Any:
        devices = known(mesh)
        reach = dict.fromkeys(devices.reach, "host")
        return dataclasses.replace(devices, platform="gpu", reach=reach)

    jax.clear_caches()
    with mock.patch.object(program, "devices_of", apart):
        yield
    jax.clear_caches()
