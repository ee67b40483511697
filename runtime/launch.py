"""How SLURM or Open MPI started a process, by the variables in its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jhost.runtime.problem import Problem


def alone_on_its_host(environment: Mapping[str, str]) -> bool:
    """Whether one process was started on each host."""
    # By default JAX gives a process one GPU: the one with the process's number on its
    # host.  A user who sets the GPUs of a process wants these.
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return False
    return _processes_on_a_host(environment) == {1}


def one_gpu_each(environment: Mapping[str, str]) -> Problem | None:
    """What to change if each GPU of a host got a process of its own.

    Loops over chunks gain nothing there: between processes chunks are not hidden.
    """
    most = max(_processes_on_a_host(environment), default=1)
    gpus = _gpus_on_a_host(environment)
    if "JAX_LOCAL_DEVICE_IDS" in environment or most == 1 or gpus < 2:
        return None
    change = (
        f"#SBATCH --ntasks-per-node=1 (now {most}), with --gpus-per-node={gpus} "
        "and the CPUs of all tasks in --cpus-per-task"
        if "SLURM_STEP_TASKS_PER_NODE" in environment
        else "mpirun --map-by ppr:1:node"
    )
    return Problem(
        f"{most} processes were started on a host with {gpus} GPUs, one GPU each, so "
        f"jhost chooses no pipeline, and nothing hides activations that move between "
        f"these GPUs",
        f"start one process for each host: {change}",
    )


def is_first(environment: Mapping[str, str]) -> bool:
    """Whether this process is the first one, which prints for all."""
    names = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    return next((environment[n] for n in names if n in environment), "0") == "0"


def _processes_on_a_host(environment: Mapping[str, str]) -> set[int]:
    """The numbers of processes on hosts.

    SLURM writes "1(x4),2" for one process on each of four hosts, and two on a fifth.
    """
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", tasks)
    counts = counts or [environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")]
    return {int(count) for count in counts if int(count)}


def _gpus_on_a_host(environment: Mapping[str, str]) -> int:
    said = environment.get("SLURM_GPUS_ON_NODE", "")
    if said.isdecimal():
        return int(said)
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    return len([device for device in visible.split(",") if device.strip()])
