"""Reports as pages: well formed, they say what the texts say, and refuse plainly."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost import errors
from jhost._tuning import Candidate, TunedProgram, TunedStream
from jhost._tuning_holds import environment_of

MakeMesh = Callable[[Sequence[int], Sequence[str]], Mesh]

X, UP, DOWN = jnp.ones((32, 16)), jnp.ones((16, 64)), jnp.ones((64, 16))
SPECS: dict[str, Any] = {
    "in_shardings": (P("tp"), P(None, "tp"), P("tp")),
    "out_shardings": P("tp"),
}


class Page(HTMLParser):
    """The texts, the tags and the widths of bars of a page that is well formed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.widths: list[float] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if width := re.fullmatch(r"width: (.*)%", dict(attrs).get("style", "")):
            self.widths.append(float(width[1]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and data.strip():
            self.texts.append(data.strip())


def in_notebook(report: Any) -> str:
    return report._repr_html_()


def saved(report: Any, folder: Path) -> Page:
    """The page that a report is saved as, which has in it what a notebook shows."""
    report.save(folder / "report.html")
    html = (folder / "report.html").read_text()
    assert in_notebook(report) in html
    page = Page(html)
    assert not {"script", "link"} & set(page.tags)
    assert all(0 <= width <= 100 for width in page.widths)
    return page


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream((x @ up) @ down, axis=0)


def block_of(make_mesh: MakeMesh, f: Callable[..., Any] = block, **how: Any) -> Any:
    return jhost.jit(f, mesh=make_mesh((4,), ("tp",)), **SPECS, **how)


# --- Explanations ------------------------------------------------------------------- #


def test_a_block_with_predictions_looks_well(
    make_mesh: MakeMesh, golden: Callable[..., None]
) -> None:
    f = block_of(make_mesh, chunks=2, pipeline="collective")
    explanation = jhost.explain(f, X, UP, DOWN)
    times = (("collective pipeline in 2 chunks", 1e-3), ("no pipeline", 1.6e-3))
    streams = [dataclasses.replace(s, predicted=times) for s in explanation.streams]
    html = in_notebook(dataclasses.replace(explanation, streams=tuple(streams)))
    _, _, body = html.partition("</style>\n")
    golden(re.sub(r"(test_report_pages\.py):\d+", r"\1", body))


def plain(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return (x @ up) @ down


def two_marks(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    y = jhost.stream((x @ up) @ down, axis=0, chunks=2)
    return jhost.stream(jnp.sort(y, axis=0) + 1, axis=1, chunks=2)


def in_bodies(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return block(x, up, down), None

    x = jax.lax.scan(layer, x, length=3)[0]
    return jax.lax.cond(x[0, 0] > 0, lambda x: block(x, up, down), jnp.negative, x)


@pytest.mark.parametrize("derived", ["called", "grad", "compiled"])
@pytest.mark.parametrize("f", [plain, block, two_marks, in_bodies])
@pytest.mark.parametrize("pipeline", ["off", "collective", "p2p"])
def test_a_page_says_what_the_text_says(
    make_mesh: MakeMesh, tmp_path: Path, f: Any, pipeline: Any, derived: str
) -> None:
    how = {"pipeline": "auto", "chunks": "auto"} if f is two_marks else {}
    model = block_of(make_mesh, f, **({"pipeline": pipeline} | how))
    match derived:
        case "called":
            found = jhost.explain(model, X, UP, DOWN)
        case "grad":
            step = jax.grad(lambda *args: model(*args).sum(), (0, 1))
            found = jhost.explain(step, X, UP, DOWN)
        case _:
            found = model.lower(X, UP, DOWN).explain()
            found = dataclasses.replace(found, schedule="schedule: 2 < 3\n  & more")
    page = saved(found, tmp_path)
    rows = (*found.streams, *found.communications, *found.notes, *found.options)
    assert {str(row) for row in rows} <= set(page.texts)
    assert {row.reason for row in found.layouts} <= set(page.texts)
    moved = {f"{row}; {row.detail}" for row in found.communications}
    assert moved <= set(page.texts)
    for text in found.text.splitlines():
        if text.endswith((" loop", " loops")):  # a program's or a body's head
            assert text.strip() in page.texts
    assert not found.schedule or found.schedule in page.texts


def test_boxes_hold_what_loops_do(make_mesh: MakeMesh) -> None:
    f = block_of(make_mesh, in_bodies, chunks=2, pipeline="collective")
    explanation = jhost.explain(f, X, UP, DOWN)
    scan = next(step for step in explanation.steps if "in a scan of 3" in step.text)
    (loop,) = [step for step in scan.steps if step.steps]
    assert loop.text == "loop of 2 iterations, which take turns on queues"
    kinds = [step.communication and step.communication.kind for step in loop.steps]
    assert kinds == ["AllGather", None, "ReduceScatter"]
    _, computation, reduction = loop.steps
    assert computation.text == "2 dot_general"
    assert reduction.text in map(str, explanation.communications)
    assert reduction.layout.endswith("partial(sum tp) -> f32[4@tp~s0, 16]")


# --- Tunings ------------------------------------------------------------------------ #


def candidate(text: str, median: float, predicted: float | None) -> Candidate:
    return Candidate(
        text=text,
        pipeline="collective" if "chunks" in text else None,
        chunks=None,
        streams=None,
        minimum=median / 2,
        median=median,
        predicted=predicted,
    )


def tuning_of(function: str, *candidates: Candidate) -> jhost.Tuning:
    stream = TunedStream(
        value="y: f32[8, 4]",
        where=f"model.py:3 ({function})",
        axis=0,
        marks=(0,),
        candidates=candidates,
        left_out=("p2p: too much memory & time",),
    )
    program = TunedProgram(
        name=function, fingerprint="0", arguments=("x: f32[8]",), streams=(stream,)
    )
    return jhost.Tuning(
        function=function, environment=environment_of(None), programs=(program,)
    )


def test_a_tuning_has_a_bar_for_each_time(tmp_path: Path) -> None:
    tuning = tuning_of(
        "f", candidate("in 2 chunks", 1e-3, 2e-3), candidate("none", 1.5e-3, None)
    )
    page = saved(tuning, tmp_path)
    assert page.widths == [50, 100, 75]
    assert "median 1 ms, minimum 500 us, chosen" in page.texts
    assert "median 1.5 ms, minimum 750 us" in page.texts
    assert "predicted 2 ms" in page.texts
    said = "in 2 chunks takes 1 ms, and none 1.5 ms: the choice is 1.50 times as fast"
    assert said in page.texts
    assert ["0", "2 ms", "time of one call"] == page.texts[-4:-1]
    lines = [line.strip().removesuffix(":") for line in str(tuning).splitlines()]
    others = [line for line in lines if "median" not in line]
    assert set(others) <= set(page.texts)


@pytest.mark.parametrize("seconds", [[], [0.0, 0.0]], ids=["none", "no time"])
def test_a_tuning_of_nothing_has_no_long_bars(seconds: Any, tmp_path: Path) -> None:
    rows = [candidate("none", time, time) for time in seconds]
    page = saved(tuning_of("f", *rows), tmp_path)
    assert page.widths == [0.0] * 2 * len(rows)


# --- Names and refusals ------------------------------------------------------------- #

REPORTS: dict[str, Callable[[str], Any]] = {
    "explanation": lambda name: dataclasses.replace(
        jhost.explain(jhost.jit(lambda x: x + 1), X), name=name, notes=(name,)
    ),
    "tuning": tuning_of,
}


@pytest.mark.parametrize("report_of", REPORTS.values(), ids=REPORTS)
@pytest.mark.parametrize("name", ["<lambda>", "a<b> & </summary>", "</style>", '"é'])
def test_names_are_texts_and_not_tags(
    report_of: Callable[[str], Any], name: str, tmp_path: Path
) -> None:
    page = saved(report_of(name), tmp_path)
    assert any(text.startswith((name, f"tuning of {name}")) for text in page.texts)
    assert page.tags == saved(report_of("f"), tmp_path).tags


@pytest.mark.parametrize("report_of", REPORTS.values(), ids=REPORTS)
def test_other_files_are_refused(
    report_of: Callable[[str], Any], tmp_path: Path
) -> None:
    report = report_of("f")
    for name, ending in (("f.pdf", r"\.pdf"), ("f", "")):
        with pytest.raises(errors.OptionError, match=rf"\.html(.|\n)*in '{ending}'"):
            report.save(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"no_folder.f\.html"):
        report.save(tmp_path / "no_folder" / "f.html")
    assert not list(tmp_path.iterdir())
