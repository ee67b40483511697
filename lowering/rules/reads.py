"""Dims that are read with an offset: each step of a factor reads a window of elements.

Step i of `y[i] = x[i + 1]`, of a convolution, or of a reversal reads elements that need
not stand in the same part of the dim.  A device then needs a few of its neighbours'
elements as well, the *halo*: its window is what all of its steps read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WindowReads:
    """Which elements of a dim the steps of a factor read.

    Step i reads `extent` places from place `first + stride * i` on.  Element e is at
    place `dilation * e`, and all other places are empty, also before the first element
    and behind the last.

    Attributes:
        size: the elements of the dim, without padding.
        first: the first place that step 0 reads.
        stride: how many places further the next step begins; negative in a reversal.
        extent: how many places a step reads.
        dilation: how many places there are from one element to the next.
        steps: the first step that reads anything, and the step behind the last one.
    """

    size: int
    first: int
    steps: tuple[int, int]
    stride: int = 1
    extent: int = 1
    dilation: int = 1

    @property
    def count(self) -> int:
        """The steps up to the last that reads anything."""
        return self.steps[1]

    @property
    def fewest(self) -> int:
        """The fewest steps that go on by a whole number of elements."""
        return self.dilation // math.gcd(self.stride, self.dilation)

    def reach(self, count: int) -> int:
        """How many places `count` steps in a row read."""
        return abs(self.stride) * (count - 1) + self.extent

    def window(self, count: int) -> int:
        """The most elements that each `count` steps can read, counted from step 0."""
        if self.lead(count) is None:
            return (self.reach(count) + self.dilation - 2) // self.dilation + 1
        return self._elements(count)

    def shard(self, step: Any, count: int) -> Any:
        """The first place that `count` steps from `step` on read."""
        # Backward, the last step reads the lowest place.
        lowest = step if self.stride > 0 else step + (count - 1)
        return self.first + self.stride * lowest

    def start(self, step: Any, count: int) -> Any:
        """The first element of the window of `count` steps from `step` on."""
        lead = self.lead(count)
        # Where windows begin differently, some begin behind the element before them.
        return (self.shard(step, count) + (lead or 0)) // self.dilation

    def lead(self, count: int) -> int | None:
        """How many empty places a window of `count` steps begins with.

        None if windows begin with different numbers of them, or have no element.
        """
        if self.stride * count % self.dilation or self._elements(count) < 1:
            return None
        return -self.shard(0, count) % self.dilation

    def _elements(self, count: int) -> int:
        """How many elements the first `count` steps read."""
        first = self.shard(0, count)
        last = first + self.reach(count) - 1
        return last // self.dilation + -first // self.dilation + 1

    def needed(self, step: int, count: int) -> range:
        """The elements that `count` steps from `step` on read."""
        first, end = max(step, self.steps[0]), min(step + count, self.steps[1])
        if first >= end:
            return range(0)
        shard = self.shard(first, end - first)
        last = shard + self.reach(end - first) - 1
        start = max(-(-shard // self.dilation), 0)
        return range(start, min(last // self.dilation + 1, self.size))
