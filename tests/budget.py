"""How many examples a property test tries whose every example is compiled."""

from __future__ import annotations

import hypothesis

CI = 25  # `--examples` there


def examples(most: int) -> int:
    """So many in CI, and with fewer `--examples` that part of them, two at least."""
    tried = hypothesis.settings().max_examples
    return max(2, min(most, round(most * tried / CI)))
