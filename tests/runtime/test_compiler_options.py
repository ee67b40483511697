"""What jhost asks of XLA, as far as it can be seen without a GPU."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

import jhost
from jhost._call import execute
from jhost.lowering.ir.reach import Reach
from jhost.runtime import accepted_options, compiler_options
from jhost.runtime.devices import Devices
from tests.jhost.blocks import ARGS, assert_same, hosted, relu_block


def test_nothing_is_asked_of_a_cpu(
    make_mesh: Callable[[Sequence[int], Sequence[str]], Mesh],
) -> None:
    assert compiler_options.overlap_options(make_mesh((4,), ("tp",))) == {}
    assert compiler_options.overlap_options(AbstractMesh((4,), ("tp",))) == {}
    assert compiler_options.overlap_options(None) == {}


def test_options_for_an_outer_jit_are_taken_by_it() -> None:
    options = jhost.compiler_options()
    assert float(jax.jit(lambda x: x + 1, compiler_options=options)(1.0)) == 2.0


def test_an_option_that_xla_does_not_know_is_found_out() -> None:
    device = jax.devices()[0]
    accepts = accepted_options._accepts  # pyright: ignore[reportPrivateUsage]
    assert accepts(device, "xla_gpu_dot_merger_threshold_mb", 0)
    assert not accepts(device, "xla_gpu_there_is_no_such_option", 0)


def test_a_trial_is_apart_from_the_mesh_that_is_set(
    make_mesh: Callable[..., Mesh],
) -> None:
    accepts = accepted_options._accepts  # pyright: ignore[reportPrivateUsage]
    with jax.set_mesh(make_mesh((4,), ("tp",))):
        assert accepts(jax.devices()[1], "xla_gpu_dot_merger_threshold_mb", 0)


@pytest.mark.usefixtures("options_not_asked_for")
def test_missed_options_are_told_once() -> None:
    with pytest.warns(UserWarning, match="told_once .* misses .* xla_option=4"):
        compiler_options.warn_of_missed_options("told_once", None, {"xla_option": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiler_options.warn_of_missed_options("told_once", None, {"xla_option": 4})


@pytest.mark.usefixtures("options_not_asked_for")
def test_who_asked_for_the_options_is_not_warned() -> None:
    jhost.compiler_options()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiler_options.warn_of_missed_options("not_warned", None, {"xla_option": 4})


@pytest.mark.usefixtures("options_not_asked_for")
def test_those_for_permutes_between_processes_are_asked_for_on_their_own() -> None:
    """Collectives without chunks are slower with them, so that not all get them."""
    jhost.compiler_options()
    options = {"xla_option": 4, **SYMMETRIC}
    with pytest.warns(
        UserWarning, match=r"buffers=True\. .*\(between_processes=True\)"
    ):
        compiler_options.warn_of_missed_options("between", None, options)


@pytest.mark.usefixtures("options_not_asked_for")
def test_a_function_warns_of_its_own_wishes_inside_an_outer_jit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wishes = {"xla_cpu_enable_fast_math": False}
    monkeypatch.setattr(execute, "overlap_options", lambda *_, **__: wishes)
    f = hosted(relu_block, "collective", compiler_options=None)
    with pytest.warns(UserWarning, match="relu_block .* xla_cpu_enable_fast_math"):
        assert_same(jax.jit(f)(*ARGS), f(*ARGS))


GPUS = Devices(
    platform="gpu",
    kind="NVIDIA H200",
    count=4,
    processes=1,
    reach={"dp": "process", "tp": "process"},
)
PUTS = {"xla_gpu_collective_permute_mode": "COLLECTIVES_SYMMETRIC_MEMORY"}
PEER = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
AMONG_SEVERAL = {"xla_gpu_collective_permute_connected_components": True}
SYMMETRIC = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}


@pytest.mark.parametrize(
    ("processes", "reach", "permuted", "ways"),
    [
        (1, {}, None, PEER),
        (1, {}, (), PEER),
        (4, {"dp": "host", "tp": "host"}, None, {}),
        (4, {"dp": "host", "tp": "host"}, ("tp",), SYMMETRIC),
        (2, {"dp": "host"}, None, PEER | AMONG_SEVERAL),
        (2, {"dp": "host"}, ("tp",), PEER | AMONG_SEVERAL),
        (2, {"dp": "hosts"}, ("dp", "tp"), PEER | AMONG_SEVERAL),
        (2, {"dp": "hosts"}, ("dp",), SYMMETRIC),
        (2, {"dp": "hosts"}, (), {}),
    ],
)
def test_copies_within_a_process_and_symmetric_buffers_between_several(
    processes: int,
    reach: dict[str, Reach],
    permuted: tuple[str, ...] | None,
    ways: dict[str, object],
    make_mesh: Callable[[Sequence[int], Sequence[str]], Mesh],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"))
    there = dataclasses.replace(
        GPUS, processes=processes, reach={**GPUS.reach, **reach}
    )
    monkeypatch.setattr(compiler_options, "devices_of", lambda mesh: there)
    wanted = compiler_options.wanted_options(mesh, permuted=permuted)
    assert {
        n: v for n, v in wanted.items() if n in PEER | AMONG_SEVERAL | SYMMETRIC
    } == ways
    assert "xla_gpu_enable_triton_gemm" not in wanted
    adding = compiler_options.wanted_options(mesh, adds_up=True, permuted=permuted)
    assert adding == wanted | {"xla_gpu_enable_triton_gemm": False}
    many = "xla_gpu_experimental_parallel_collective_overlap_limit"
    for under_way, limit in ((0, 8), (7, 8), (9, 10)):
        found = compiler_options.wanted_options(mesh, under_way=under_way)
        assert found[many] == (limit if processes == 1 else 16)
    left = compiler_options.wanted_options(mesh, left_to_xla=True)
    assert left == compiler_options.EARLY_COLLECTIVES
    if processes == 1:
        put = compiler_options.wanted_options(mesh, permuted=permuted, puts=True)
        assert put == wanted | PUTS


@pytest.mark.usefixtures("options_not_asked_for")
def test_what_became_of_the_options_is_explained(
    make_mesh: Callable[[Sequence[int], Sequence[str]], Mesh],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = make_mesh((4,), ("tp",))
    wanted = {"xla_gpu_dot_merger_threshold_mb": 0, "xla_gpu_there_is_no_such": 1}
    monkeypatch.setattr(compiler_options, "wanted_options", lambda *_, **__: wanted)
    with pytest.warns(UserWarning, match="explained_options"):
        compiler_options.warn_of_missed_options("explained_options", mesh, {"a": 1})
    assert compiler_options.options_report("explained_options", mesh) == (
        "applied: xla_gpu_dot_merger_threshold_mb=0",
        "refused by this XLA: xla_gpu_there_is_no_such=1",
        "missed inside an outer jax.jit: a=1",
    )
    # Nothing is said of a namesake elsewhere.
    elsewhere = make_mesh((2,), ("tp",))
    found = compiler_options.options_report("explained_options", elsewhere)
    assert not [line for line in found if "missed" in line]

    @jhost.jit(mesh=mesh, in_shardings=P("tp"), chunks=2, compiler_options={})
    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.tanh(x), axis=0)

    lowered = f.lower(jnp.zeros((8, 2)))
    assert "XLA options:\n    applied: xla_gpu_dot_merger" in lowered.explain().text
    plain = jhost.jit(jnp.tanh, mesh=mesh, in_shardings=P("tp"))
    assert not plain.lower(jnp.zeros((8, 2))).explain().options
