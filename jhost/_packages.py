"""What is installed beside jhost."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that there are."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
