"""`jhost.profile` end to end, on CPU devices: times vary, what ran does not."""

from __future__ import annotations

import base64
import html
import json
import re
import struct
import sys
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost import errors
from jhost.lowering.ir.statements import walk
from jhost.runtime.profile.origins import Activity

PAGE = Path(__file__).parents[2] / "docs" / "profiling.md"
SHARDINGS = (P("tp", None), P(None, "tp"), P("tp", None))
CHUNKS = 4


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream(jnp.tanh(x @ up) @ down, axis=0, chunks=CHUNKS)


def arguments() -> list[jax.Array]:
    shapes = ((64, 128), (128, 256), (256, 128))
    return [jnp.ones(shape) for shape in shapes]


@pytest.fixture(scope="module")
def function(make_mesh: Callable[..., Mesh]) -> Any:
    mesh = make_mesh((2,), ("tp",))
    return jhost.jit(block, mesh=mesh, in_shardings=SHARDINGS, out_shardings=P("tp"))


@pytest.fixture(scope="module")
def report(function: Any) -> jhost.OverlapReport:
    return jhost.profile(function, *arguments())


# --- What is in it ---------------------------------------------------------------- #


def test_every_device_communicates_and_computes(report: jhost.OverlapReport) -> None:
    assert [overlap.device for overlap in report.devices] == ["cpu 0", "cpu 1"]
    for overlap in report.devices:
        assert overlap.computation > 0
        assert overlap.communication > 0
        assert 0 <= overlap.exposed <= overlap.communication
        spent = overlap.computation + overlap.exposed + overlap.idle
        assert spent == pytest.approx(overlap.total)
        assert overlap.efficiency is not None
        assert 0 <= overlap.efficiency <= 1


def test_each_chunk_of_each_statement_is_found(report: jhost.OverlapReport) -> None:
    """The gather, the two matmuls in one unit, the reduce-scatter; on both devices."""
    chunks = {(i,) for i in range(CHUNKS)}
    expected: dict[str, Activity] = {
        "AllGather": "communication",
        "compute unit": "computation",
        "ReduceScatter": "communication",
    }
    for word, activity in expected.items():
        (found,) = (
            row
            for row in report.statements
            if word in row.text and row.activity == activity
        )
        assert found.times == CHUNKS
        for device in (0, 1):
            spans = report.timeline.of_device(device, activity)
            mine = [span for span in spans if span.statement == found.number]
            assert {span.iterations for span in mine} == chunks


def test_the_numbers_of_statements_are_places_in_the_program(
    function: Any, report: jhost.OverlapReport
) -> None:
    program = function.lower(*arguments()).host_ir
    stmts = list(walk(program.body))
    for row in report.statements:
        if row.number is not None and row.activity == "communication":
            assert type(stmts[row.number]).__name__ == "Communicate"
    assert len(report.timeline.statements) == len(stmts) + 1  # and the return


def test_what_the_model_predicts_stands_beside(report: jhost.OverlapReport) -> None:
    assert report.predicted is not None  # the CPU's rates are known
    assert report.predicted.total >= report.predicted.computation > 0
    assert report.predicted.communication > 0


def test_the_call_in_the_middle_is_reported(report: jhost.OverlapReport) -> None:
    calls = report.timeline.calls
    assert len(calls) == 5
    assert report.timeline.total == sorted(calls)[2]
    starts = [span.start for span in report.timeline.spans]
    ends = [span.end for span in report.timeline.spans]
    assert (min(starts), max(ends)) == (0, report.timeline.total)


def test_it_prints_as_a_table(report: jhost.OverlapReport) -> None:
    title, header, *rows = str(report).splitlines()
    assert title.startswith("block on tp=2, cpu: ")
    assert "the median of 5 calls" in title
    columns = "total computation communication hidden exposed idle efficiency"
    assert header.split() == columns.split()
    assert [row.split()[0] for row in rows[:4]] == ["cpu", "cpu", "mean", "predicted"]
    assert sum("AllGather" in row for row in rows) >= 1


def test_permutes_of_a_p2p_pipeline_are_found(make_mesh: Callable[..., Mesh]) -> None:
    f = jhost.jit(
        lambda x, w: jhost.stream(x @ w, axis=0, pipeline="p2p"),
        mesh=make_mesh((4,), ("tp",)),
        in_shardings=(P("tp", None), P(None, "tp")),
        out_shardings=P(None, "tp"),
    )
    report = jhost.profile(f, jnp.ones((64, 32)), jnp.ones((32, 64)))
    moved = [row for row in report.statements if row.activity == "communication"]
    assert sum(row.times for row in moved) == 3
    assert all("CollectivePermute" in row.text for row in moved)


def test_a_function_without_communication_has_no_efficiency() -> None:
    f = jhost.jit(lambda x: jhost.stream(jnp.sin(x), axis=0, chunks=2))
    report = jhost.profile(f, jnp.ones((8, 4)))
    (overlap,) = report.devices
    assert overlap.communication == overlap.exposed == 0
    assert overlap.efficiency is None
    assert str(report).splitlines()[2].split()[-1] == "-"


# --- Arguments -------------------------------------------------------------------- #


def test_arguments_may_be_anywhere_and_donated_ones_stay(
    make_mesh: Callable[..., Mesh],
) -> None:
    mesh = make_mesh((2,), ("tp",))

    def scaled(power: int, tree: Any, w: jax.Array, unused: Any) -> jax.Array:
        return jhost.stream((tree["x"] ** power) @ w, axis=0, chunks=2)

    f = jhost.jit(
        scaled,
        mesh=mesh,
        in_shardings=({"x": P("tp", None)}, P(None, "tp"), None),
        static_argnums=0,
        donate_argnums=1,
    )
    tree = {"x": jnp.ones((16, 8))}
    w = jax.device_get(jnp.ones((8, 8)))
    report = jhost.profile(f, 2, tree, w, None)
    assert len(report.devices) == 2
    assert tree["x"].sum() == 16 * 8


def test_arguments_may_have_names_and_be_unused() -> None:
    @jhost.jit(static_argnames="times")
    def f(x: jax.Array, unused: jax.Array, scale: Any, times: int) -> jax.Array:
        return jhost.stream(x * scale * times, axis=0, chunks=2)

    report = jhost.profile(f, jnp.ones((8, 4)), scale=2.0, times=3, unused=jnp.ones(3))
    assert report.mean.computation > 0


# --- The page ---------------------------------------------------------------------- #


def fences(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def form(text: str) -> list[str]:
    """Its lines without times, shares and alignment; copies differ between XLAs."""
    lines = [re.sub(r"[\d.e-]+ [um]?s\b|\d+%", "#", line) for line in text.splitlines()]
    return [
        " ".join(line.split())
        for line in lines
        if " computation  " not in line or "compute" in line or "hidden" in line
    ]


@pytest.mark.newest
def test_the_page_shows_what_its_example_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    example, saving = fences("python")
    namespace: dict[str, Any] = {}
    exec(example, namespace)
    (shown,) = fences("text")
    assert form(capsys.readouterr().out) == form(shown)
    exec(saving, namespace)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"mlp.svg", "first.svg", "mlp.json", "mlp.html", "explained.html"}


# --- Files ------------------------------------------------------------------------ #


def test_the_dict_is_json(report: jhost.OverlapReport) -> None:
    found = json.loads(json.dumps(report.to_dict()))
    assert found["mean"]["exposed"] == report.mean.exposed
    assert found["mean"]["efficiency"] == report.mean.efficiency
    assert found["predicted"]["total"] == report.predicted.total  # type: ignore
    assert len(found["timeline"]["spans"]) == len(report.timeline.spans)


def test_the_trace_has_a_process_a_device_and_a_thread_a_stream(
    report: jhost.OverlapReport, tmp_path: Path
) -> None:
    report.save(tmp_path / "f.json")
    events = json.loads((tmp_path / "f.json").read_text())["traceEvents"]
    names = [event for event in events if event["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in names if "process" in e["name"]}
    assert processes == {0: "cpu 0", 1: "cpu 1"}
    threads = {(e["pid"], e["tid"]) for e in names if e["name"] == "thread_name"}
    ran = [event for event in events if event["ph"] == "X" and "cat" in event]
    assert len(ran) == len(report.timeline.spans)
    assert {(event["pid"], event["tid"]) for event in ran} <= threads
    longest = max(event["ts"] + event["dur"] for event in ran)
    assert longest == pytest.approx(report.timeline.total * 1e6)
    assert any("AllGather" in event["args"]["statement"] for event in ran)


@pytest.mark.newest
def test_a_png_is_one(report: jhost.OverlapReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.save(tmp_path / "f.png")
    content = (tmp_path / "f.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width > height > 200


@pytest.mark.newest
def test_an_svg_is_one_and_always_the_same(
    report: jhost.OverlapReport, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.SVG"):
        report.save(tmp_path / name)
    content = (tmp_path / "a.svg").read_text()
    assert content == (tmp_path / "b.SVG").read_text()
    xml.etree.ElementTree.fromstring(content)
    assert "cpu 1" in content  # as a comment beside the glyphs


def in_notebook(report: Any) -> str:
    return report._repr_html_()


def page_of(report: jhost.OverlapReport, folder: Path) -> str:
    report.save(folder / "f.html")
    return (folder / "f.html").read_text()


@pytest.mark.newest
def test_a_page_has_the_tables_and_the_timeline(
    report: jhost.OverlapReport, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    page = page_of(report, tmp_path)
    assert in_notebook(report) in page
    svg = re.search(r'src="data:image/svg\+xml;base64,([^"]*)"', page)
    assert svg
    assert "cpu 1" in base64.b64decode(svg[1]).decode()
    texts = set(re.findall(r">([^<>\n]+)<", page))
    for line in str(report).splitlines()[1:5]:
        assert set(re.split(r"  +", line.strip())) <= texts
    ran = [statement for statement in report.statements if statement.seconds]
    assert {html.escape(statement.text, quote=False) for statement in ran} <= texts
    report.save(tmp_path / "one.html", devices=[0])
    assert len((tmp_path / "one.html").read_text()) < len(page)


def test_without_matplotlib_a_page_says_what_to_install(
    report: jhost.OverlapReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = page_of(report, tmp_path)
    assert "pip install matplotlib" in page
    assert "<img" not in page
    assert page.count('class="bar"') > len(report.devices)


def test_a_page_says_why_a_picture_failed(
    report: jhost.OverlapReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("Failed to process string with tex\nbecause of latex")

    monkeypatch.setattr("jhost.runtime.profile.picture._matplotlib", fails)
    assert "No picture: Failed to process string with tex<" in page_of(report, tmp_path)


def test_some_devices_may_be_shown(report: jhost.OverlapReport, tmp_path: Path) -> None:
    report.save(tmp_path / "f.json", devices=[1])
    events = json.loads((tmp_path / "f.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1}
    with pytest.raises(errors.OptionError, match=r"ran on devices 0, 1(.|\n)*device 7"):
        report.save(tmp_path / "f.json", devices=[1, 7])


# --- Refusals --------------------------------------------------------------------- #


def test_other_functions_are_refused() -> None:
    with pytest.raises(errors.ArgumentError, match=r"jhost\.profile takes a function"):
        jhost.profile(jax.jit(jnp.sin), jnp.ones(3))  # type: ignore


def test_types_are_refused_by_their_paths(function: Any) -> None:
    x, *others = arguments()
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    with pytest.raises(errors.ArgumentError, match=r"needs arrays(.|\n)*x: Shape"):
        jhost.profile(function, shape, *others)


def test_other_endings_are_refused(report: jhost.OverlapReport, tmp_path: Path) -> None:
    with pytest.raises(errors.OptionError, match=r"'f\.pdf' ends in '\.pdf'"):
        report.save(tmp_path / "f.pdf")
    with pytest.raises(FileNotFoundError, match=r"no_folder.f\.html"):
        report.save(tmp_path / "no_folder" / "f.html")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_says_what_to_install(
    report: jhost.OverlapReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(errors.MissingPackageError, match="pip install matplotlib"):
        report.save(tmp_path / "f.png")
    report.save(tmp_path / "f.json")


def test_two_profiles_at_once_are_refused(function: Any, tmp_path: Path) -> None:
    with (
        jax.profiler.trace(str(tmp_path)),
        pytest.raises(errors.ProfileError, match=r"end the jax\.profiler\.trace"),
    ):
        jhost.profile(function, *arguments())
    assert jhost.profile(function, *arguments()).devices  # and later it works
