"""Transfers outside of loops, of any size, as permutes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import sums


@pytest.fixture
def by_permutes() -> Iterator[None]:
    """Each goes by permutes wherever there is work beside it."""
    with sums.by_permutes():
        yield
