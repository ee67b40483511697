"""What is wrong with an installation or a job."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong, and what to do about it."""

    what: str
    advice: str
