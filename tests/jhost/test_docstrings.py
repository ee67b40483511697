"""The examples in docstrings run."""

from __future__ import annotations

import builtins
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
from types import ModuleType
from typing import Any

import pytest

import jhost
from jhost import errors
from jhost.lowering.steps import CommunicationReport
from jhost.runtime.profile.schedule import ScheduledCommunication

ROWS = CommunicationReport, ScheduledCommunication

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


@pytest.mark.parametrize(
    "report",
    [jhost.Explanation, jhost.Schedule, jhost.OverlapReport, *ROWS],
    ids=lambda report: report.__name__,
)
def test_help_has_every_field_of_a_report(report: type) -> None:
    """`help` shows the docstring of the class, and nothing of a field's own."""
    text = inspect.getdoc(report) or ""
    listed = re.findall(r"^    (\w+): ", text.partition("Attributes:")[2], re.M)
    assert listed == [field.name for field in dataclasses.fields(report)]


@pytest.mark.parametrize(
    "method",
    [
        jhost.JitFunction.__call__,
        jhost.JitFunction.lower,
        jhost.Lowered.as_text,
        jhost.Lowered.interpret,
        jhost.Lowered.compile,
        jhost.Compiled.__call__,
        jhost.Compiled.schedule,
    ],
    ids=lambda method: method.__qualname__,
)
def test_what_can_fail_says_how(method: Any) -> None:
    text = inspect.getdoc(method) or ""
    raised = re.findall(r"\b(\w+Error)\b", text.partition("Raises:")[2])
    assert raised
    known = vars(errors) | vars(builtins)
    assert all(issubclass(known[name], Exception) for name in raised)


def test_layers_show_their_arguments() -> None:
    nnx: Any = imported("jhost.nnx")
    layers = [each for each in vars(nnx).values() if isinstance(each, type)]
    assert len(layers) > 5
    for layer in layers:
        names = list(inspect.signature(layer).parameters)
        assert names[:1] != ["args"], layer
        assert set(names) == set(inspect.signature(layer.__init__).parameters) - {
            "self"
        }


def imported(name: str) -> ModuleType:
    """A module, where what it is for is installed."""
    if name.startswith("jhost.nnx"):
        pytest.importorskip("flax")
    return importlib.import_module(name)
