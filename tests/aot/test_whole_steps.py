"""Whole training steps of users: what stands beside nothing, and the memory they take.

Embedding, layers in a scan with `jax.checkpoint`, the vocabulary's loss, clipping and
AdamW, with float32 masters that are cast in the layer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jhost

pytest.importorskip("optax")  # of the step; it comes with test-ecosystem

# Last, so that `jhost` stays the one that is installed.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.layers import Model
from benchmarks.step.whole import arms, model
from benchmarks.step.whole.model import first_state
from benchmarks.step.whole.sizes import WIDTHS, Case
from tests.aot.on_h200 import QUICKLY, MakeH200s, exposed_in_bodies

MODEL = Model(
    "small", hidden=2048, ffn=6144, heads=16, kv_heads=8, head=128, sequence=512
)
VOCABULARY, LAYERS, SEQUENCES = 16_000, 4, 32
SMALL = Model(
    "small", hidden=1024, ffn=2048, heads=8, kv_heads=8, head=128, sequence=256
)
WIDE = dataclasses.replace(SMALL, hidden=4096, ffn=8192, heads=32, kv_heads=32)
"""For sums between processes: of 8 MB and less XLA makes kernels of its own, which its
scheduler has beside nothing."""
LARGE = 1 << 20
"""Bytes of a transfer that is worth hiding."""
MOST = 1.05
"""The temporary memory of a step, as a share of plain JAX's."""


def case_of(axes: Mapping[str, int]) -> Case:
    return Case(
        MODEL, VOCABULARY, "scan-checkpoint", LAYERS, SEQUENCES, tuple(axes.items())
    )


def types_of(case: Case) -> tuple[Any, jax.ShapeDtypeStruct]:
    tokens = (case.sequences, case.model.sequence + 1)
    state = jax.eval_shape(functools.partial(first_state, case))
    return state, jax.ShapeDtypeStruct(tokens, jnp.int32)


def compiled(case: Case, mesh: Mesh) -> jhost.Compiled:
    # As by name: what a prediction would leave alone is not what is tested.
    return arms.hosted("p2p")(case, mesh).lower(*types_of(case)).compile(dict(QUICKLY))


def memory_of(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def of(devices: np.ndarray, axes: Mapping[str, int]) -> Mesh:
    grid = devices.reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@pytest.fixture
def together(h200s: MakeH200s) -> MakeH200s:
    """Makes a mesh of two or four H200s of one process."""

    def make(axes: Mapping[str, int]) -> Mesh:
        return of(h200s({"all": 4}).devices[: math.prod(axes.values())], axes)

    return make


@pytest.fixture
def apart(two_processes: MakeH200s) -> MakeH200s:
    """Makes a mesh of H200s of two processes: of one of each, or of two."""

    def make(axes: Mapping[str, int]) -> Mesh:
        stride = 4 // math.prod(axes.values())
        return of(two_processes({"all": 4}).devices[::stride], axes)

    return make


# --- What waits ------------------------------------------------------------------- #


def of_linear_layers(case: Case, place: Any, x: jax.Array, weights: Any) -> jax.Array:
    """What attention moves, without its kernels: most of what XLA takes to compile."""
    x = place.gathered(x)
    heads = place.mark(x @ weights["query"]) + place.mark(x @ weights["key"])
    return place.rows(place.features(heads) @ weights["out"])


def schedule_of(axes: Mapping[str, int], mesh: Mesh, of: Model = SMALL) -> Any:
    """What XLA makes of a step of four layers."""
    sequences = 64 if "tp" in axes else 16  # activations are larger than weights
    case = Case(of, 4096, "scan-checkpoint", 4, sequences, tuple(axes.items()))
    with (
        jax.numpy_dtype_promotion("standard"),
        mock.patch.object(model, "_attention", of_linear_layers),
    ):
        step = arms.hosted("p2p", marked="tp" in axes)(case, mesh)
        return step.lower(*types_of(case)).compile(dict(QUICKLY)).schedule()


def check_beside(schedule: Any) -> None:
    """No large transfer waits with nothing beside it, but for four.

    They are the first and the last of a body, and of the program.
    """
    large, table = worth_hiding(schedule), str(schedule)
    assert large, table
    for body in {c.computation for c in large}:
        moved = [c for c in large if c.computation == body]
        alone = [
            c for c in moved[1:-1] if not (c.asynchronous and (c.matmuls or c.others))
        ]
        assert not alone, table


def worth_hiding(schedule: Any) -> Sequence[Any]:
    return [c for c in schedule.communications if c.bytes >= LARGE]


# Over fsdp between processes: `test_a_step_between_processes_never_waits...`, below.
QUICK = [({"tp": 2}, "together")]
OTHERS = [
    ({"dp": 2}, "apart"),
    ({"dp": 4}, "together"),
    ({"fsdp": 2, "tp": 2}, "together"),
]


def _said(each: Any) -> str:
    return (
        each if isinstance(each, str) else "-".join(f"{a}{n}" for a, n in each.items())
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optax
@pytest.mark.parametrize(("axes", "where"), QUICK, ids=_said)
def test_no_large_transfer_of_a_step_waits_beside_nothing(
    axes: dict[str, int], where: str, request: pytest.FixtureRequest
) -> None:
    make: MakeH200s = request.getfixturevalue(where)
    check_beside(schedule_of(axes, make(axes)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optax
@pytest.mark.parametrize(("axes", "where"), OTHERS, ids=_said)
def test_nor_one_over_other_axes(
    axes: dict[str, int], where: str, request: pytest.FixtureRequest
) -> None:
    make: MakeH200s = request.getfixturevalue(where)
    sizes = WIDE if where == "apart" else SMALL
    check_beside(schedule_of(axes, make(axes), sizes))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optax
def test_marks_that_a_mesh_gives_nothing_change_nothing(together: MakeH200s) -> None:
    """The marked dims lie whole on each device of such a mesh."""
    case = Case(SMALL, 4096, "scan-checkpoint", 4, 16, (("fsdp", 2),))
    mesh = together({"fsdp": 2})
    with (
        jax.numpy_dtype_promotion("standard"),
        mock.patch.object(model, "_attention", of_linear_layers),
    ):
        hows = {"finds": False}, {"marked": True}  # one mark ends finding
        steps = [arms.hosted("auto", **how)(case, mesh) for how in hows]
        plain, marked = (step.lower(*types_of(case)).as_text() for step in steps)
    assert marked == plain


# --- Memory ----------------------------------------------------------------------- #


def check(axes: Mapping[str, int], mesh: Mesh) -> None:
    """A step has its large transfers beside work, and takes no more memory."""
    case = case_of(axes).with_cudnn()  # XLA takes long to compile it written out
    step = compiled(case, mesh)
    schedule = step.schedule()
    large = worth_hiding(schedule)
    assert all(c.matmuls for c in large if c.computation), str(schedule)
    # The lookup and its gradient, and the first layer's first weights.
    alone = [n for n, c in enumerate(large) if not c.matmuls]
    assert set(alone) <= {0, 1, len(large) - 1}, str(schedule)
    assert all(c.asynchronous and c.others for c in large), str(schedule)
    plain = arms.jitted(case, mesh).lower(*types_of(case)).compile(dict(QUICKLY))
    assert memory_of(step) <= MOST * memory_of(plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optax
@pytest.mark.usefixtures("hopper")
def test_a_step_between_processes_never_waits_and_takes_no_more_memory(
    apart: MakeH200s,
) -> None:
    with jax.numpy_dtype_promotion("standard"):
        check({"fsdp": 2}, apart({"fsdp": 2}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optax
@pytest.mark.usefixtures("hopper")
def test_a_step_of_8b_between_processes_takes_no_more_memory(apart: MakeH200s) -> None:
    """The gathered vocabulary ends before its gradient is made."""
    axes = (("fsdp", 4),)
    case = Case(*WIDTHS["8b"], "scan-checkpoint", LAYERS, 8, axes).with_cudnn()
    mesh = apart(dict(axes))
    with jax.numpy_dtype_promotion("standard"):
        step = arms.hosted("auto")(case, mesh).lower(*types_of(case))
        plain = arms.jitted(case, mesh).lower(*types_of(case)).compile(dict(QUICKLY))
    assert memory_of(step.compile(dict(QUICKLY))) <= MOST * memory_of(plain)


MOVED = re.compile(
    r"= \(?.*?(\w+)\[([\d,]*)\][^\[]*? (all-gather|all-reduce|reduce-scatter"
    r"|all-to-all|collective-permute)(?:-start)?\("
)
"""A transfer in XLA's text: its dtype, its shape and its kind."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optax
@pytest.mark.usefixtures("hopper")
def test_a_step_of_8b_takes_no_more_memory_and_moves_its_masters_in_bfloat16(
    together: MakeH200s,
) -> None:
    """All scalars are added up in one transfer, and no large one waits.

    The vocabulary's gradient goes by permutes, and takes 2.6 GB until these have ended.
    """
    axes = (("fsdp", 4),)
    case = Case(*WIDTHS["8b"], "scan-checkpoint", LAYERS, 8, axes).with_cudnn()
    mesh = together(dict(axes))
    with jax.numpy_dtype_promotion("standard"):
        step = compiled(case, mesh)
        plain = arms.jitted(case, mesh).lower(*types_of(case)).compile(dict(QUICKLY))
    moved = MOVED.findall(step.as_text() or "")
    large = {dtype for dtype, shape, _ in moved if elements_of(shape) >= LARGE}
    assert large == {"bf16"}, moved
    sums = [shape for dtype, shape, kind in moved if (dtype, kind) == F32_SUM]
    assert len(sums) == 1, moved
    schedule = step.schedule()
    assert not exposed_in_bodies(schedule, LARGE)
    check_beside(schedule)
    assert memory_of(step) <= MOST * memory_of(plain)


F32_SUM = ("f32", "all-reduce")


def elements_of(shape: str) -> int:
    return math.prod(map(int, filter(None, shape.split(","))))
