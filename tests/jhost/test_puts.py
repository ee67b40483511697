"""Permutes that NCCL puts: which programs have them, and what XLA is told of those.

On a CPU the option is taken and does nothing; the last tests run it on GPUs whose NCCL
can put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost._call import config as call_config, execute, explained
from jhost._call.config import Config
from jhost.lowering.explain import puts
from jhost.lowering.ir.program import Program
from jhost.runtime import nccl
from jhost.runtime.compiler_options import PERMUTE_MODE, PUTS
from jhost.runtime.devices import all_devices, assumed
from jhost.runtime.nccl import why_no_puts
from tests.jhost.blocks import (
    ARGS,
    SPECS,
    assert_same,
    gradients,
    hosted,
    relu_block,
)

PUT, COPIED = PUTS[PERMUTE_MODE], "COLLECTIVES_PEER_MEMORY"
LARGE = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    for shape in ((8192, 4096), (4096, 14336), (14336, 4096))
]


@pytest.fixture
def h200s() -> Iterator[None]:
    """Devices are taken to be H200s; nothing that was lowered for them stays."""
    with assumed("NVIDIA H200"):
        yield


@pytest.fixture
def can_put(h200s: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are H200s whose NCCL puts."""
    for module in (call_config, explained):
        monkeypatch.setattr(module, "puts_are_known", lambda mesh: mesh is not None)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The programs that jhost compiles for calls, each with XLA's permute mode."""
    found: list[tuple[str, Any]] = []
    real = execute.jitted

    def jitted(program: Program, config: Config, avals: Any) -> Any:
        options = execute.executable_options(program, config) or {}
        found.append((config.title, options.get(PERMUTE_MODE)))
        return real(program, config, avals)

    monkeypatch.setattr(execute, "jitted", jitted)
    return found


def mode(explanation: jhost.Explanation) -> str:
    """The permute mode among the options that XLA is given."""
    (applied, *_) = explanation.options
    return applied.partition(f"{PERMUTE_MODE}='")[2].partition("'")[0]


@pytest.mark.usefixtures("can_put")
def test_options_follow_what_is_chosen_and_it_is_explained() -> None:
    f = hosted(relu_block, "p2p")
    small = jhost.explain(f, *ARGS)
    assert [report.kind for report in small.permutes] == ["puts"]
    assert mode(small) == PUT
    assert "\n  permutes:\n    puts, predicted to take" in small.text
    compiled = f.lower(*ARGS).compile()
    assert compiled.explain().permutes == small.permutes
    assert_same(compiled(*ARGS), relu_block(*ARGS))
    assert_same(f(*ARGS), relu_block(*ARGS))
    large = jhost.explain(f, *LARGE)
    assert [report.kind for report in large.permutes] == ["peer copies"]
    assert mode(large) == COPIED


def told() -> tuple[jhost.Explanation, ...]:
    """What is said of a function, and of one around it."""
    f = hosted(relu_block, "p2p")
    return jhost.explain(f, *ARGS), jhost.explain(gradients(f), *ARGS)


@pytest.mark.usefixtures("h200s")
def test_an_nccl_that_cannot_put_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, make_mesh: Callable[..., Mesh]
) -> None:
    """No option, no word, no other program; and nothing is tried."""
    before = told()
    assert not any(each.permutes for each in before)
    assert {mode(each) for each in before} == {COPIED}
    monkeypatch.setattr(nccl, "is_assumed", lambda: False)
    monkeypatch.setattr(nccl, "nccl_version", lambda: "2.28.9")
    monkeypatch.setattr(nccl, "_failure", lambda _: pytest.fail("a trial"))
    jax.clear_caches()
    mesh = make_mesh((4,), ("tp",))
    assert why_no_puts(mesh).startswith("NCCL 2.28.9 has no puts")
    assert not call_config.puts_are_known(mesh)
    assert told() == before
    monkeypatch.setattr(nccl, "nccl_version", lambda: "2.29.0")
    monkeypatch.setattr(nccl, "_failure", lambda _: "")
    jax.clear_caches()
    assert call_config.puts_are_known(mesh)
    assert told() != before


@pytest.mark.usefixtures("can_put")
def test_an_outer_program_counts_on_peer_copies(ran: list[tuple[str, Any]]) -> None:
    """Its options are not jhost's to give, and those that it should get have these."""
    f = hosted(relu_block, "p2p", compiler_options=None)
    assert jhost.compiler_options()[PERMUTE_MODE] == COPIED
    step = jax.jit(lambda *args: f(*args) + 1)
    explanation = jhost.explain(step, *ARGS)
    assert not explanation.permutes
    assert mode(explanation) == COPIED
    (said,) = [note for note in explanation.notes if "peer copies" in note]
    assert said.startswith("jhost assumes that permutes are peer copies")
    assert said not in jhost.explain(f, *ARGS).notes
    assert_same(step(*ARGS), relu_block(*ARGS) + 1)
    assert ran == []
    # The same function on its own is another program.
    assert_same(f(*ARGS), relu_block(*ARGS))
    assert jhost.explain(f, *ARGS).permutes


@pytest.mark.usefixtures("can_put")
def test_what_is_run_from_python_has_options_of_its_own(
    ran: list[tuple[str, Any]],
) -> None:
    """Gradients outside of a `jax.jit`: forward and backward are executables."""
    f = hosted(relu_block, "p2p")
    assert_same(gradients(f)(*ARGS), gradients(relu_block)(*ARGS))
    assert ran == [("relu_block (forward)", PUT), ("relu_block (backward)", PUT)]


@pytest.mark.usefixtures("can_put")
@pytest.mark.parametrize("asked", [COPIED, PUT, "COLLECTIVES_PRIVATE_MEMORY"])
def test_the_user_s_option_wins(asked: str, ran: list[tuple[str, Any]]) -> None:
    """Then nothing is chosen, and nothing is said to be."""
    f = hosted(relu_block, "p2p", compiler_options={PERMUTE_MODE: asked})
    assert not jhost.explain(f, *ARGS).permutes
    assert_same(jax.vmap(f)(*(x[None] for x in ARGS)), relu_block(*ARGS)[None])
    assert ran == [("relu_block (batched)", asked)]


@pytest.mark.usefixtures("can_put")
def test_a_profile_is_predicted_by_the_kind_that_ran() -> None:
    f = hosted(relu_block, "p2p")
    (report,) = jhost.explain(f, *ARGS).permutes
    assert report.kind == "puts"
    predicted = jhost.profile(f, *ARGS).predicted
    assert predicted is not None
    assert predicted.total == report.predicted[0][1].total


# --- On GPUs ------------------------------------------------------------------------ #


@pytest.fixture
def gpus() -> Mesh:
    """All GPUs, along one axis, if their NCCL puts."""
    if why_not := why_no_puts(all_devices()):
        pytest.skip(f"no puts: {why_not}")
    return jax.make_mesh(
        (jax.device_count(),), ("tp",), axis_types=(jax.sharding.AxisType.Auto,)
    )


def operands(seed: int, size: int, rows: int) -> tuple[jax.Array, ...]:
    """Integers, so small that sums are exact in any order, gradients' as well."""
    drawn = np.random.default_rng(seed)
    shapes = (rows * size, 64), (64, 64 * size), (64 * size, 64)
    return tuple(
        jnp.array(drawn.integers(-1, 2, shape), jnp.float32) for shape in shapes
    )


@pytest.mark.parametrize("rows", [8, 4096])
@pytest.mark.parametrize("transform", [lambda f: f, gradients], ids=["f", "gradients"])
def test_what_is_put_is_right(
    rows: int, transform: Callable[[Any], Any], gpus: Mesh
) -> None:
    """Exactly, in calls that follow one another without a wait."""
    how: dict[str, Any] = {"in_shardings": SPECS, "out_shardings": P("tp")}
    f = jhost.jit(relu_block, mesh=gpus, pipeline="p2p", compiler_options=PUTS, **how)
    given, wanted = transform(f), jax.jit(transform(relu_block))
    calls = [operands(seed, gpus.size, rows) for seed in range(10)]
    with jax.default_matmul_precision("highest"):
        results = [given(*args) for args in calls]
        for args, result in zip(calls, results, strict=True):
            assert_same(result, wanted(*args))


def test_chosen_puts_are_right(gpus: Mesh) -> None:
    """Where their rates are known: a block for which launches are the limit."""
    how: dict[str, Any] = {"in_shardings": SPECS, "out_shardings": P("tp")}
    f = jhost.jit(relu_block, mesh=gpus, pipeline="p2p", **how)
    args = operands(0, gpus.size, 8)
    with jax.default_matmul_precision("highest"):
        compiled = f.lower(*args).compile()
        if not compiled.explain().permutes:
            pytest.skip("nothing was measured on such devices")
        assert puts(compiled.host_ir)
        assert PUT in compiled.as_text()
        assert_same(compiled(*args), jax.jit(relu_block)(*args))
