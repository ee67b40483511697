"""Many processes: starts `jax.distributed`, and makes meshes over its processes.

It sets the options that overlap needs before XLA starts.  Before a program runs, the
processes compare it (`runtime/agreement.py`).
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jhost import errors
from jhost._calibration_cache import kept_texts, share
from jhost._jax import backend_is_up, coordination, from_process_0
from jhost.runtime.agreement import DEFAULT_TIMEOUT, set_timeout
from jhost.runtime.compiler_options import SYMMETRIC_BUFFERS
from jhost.runtime.launch import alone_on_its_host, is_first, one_gpu_each

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
    """Makes this process one of several, as `jax.distributed.initialize` does.

    Call it before anything else that asks JAX for devices.  Under SLURM, Open MPI and
    Kubernetes it needs no argument.  It warns if SLURM or Open MPI started a process
    for each GPU of a host.  If a process dies, the others end, too:
    `heartbeat_timeout_seconds` (100 by default) after a kill, or
    `shutdown_timeout_seconds` (300 by default) after an error.  `docs/processes.md`
    says how to launch processes.

    Args:
        coordinator_address: as for `jax.distributed.initialize`: host and port of
            process 0.
        num_processes: as for JAX: the number of processes.
        process_id: as for JAX: the number of this process.
        local_device_ids: as for JAX: the GPUs of this process.  If SLURM or Open MPI
            started one process on the host, it gets all GPUs by default. (JAX gives it
            only the first GPU.)
        program_timeout_seconds: before a process first runs a program, the processes of
            the mesh compare it.  This is how long a process waits for the others.  None
            turns the comparison off.
        symmetric_buffers: whether all programs of this process, and NCCL's
            communicators, use symmetric buffers.  This is for processes of one GPU
            each: it makes pipelines about 2 % faster, and collectives without chunks 5
            % slower.
        **arguments: other arguments of `jax.distributed.initialize`, depending on JAX's
            version.

    Raises:
        InitializeError: JAX has already made its devices, or this was called before.
        OptionError: a timeout is 0 or below, or longer than 30 years.
        ArgumentError: a timeout is not a number.

    Example:
        >>> import jhost
        >>> jhost.distributed.initialize("10.0.0.1:1234", 2, 0)  # doctest: +SKIP
    """
    # First of all: a wrong argument must not leave the job half started.
    _check_timeout(program_timeout_seconds)
    _check_is_early()
    _warn_of_one_gpu_each(local_device_ids)
    if local_device_ids is None and alone_on_its_host(os.environ):
        local_device_ids = ()  # JAX then leaves all of them visible
    jax.distributed.initialize(
        coordinator_address, num_processes, process_id, local_device_ids, **arguments
    )
    set_timeout(program_timeout_seconds)
    _share_calibrations()
    if symmetric_buffers:
        # XLA reads them when a backend starts, which `jax.distributed` does not do.
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


def _warn_of_one_gpu_each(local_device_ids: Any) -> None:
    slow = one_gpu_each(os.environ)
    if slow and local_device_ids is None and is_first(os.environ):
        warnings.warn(f"{slow.what}; {slow.advice}.", stacklevel=3)


def _share_calibrations() -> None:
    """Gives all processes the calibrations that process 0 finds on its disk."""
    if coordination() is not None:
        # With other rates a process may choose another program, and would be refused.
        kept = from_process_0("jhost/calibrations", lambda: json.dumps(kept_texts()))
        share(json.loads(kept))


def _with_flags(given: str, flags: Mapping[str, Any]) -> str:
    """XLA's flags with some more; what the user said of one stands."""
    more = [
        f"--{name}={str(value).lower()}"
        for name, value in flags.items()
        # A user who sets a flag wants it, true or false.
        if name not in given
    ]
    return " ".join([*given.split(), *more])


def make_mesh(
    axes: Mapping[str, int],
    *,
    within: str | Sequence[str] | None = None,
    axis_types: Sequence[AxisType] | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh over all processes, with axes that stay within a process.

    Pipelines gain most between the devices of one process, so the axes along which
    jhost pipelines have to stay within a process.  `jax.make_mesh` does not look at
    processes, and refuses GPUs of several hosts.

    Args:
        axes: the name and size of each axis, the outermost first.
        within: the axis or axes that have to stay within a process: by default the last
            axis, and with `()` no axis.  If these axes need fewer devices than a
            process has, the other axes fill the process, the last one first.
        axis_types: one type for each axis, as for `jax.make_mesh`; by default all are
            `Auto`.
        devices: the devices of the mesh.  By default these are the first devices of
            `jax.devices()`, as many as the axes need.

    Returns:
        The mesh, in the order of
        `jax.experimental.mesh_utils.create_hybrid_device_mesh`.

    Raises:
        ArgumentError: `axes` is not a dict from names to ints above 0.
        OptionError: there are too few devices, processes have different numbers of
            devices, or a process has too few for the axes in `within`.
        UnknownAxisError: `within` names an axis that `axes` does not have.

    Example:
        >>> import jax
        >>> import jhost
        >>> mesh = jhost.distributed.make_mesh({"dp": 1, "tp": jax.device_count()})
        >>> mesh.axis_names
        ('dp', 'tp')
    """
    _check_axes(axes)
    inner = _inner_axes(axes, within)
    chosen, room = _equal_share(axes, jax.devices() if devices is None else devices)
    local = _in_a_process(axes, inner, room)
    too_large = [axis for axis in inner if local[axis] != axes[axis]]
    if too_large:
        wanted = " x ".join(f"{axis}={axes[axis]}" for axis in inner)
        raise errors.OptionError(
            f"jhost.distributed.make_mesh cannot lay {wanted} within a process, which "
            f"has {room} of the {len(chosen)} devices. Make {' and '.join(too_large)} "
            "smaller, start processes with more devices, or give within=() to lay axes "
            "across processes, where jhost pipelines only what you ask for."
        )
    grid = mesh_utils.create_hybrid_device_mesh(
        [local[axis] for axis in axes],
        [size // local[axis] for axis, size in axes.items()],
        chosen,
        # The default of JAX is the slice, which is a thing of TPUs.
        process_is_granule=True,
    )
    # By default `jax.make_mesh` makes Explicit axes (JAX 0.10 to 0.12), whose shardings
    # are the user program's to say, and not jhost's.
    types = axis_types or (AxisType.Auto,) * len(axes)
    return Mesh(grid, tuple(axes), axis_types=tuple(types))


def _check_axes(axes: Any) -> None:
    pairs = axes.items() if isinstance(axes, Mapping) else [(axes, None)]
    wrong = [
        f"{name!r}: {size!r}"
        for name, size in pairs
        if not isinstance(name, str)
        or isinstance(size, bool)
        or not isinstance(size, int)
        or size < 1
    ]
    if wrong or not pairs:
        raise errors.ArgumentError(
            "jhost.distributed.make_mesh takes axes as a mapping from names to whole "
            f"numbers above 0, as {{'dp': 2, 'tp': 4}}, but got {axes!r}."
        )


def _inner_axes(axes: Mapping[str, int], within: Any) -> tuple[str, ...]:
    """The axes that have to stay within a process, in the order of the mesh."""
    if within is None:
        return tuple(axes)[-1:]
    named = (within,) if isinstance(within, str) else tuple(within)
    if unknown := [axis for axis in named if axis not in axes]:
        raise errors.UnknownAxisError(
            f"jhost.distributed.make_mesh got within={within!r}, but its axes are "
            f"{', '.join(axes)}.",
            [repr(axis) for axis in unknown],
        )
    return tuple(axis for axis in axes if axis in named)


def _equal_share(
    axes: Mapping[str, int], devices: Sequence[Any]
) -> tuple[list[Any], int]:
    """The devices of a mesh, and how many of them each process has."""
    count = math.prod(axes.values())
    product = " x ".join(f"{axis}={size}" for axis, size in axes.items())
    # By process, so that few processes take part if fewer devices are needed.
    chosen = sorted(devices, key=lambda d: (d.process_index, d.id))[:count]
    of_each = Counter(device.process_index for device in chosen)
    if len(chosen) < count:
        raise errors.OptionError(
            f"jhost.distributed.make_mesh got {product}, which needs {count} devices, "
            f"but there are {len(devices)} in all. JAX_PLATFORMS=cpu "
            f"JAX_NUM_CPU_DEVICES={count} makes {count} of any CPU."
        )
    if len(set(of_each.values())) > 1:
        shares = ", ".join(f"{n} of process {p}" for p, n in sorted(of_each.items()))
        raise errors.OptionError(
            f"jhost.distributed.make_mesh got {product}, which needs {count} devices: "
            f"{shares}. All processes must have the same number of these: give other "
            "sizes, or devices=."
        )
    return chosen, count // len(of_each)


def _in_a_process(
    axes: Mapping[str, int], inner: Sequence[str], room: int
) -> dict[str, int]:
    """Of each axis, the part that lies within a process of so many devices."""
    local = dict.fromkeys(axes, 1)
    outer = [axis for axis in axes if axis not in inner]
    # The last axis first: it has the most traffic, and takes what a process has.
    for axis in (*reversed(inner), *reversed(outer)):
        local[axis] = math.gcd(axes[axis], room)
        room //= local[axis]
    return local
