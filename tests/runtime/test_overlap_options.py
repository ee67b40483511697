"""What jhost asks of XLA, as far as it can be seen without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh

import jhost
from jhost.runtime import overlap_options


def test_nothing_is_asked_of_a_cpu(
    make_mesh: Callable[[Sequence[int], Sequence[str]], Mesh],
) -> None:
    assert overlap_options.overlap_options(make_mesh((4,), ("tp",))) == {}
    assert overlap_options.overlap_options(AbstractMesh((4,), ("tp",))) == {}
    assert overlap_options.overlap_options(None) == {}


def test_options_for_an_outer_jit_are_taken_by_it() -> None:
    options = jhost.compiler_options()
    assert float(jax.jit(lambda x: x + 1, compiler_options=options)(1.0)) == 2.0


def test_an_option_that_xla_does_not_know_is_found_out() -> None:
    device = jax.devices()[0]
    accepts = overlap_options._accepts  # pyright: ignore[reportPrivateUsage]
    assert accepts(device, "xla_gpu_dot_merger_threshold_mb", 0)
    assert not accepts(device, "xla_gpu_there_is_no_such_option", 0)


def test_missed_options_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_options, "_asked_for", False)
    with pytest.warns(UserWarning, match="told_once .* misses .* xla_option=4"):
        overlap_options.warn_of_missed_options("told_once", {"xla_option": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        overlap_options.warn_of_missed_options("told_once", {"xla_option": 4})


def test_who_asked_for_the_options_is_not_warned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlap_options, "_asked_for", False)
    jhost.compiler_options()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        overlap_options.warn_of_missed_options("not_warned", {"xla_option": 4})


def test_a_function_with_options_warns_inside_an_outer_jit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlap_options, "_asked_for", False)
    options = {"xla_cpu_enable_fast_math": False}

    @jhost.jit(compiler_options=options)
    def with_options(x: jax.Array) -> jax.Array:
        return x + 1

    one = jnp.float32(1)
    assert float(with_options(one)) == 2.0
    with pytest.warns(UserWarning, match="with_options .* xla_cpu_enable_fast_math"):
        assert float(jax.jit(with_options)(one)) == 2.0
