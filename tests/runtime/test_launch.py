"""What the environments of SLURM and Open MPI say of a job's processes."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

from jhost import distributed
from jhost._commands import doctor, links
from jhost.runtime.launch import alone_on_its_host, one_gpu_each
from tests.tables import DOCS


@pytest.mark.parametrize(
    ("environment", "alone"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, False),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2"}, False),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4),2(x3)"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, False),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "JAX_LOCAL_DEVICE_IDS": "0"}, False),
        ({}, False),
    ],
)
def test_a_process_alone_on_its_host_sees_all_its_gpus(
    environment: dict[str, str], alone: bool
) -> None:
    assert alone_on_its_host(environment) is alone


EIGHT = {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_GPUS_ON_NODE": "8"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (EIGHT, "--ntasks-per-node=1 (now 8), with --gpus-per-node=8"),
        (
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            "mpirun --map-by ppr:1:node",
        ),
        (EIGHT | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, ""),
        (EIGHT | {"SLURM_GPUS_ON_NODE": "1"}, ""),
        (EIGHT | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, ""),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, ""),  # CPUs
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0"}, ""),
        ({}, ""),
    ],
)
def test_a_process_for_each_gpu_is_told_what_to_change(
    environment: dict[str, str], said: str
) -> None:
    slow = one_gpu_each(environment)
    assert bool(slow) == bool(said)
    assert slow is None or said in slow.advice


@pytest.mark.parametrize(("number", "warns"), [("0", True), ("3", False)])
def test_initialize_warns_once_in_a_job(
    number: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (EIGHT | {"SLURM_PROCID": number}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "_check_is_early", lambda: None)
    monkeypatch.setattr("jax.distributed.initialize", lambda *_, **__: None)
    monkeypatch.setattr(distributed, "set_timeout", lambda _: None)
    told = re.escape(
        "; start one process for each host: #SBATCH --ntasks-per-node=1 (now 8)"
    )
    with pytest.warns(UserWarning, match=told) if warns else nullcontext():
        distributed.initialize()
    distributed.initialize(local_device_ids=[0, 1])


@pytest.mark.slow
def test_the_doctor_tells_a_job_with_a_process_for_each_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in EIGHT.items():
        monkeypatch.setenv(name, value)
    # What takes long, and is not asked for here.
    monkeypatch.setattr(doctor, "_tried", lambda *_: "works")
    monkeypatch.setattr(links, "_LINK_BYTES", 1 << 20)
    (problem,) = doctor.examined().problems
    assert "one GPU each" in problem.what
    assert problem.advice.startswith("start one process for each host: #SBATCH")


def test_the_page_has_the_line_that_is_right() -> None:
    assert "#SBATCH --ntasks-per-node=1\n" in (DOCS / "processes.md").read_text()
