"""The examples in docstrings run, and what they say of arguments is complete."""

from __future__ import annotations

import builtins
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from jax.typing import ArrayLike

import jhost
from jhost import errors
from jhost.lowering.communication_report import CommunicationReport
from jhost.lowering.cost.rates import Link, Rates
from jhost.lowering.cost.task import Task
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.pipelines import PipelineSpec
from jhost.lowering.ir.remarks import (
    LayoutReport,
    LeftStream,
    Prediction,
    ReplicationReport,
    StreamReport,
)
from jhost.lowering.rules.dim_rule import DimRule
from jhost.runtime.profile.schedule import ScheduledCommunication

ROWS = (
    CommunicationReport,
    LayoutReport,
    LeftStream,
    Prediction,
    ReplicationReport,
    ScheduledCommunication,
    StreamReport,
)
DECISIONS = jhost.Tuning, DimRule, PipelineSpec, StreamChoice, Task, Rates, Link

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
    [jhost.Explanation, jhost.Schedule, jhost.OverlapReport, *ROWS, *DECISIONS],
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


def held() -> dict[str, Any]:
    """One of each object of a function's that users hold, by the name of its class."""
    f = jhost.jit(lambda x: x + 1)
    lowered = f.lower(jax.ShapeDtypeStruct((2,), "float32"))
    return {"JitFunction": f, "Lowered": lowered, "Compiled": lowered.compile()}


@pytest.mark.parametrize("name", ["JitFunction", "Lowered", "Compiled"])
def test_help_has_the_attributes_of_what_users_hold(name: str) -> None:
    text = inspect.getdoc(getattr(jhost, name)) or ""
    part = text.partition("Attributes:")[2].partition("Example:")[0]
    listed = re.findall(r"^    (\w+): ", part, re.M)
    assert len(listed) > 2
    each = held()[name]
    assert all(hasattr(each, attribute) for attribute in listed)


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


# --- Shapes and dtypes ------------------------------------------------------------- #


def blocks() -> dict[str, str]:
    """The part of the reference for each module; that of `jhost` comes first."""
    text = (Path(__file__).parents[2] / "docs/api.md").read_text()
    first, *others = text.split(".. automodule:: ")
    return {"jhost": first} | {part.split()[0]: part for part in others}


def members(module: str) -> dict[str, Any]:
    """Each function, class and method that the reference has of a module, by name."""
    block, found = blocks()[module], dict[str, Any]()
    left_out = "".join(re.findall(r":exclude-members: (.*)", block)).split(", ")
    of_all = module == "jhost" or ":imported-members:" in block
    ours = "jhost." if of_all else module
    for name, each in vars(imported(module)).items():
        if (getattr(each, "__module__", "") or "").startswith(ours):
            methods = vars(each) if isinstance(each, type) else {}
            found |= {name: each} | {f"{name}.{m}": f for m, f in methods.items()}
    is_hidden = re.compile(
        r"(.*\.)?(?!__call__$)_.*|(.*\.)?(" + "|".join(left_out) + ")"
    )
    return {
        n: f for n, f in found.items() if callable(f) and not is_hidden.fullmatch(n)
    }


SHAPE = re.compile(r"\bshapes?\b|`\([\w.]+(, [\w.]+)+\)`")
DTYPE = re.compile(r"\bdtypes?\b|\b(integer|float|bool)s\b")
ARRAY = re.compile(r"\bjax\.Array\b|\bArrayLike\b")

# Arrays, or functions of some, whose annotations do not say so.  What a function of the
# user's takes, as `args` and `kwargs`, is looked at in any case.
MORE = {
    "jhost": {
        "jit": ("f", "Returns"),
        "JitFunction.__call__": ("Returns",),
        "Lowered.interpret": ("Returns",),
        "Compiled.__call__": ("Returns",),
    },
    "jhost.testing": {"assert_close": ("given", "wanted")},
}

SOME = {
    "jhost": {"stream": ["x", "Returns"], "JitFunction.lower": ["args", "kwargs"]},
    "jhost.nnx": {
        "ParallelMLP": ["activation"],
        "ParallelEmbed.attend": ["query", "Returns"],
        "RowParallelDot.__call__": ["x", "kernel", "Returns"],
    },
    "jhost.testing": {"assert_program": ["args", "kwargs"]},
}
"""What has to be found, for the check to be one."""


def arrays_of(function: Any, more: Sequence[str] = ()) -> list[str]:
    """The arguments that are arrays, and "Returns" if the result is."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a class of Python's own, as warnings are
        return []
    types = {name: str(p.annotation) for name, p in signature.parameters.items()}
    types["Returns"] = str(signature.return_annotation)
    known = (*more, "args", "kwargs")
    return [name for name, each in types.items() if name in known or ARRAY.search(each)]


def entries_of(function: Any) -> dict[str, str]:
    """What a docstring says of each argument, and of what is returned."""
    text = inspect.getdoc(function) or ""
    sections = dict(re.findall(r"^(\w+):\n((?:    .*\n?|\n)+)", text, re.M))
    found, before = {"Returns": sections.get("Returns", "")}, ""
    for entry in re.split(r"^    (?=\S)", sections.get("Args", ""), flags=re.M)[1:]:
        name, _, said = entry.partition(": ")
        before = before if said.strip().endswith("likewise.") else said
        found[name.lstrip("*")] = before
    return found


def unsaid(function: Any, more: Sequence[str] = ()) -> list[str]:
    """The arrays of which a docstring has no shape, or no dtype."""
    entries = entries_of(function)
    return [
        name
        for name in arrays_of(function, more)
        if not all(what.search(entries.get(name, "")) for what in (SHAPE, DTYPE))
    ]


@pytest.mark.parametrize("module", blocks())
def test_docstrings_say_the_shape_and_dtype_of_every_array(module: str) -> None:
    found, more = members(module), MORE.get(module, {})
    assert found.keys() >= more.keys()
    for name, arrays in SOME.get(module, {}).items():
        assert arrays_of(found[name]) == arrays
    missing = {name: unsaid(each, more.get(name, ())) for name, each in found.items()}
    assert {name: arrays for name, arrays in missing.items() if arrays} == {}


@pytest.mark.parametrize("module", blocks())
def test_docstrings_say_every_argument_and_every_result(module: str) -> None:
    """Of functions and methods; classes are made by them, or have Attributes."""
    missing: dict[str, list[str]] = {}
    for name, each in members(module).items():
        is_hook = module == "jhost.pytest_plugin" or module == "jhost.errors"
        if not isinstance(each, type) and not is_hook:
            if lacks := unlisted(each):
                missing[name] = lacks
    assert missing == {}


def unlisted(function: Any) -> list[str]:
    """The arguments that a docstring leaves out, and "Returns" if it says no result."""
    signature, entries = inspect.signature(function), entries_of(function)
    wanted = [name for name in signature.parameters if name != "self"]
    if signature.return_annotation not in (None, "None", inspect.Signature.empty):
        wanted.append("Returns")
    return [name for name in wanted if not entries.get(name)]


def test_layers_say_the_shapes_and_dtypes_of_what_comes_and_goes() -> None:
    """Where the reference shows it, which has flax's and their calls nowhere."""
    layers = [each for each in members("jhost.nnx").values() if isinstance(each, type)]
    assert len(layers) > 5
    for layer in layers:
        said = (inspect.getdoc(layer) or "").partition("Args:")[0]
        comes_and_goes = re.search(r"\bIt\s+takes\b.*\breturns\b.*", said, re.S)
        assert comes_and_goes, layer
        assert SHAPE.search(comes_and_goes[0]), layer
        assert DTYPE.search(comes_and_goes[0]), layer


def test_what_a_docstring_does_not_say_is_found() -> None:
    def poor(
        x: jax.Array, y: ArrayLike, n: int, *args: Any, **kwargs: Any
    ) -> jax.Array:
        """Adds (well, about) two arrays.

        Args:
            x: floats of shape `(..., features)`.
            y: the other one (of the two, say), of any dtype.
            n: a number.
            *args: arrays of any shape.
            **kwargs: likewise.

        Returns:
            The sum, of the same dtype.
        """
        raise NotImplementedError

    assert unsaid(poor) == ["y", "args", "kwargs", "Returns"]
    assert unsaid(poor, ["n"]) == ["y", "n", "args", "kwargs", "Returns"]
    poor.__doc__ = (poor.__doc__ or "").replace("any shape", "any shape and dtype")
    assert unsaid(poor) == ["y", "Returns"]
    poor.__doc__ = "Adds two arrays of any shape and dtype."
    assert unsaid(poor) == ["x", "y", "args", "kwargs", "Returns"]
    assert unlisted(poor) == ["x", "y", "n", "args", "kwargs", "Returns"]


def imported(name: str) -> ModuleType:
    """A module, where what it is for is installed."""
    if name.startswith("jhost.nnx"):
        pytest.importorskip("flax")
    return importlib.import_module(name)
