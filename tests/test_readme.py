"""The pages say what is so: examples run, links lead somewhere, no error is missing."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import jhost
from jhost import errors
from jhost._call.once_a_line import warned_lines
from tests import budget

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
ERRORS = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.JhostError) and cls is not errors.JhostError
]


class Block(NamedTuple):
    """A fenced block of a page, and the heading that it stands under."""

    heading: str
    language: str
    line: int
    text: str


def blocks(page: Path) -> Iterator[Block]:
    heading, language, start = "", "", 0
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        if line.startswith("```") and not start:
            language, start = line.removeprefix("```"), number
        elif line.startswith("```"):
            yield Block(heading, language, start, "\n".join(lines[start : number - 1]))
            start = 0
        elif line.startswith("#") and not start:
            heading = line.lstrip("# ")
    assert not start, f"{page.name}:{start}: this block has no end"


def run(page: Path, block: Block, namespace: dict[str, Any]) -> None:
    # Empty lines in front, so that a traceback names the page's own line.
    source = "\n" * block.line + block.text
    exec(compile(source, str(page), "exec"), namespace)


def test_the_readme_shows_what_its_command_prints(tmp_path: Path) -> None:
    """Of the example, saved under the name that the page says."""
    found = list(blocks(ROOT / "README.md"))
    assert {block.language for block in found} == {"python", "sh", "text"}
    (example,) = (block for block in found if block.language == "python")
    (shown,) = (block for block in found if block.language == "text")
    (command,) = (b.text for b in found if b.text.startswith("jhost "))
    (tmp_path / "mlp.py").write_text(example.text)
    printed = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert printed.stdout == shown.text + "\n"


@pytest.mark.parametrize("name", ["marks.md", "how-it-works.md", "ir.md"])
def test_the_text_shown_is_what_the_example_before_it_prints(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page, namespace = ROOT / "docs" / name, dict[str, Any]()
    found = [b for b in blocks(page) if b.language in ("python", "text")]
    assert any(block.language == "text" for block in found)
    for block in found:
        if block.language == "python":
            run(page, block, namespace)
        else:
            assert capsys.readouterr().out == block.text + "\n"


@budget.first_is_quick(
    "name",
    [
        "quickstart.md",
        "attention.md",
        "explicit-meshes.md",
        "migration.md",
        "performance.md",
        "recipes.md",
        "testing.md",
        "tuning.md",
    ],
)
def test_the_examples_of_a_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JHOST_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    page, namespace = ROOT / "docs" / name, dict[str, Any]()
    examples = [block for block in blocks(page) if block.language == "python"]
    assert examples
    for example in examples:
        run(page, example, namespace)


def test_the_readme_has_the_two_commands_that_ci_runs() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    commands = [line for line in lines if line.startswith("python3 -m venv .venv && ")]
    assert len(commands) == 2, commands
    assert commands[0].endswith(" && .venv/bin/python -m jhost demo")
    assert commands[1].endswith(" && .venv/bin/python -m pytest -q -n auto")
    assert "grep '^python3 -m venv ' README.md" in (ROOT / ".ci" / "run").read_text()


def test_no_index_is_said_to_have_jhost() -> None:
    """What is to be installed, beside JAX, is what an extra of the project names."""
    said: set[str] = set()
    for folder in ("docs", "jhost", "runtime"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".md", ".py"):
                said |= set(
                    re.findall(r"pip install '((?!jax)\w[^']*)'", path.read_text())
                )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert said
    assert said <= {requirement for extra in extras.values() for requirement in extra}


def test_git_does_not_see_what_the_training_example_writes() -> None:
    example = (ROOT / "examples" / "train_transformer.py").read_text()
    (folder,) = re.findall(r'"--out", type=Path, default=Path\("(.*)"\)', example)
    assert f"{folder}/" in (ROOT / ".gitignore").read_text().splitlines()


WARNINGS: dict[type[Warning], Sequence[str]] = {
    errors.ReplicationWarning: ["sort is repeated"],
    errors.StreamWarning: [
        "marks nothing, because nothing reads its result",
        "makes 2 chunks, not the 3 asked for: 4 steps can be cut into 2 or 4 chunks",
    ],
}


def test_every_error_has_a_section() -> None:
    page = (ROOT / "docs/errors.md").read_text()
    found = re.findall(r"^### (\w+(?:Error|Warning))$", page, re.M)
    classes = [*ERRORS, *WARNINGS]
    assert sorted(found) == sorted(cls.__name__ for cls in classes)
    for cls in classes:
        examples = error_examples(cls.__name__)[2:]
        assert all(example.text in (cls.__doc__ or "") for example in examples), cls


ELSEWHERE = {  # in processes of their own: test_processes.py
    errors.InitializeError,
    errors.ProcessMismatchError,
    errors.ProcessTimeoutError,
}
HERE = [cls for cls in ERRORS if cls not in ELSEWHERE]


@pytest.mark.parametrize("cls", HERE, ids=lambda cls: cls.__name__)
def test_the_first_example_raises_and_the_second_runs(
    cls: type[errors.JhostError],
) -> None:
    page, namespace, wrong, right = error_examples(cls.__name__)
    with pytest.raises(cls, match=rf"help\(jhost.errors.{cls.__name__}\)") as raised:
        run(page, wrong, dict(namespace))
    assert raised.type is cls
    run(page, right, dict(namespace))


@pytest.mark.parametrize(("cls", "said"), WARNINGS.items(), ids=lambda x: x)
def test_the_first_example_warns_and_the_second_does_not(
    cls: type[Warning], said: Sequence[str]
) -> None:
    page, namespace, wrong, right = error_examples(cls.__name__)
    warned_lines().clear()
    with pytest.warns(cls) as found:
        run(page, wrong, dict(namespace))
    for text, warning in zip(said, found, strict=True):
        assert text in str(warning.message)
    run(page, right, dict(namespace))


def error_examples(name: str) -> tuple[Path, dict[str, Any], Block, Block]:
    """The page, what its preamble defines, and the two examples of a section."""
    page = ROOT / "docs" / "errors.md"
    preamble, *found = (block for block in blocks(page) if block.language == "python")
    wrong, right = (block for block in found if block.heading == name)
    namespace: dict[str, Any] = {}
    run(page, preamble, namespace)
    return page, namespace, wrong, right


def test_unreleased_is_on_top_of_the_changelog() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[0] == "## Unreleased"
    released = [heading.split()[2] for heading in headings[1:]]
    assert jhost.__version__ not in released, "raise jhost.__version__ after a release"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.name for path in ROOT.glob("docs/*.md")} - {"index.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_the_reference_has_every_public_module() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    found = re.findall(r"^\.\. automodule:: (\S+)$", text, re.M)
    stages = {"lowering", "runtime"}
    names = {module.name for module in pkgutil.iter_modules(jhost.__path__)} - stages
    public = {f"jhost.{name}" for name in names if not name.startswith("_")}
    assert set(found) == public


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    found = re.findall(r"^\.\. auto(?:function|class):: jhost\.(\w+)", text, re.M)
    modules = {"__version__", "distributed", "errors"}
    assert sorted(found) == sorted(set(jhost.__all__) - modules)
