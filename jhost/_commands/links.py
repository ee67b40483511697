"""How devices are joined: the speed of copies, XLA's options, the axes of a mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jhost._commands.findings import JAX, Report
from jhost._text import bytes_text
from jhost._timing import take_turns
from jhost.lowering.ir.reach import WHERE, between_processes, laid_better
from jhost.runtime.compiler_options import overlap_options, wanted_options
from jhost.runtime.devices import Devices, devices_of
from jhost.runtime.problem import Problem

# Large enough that latency does not count, small enough for any GPU.
_LINK_BYTES = 64 << 20
_SLOW_LINK = 40e9
"""Bytes a second; PCIe of the fifth generation gives more, and host memory less."""


def examine_links(report: Report, devices: list[Any], here: Devices) -> None:
    """How fast an array goes from the first device to each other of this process."""
    local = [d for d in devices if d.process_index == jax.process_index()]
    if len(local) < 2:
        return
    source = jax.device_put(jnp.zeros(_LINK_BYTES // 4, jnp.float32), local[0])
    copies = {
        f"{local[0].id} -> {device.id}": functools.partial(_copy, source, device)
        for device in local[1:]
    }
    times = take_turns(copies, rounds=3)
    # The fastest of three: what else goes over a link only slows a copy.
    rates = {name: _LINK_BYTES / min(each) for name, each in times.items()}
    report.facts["links"] = {
        name: f"{bytes_text(int(rate))}/s" for name, rate in rates.items()
    }
    slow = [name for name, rate in rates.items() if rate < _SLOW_LINK]
    if here.platform == "gpu" and slow:
        report.problems.append(
            Problem(
                f"copies between GPUs are slow: {', '.join(slow)}",
                "see `nvidia-smi topo -p2p r` and `nvidia-smi topo -m`: without peer "
                "access, copies go through host memory. Containers need all GPUs of "
                "an NVLink group, and virtual machines peer access (ACS off)",
            )
        )


def _copy(source: jax.Array, device: Any) -> jax.Array:
    return jax.device_put(source, device, may_alias=False)


def examine_options(report: Report, mesh: Mesh) -> None:
    wanted, taken = wanted_options(mesh), overlap_options(mesh)
    facts = {n: f"{v!r}" if n in taken else "refused" for n, v in wanted.items()}
    report.facts["XLA options"] = facts or {"wanted": "none on these devices"}
    refused = [name for name in wanted if name not in taken]
    if refused:
        report.problems.append(
            Problem(
                f"this XLA does not take {', '.join(refused)}: less will overlap",
                f"use a newer JAX below {'.'.join(map(str, JAX[1]))}",
            )
        )


def examine_mesh(report: Report, mesh: Mesh) -> None:
    """How far apart the devices along each axis lie, and whether they have to."""
    devices, sizes = devices_of(mesh), dict(mesh.shape)
    report.facts["mesh"] = {
        axis: f"{size} devices {WHERE[devices.reach.get(axis, 'process')]}"
        for axis, size in sizes.items()
    }
    *_, last = sizes  # which by convention is the one to pipeline along
    advice = laid_better(between_processes([last], devices.reach), devices.reach, sizes)
    if advice:
        what = f"the devices along {last} are {WHERE[devices.reach[last]]} without need"
        report.problems.append(Problem(what, advice))
