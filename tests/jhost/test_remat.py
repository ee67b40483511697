"""`jax.checkpoint` in a jhost function and around it: policies, and offloading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params

from tests.jhost.blocks import ARGS, Function, assert_same, gradients, hosted, rows

POLICIES = jax.checkpoint_policies
# What these programs are part of is compiled without the options of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")

OFFLOAD = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=["a"],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
)


def named(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    h = checkpoint_name(x @ up, "h")
    return rows(checkpoint_name(jnp.maximum(h, 0), "a") @ down)


EACH_POLICY = pytest.mark.parametrize(
    "policy",
    [None, POLICIES.dots_saveable, POLICIES.save_only_these_names("h"), OFFLOAD],
    ids=["nothing", "dots", "names", "offload"],
)


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def counted(f: Function) -> Counter[str]:
    jaxpr = jax.make_jaxpr(f)(*ARGS).jaxpr
    return Counter(eqn.primitive.name for eqn in equations(jaxpr))


def gathers(f: Any) -> int:
    return f.lower(*ARGS).as_text().count("stablehlo.all_gather")


def around(policy: Any, pipeline: str) -> Callable[..., Any]:
    return jax.checkpoint(hosted(named, pipeline), policy=policy)


def inside(policy: Any, pipeline: str) -> Callable[..., Any]:
    return hosted(jax.checkpoint(named, policy=policy), pipeline)


@EACH_POLICY
@pytest.mark.parametrize(
    ("place", "pipeline"), [(around, "p2p"), (inside, "collective")]
)
def test_policies(place: Any, policy: Any, pipeline: str) -> None:
    """The same gradients, by as many matmuls as the plain function then has."""
    plain = gradients(jax.checkpoint(named, policy=policy))
    grad = gradients(place(policy, pipeline))
    assert_same(grad(*ARGS), plain(*ARGS))
    assert counted(grad)["dot_general"] == counted(plain)["dot_general"]


@pytest.mark.parametrize("place", [around, inside])
def test_what_is_computed_again(place: Any) -> None:
    saved, again = (
        counted(gradients(place(policy, "p2p")))["dot_general"]
        for policy in (POLICIES.dots_saveable, None)
    )
    assert again > saved


@pytest.mark.parametrize("place", [around, inside])
def test_each_device_offloads_its_own_part(place: Any) -> None:
    """What goes to the host's memory and back is neither gathered nor streamed."""
    grad = jax.jit(gradients(place(OFFLOAD, "collective")))
    kept = jax.jit(
        gradients(place(POLICIES.save_only_these_names("h", "a"), "collective"))
    )
    assert counted(grad)["device_put"] == 2
    assert gathers(grad) == gathers(kept)
