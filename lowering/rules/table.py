"""The whole table of dim rules; import `rule_of` from here, so that it is complete."""

from __future__ import annotations

from jhost.lowering.rules import (
    along,
    attention,
    contract,
    convolution,
    elementwise,
    gather,
    halo,
    index,
    opaque,
    partitioning,
    pooling,
    ragged,
    random,
    rearrange,
    rotate,
    scaled,
    scatter,
    shape,
    shard_map,
    written_attention,
)
from jhost.lowering.rules.attention import for_parts
from jhost.lowering.rules.linear import distributes, keeps_terms
from jhost.lowering.rules.registry import (
    known_primitives,
    opaque_reason,
    reason_of,
    rule_of,
    ruled_primitives,
)

# Importing a module of rules registers them.
__all__ = [
    "along",
    "attention",
    "contract",
    "convolution",
    "distributes",
    "elementwise",
    "for_parts",
    "gather",
    "halo",
    "index",
    "keeps_terms",
    "known_primitives",
    "opaque",
    "opaque_reason",
    "partitioning",
    "pooling",
    "ragged",
    "random",
    "rearrange",
    "reason_of",
    "rotate",
    "rule_of",
    "ruled_primitives",
    "scaled",
    "scatter",
    "shape",
    "shard_map",
    "written_attention",
]
