"""This process among those of `jax.distributed`."""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from jax._src import distributed, xla_bridge


class Coordination(Protocol):
    """The store of keys and values that all processes of `jax.distributed` share."""

    def key_value_set(
        self, key: str, value: str, allow_overwrite: bool = False
    ) -> None: ...

    def key_value_set_bytes(
        self, key: str, value: bytes, allow_overwrite: bool = False
    ) -> None: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]: ...

    def wait_at_barrier(
        self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int]
    ) -> None: ...


def coordination() -> Coordination | None:
    """This process's client of the coordination service; None without one."""
    return distributed.global_state.client


def process_number() -> int:
    """This process's number in its job, found without asking for devices."""
    return distributed.global_state.process_id


_TIMEOUT = 300_000
"""Milliseconds that a process waits for the text of process 0."""


def from_process_0(key: str, text: Callable[[], str]) -> str:
    """The `text` of process 0, in all processes; they all call this with one key."""
    client = coordination()
    assert client is not None, "of several processes"
    if process_number() == 0:
        client.key_value_set(key, text())
    return client.blocking_key_value_get(key, _TIMEOUT)


def backend_is_up() -> bool:
    """Whether JAX has asked for devices; settings no longer reach XLA after that."""
    return xla_bridge.backends_are_initialized()
