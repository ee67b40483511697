"""Times without garbage collection, while programs are made."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Generator[None]:
    """Inside, nothing looks for garbage.

    Passes and emission make many objects that stay alive, and hardly any cycles of
    them.  Looking for garbage among them is up to a third of their time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
