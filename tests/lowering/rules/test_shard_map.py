"""The rule of `jax.shard_map`: factors where specs have axes, pinned to these."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jhost.lowering.rules.table import rule_of
from tests.lowering.hand_built import mesh_of


def test_each_dim_that_a_spec_shards_is_a_factor_of_its_own() -> None:
    mapped = jax.shard_map(
        lambda x, y: (lax.psum(x, ("a", "one")), y),
        mesh=mesh_of(a=2, b=2, one=1),
        in_specs=(P("a", None, ("b", "one")), P(("b", "a"))),
        out_specs=(P(None, None, "b"), P(("b", "a"))),
    )
    (eqn,) = jax.make_jaxpr(mapped)(np.ones((2, 4, 6)), np.ones((8, 3))).eqns
    rule = rule_of(eqn)
    # An axis of one device shards nothing.
    assert rule.pinned == (("a",), ("b",), ("b", "a"), ("b",), ("b", "a"))
    assert rule.sizes == (2, 6, 8, 6, 8)
    kept = [[dim and dim.factor for dim in dims] for dims in rule.operands]
    assert kept == [[0, None, 1], [2, None]]
    made = [[dim and dim.factor for dim in dims] for dims in rule.results]
    assert made == [[None, None, 3], [4, None]]
    assert not rule.reduces
    assert rule.is_closed


def test_one_that_shards_nothing_is_pinned_to_that() -> None:
    mesh = mesh_of(a=2)
    mapped = jax.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P())
    (eqn,) = jax.make_jaxpr(mapped)(np.ones(2)).eqns
    assert rule_of(eqn).pinned == ()
