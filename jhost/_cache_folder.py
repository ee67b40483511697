"""The user's cache folder, and files in it that processes may use at the same time.

A file is written under another name and moved to its place, so that a reader sees all
of it or none.  The folder is the one of the XDG Base Directory Specification: JAX runs
jhost's devices on Linux, so a dependency for the folders of other systems would serve
nobody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def folder() -> Path:
    """`JHOST_CACHE_DIR`, or jhost's own folder in the user's cache folder.

    The latter is `$XDG_CACHE_HOME/jhost`, by default `~/.cache/jhost`.
    """
    if given := os.environ.get("JHOST_CACHE_DIR"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return home / "jhost"


def file_in(folder: Path, key: Any) -> Path:
    """The file for what a dataclass says, whose fields JSON can hold."""
    # Sorted, so that the order of fields in the source can change.
    text = json.dumps(dataclasses.asdict(key), sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def write(path: Path, text: str) -> None:
    """Puts a file in its place, and replaces an older one.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    # After Ctrl-C, too, no half file stays in the folder.
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
