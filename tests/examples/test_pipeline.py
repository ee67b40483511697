"""Microbatches go through stages: a permute a tick, and weights stay where they are."""

from __future__ import annotations

import functools
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.program import Program
from tests.lowering.hand_built import integers, mesh_of

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def script(beside_examples: None) -> dict[str, Any]:
    """What the example defines."""
    return runpy.run_path(str(EXAMPLES / "pipeline.py"))


def mesh_with(stage: int, dp: int = 1, tp: int = 1) -> Mesh:
    return mesh_of(stage=stage, dp=dp, tp=tp)


def sends_in_scans(program: Program) -> Iterator[str]:
    """What an iteration of each scan sends, and over which axes."""
    for stmt in statements(program):
        if isinstance(stmt, ir.Scan):
            for each in ir.walk(stmt.body.body):
                if isinstance(each, ir.Communicate):
                    yield f"{each.kind} {','.join(each.axes)}"


def product(weight: jax.Array, x: jax.Array) -> jax.Array:
    """A stage that is exact on integers."""
    return x @ weight


def lowered(
    script: dict[str, Any],
    mesh: Mesh,
    repeats: int,
    microbatches: int,
    **how: bool,
) -> tuple[Any, Callable[..., Any], tuple[np.ndarray, np.ndarray]]:
    """The pipeline's results and gradients by jhost, the same by JAX, and operands."""
    stages = mesh.shape["stage"]
    # Few of them: products through all stages are to stay exact.
    weights = np.sign(integers(repeats, stages, 6, 6)) * (np.arange(6) < 2)
    weights, xs = weights.astype(np.float32), integers(microbatches, 2, 6)

    def both(
        through: Callable[..., jax.Array], weights: Any, xs: Any
    ) -> tuple[jax.Array, Any]:
        made, pull = jax.vjp(functools.partial(through, product), weights, xs)
        return made, pull(jnp.sign(xs))

    sides = P(None, "stage", None, "tp"), P(None, "dp")
    given = jhost.jit(
        functools.partial(both, functools.partial(script["pipeline"], **how)),
        mesh=mesh,
        in_shardings=sides,
        out_shardings=(sides[1], sides),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    with jax.set_mesh(mesh):
        return (
            given.lower(weights, xs),
            functools.partial(both, script["one_by_one"]),
            (
                weights,
                xs,
            ),
        )


@pytest.mark.parametrize(
    ("axes", "repeats", "microbatches", "delay"),
    [
        ({"stage": 2, "dp": 2, "tp": 2}, 2, 4, True),
        ({"stage": 6}, 1, 4, False),
        pytest.param({"stage": 2, "tp": 3}, 1, 4, True, marks=pytest.mark.slow),
        pytest.param({"stage": 6}, 2, 6, False, marks=pytest.mark.slow),
        pytest.param({"stage": 4, "dp": 2}, 3, 8, True, marks=pytest.mark.slow),
    ],
)
def test_there_is_one_permute_a_tick_each_way(
    script: dict[str, Any],
    axes: dict[str, int],
    repeats: int,
    microbatches: int,
    delay: bool,
) -> None:
    mesh = mesh_with(**axes)
    made, plain, operands = lowered(script, mesh, repeats, microbatches, delay=delay)
    sent = [each for each in sends_in_scans(made.host_ir) if each.endswith("stage")]
    assert sent == ["CollectivePermute stage"] * 2
    compiled = made.compile()
    assert compiled.as_text().count(" collective-permute(") == 2
    given = jax.tree.map(np.asarray, compiled(*operands))
    with jax.set_mesh(mesh):
        wanted = jax.tree.map(np.asarray, jax.jit(plain)(*operands))
    chex.assert_trees_all_equal(given, wanted)


def test_gradients_of_repeated_stages_are_summed_once(script: dict[str, Any]) -> None:
    """Behind the scan, over data-parallel devices, though each tick adds to a part."""
    mesh, spec = mesh_with(stage=2, dp=2), P(None, "stage")

    def loss(weights: jax.Array, xs: jax.Array) -> jax.Array:
        return jnp.sum(script["pipeline"](product, weights, xs))

    step = jhost.jit(
        jax.grad(loss),
        mesh=mesh,
        in_shardings=(spec, P(None, "dp")),
        out_shardings=spec,
    )
    with jax.set_mesh(mesh):
        program = step.lower(integers(2, 2, 6, 6), integers(4, 64, 6)).host_ir
    assert {*sends_in_scans(program)} == {"CollectivePermute stage"}
    sums = [s for s in program.body if isinstance(s, ir.Communicate)]
    assert [(s.kind, s.axes) for s in sums] == [("AllReduce", ("dp",))]


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ("stage=2,tp=2", ["--microbatches", "4"]),
        pytest.param(
            "stage=2,dp=2",
            ["--microbatches", "4", "--repeats", "2", "--delay", "--layers", "1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "stage=6", ["--microbatches", "6", "--repeats", "2"], marks=pytest.mark.slow
        ),
        pytest.param(
            "stage=2,dp=2,tp=2", ["--microbatches", "4"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_llama_in_stages_has_the_loss_and_the_gradients_of_one_without(
    script: dict[str, Any],
    mesh: str,
    how: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To rounding; weights stay where they are, and the example says what moves."""
    explanation = script["main"](["--mesh", mesh, *how])
    (off,) = re.findall(r"differ by (\S+)", capsys.readouterr().out)
    assert float(off) < 1e-5
    moved = [row for row in explanation.communications if "stage" in row.axes]
    assert [row.kind for row in moved if row.times > 1] == ["CollectivePermute"] * 2
    for row in explanation.communications:
        is_sum = row.kind == "AllReduce" and row.axes == ("dp",)
        assert is_sum or "'layers'" not in row.value, row


def test_microbatches_go_around_in_whole_rounds(script: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="3 microbatches do not come in rounds of 2"):
        script["pipeline"](product, np.ones((2, 2, 6, 6)), np.ones((3, 2, 6)))
