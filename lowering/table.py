"""The whole table of dim rules; import `rule_of` from here, so that it is complete."""

from __future__ import annotations

from jhost.lowering import (
    rules_along,
    rules_contract,
    rules_elementwise,
    rules_index,
    rules_opaque,
    rules_shape,
)
from jhost.lowering.rules import (
    known_primitives,
    opaque_reason,
    rule_of,
    ruled_primitives,
)
from jhost.lowering.rules_linear import distributes
from jhost.lowering.rules_opaque import INLINED

# Importing a module of rules registers them.
__all__ = [
    "INLINED",
    "distributes",
    "known_primitives",
    "opaque_reason",
    "rule_of",
    "ruled_primitives",
    "rules_along",
    "rules_contract",
    "rules_elementwise",
    "rules_index",
    "rules_opaque",
    "rules_shape",
]
