"""Text from outside, a file's or XLA's, which may be damaged."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def damage_refused() -> Generator[None]:
    """Inside, whatever a reader stumbles over in a text is a `ValueError`.

    >>> import json
    >>> with damage_refused():
    ...     json.loads("[" * 100_000)
    Traceback (most recent call last):
    ValueError: RecursionError: ...
    """
    try:
        yield
    except ValueError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError) as error:
        # Numbers too large, fields that are not there, and brackets too deep.
        raise ValueError(f"{type(error).__name__}: {error}") from error
