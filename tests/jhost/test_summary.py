"""`str` of an explanation is a screen, with the times first and what weighs most."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import jhost
from jhost.lowering.communication_report import CommunicationReport
from jhost.lowering.explanation import Explanation
from jhost.lowering.ir.remarks import (
    LayoutReport,
    LeftStream,
    Prediction,
    Search,
    StreamReport,
)
from jhost.runtime.devices import assumed

MakeMesh = Callable[[Sequence[int], Sequence[str]], Mesh]

H200 = "NVIDIA H200"


@pytest.mark.newest
def test_a_step_of_a_whole_model_fits_a_screen() -> None:
    """Of a decoder whose weights and heads are sharded, and whose queries are not."""
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    from tests.decoder import step_of

    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    step, arguments = step_of(mesh)
    with (
        jax.set_mesh(mesh),
        assumed(H200),
        jax.numpy_dtype_promotion("standard"),
    ):
        explanation = jhost.explain(step, *arguments)
    lines = str(explanation).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 260
    assert re.match(r"  predicted to take \S+ ms on 4 x NVIDIA H200, and ", lines[1])
    (largest,) = (line for line in lines if "largest exposed transfer" in line)
    longest = max(explanation.communications, key=lambda each: each.exposed or 0.0)
    assert longest.value in largest
    rows = '`norm(name="pre_mlp_norm")(x)` at decoder.py:'
    assert f"of {rows}" in largest
    assert "to change first: mark gate with jhost.stream(" in str(explanation)
    assert "['layers']['attention']['query']['kernel'] over fsdp" in str(explanation)


# --- The first lines ---------------------------------------------------------------- #


def transfer(**fields: Any) -> CommunicationReport:
    """A gather of which nothing is hidden, but for what `fields` say."""
    usual: dict[str, Any] = {
        "kind": "AllGather",
        "axes": ("tp",),
        "value": "x",
        "bytes": 10_000_000,
        "chunks": 1,
        "seconds": 1e-3,
        "exposed": 1e-3,
        "behind": "the start",
        "before": "`x @ w` at model.py:7",
    }
    return CommunicationReport(**{**usual, **fields})


def stream(**fields: Any) -> StreamReport:
    usual: dict[str, Any] = {
        "stream": "s0",
        "axis": 0,
        "pipeline": "off",
        "chunks": 1,
        "extent": 8,
        "reason": "not pipelined, predicted to take 3 ms",
        "lines": ("model.py:7 (model)",),
    }
    return StreamReport(**{**usual, **fields})


def explanation(
    *moved: CommunicationReport, total: float = 4e-3, **fields: Any
) -> Explanation:
    usual: dict[str, Any] = {
        "name": "step",
        "loops": 0,
        "streams": (),
        "layouts": (),
        "communications": moved,
        "notes": (),
        "devices": "2 x NVIDIA H200",
        "predicted": Prediction(total=total, compute=3e-3, communication=2e-3),
        "unpipelined": Prediction(total=6e-3, compute=3e-3, communication=3e-3),
    }
    return Explanation(**{**usual, **fields})


def advised(found: Explanation) -> str:
    """What is to be changed first."""
    (line,) = (each for each in str(found).splitlines() if "to change first" in each)
    return line.partition(": ")[2]


def test_the_first_lines_say_what_is_gained_and_what_is_not() -> None:
    _, time, hidden, largest, *_ = str(explanation(transfer())).splitlines()
    assert time == (
        "  predicted to take 4 ms on 2 x NVIDIA H200, and 6 ms without jhost "
        "(1.50 times as fast)"
    )
    assert hidden == (
        "  each device receives 10.0 MB in 2 ms: computation hides 1 ms, and 1 ms "
        "is exposed (25% of the time)"
    )
    assert largest.startswith(
        "  largest exposed transfer: 1 ms of 1 ms exposed: AllGather of x over tp"
    )


def test_a_transfer_without_a_stream_is_to_be_marked() -> None:
    assert advised(explanation(transfer())).startswith("mark `x @ w` at model.py:7")


def test_choices_that_are_close_are_to_be_measured() -> None:
    close = stream(predicted=(("not pipelined", 3e-3), ("p2p in chunks", 3.05e-3)))
    assert advised(explanation(transfer(), streams=(close,))).startswith(
        "measure with jhost.tune: at model.py:7 (model) p2p in chunks"
    )


def test_chunks_that_would_lose_want_another_mesh() -> None:
    clear = stream(predicted=(("not pipelined", 3e-3), ("p2p in chunks", 9e-3)))
    assert advised(explanation(transfer(), streams=(clear,))).startswith(
        "use fewer devices along tp, or more rows on each device"
    )


def left(best: float) -> dict[str, Any]:
    """That a stream beside the transfer was found and left: a loop takes `best`."""
    predicted = ("not pipelined", 3e-3), ("p2p in chunks", best)
    stream = LeftStream(lines=("model.py:7 (model)",), predicted=predicted)
    return {"searches": (Search(left=(stream,)),)}


def test_nothing_is_to_be_marked_where_jhost_looked_and_left() -> None:
    assert advised(explanation(transfer(), **left(3.05e-3))).startswith(
        "jhost found a stream at model.py:7 and left it, too close to choose by "
        "prediction (3.05 ms with a loop and 3 ms without): mark it"
    )
    assert advised(explanation(transfer(), **left(9e-3))).startswith(
        "fewer devices along tp, or more rows a device: jhost found a stream at "
        "model.py:7 and left it, because its chunks are too small to gain"
    )
    searched = explanation(transfer(), searches=(Search(),))
    assert "to change first" not in str(searched)


def test_loops_that_lose_are_not_to_be_asked_for() -> None:
    asked = stream(pipeline="p2p", chunks=4, reason="4 chunks, as asked")
    weighed = (("p2p with 4 chunks", 9e-3), ("collective with 4 chunks", 9.1e-3))
    for predicted in ((), weighed):
        one = dataclasses.replace(asked, predicted=predicted)
        found = explanation(transfer(), streams=(one,), total=9e-3)
        assert advised(found).startswith("leave chunks= and pipeline= open")


def test_where_little_is_exposed_nothing_is_to_be_changed() -> None:
    found = explanation(transfer(exposed=0.0), total=3.01e-3)
    assert advised(found).startswith("nothing: computation takes")
    assert "largest exposed transfer" not in str(found)


def test_on_cpus_nothing_is_predicted(make_mesh: MakeMesh) -> None:
    mesh = make_mesh((4,), ("tp",))
    f = jhost.jit(lambda x: x @ x.T, mesh=mesh, in_shardings=P("tp"))
    found = jhost.explain(f, jnp.ones((32, 16)))
    assert found.predicted is None
    assert "\n  nothing is predicted for 4 x cpu, where nothing runs" in str(found)
    assert all(each.seconds is None for each in found.communications)


def test_what_is_predicted_is_of_the_devices_that_are_assumed(
    make_mesh: MakeMesh,
) -> None:
    mesh = make_mesh((4,), ("tp",))
    specs: dict[str, Any] = {
        "in_shardings": (P("tp"), P(None, "tp"), P("tp")),
        "out_shardings": P("tp"),
    }

    @jhost.jit(mesh=mesh, **specs)
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.stream((x @ up) @ down, axis=0)

    shapes = (8192, 4096), (4096, 14336), (14336, 4096)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with assumed(H200):
        found = jhost.explain(block, *types)
    assert found.predicted is not None
    assert found.unpipelined is not None
    assert found.predicted.total < 0.8 * found.unpipelined.total
    first, second = found.communications
    assert {first.lane, second.lane} == {"copies"}
    assert first.seconds is not None
    assert first.exposed is not None
    assert 0.0 <= first.exposed < 0.1 * first.seconds


# --- Rows --------------------------------------------------------------------------- #


def rows_of(found: Explanation, title: str) -> list[str]:
    """The rows below a title."""
    _, _, behind = str(found).partition(f"\n  {title}:\n")
    rows: list[str] = []
    for line in behind.splitlines():
        if not line.startswith("    "):
            break
        rows.append(line.strip())
    return rows


def test_transfers_alike_are_one_row() -> None:
    moved = [transfer(times=2), transfer(), transfer(value="y", exposed=0.0)]
    first, second = rows_of(explanation(*moved), "transfers")
    assert first.startswith("2 ms of 2 ms exposed: 3 x AllGather of x over tp, 20.0 MB")
    assert second.startswith("0 of 1 ms exposed: AllGather of y")


def test_an_alternative_is_said_of_its_own_place() -> None:
    """Of several places in one row."""
    usual: dict[str, Any] = {"value": "x", "before": "P('tp')", "text": "", "where": ""}
    rows = [
        LayoutReport(**usual, after="P(None) for dot_general", bytes=n, reason=reason)
        for n, reason in ((1000, "if this"), (3000, "if that"))
    ]

    def row(*layouts: LayoutReport) -> str:
        (text,) = rows_of(explanation(transfer(), layouts=layouts), "layouts")
        return text.partition(" a device")[2]

    assert row(rows[0]) == "; if this"
    assert row(rows[0], rows[0]) == "; in each of them: if this"
    assert row(*rows) == "; in one of them, of 3.0 kB: if that"


def test_small_transfers_are_one_row() -> None:
    small = [transfer(value=f"g{n}", bytes=4, seconds=1e-5) for n in range(9)]
    rows = rows_of(explanation(transfer(), *small), "transfers")
    assert rows[1:] == ["9 small transfers, 36 bytes a device in all"]


def test_no_more_rows_than_a_screen_has() -> None:
    moved = [transfer(value=f"w{n}") for n in range(50)]
    notes = tuple(f"note {n}" for n in range(50))
    text = str(explanation(*moved, notes=notes))
    assert len(text.splitlines()) <= 40
    assert "\n    and 40 more\n" in text


def test_a_choice_that_is_predicted_to_be_slower_says_why() -> None:
    ranked = (("not pipelined", 3e-3), ("p2p in chunks", 2.95e-3))
    found = explanation(transfer(), streams=(stream(predicted=ranked),))
    (row,) = rows_of(found, "streams")
    assert "; p2p in chunks 2.95 ms, which gains too little [" in row


def test_marks_of_which_the_same_became_are_one_row() -> None:
    ranked = (("not pipelined", 3e-3), ("p2p in chunks", 9e-3))
    streams = [stream(predicted=ranked, lines=(f"m.py:{n} (f)",)) for n in (3, 5)]
    (row,) = rows_of(explanation(transfer(), streams=tuple(streams)), "streams")
    assert row == (
        "2 x axis 0: not pipelined, predicted 3 ms; p2p in chunks 9 ms [m.py:3, m.py:5]"
    )


def test_a_found_stream_is_compared_with_no_loop() -> None:
    ranked = (("p2p", 1e-3), ("p2p with 8 chunks", 1.1e-3), ("not pipelined", 2e-3))
    found = explanation(transfer(), streams=(stream(predicted=ranked, found=True),))
    (row,) = rows_of(found, "streams")
    assert "predicted 1 ms; not pipelined 2 ms" in row
