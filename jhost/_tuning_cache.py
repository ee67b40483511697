"""Tunings on disk: one JSON file each.

A file that is no tuning for this environment and these programs is ignored.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

from jhost import errors
from jhost._cache_folder import file_in, folder, write
from jhost._tuning import FORMAT, Environment, Tuning


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """What a tuning is asked for: programs by fingerprint, and where they run."""

    environment: Environment
    fingerprints: tuple[str, ...]

    def path(self) -> Path:
        """The file for it."""
        return file_in(folder() / f"tuning-{FORMAT}", self)

    def fits(self, tuning: Tuning) -> bool:
        """Whether a tuning is one for this."""
        found = tuple(program.fingerprint for program in tuning.programs)
        return (tuning.environment, found) == (self.environment, self.fingerprints)


def load(key: CacheKey) -> Tuning | None:
    """The tuning that was kept, if there is one; warns of a file that is no good."""
    path = key.path()
    try:
        tuning = Tuning.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    # A damaged file costs time, and no more: it is measured again.
    except (OSError, UnicodeDecodeError, errors.TuningError) as error:
        _warn(f"{path} is ignored: {errors.first_line(error)}")
        return None
    # The name is a hash of the key, but files can be copied and renamed.
    if not key.fits(tuning):
        _warn(f"{path} is ignored: it is a tuning of something else")
        return None
    return tuning


def store(key: CacheKey, tuning: Tuning) -> None:
    """Keeps a tuning in place of the one before; a warning says if it cannot."""
    path = key.path()
    try:
        write(path, tuning.to_json())
    except OSError as error:
        _warn(f"the tuning is not kept: {error}")


def _warn(text: str) -> None:
    warnings.warn(f"jhost.tune: {text}", stacklevel=2)
