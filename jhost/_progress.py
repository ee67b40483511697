"""A progress bar by tqdm; lines on standard error where that is not installed."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any, Protocol


class Progress(Protocol):
    """How a run says where it is."""

    def grow(self, count: int) -> None:
        """There are `count` more steps than was known."""
        ...

    def step(self, what: str) -> None:
        """`what` begins; what came before is done."""
        ...

    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None: ...


def progress(total: int, unit: str = "case") -> Progress:
    """A bar of `total` steps."""
    try:
        tqdm = importlib.import_module("tqdm")
    except ImportError:
        return _Lines(total)
    return _Bar(tqdm.tqdm(total=total, unit=unit, dynamic_ncols=True))


def no_progress() -> Progress:
    """Steps that nobody wants to see."""
    return _Silence()


class _Bar:
    def __init__(self, bar: Any) -> None:
        self._bar, self._started = bar, False

    def grow(self, count: int) -> None:
        self._bar.total += count
        self._bar.refresh()

    def step(self, what: str) -> None:
        self._bar.update(int(self._started))
        self._started = True
        self._bar.set_description(what)

    def say(self, text: str) -> None:
        self._bar.write(text)

    def close(self) -> None:
        self._bar.update(int(self._started))
        self._bar.close()


class _Lines:
    def __init__(self, total: int) -> None:
        self._total, self._count, self._start = total, 0, time.monotonic()

    def grow(self, count: int) -> None:
        self._total += count

    def step(self, what: str) -> None:
        self._count += 1
        elapsed = time.monotonic() - self._start
        line = f"[{self._count}/{self._total}, {elapsed:.0f} s] {what}"
        print(line, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class _Silence:
    def grow(self, count: int) -> None:
        pass

    def step(self, what: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass
