"""The notebooks run in a kernel of their own, and print what they say they print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "examples"
NAMES = [path.name for path in sorted(NOTEBOOKS.glob("*.ipynb"))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a kernel runs and leaves its files; it chooses its devices itself."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("XLA_FLAGS", "")
    return tmp_path


def printed(name: str, folder: Path) -> dict[str, str]:
    """What each cell prints; an error in one, or a warning, fails."""
    notebook = read(name)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=240, resources=where).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    streams = [output for cell in cells for output in cell.outputs]
    # XLA says there when a busy machine keeps it waiting.
    assert not [o.text for o in streams if o.name == "stderr" and "Warning" in o.text]
    return {
        cell.id: "".join(o.text for o in cell.outputs if o.name == "stdout")
        for cell in cells
    }


def read(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / name, as_version=nbformat.NO_CONVERT)  # pyright: ignore[reportUnknownMemberType]


def test_the_quickstart_pipelines_a_block_and_trains_it(folder: Path) -> None:
    out = printed("quickstart.ipynb", folder)
    assert out["run-block"].startswith("block: 0 loops\n")
    first, *lines = out["run-mark"].splitlines()
    assert first == "plain: 1 loop"
    # The cell, by the number that its reader sees, and the line in it.
    said = "collective pipeline: 4 chunks, as asked [In[3]:2 (plain)]"
    assert any(line.endswith(said) for line in lines)
    assert "AllGather(x_i, dim=0, axes=(tp))" in out["run-program"]
    assert len(re.findall(r"difference of \w+: \d\.\de-\d\d", out["run-values"])) == 2
    losses = [float(loss) for loss in re.findall(r"loss (.*)", out["run-training"])]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert out["run-training"].endswith(
        "plain (forward): 1 loop\nplain (backward): 1 loop\n"
    )


def test_the_report_has_the_columns_and_candidates_that_are_explained(
    folder: Path,
) -> None:
    out = printed("overlap_report.ipynb", folder)
    cells = {cell.id: cell.source for cell in read("overlap_report.ipynb").cells}
    report, tuning = out["run-record"], out["run-candidates"]
    title, columns, *_ = report.splitlines()
    assert title.startswith("mlp on tp=4, cpu: ")
    assert [f"*{column}*" in cells["record"] for column in columns.split()] == [
        True
    ] * 7
    assert len(re.findall(r"^  cpu \d ", report, re.M)) == 4
    assert re.search(r"^exposed: \d+% of the total$", out["run-numbers"], re.M)
    shares = re.findall(
        r"^ *\d+% of [\d.]+ ms: .*(Gather|Scatter)", out["run-statements"], re.M
    )
    assert sorted(shares) == ["Gather", "Scatter"]
    assert re.search("AllGather .* synchronous", out["run-schedule"])
    assert len(re.findall("median .* minimum .* predicted ", tuning)) >= 3
    assert tuning.splitlines()[1] == "  mlp: 1 stream tuned"
    chosen = tuning.splitlines()[3].split("  median")[0].strip()
    assert f"{chosen}, measured to take" in out["run-follow"]


@pytest.mark.parametrize("name", NAMES)
def test_no_output_is_stored_and_links_lead_somewhere(name: str) -> None:
    """Cells have names, so that a change shows as what it is."""
    notebook = read(name)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.id.startswith("run-") for cell in code)
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert {cell.execution_count for cell in code} == {None}
    text = "".join(cell.source for cell in notebook.cells if cell not in code)
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    assert links
    assert [link for link in links if not (NOTEBOOKS / link).exists()] == []
