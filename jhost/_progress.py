"""A progress bar by tqdm; lines on standard error where that is not installed."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any, Protocol


class Progress(Protocol):
    """How a run says where it is."""

    def step(self, what: str, size: int = 1) -> None:
        """`what` begins, and has so many steps; the one before is done."""
        ...

    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None: ...


def progress(total: int, unit: str = "case") -> Progress:
    """A bar of `total` steps."""
    # jhost does not depend on tqdm, so a bar is there for those who have it.
    try:
        tqdm = importlib.import_module("tqdm")
    except ImportError:
        return _Lines(total)
    return _TqdmBar(tqdm.tqdm(total=total, unit=unit, dynamic_ncols=True))


def no_progress() -> Progress:
    """Steps that nobody wants to see."""
    return _Silence()


class _TqdmBar:
    def __init__(self, bar: Any) -> None:
        self._bar, self._under_way = bar, 0

    def step(self, what: str, size: int = 1) -> None:
        # A step is done when the next one begins; its size was said before.
        self._bar.update(self._under_way)
        self._under_way = size
        self._bar.set_description(what)

    def say(self, text: str) -> None:
        self._bar.write(text)

    def close(self) -> None:
        self._bar.update(self._under_way)
        self._bar.close()


class _Lines:
    def __init__(self, total: int) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()

    def step(self, what: str, size: int = 1) -> None:
        self._done += size
        elapsed = time.monotonic() - self._start
        line = f"[{self._done}/{self._total}, {elapsed:.0f} s] {what}"
        # Flushed, because a job's log is a file, which Python fills block by block.
        print(line, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class _Silence:
    def step(self, what: str, size: int = 1) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass
