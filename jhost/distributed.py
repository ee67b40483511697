"""Many processes: `jax.distributed`, with what overlap needs set before XLA starts.

Before they run, programs are compared between the processes: `runtime/agreement.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jhost import errors
from jhost._jax import backend_is_up
from jhost.runtime.agreement import DEFAULT_TIMEOUT, set_timeout
from jhost.runtime.compiler_options import SYMMETRIC_BUFFERS

_LONGEST_TIMEOUT = 1e9
"""Thirty years: in milliseconds it is still a number that JAX can pass on."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    program_timeout_seconds: float | None = DEFAULT_TIMEOUT,
    symmetric_buffers: bool = False,
    **arguments: Any,
) -> None:
    """Makes this one of several processes, as `jax.distributed.initialize` does.

    Call it before anything else that asks JAX for devices.  Under SLURM, Open MPI and
    Kubernetes no argument is needed.  `docs/processes.md` says how to launch, and when
    processes end whose peers died: `heartbeat_timeout_seconds` (100 by default) after
    one was killed, `shutdown_timeout_seconds` (300) after one raised.

    Args:
        coordinator_address: as for `jax.distributed.initialize`: host and port of
            process 0.
        num_processes: likewise, how many there are.
        process_id: likewise, the number of this one.
        local_device_ids: likewise, the GPUs of this process.  By default a process that
            SLURM or Open MPI started alone on its host has all of them, where JAX gives
            it the first.
        program_timeout_seconds: before it first runs a program, a process waits so long
            for the others of the program's mesh, and compares it with theirs.  None
            leaves that out.
        symmetric_buffers: whether all programs of this process, and NCCL's
            communicators, use symmetric buffers, for one GPU a process.  Pipelines
            are some 2 % faster then, and whole collectives 5 % slower.
        **arguments: the others of `jax.distributed.initialize`, which depend on JAX's
            version.

    Raises:
        InitializeError: JAX has started its backend, or this was called before.
        OptionError: a timeout that is not above 0, or longer than 30 years.
        ArgumentError: a timeout that is no number.

    Example:
        >>> import jhost
        >>> jhost.distributed.initialize("10.0.0.1:1234", 2, 0)  # doctest: +SKIP
    """
    _check_timeout(program_timeout_seconds)
    _check_is_early()
    if local_device_ids is None and _is_alone_on_its_host(os.environ):
        local_device_ids = ()  # JAX then leaves all of them visible
    jax.distributed.initialize(
        coordinator_address, num_processes, process_id, local_device_ids, **arguments
    )
    set_timeout(program_timeout_seconds)
    if symmetric_buffers:
        flags = _with_flags(os.environ.get("XLA_FLAGS", ""), SYMMETRIC_BUFFERS)
        os.environ["XLA_FLAGS"] = flags


def _check_timeout(seconds: Any) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise errors.ArgumentError(
            "jhost.distributed.initialize takes a number of seconds or None as "
            f"program_timeout_seconds, but got {seconds!r}."
        )
    if not 0 < seconds <= _LONGEST_TIMEOUT:
        raise errors.OptionError(
            f"jhost.distributed.initialize got program_timeout_seconds={seconds!r}, "
            f"but needs seconds above 0 and up to {_LONGEST_TIMEOUT:.0e}, or None for "
            "no comparing."
        )


def _check_is_early() -> None:
    if jax.distributed.is_initialized():
        raise errors.InitializeError(
            "jhost.distributed.initialize was called, or jax.distributed.initialize, "
            "and this process is one of several already. Call it once."
        )
    if backend_is_up():
        raise errors.InitializeError(
            "jhost.distributed.initialize comes too late: JAX has started its backend, "
            "which knows of this process alone. Call it before any computation, and "
            "before jax.devices, jax.device_count, jax.process_index or jax.make_mesh; "
            "importing a module may do one of these."
        )


def _is_alone_on_its_host(environment: Mapping[str, str]) -> bool:
    """Whether SLURM or Open MPI started one process a host.

    JAX takes the number of a process on its host for that of its only GPU.
    """
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return False
    # "1(x4)" is one on each of four hosts.
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    size = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return bool(re.fullmatch(r"1(\(x\d+\))?", tasks)) or size == "1"


def _with_flags(given: str, flags: Mapping[str, Any]) -> str:
    """XLA's flags with some more; what the user said of one stands."""
    more = [
        f"--{name}={str(value).lower()}"
        for name, value in flags.items()
        if name not in given
    ]
    return " ".join([*given.split(), *more])
