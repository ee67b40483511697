"""What SLURM and Open MPI say, in a process's environment, of how they started it."""

from __future__ import annotations

import re
from collections.abc import Mapping


def alone_on_its_host(environment: Mapping[str, str]) -> bool:
    """Whether one process a host was started.

    JAX takes the number of a process on its host for that of its only GPU.
    """
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return False
    return _processes_on_a_host(environment) == {1}


def one_gpu_each(environment: Mapping[str, str]) -> str:
    """What to change where each GPU of a host got a process of its own, if so.

    Between processes no transfer runs beside matmuls.
    """
    most = max(_processes_on_a_host(environment), default=1)
    gpus = _gpus_on_a_host(environment)
    if "JAX_LOCAL_DEVICE_IDS" in environment or most == 1 or gpus < 2:
        return ""
    change = (
        f"#SBATCH --ntasks-per-node=1 (now {most}), with --gpus-per-node={gpus} "
        "and the CPUs of all tasks in --cpus-per-task"
        if "SLURM_STEP_TASKS_PER_NODE" in environment
        else "mpirun --map-by ppr:1:node"
    )
    return (
        f"{most} processes were started on a host with {gpus} GPUs, one GPU each: "
        f"activations that move between them are not hidden, and no pipeline is "
        f"chosen. Start one process for each host: {change}"
    )


def is_first(environment: Mapping[str, str]) -> bool:
    """Whether this is the one of the processes that speaks for all."""
    names = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    return next((environment[n] for n in names if n in environment), "0") == "0"


def _processes_on_a_host(environment: Mapping[str, str]) -> set[int]:
    """How many there are, of each host: "1(x4),2" is one on four hosts, two on one."""
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
