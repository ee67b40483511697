"""Dim rules of slices and updates at computed indices.

The dims that are indexed stay whole, so that an index means the same in each part, in
bounds or out of them.  A dim taken in full counts as not indexed: the one start in
bounds is 0, for the whole and for a part alike.
"""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from jhost.lowering.rules.building import along
from jhost.lowering.rules.dim_rule import DimRule, rule, shape_of
from jhost.lowering.rules.rows import differing


@rule("dynamic_slice")
def dynamic_slice(eqn: JaxprEqn) -> DimRule:
    """Dims sliced in full are factors."""
    indexed = differing(shape_of(eqn.invars[0]), eqn.params["slice_sizes"])
    return along(eqn, indexed, sizes="slice_sizes")


@rule("dynamic_update_slice")
def dynamic_update_slice(eqn: JaxprEqn) -> DimRule:
    """Dims updated in full are factors."""
    operand, update, *_ = eqn.invars
    return along(eqn, differing(shape_of(operand), shape_of(update)))
