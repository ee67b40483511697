"""Loops over keys that not all queries see: windows, and steps that can be left out."""

from __future__ import annotations

import dataclasses

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Node
from jhost.lowering.ir.index import Index, minimum
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.loops.chunk import LoopSpec
from jhost.lowering.rules.dim_rule import AttentionWindow
from jhost.lowering.streams.participation import rule_of


def window_of(node: Node, spec: LoopSpec) -> AttentionWindow | None:
    """The window of attention whose queries and keys are sharded alike, or None."""
    rule = rule_of(node)
    if rule is None or rule.window is None:
        return None
    assert isinstance(node.stmt, ir.Compute)
    (unit_eqn,) = node.stmt.unit.eqns
    seen = rule.window
    same = rule.sizes[seen.queries] == rule.sizes[seen.keys]
    spread = unit_eqn.axes[seen.queries] == spec.choice.axes
    return (
        seen
        if same and spread and spec.participation(node).factor == seen.keys
        else None
    )


@dataclasses.dataclass(frozen=True, slots=True)
class HiddenSteps:
    """The steps that a p2p loop leaves out: `count` of them, behind `before` others."""

    before: int = 0
    count: int = 0

    def step(self, number: Index) -> Index:
        """The step that the iteration of that number takes, from 1 on."""
        if not self.count:
            return number + 1
        if not self.before:
            return number + (1 + self.count)
        return number + 1 + minimum(number // self.before, 1) * self.count

    def order(self, step: Index) -> Index:
        """The number of a step among those taken; the device's own chunk is step 0."""
        if not self.count:
            return step
        if not self.before:
            return step - self.count
        return step - minimum(step // (self.before + 1), 1) * self.count


def hidden_steps(spec: LoopSpec) -> HiddenSteps:
    """The steps of a p2p loop in which no query of any device sees a key.

    At step k device r has the keys of device r + k (modulo D).  These are k shards
    behind its queries, or for the last k devices D - k shards before them.
    """
    devices = axes_size(spec.choice.axes, spec.mesh)
    lefts, rights = list[int](), list[int]()
    for node in spec.nodes:
        part, rule = spec.participation(node), rule_of(node)
        # Something outside of the loop reads chunks of this from every device.
        if part.ratio >= 1 and any(spec.leaves(node.writes[i]) for i in part.writes):
            return HiddenSteps()
        if rule is None:
            continue
        window = window_of(node, spec)
        # Its queries may see all keys.
        if window is None:
            return HiddenSteps()
        # A window reaches this many shards to each side; the farthest may be seen in
        # part.
        each = rule.sizes[window.keys] // devices
        for reach, side in ((lefts, window.left), (rights, window.right)):
            reach.append(devices - 1 if side is None else -(-max(side, 0) // each))
    if not lefts:
        return HiddenSteps()
    right = min(max(rights), devices - 1)
    left = max(lefts) or int(not right)  # a loop has one step at least
    return HiddenSteps(right, max(0, devices - 1 - left - right))
