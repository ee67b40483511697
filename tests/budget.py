"""What plain `pytest` leaves to CI: examples that are compiled, and variants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest

CI = 25  # `--examples` there


def examples(most: int) -> int:
    """So many in CI, and with fewer `--examples` that part of them, two at least."""
    tried = hypothesis.settings().max_examples
    return max(2, min(most, round(most * tried / CI)))


def first_is_quick(
    names: str | tuple[str, ...], values: Iterable[Any], ids: Any = None
) -> pytest.MarkDecorator:
    """Variants of which plain `pytest` tries the first, and CI all."""

    def slow(value: Any) -> Any:
        each = (value,) if isinstance(names, str) else value
        return pytest.param(*each, marks=pytest.mark.slow)

    first, *others = values
    return pytest.mark.parametrize(names, [first, *map(slow, others)], ids=ids)
