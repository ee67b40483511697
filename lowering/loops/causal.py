"""Loops over keys that not all queries see, and the steps that nothing comes of."""

from __future__ import annotations

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Node
from jhost.lowering.loops.chunk import Work
from jhost.lowering.rules.dim_rule import Causal, DimRule, axes_size


def rule_of(node: Node) -> DimRule | None:
    """The rule of a computation."""
    if not isinstance(node.stmt, ir.Compute):
        return None
    (unit_eqn,) = node.stmt.unit.eqns
    return unit_eqn.rule


def causal_of(node: Node, work: Work) -> Causal | None:
    """Which queries see which keys, where a device has both of the same positions."""
    rule = rule_of(node)
    if rule is None or rule.causal is None:
        return None
    assert isinstance(node.stmt, ir.Compute)
    (unit_eqn,) = node.stmt.unit.eqns
    seen = rule.causal
    same = rule.sizes[seen.queries] == rule.sizes[seen.keys]
    spread = unit_eqn.axes[seen.queries] == work.choice.axes
    return seen if same and spread and work.part(node).factor == seen.keys else None


def hidden_steps(work: Work) -> int:
    """How many of the first steps of a p2p loop work on keys that no query sees.

    At step k device r has the keys of device r + k, all later than its queries but for
    those of D - k devices before it, of which a window reaches the nearest.
    """
    devices = axes_size(work.choice.axes, work.mesh)
    reaches: list[int] = []
    for node in work.nodes:
        part, rule = work.part(node), rule_of(node)
        if part.growth >= 1 and any(work.leaves(node.writes[i]) for i in part.writes):
            return 0
        if rule is None:
            continue
        seen = causal_of(node, work)
        if seen is None or seen.window is None:
            return 0
        each = rule.sizes[seen.keys] // devices
        reaches.append(-(-(seen.window - 1) // each))
    return max(0, devices - 1 - max(1, *reaches)) if reaches else 0
