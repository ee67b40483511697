"""The options that jhost gives XLA so that transfers run beside computation, and why.

Options go to each executable, never to the process.  A trial finds out which options a
backend or version does not know, and these are left out: the user never sees an error
about an unknown name.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Mapping
from typing import Any, TypedDict, Unpack

from jax.sharding import Mesh

from jhost.runtime.accepted_options import accepted
from jhost.runtime.devices import Devices, all_devices, devices_of
from jhost.runtime.mesh import AnyMesh

_EARLY: Mapping[str, Any] = {
    # Each starts right after its operand; by default the first sends wait for the last.
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    # Collectives of chunks stay apart: a combined one ends only with its last chunk.
    "xla_gpu_collective_combine_threshold_count": 1,
}

# Measured on four H200s with JAX 0.11.2: a p2p MLP block takes 0.85 ms with these, 1.42
# ms without them, and 1.07 ms without chunks.
_WANTED: Mapping[str, Any] = {
    **_EARLY,
    # Matmuls of chunks stay apart, also where nothing orders them.
    "xla_gpu_dot_merger_threshold_mb": 0,
}

_ADDS_UP: Mapping[str, Any] = {
    # Otherwise Triton's fusions take every matmul, and none of them adds to a loop's
    # sum in place, as cuBLAS does.  An MLP block, forward and backward, takes 2.57 ms
    # with this off and 2.74 ms with it on.  Without sums some shapes lose by turning it
    # off: a smaller block takes 0.47 ms with it off and 0.42 ms with it on.
    "xla_gpu_enable_triton_gemm": False,
}

_MANY_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"

PERMUTE_MODE = "xla_gpu_collective_permute_mode"

_PEER_COPIES: Mapping[str, Any] = {
    # Permutes go by copy engines.  A collective's kernel would wait until the matmul
    # leaves it multiprocessors.  XLA can do this only within a process.
    PERMUTE_MODE: "COLLECTIVES_PEER_MEMORY",
}

PUTS: Mapping[str, Any] = {
    # Also by copy engines, but no thread waits for other devices' threads.  A p2p MLP
    # block of 2048 rows takes 0.34 ms with it, and 0.42 ms with peer copies.  A block
    # of 4096 rows, where the devices are the limit, takes 0.45 and 0.41 ms.
    PERMUTE_MODE: "COLLECTIVES_SYMMETRIC_MEMORY",
}

_AMONG_SEVERAL: Mapping[str, Any] = {
    # A permute then waits only for the devices that it connects, and not for all
    # devices of the program.  Two processes of two H200s each, with p2p over the two of
    # a process: an MLP block takes 1.58 ms with it, 1.73 ms without it, and 1.74 ms
    # without chunks.
    "xla_gpu_collective_permute_connected_components": True,
}

SYMMETRIC_BUFFERS: Mapping[str, Any] = {
    # Buffers that every process maps.  With one GPU in each process, a p2p MLP block
    # takes 0.98 ms with them, 1.23 ms without them, and 1.05 ms without chunks.  An
    # option for the whole process makes NCCL move them by copy engines (openxla/xla
    # #33613): p2p then takes 1.005 ms instead of 1.023, but no chunks 1.12 instead of
    # 1.06.  They are for programs with permutes only: on two H100s in two processes, a
    # program of plain collectives takes 1.82 ms with them and 1.74 ms without them; its
    # p2p form takes 1.69 ms.
    "xla_gpu_experimental_enable_nccl_symmetric_buffers": True,
}


EARLY_COLLECTIVES: Mapping[str, Any] = {
    # A collective that is issued while a matmul runs starts when that matmul ends, and
    # the next matmuls hide it if none of them waits for it.  By default XLA has one
    # under way, and waits for it before the next matmul.  Measured on a training step
    # of 13B width, in two processes with one H100 each and 25 GB/s between them: 163 ms
    # with these instead of 199 (dp), and 227 instead of 263 (fsdp).  At NVLink's speed
    # NCCL's kernels take from the matmuls beside them about what hiding them gains:
    # steps of 8B on four H200s take 0.96 to 1.00 of the time (dp and fsdp), and 0.98 to
    # 1.04 (tp, and fsdp with tp).
    _MANY_AT_ONCE: 16,
    **_EARLY,
}
"""Options that hide collectives in programs that XLA partitions."""


class Loops(TypedDict, total=False):
    """The facts about an executable that its options depend on.

    Attributes:
        left_to_xla: whether XLA partitions the program, so that it has no loops.
        adds_up: whether loops add up matmuls, as loops with weight gradients do.
        permuted: the axes along which loops permute; None if they are not known, and
            may be any axes within a process.
        puts: whether NCCL puts, instead of peer copies.
        under_way: the most communications that are under way outside of loops.
    """

    left_to_xla: bool
    adds_up: bool
    permuted: Collection[str] | None
    puts: bool
    under_way: int


def wanted_options(mesh: AnyMesh | None, **loops: Unpack[Loops]) -> dict[str, Any]:
    """The options for an executable on `mesh`, which XLA may refuse."""
    if not isinstance(mesh, Mesh) or mesh.size == 1:
        return {}
    devices = devices_of(mesh)
    if devices.platform != "gpu":
        return {}
    if loops.get("left_to_xla"):
        return dict(EARLY_COLLECTIVES)
    ways = _ways(devices, loops.get("permuted"))
    put = PUTS if loops.get("puts") else {}
    sums = _ADDS_UP if loops.get("adds_up") else {}
    # Several permutes may be under way in a loop.  All permutes of a gather queue at
    # the start, and a piece of an all-reduce goes back to all others while they get the
    # next piece.  Outside of loops come those under way there, and one collective.
    many = max(2 * mesh.size, 1 + loops.get("under_way", 0))
    if devices.processes > 1:  # XLA's own collectives between processes, as above
        many = max(many, EARLY_COLLECTIVES[_MANY_AT_ONCE])
    return {_MANY_AT_ONCE: many, **_WANTED, **ways, **put, **sums}


def _ways(devices: Devices, permuted: Collection[str] | None) -> Mapping[str, Any]:
    """How permutes move: by copy engines, if one of their axes is in a process."""
    if devices.processes == 1:
        return _PEER_COPIES
    if not devices.copied.isdisjoint(devices.reach if permuted is None else permuted):
        return {**_PEER_COPIES, **_AMONG_SEVERAL}
    return SYMMETRIC_BUFFERS if permuted else {}


def overlap_options(mesh: AnyMesh | None, **loops: Unpack[Loops]) -> dict[str, Any]:
    """The `wanted_options` that XLA takes."""
    return accepted(mesh, wanted_options(mesh, **loops))


def options_report(
    name: str, mesh: AnyMesh | None, **loops: Unpack[Loops]
) -> tuple[str, ...]:
    """The options that function `name` got on `mesh`, and those refused or missed."""
    wanted, applied = wanted_options(mesh, **loops), overlap_options(mesh, **loops)
    refused = {option: v for option, v in wanted.items() if option not in applied}
    said = (
        ("applied", applied),
        ("refused by this XLA", refused),
        ("missed inside an outer jax.jit", _missed.get((name, mesh), {})),
    )
    return tuple(f"{how}: {options_text(o)}" for how, o in said if o)


def compiler_options(
    *, gradients: bool = False, between_processes: bool = False
) -> dict[str, Any]:
    """The options that an outer `jax.jit` around jhost functions needs.

    XLA takes options only for a whole program.  So a jhost function inside another
    `jax.jit` cannot give its own options, and warns if `compiler_options` was never
    called.

    Args:
        gradients: whether the program differentiates jhost functions.  If it does, only
            cuBLAS does matmuls, because it adds to the weights' gradients in place.
        between_processes: whether you ask for p2p pipelines along an axis over
            processes of one GPU each.  If you do, NCCL's permutes use symmetric
            buffers, which make collectives without chunks slower.

    Returns:
        A dict for `jax.jit(..., compiler_options=...)`, for the devices of this
        process.  It is empty for one GPU and for other backends.

    Example:
        >>> import jax
        >>> import jhost
        >>> step = jax.jit(lambda x: x + 1, compiler_options=jhost.compiler_options())
        >>> float(step(1.0))
        2.0
    """
    global _given
    mesh = all_devices()
    permuted = mesh.axis_names if between_processes else None
    options = overlap_options(mesh, adds_up=gradients, permuted=permuted)
    _given = {**(_given or {}), **options}
    return options


_given: Mapping[str, Any] | None = None
"""The options that the user has asked for, to give to outer programs; None before."""

_missed: dict[tuple[str, AnyMesh | None], Mapping[str, Any]] = {}


def options_text(options: Mapping[str, Any]) -> str:
    """The options as arguments of a call."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


@functools.lru_cache(maxsize=1024)
def _warn_once(name: str, options: str, how: str) -> None:
    warnings.warn(
        f"{name} is part of a program that an outer jax.jit compiles, and misses these "
        f"options unless they are given there: {options}. Use jax.jit(..., "
        f"compiler_options=jhost.compiler_options({how})).",
        stacklevel=2,
    )


def warn_of_missed_options(
    name: str, mesh: AnyMesh | None, options: Mapping[str, Any]
) -> None:
    """Say once that `name` wants options on `mesh` and cannot give them itself.

    A user who has asked for options is assumed to give them to the outer program.
    Options for permutes between processes have to be asked for separately.
    """
    between = SYMMETRIC_BUFFERS.keys() & options.keys()
    missed = options
    if _given is not None:
        missed = {option: options[option] for option in between - _given.keys()}
    if missed:
        _missed[name, mesh] = dict(missed)
        how = "between_processes=True" if between else ""
        _warn_once(name, options_text(missed), how)
