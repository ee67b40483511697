"""What is shipped is what stands in the tree, under one import name."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jhost.lowering.ir import program

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "benchmarks",
    "docs",
    "examples",
    "jhost",
    "lowering",
    "pyproject.toml",
    "runtime",
    "tests",
}
# What pip leaves at the top; .gitignore names them too.
BUILD_OUTPUTS = {"build", "dist", "jhost.egg-info"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return built(tmp_path_factory.mktemp("tree"), "build_wheel")


def built(tree: Path, how: str) -> zipfile.ZipFile:
    """What setuptools' own entry point makes of a copy: no pip, no network is needed.

    In a copy, because setuptools keeps what it built before in `build/`, and ships a
    module from there after it has left the tree.
    """
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    for name in ("docs", "jhost", "lowering", "runtime"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    build = f"import setuptools.build_meta as b; b.{how}('dist')"
    command = [sys.executable, "-c", build]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next((tree / "dist").glob("*.whl")))


def test_the_wheel_holds_every_module_of_the_tree(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in [
            ("jhost", "jhost"),
            ("lowering", "jhost/lowering"),
            ("runtime", "jhost/runtime"),
        ]
        for path in (ROOT / folder).rglob("*.py")
    }
    assert shipped == modules | {"jhost/errors.md", "jhost/py.typed"}
    page = (ROOT / "docs" / "errors.md").read_bytes()
    assert wheel.read("jhost/errors.md") == page


@pytest.mark.slow
def test_an_editable_install_is_found_beside_a_clone(tmp_path: Path) -> None:
    """By a path: a finder comes after it, and the clone's folder is a package too."""
    clone = tmp_path / "jhost"
    clone.mkdir()
    editable = built(clone, "build_editable")
    (pth,) = [name for name in editable.namelist() if name.endswith(".pth")]
    assert editable.read(pth).decode().split() == [str(clone)]
    environment = os.environ | {"PYTHONPATH": str(clone), "JAX_PLATFORMS": "cpu"}
    script = "import jhost; jhost.jit; print(jhost.__file__)"
    command = [sys.executable, "-c", script]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(clone / "jhost" / "__init__.py")


@pytest.mark.slow
def test_the_wheel_works_as_it_is_zipped(wheel: zipfile.ZipFile) -> None:
    """On the path, not installed; the user's lines are still told from its own."""
    script = """
import jax.numpy as jnp, jhost
assert ".whl" in jhost.__file__, jhost.__file__
f = jhost.jit(lambda x: jhost.stream(x * 2, axis=0, chunks=2))
assert f(jnp.ones(4)).tolist() == [2, 2, 2, 2]
print(jhost.explain(f, jnp.ones(4)).streams[0].where)
"""
    assert wheel.filename is not None
    environment = os.environ | {"PYTHONPATH": wheel.filename, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-c", script]
    ran = subprocess.run(
        command, cwd="/", env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("<string>:4")


def test_the_wheel_needs_jax_and_what_that_needs(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
    requires = email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist", [])
    always = [line for line in requires if "extra ==" not in line]
    assert always == ["jax<0.13,>=0.10", "numpy", "scipy"]


def test_the_wheel_has_a_command(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    name = next(name for name in names if name.endswith("/entry_points.txt"))
    assert b"jhost = jhost.__main__:main" in wheel.read(name)


def test_the_folders_at_the_top_are_inside_jhost() -> None:
    assert program.Program.__module__ == "jhost.lowering.ir.program"
    for name in ("lowering", "runtime"):
        assert (ROOT / "jhost" / name).resolve() == ROOT / name


def test_the_top_level_is_as_agreed() -> None:
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert names - BUILD_OUTPUTS == TOP_LEVEL
    assert (ROOT / ".ci" / "run").is_file()
