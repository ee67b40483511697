"""Calibrations on disk, a file each, and those that the processes of a job share."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax

from jhost import errors
from jhost._cache_folder import file_in, folder, write
from jhost._calibration import FORMAT, Calibration

_shared: Sequence[str] | None = None
"""The texts that process 0 gave this one of several processes."""


def keep(calibration: Calibration) -> None:
    """Puts it into the folder, in place of one that holds for the same.

    Raises:
        OSError: the folder cannot be written.
    """
    write(file_in(_files(), calibration.conditions), calibration.to_json())


def kept_texts() -> list[str]:
    """Each file in the folder."""
    found: list[str] = []
    # In one order, because the first of equals is taken.
    for path in sorted(_files().glob("*.json")):
        try:
            found.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            _warn(f"{path} is ignored: {error}")
    return found


def share(texts: Sequence[str]) -> None:
    """From now on these are all the calibrations that there are."""
    global _shared
    _shared = tuple(texts)


def add_to_shared(text: str) -> None:
    """One more that all processes have, if process 0 gave them any."""
    if _shared is not None:
        share([text, *_shared])


def of_kind(kind: str) -> list[Calibration]:
    """Calibrations of that kind of device."""
    if _shared is None and jax.process_count() > 1:
        return []  # another process may have others, and would choose differently
    texts = kept_texts() if _shared is None else _shared
    return [c for c in _parsed(tuple(texts)) if c.conditions.device_kind == kind]


# By text, so that a calibration is seen that another process makes in the meantime.
@functools.lru_cache(maxsize=8)
def _parsed(texts: tuple[str, ...]) -> list[Calibration]:
    found: list[Calibration] = []
    for text in texts:
        try:
            found.append(Calibration.from_json(text))
        except ValueError as error:
            _warn(f"a file in {_files()} is ignored: {errors.first_line(error)}")
    return found


def _files() -> Path:
    return folder() / f"calibration-{FORMAT}"


def _warn(text: str) -> None:
    warnings.warn(f"jhost.calibrate: {text}", stacklevel=2)
