"""`JHOST_DUMP` writes what it names, where it is told, and refuses other words."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jhost
from jhost import errors
from jhost.runtime import dump

X = jnp.ones((4, 2))


def run() -> None:
    """Compile a function that was never compiled before, and call it."""

    @jhost.jit(chunks=2)
    def model(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.sin(x) * 2, axis=0)

    model(X)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for dumps, which does not exist yet."""
    path = tmp_path / "dumps" / "here"
    monkeypatch.setenv("JHOST_DUMP_DIR", str(path))
    return path


def test_nothing_is_written_unasked(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for empty in (None, "", " , "):
        if empty is None:
            monkeypatch.delenv("JHOST_DUMP", raising=False)
        else:
            monkeypatch.setenv("JHOST_DUMP", empty)
        run()
    assert not folder.exists()
    assert capsys.readouterr() == ("", "")


def test_the_finished_program_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JHOST_DUMP", "host_ir")
    run()
    paths = list(folder.iterdir())
    assert paths
    for path in paths:
        assert re.fullmatch(r"model\.\d+\.host_ir\.txt", path.name)
        assert path.read_text().startswith("program model\n")
        assert "for i in range(2):" in path.read_text()


def test_the_program_after_every_pass_is_written_in_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JHOST_DUMP", "passes")
    run()
    # JAX 0.10 hands jhost the program once more, as another object.
    first = min((p.name.split(".")[1] for p in folder.iterdir()), key=int)
    paths = sorted(folder.glob(f"model.{first}.*"))
    steps = [path.stem.split(".")[-1] for path in paths]
    assert steps[0] == "00_build"
    assert any(step.endswith("_lower_streams") for step in steps)
    assert [step[:2] for step in steps] == [f"{n:02}" for n in range(len(steps))]
    looped = ["for i in range(2):" in path.read_text() for path in paths]
    assert not looped[0]
    assert looped[-1]
    assert looped == sorted(looped)  # from one pass on


def test_two_compilations_do_not_overwrite_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JHOST_DUMP", "host_ir, passes")
    run()
    once = len(list(folder.iterdir()))
    run()
    assert len(list(folder.iterdir())) == 2 * once


def test_without_a_folder_host_ir_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JHOST_DUMP", "host_ir")
    monkeypatch.delenv("JHOST_DUMP_DIR", raising=False)
    run()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("--- model.")
    assert "\nprogram model\n" in err


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("word", ["hlo", "schedule"])
def test_xla_writes_its_own_modules(
    folder: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("JHOST_DUMP", word)
    run()
    names = [path.name for path in folder.iterdir()]
    assert any("jit_model" in name for name in names)
    assert any("before_optimizations" in name for name in names)
    assert any("after_optimizations" in name for name in names)


def test_an_unknown_word_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JHOST_DUMP", "host_ir,hol,pases")
    with pytest.raises(errors.OptionError) as raised:
        run()
    text = str(raised.value)
    assert "JHOST_DUMP may name host_ir, passes, hlo, schedule." in text
    assert "'hol'" in text
    assert "'pases'" in text
    assert "* 'host_ir'" not in text
    with pytest.raises(errors.OptionError):
        dump.requested()
