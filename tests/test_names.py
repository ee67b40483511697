"""One word for one thing: each class and type has a name of its own, each pass one."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def definitions() -> tuple[tuple[str, ast.ClassDef | ast.AnnAssign], ...]:
    """Classes and annotated names with their files, by their places in the tree."""
    folders = [ROOT / name for name in ("jhost", "lowering", "runtime")]
    return tuple(
        (str(path.relative_to(ROOT)), node)
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if not any(part.is_symlink() for part in path.parents)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.ClassDef, ast.AnnAssign))
    )


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Each class with its file."""
    for path, node in definitions():
        if isinstance(node, ast.ClassDef):
            yield path, node


def aliases() -> tuple[tuple[str, str, int], ...]:
    """The file of each type alias, its name and its line."""
    return tuple(
        (path, node.target.id, node.lineno)
        for path, node in definitions()
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.annotation, ast.Name)
        and node.annotation.id == "TypeAlias"
    )


def passes() -> Iterator[tuple[str, str, str]]:
    """Each pass by the name of its module, its class's name, and what it says it is."""
    for path, node in classes():
        for stmt in node.body:
            match stmt:
                case ast.AnnAssign(
                    target=ast.Name(id="name"),
                    annotation=ast.Subscript(value=ast.Name(id="ClassVar")),
                    value=ast.Constant(value=str(name)),
                ):
                    yield Path(path).stem, node.name, name
                case _:
                    pass


def test_no_two_classes_or_types_have_one_name() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, node in classes():
        found[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    for path, name, line in aliases():
        found[name.lstrip("_")].append(f"{path}:{line}")
    assert {name: at for name, at in found.items() if len(at) > 1} == {}
    assert len(found) > 100


def test_a_pass_its_class_and_its_module_are_called_the_same() -> None:
    found = [*passes()]
    for module, cls, name in found:
        assert cls == "".join(word.capitalize() for word in name.split("_"))
        assert module == name, (module, name)
    assert len(found) > 10
