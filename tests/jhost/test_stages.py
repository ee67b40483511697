"""`lower` and `compile`: JAX's ahead-of-time words, with the Host IR between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost._call import build
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import For
from jhost.lowering.pipeline import build_program

X = jnp.arange(64.0).reshape(8, 8)
W = jnp.eye(8, 32) * 2 + 1


@pytest.fixture
def block(
    make_mesh: Callable[[Sequence[int], Sequence[str]], Mesh],
) -> jhost.JitFunction[..., jax.Array]:
    """Gathers rows, multiplies twice and reduce-scatters, in two chunks."""

    @jhost.jit(
        mesh=make_mesh((4,), ("tp",)),
        in_shardings=(P("tp"), P(None, "tp")),
        out_shardings=P("tp"),
        pipeline="collective",
    )
    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream((x @ w) @ w.T, axis=0, chunks=2)

    return block


def types(*arrays: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)


def test_a_function_with_dead_code_is_lowered_once(
    make_mesh: Callable[[Sequence[int], Sequence[str]], Mesh],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the program that runs, which JAX has taken the dead code from."""
    programs: list[Any] = []

    def lowered(jaxpr: Any, **settings: Any) -> Any:
        programs.append(jaxpr)
        return build_program(jaxpr, **settings)

    monkeypatch.setattr(build, "build_program", lowered)

    def f(x: jax.Array) -> jax.Array:
        jnp.sin(x)
        return jhost.stream(jnp.cos(x), axis=0)

    jhost.jit(f, mesh=make_mesh((4,), ("tp",)), in_shardings=P("tp")).lower(X)
    assert len(programs) == 1


def test_types_lower_to_the_same_program_as_arrays(block: Any) -> None:
    from_arrays, from_types = block.lower(X, W), block.lower(*types(X, W))
    assert isinstance(from_arrays, jhost.Lowered)
    assert str(from_arrays.host_ir) == str(from_types.host_ir)
    assert isinstance(from_types.host_ir, Program)
    assert from_types.host_ir.name == "block"


def test_the_host_ir_has_the_user_s_names(block: Any) -> None:
    text = str(block.lower(X, W).host_ir)
    assert text.startswith(
        "program block on tp=4\n  x: f32[2@tp, 8]\n  w: f32[8, 8@tp]"
    )


@pytest.mark.usefixtures("lines_in_programs")
def test_text_is_in_jax_s_dialects(block: Any) -> None:
    lowered = block.lower(X, W)
    assert lowered.as_text() == lowered.as_text("stablehlo")
    assert lowered.as_text().count("stablehlo.all_gather") == 2
    assert "test_stages.py" in lowered.as_text(debug_info=True)
    assert "all-gather" in lowered.as_text("hlo")
    with pytest.raises(ValueError, match="no_such_dialect"):
        lowered.as_text("no_such_dialect")


def test_a_compiled_function_gives_what_the_function_gives(block: Any) -> None:
    compiled = block.lower(*types(X, W)).compile()
    assert isinstance(compiled, jhost.Compiled)
    result = compiled(X, W)
    np.testing.assert_array_equal(result, (X @ W) @ W.T)
    assert result.sharding == block(X, W).sharding


def test_a_compiled_function_takes_only_its_own_types(block: Any) -> None:
    compiled = block.lower(X, W).compile()
    with pytest.raises(TypeError, match="compiled"):
        compiled(X[:4], W)
    np.testing.assert_array_equal(compiled(X, W), (X @ W) @ W.T)


def test_a_compiled_function_shows_what_xla_made(block: Any) -> None:
    compiled = block.lower(X, W).compile()
    text = compiled.as_text()
    assert text.startswith("HloModule jit_block")
    assert "is_scheduled=true" in text
    # Where it is asynchronous a collective is a start and a done.
    assert text.count("reduce-scatter(") + text.count("reduce-scatter-start(") >= 2
    assert compiled.memory_analysis().argument_size_in_bytes == 4 * (2 * 8 + 8 * 8)
    assert compiled.cost_analysis()["flops"] > 0


def test_every_stage_explains_the_same(block: Any) -> None:
    lowered = block.lower(X, W)
    explanation = jhost.explain(block, X, W)
    assert explanation == lowered.explain()
    compiled = lowered.compile().explain()
    assert "schedule: 4 communications" in compiled.schedule
    assert explanation == dataclasses.replace(compiled, schedule="")
    assert explanation.loops == 1
    assert (
        sum(isinstance(s, For) and len(s.body) > 3 for s in lowered.host_ir.body) == 1
    )


def test_pytrees_keywords_and_static_arguments_lower_as_they_are_called() -> None:
    def f(params: dict[str, jax.Array], power: int, *, shift: jax.Array) -> Any:
        return {"y": params["w"] ** power + shift}

    lowered = jhost.jit(f, static_argnums=1).lower({"w": X}, 2, shift=X)
    assert [p.name for p in lowered.host_ir.params] == ["params_w", "shift"]
    assert [r.name for r in lowered.host_ir.results] == ["result_y"]
    result = lowered.compile()({"w": X}, shift=X)
    np.testing.assert_array_equal(result["y"], X * X + X)


def test_a_donated_argument_stays_donated() -> None:
    f = jhost.jit(lambda x: x + 1, donate_argnums=0)
    x = X + 0
    np.testing.assert_array_equal(f.lower(x).compile()(x), X + 1)
    assert x.is_deleted()


def test_lowering_runs_and_compiles_nothing() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(x @ x, axis=0)

    huge = jax.ShapeDtypeStruct((10**7, 10**7), jnp.float32)
    assert "f32[10000000, 10000000]" in str(jhost.jit(f).lower(huge).host_ir)
