"""A jhost function traced, exported and read back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import NamedSharding

import jhost
from jhost import errors
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

# What these programs are part of is compiled without the options of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")


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
    f = hosted(relu_block, "p2p")
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
