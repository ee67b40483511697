"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import jhost

MODULES = [
    "jhost",
    *(
        module.name
        for module in pkgutil.walk_packages(jhost.__path__, "jhost.")
        if not module.name.endswith("__main__")  # importing it runs it
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    module = imported(name)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.testmod(module, optionflags=options, report=True)
    assert not failed, f"{failed} examples of {name} failed; see the captured output"


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_what_they_are_for(name: str) -> None:
    assert imported(name).__doc__


def imported(name: str) -> ModuleType:
    """A module, where what it is for is installed."""
    if name.startswith("jhost.nnx"):
        pytest.importorskip("flax")
    return importlib.import_module(name)
