"""A jhost function traced, exported and read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jhost
from jhost import errors
from jhost.testing import assert_close
from tests.jhost.blocks import (
    ARGS,
    SPECS,
    assert_same,
    each_pipeline,
    gradients,
    hosted,
    relu_block,
)
from tests.lowering.hand_built import mesh_of


def placed() -> list[jax.Array]:
    mesh = mesh_of(tp=4)
    pairs = zip(ARGS, SPECS, strict=True)
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in pairs]


@each_pipeline
def test_an_exported_function_runs_and_is_differentiated(pipeline: str) -> None:
    pytest.importorskip("flatbuffers")
    exported = export.export(hosted(relu_block, pipeline))(*ARGS)
    assert exported.nr_devices == 4
    read = export.deserialize(exported.serialize(vjp_order=1))
    assert_same(read.call(*placed()), relu_block(*ARGS))
    assert_same(gradients(read.call)(*placed()), gradients(relu_block)(*ARGS))


def test_what_is_around_a_call_is_exported_with_it() -> None:
    f = hosted(relu_block, "p2p", compiler_options=None)
    exported = export.export(jax.jit(lambda *args: f(*args) + 1))(*ARGS)
    assert_same(exported.call(*placed()), relu_block(*ARGS) + 1)


def test_an_exported_program_is_pipelined() -> None:
    exported = export.export(hosted(relu_block, "collective"))(*ARGS)
    assert exported.mlir_module().count("stablehlo.all_gather") == 2


def test_sizes_that_are_symbols_are_refused() -> None:
    (rows,) = export.symbolic_shape("4*n")
    x = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    functions: list[Any] = [hosted(relu_block, "p2p"), jax.jit(jhost.jit(relu_block))]
    for exported in functions:
        with pytest.raises(errors.UnsupportedError, match=r"x: a size that is a symb"):
            export.export(exported)(x, *ARGS[1:])


def test_tracing_lowering_and_compiling_go_on_from_each_other() -> None:
    traced = hosted(relu_block, "p2p").trace(*ARGS)
    assert [eqn.primitive.name for eqn in traced.jaxpr.eqns] == ["jhost"]
    assert_same(traced.lower().compile()(*placed()), relu_block(*ARGS))


# --- Exported programs inside ------------------------------------------------------- #

Call: TypeAlias = Callable[[jax.Array], Any]

ROW: Any = np.arange(8, dtype=np.float32)


def sums(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * jnp.sum(x)


def exported(devices: int, by_jhost: bool) -> Any:
    if devices == 1:
        return export.export(jhost.jit(sums) if by_jhost else jax.jit(sums))(ROW)
    how: Any = {"in_shardings": P("tp"), "out_shardings": P("tp")}
    mesh = mesh_of(tp=devices)
    if by_jhost:
        return export.export(jhost.jit(sums, mesh=mesh, **how))(ROW)
    rows = NamedSharding(mesh, P("tp"))
    how = {"in_shardings": rows, "out_shardings": rows}
    return export.export(jax.jit(sums, **how))(ROW)


INSIDE: dict[str, Callable[[Call], Call]] = {
    "alone": lambda f: lambda x: f(x * 2) + jnp.sum(x),
    "scan": lambda f: lambda x: lax.scan(lambda h, _: (f(h), h), x, None, length=2),
    "cond": lambda f: lambda x: lax.cond(x[0] < 1, f, jnp.cos, x),
    "checkpoint": lambda f: jax.checkpoint(lambda x: f(f(x))),
    "jhost": lambda f: lambda x: jhost.jit(f, mesh=mesh_of(tp=4))(x) + 1,
}


@pytest.mark.parametrize(
    ("devices", "by_jhost"), [(1, False), (4, True)], ids=["jit", "jhost"]
)
@pytest.mark.parametrize("place", INSIDE)
def test_an_exported_program_inside(place: str, devices: int, by_jhost: bool) -> None:
    function = INSIDE[place](exported(devices, by_jhost).call)
    wanted = jax.jit(INSIDE[place](sums))(ROW)
    for rows in (None, P("tp")):
        given = jhost.jit(function, mesh=mesh_of(tp=4), in_shardings=rows)
        assert_close(given(ROW), wanted, tolerance=1e-5)
    assert_close(jax.jit(given)(ROW), wanted, tolerance=1e-5)


@pytest.mark.parametrize("devices", [1, 4])
def test_an_exported_program_inside_is_differentiated(devices: int) -> None:
    pytest.importorskip("flatbuffers")
    read = export.deserialize(exported(devices, True).serialize(vjp_order=1))
    f = jhost.jit(lambda x: jnp.sum(read.call(x)), mesh=mesh_of(tp=4))
    wanted = jax.grad(lambda x: jnp.sum(sums(x)))(ROW)
    assert_close(jax.grad(f)(ROW), wanted, tolerance=1e-5)


def test_an_exported_program_for_other_devices_is_refused_as_by_jax() -> None:
    f = exported(8, False).call
    with pytest.raises(ValueError, match="8 devices and is called in a context with 4"):
        jhost.jit(lambda x: f(x), mesh=mesh_of(tp=4))(ROW)


def test_an_exported_program_over_devices_with_a_stream_is_refused() -> None:
    f = exported(4, False).call
    streamed = jhost.jit(lambda x: jhost.stream(f(x), axis=0), mesh=mesh_of(tp=4))
    calls: list[Call] = [streamed, streamed.lower]
    for call in calls:
        with pytest.raises(errors.UnsupportedError, match="exported for 4 devices"):
            call(ROW)


def test_an_exported_program_over_devices_is_lowered_for_them() -> None:
    call = exported(4, False).call
    f = jhost.jit(lambda x: call(x), mesh=mesh_of(tp=4), in_shardings=P("tp"))
    compiled = f.lower(jax.ShapeDtypeStruct(ROW.shape, ROW.dtype)).compile()
    assert_close(compiled(*jax.device_put((ROW,), compiled.input_shardings[0])), f(ROW))
    assert "exported for 4 devices" in str(jhost.explain(f, ROW))
