"""Tunings on disk: one JSON file each, which any number of processes may use at once.

A file is written under another name and moved to its place, so that a reader sees all
of it or none.  What is not a tuning for this environment and these programs is ignored.
The folder is the one of the XDG Base Directory Specification: JAX runs jhost's devices
on Linux, so a dependency for the folders of other systems would serve nobody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path

from jhost import errors
from jhost._tuning import FORMAT, Environment, Tuning


def folder() -> Path:
    """Where tunings are kept: `JHOST_CACHE_DIR`, or jhost's in the user's cache folder.

    That is `$XDG_CACHE_HOME/jhost`, by default `~/.cache/jhost`.
    """
    if given := os.environ.get("JHOST_CACHE_DIR"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return home / "jhost"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a tuning is asked for: programs by fingerprint, and where they run."""

    environment: Environment
    fingerprints: tuple[str, ...]

    def path(self) -> Path:
        """The file for it."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return folder() / f"tuning-{FORMAT}" / f"{digest}.json"

    def fits(self, tuning: Tuning) -> bool:
        """Whether a tuning is one for this."""
        found = tuple(program.fingerprint for program in tuning.programs)
        return (tuning.environment, found) == (self.environment, self.fingerprints)


def load(key: Key) -> Tuning | None:
    """The tuning that was kept, if there is one; what is wrong with a file is said."""
    path = key.path()
    try:
        tuning = Tuning.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, errors.TuningError) as error:
        _warn(f"{path} is ignored: {errors.first_line(error)}")
        return None
    if not key.fits(tuning):
        _warn(f"{path} is ignored: it is a tuning of something else")
        return None
    return tuning


def store(key: Key, tuning: Tuning) -> None:
    """Keeps a tuning, in place of what was kept before; says so if it cannot."""
    path = key.path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, tuning.to_json())
    except OSError as error:
        _warn(f"the tuning is not kept: {error}")


def _write(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tuning-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _warn(text: str) -> None:
    warnings.warn(f"jhost.tune: {text}", stacklevel=2)
