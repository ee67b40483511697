"""`jhost.tune`: what is measured, what follows it, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jhost
from jhost import _tuning_cache, errors
from jhost._call import execute
from jhost._call.bind import call_of
from jhost._call.program import planned
from jhost._compare import beyond_tolerance, tolerances_of
from jhost._tune import tuner
from jhost._tune.operands import drawn
from jhost._tuning import Candidate
from jhost.lowering.cost.candidates import Evaluation
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.remarks import StreamReport
from jhost.lowering.ir.requests import marks_alike
from jhost.testing import programs
from tests import budget
from tests.jhost.blocks import ARGS, SPECS, relu_block
from tests.jhost.derived import backward
from tests.lowering.hand_built import mesh_of
from tests.lowering.on_mesh import tp
from tests.lowering.traced import remarks

SETTINGS = tp(4, SPECS, SPECS[0])
MESH = SETTINGS["mesh"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("JHOST_CACHE_DIR", str(tmp_path))
    return tmp_path


def tuned(fun: Any = relu_block, *args: Any, **options: Any) -> jhost.Tuning:
    f: Any = jhost.jit(fun, **SETTINGS)
    options = {"rounds": 1, "progress": False, "cache": False, **options}
    return jhost.tune(f, *(args or ARGS), **options)


@functools.cache
def usual(gradients: bool = False) -> jhost.Tuning:
    """A tuning, for tests of what becomes of one."""
    return tuned(gradients=gradients)


def favouring(text: str, tuning: jhost.Tuning) -> jhost.Tuning:
    """`tuning` as if one candidate had been the fastest of each stream."""
    programs = [
        dataclasses.replace(
            program,
            streams=tuple(
                dataclasses.replace(
                    stream,
                    candidates=tuple(
                        sorted(stream.candidates, key=lambda c: c.text != text)
                    ),
                )
                for stream in program.streams
            ),
        )
        for program in tuning.programs
    ]
    return dataclasses.replace(tuning, programs=tuple(programs))


# --- What is measured ------------------------------------------------------------- #


def test_every_candidate_is_measured_and_the_best_is_first() -> None:
    (program,) = tuned().programs
    (stream,) = program.streams
    assert {c.text for c in stream.candidates} >= {
        "not pipelined",
        "collective with 2 chunks",
    }
    for candidate in stream.candidates:
        assert 0 < candidate.minimum <= candidate.median
    best, *others = stream.candidates
    assert [c.median for c in others] == sorted(c.median for c in others)
    assert best.median <= min(c.median for c in others) / tuner.GAIN
    assert program.arguments == ("x: f32[8, 8]", "up: f32[8, 16]", "down: f32[16, 8]")
    assert stream.where.startswith("blocks.py:")


def test_devices_that_nobody_has_measured_are_tuned_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There every candidate is measured, and nothing is predicted."""
    monkeypatch.setattr("jhost._call.program.rates_here", lambda *_: None)
    (stream,) = tuned().programs[0].streams
    texts = {candidate.text for candidate in stream.candidates}
    assert {"not pipelined", "p2p with a chunk a device", "p2p with 8 chunks"} <= texts
    assert {candidate.predicted for candidate in stream.candidates} == {None}


def test_what_the_mark_fixes_is_not_tried() -> None:
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.stream(x @ up @ down, axis=0, pipeline="p2p")

    (stream,) = tuned(block).programs[0].streams
    assert {candidate.pipeline for candidate in stream.candidates} == {"p2p"}

    def fixed(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.stream(x @ up @ down, axis=0, pipeline="p2p", chunks=4)

    assert tuned(fixed).programs[0].streams == ()


def test_on_one_device_there_is_nothing_to_tune() -> None:
    f = jhost.jit(lambda x: jhost.stream(x + 1, axis=0))
    tuning = jhost.tune(f, jnp.ones(4), cache=False, progress=False)
    assert tuning.programs[0].streams == ()


def layers(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    for _ in range(2):
        x = relu_block(x, up, down)
    return x


def test_marks_of_equal_layers_are_tuned_as_one() -> None:
    """But a layer on other shapes is not."""
    call = call_of(jhost.jit(layers, **SETTINGS).__jhost_source__, ARGS, {})
    program = planned(call.call_jaxpr, call.config).program
    marks = enumerate(program.marks)
    first, second = (n for n, mark in marks if isinstance(mark, StreamChoice))
    assert marks_alike(program) == [(first, second)]

    def uneven(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return relu_block(relu_block(x, up, down)[:4], up, down)

    call = call_of(jhost.jit(uneven, **SETTINGS).__jhost_source__, ARGS, {})
    program = planned(call.call_jaxpr, call.config).program
    assert len(marks_alike(program)) == 2


def test_a_pipeline_has_to_gain_three_percent() -> None:
    def timed(text: str, median: float) -> Candidate:
        return Candidate(
            text=text,
            pipeline=None,
            chunks=None,
            streams=None,
            minimum=0.0,
            median=median,
            predicted=None,
        )

    candidates = [timed("off", 1.0), timed("a", 0.98), timed("b", 1.2)]
    assert [c.text for c in tuner.best_first(candidates)] == ["off", "a", "b"]
    faster = [*candidates, timed("c", 0.9)]
    assert [c.text for c in tuner.best_first(faster)] == ["c", "a", "off", "b"]


def test_a_candidate_that_gives_something_else_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = execute.emit

    def wrong(program: Any, mesh: Any) -> Any:
        function, loops = right(program, mesh), "for " in str(program)
        return lambda *args: [x + x.dtype.type(loops) for x in function(*args)]

    monkeypatch.setattr(execute, "emit", wrong)
    with pytest.warns(UserWarning, match="does not give what the plain function gives"):
        (stream,) = tuned().programs[0].streams
    assert [candidate.text for candidate in stream.candidates] == ["not pipelined"]
    assert any("they differ by" in text for text in stream.left_out)


@pytest.mark.usefixtures("uncombined")
@pytest.mark.slow
@pytest.mark.parametrize("make", [jnp.ones, jnp.zeros])
def test_gradients_in_bfloat16_of_any_operands_are_tuned(make: Any) -> None:
    """Residuals in float32 are no more exact than what they are made of."""

    def normed(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        wide = jnp.exp((x @ up).astype(jnp.float32))
        h = (wide / (1 + wide)).astype(jnp.bfloat16)
        return jhost.stream(h @ down, axis=0)

    args = [make(a.shape, jnp.bfloat16) for a in ARGS]
    found = tuned(normed, *args, gradients=True)
    for program in found.programs:
        for stream in program.streams:
            assert not [text for text in stream.left_out if "differ" in text]
            assert len(stream.candidates) > 1


def test_tolerances_are_those_of_the_narrowest_type_that_goes_in() -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    def f(x: jax.Array, y: jax.Array, n: jax.Array) -> tuple[jax.Array, ...]:
        return inner(x) * 2, y + 1, inner(x) > 0, n + 1, inner(x) + y, jnp.ones(2), x

    args = (jnp.ones(2, jnp.bfloat16), jnp.ones(2), jnp.arange(2, dtype=jnp.int32))
    narrow, single = 2e-2, 1e-4
    wanted = [narrow, single, narrow, 0.0, narrow, single, narrow]
    assert tolerances_of(jax.make_jaxpr(f)(*args)) == wanted


def test_what_is_drawn_lies_as_it_lay_and_is_for_equal_floats_alone() -> None:
    ones = jax.device_put(jnp.ones((8, 8), jnp.bfloat16), NamedSharding(MESH, P("tp")))
    kept = jnp.arange(4.0), jnp.ones(4, jnp.int32), jnp.ones(()), "static", None
    (new, *others), kwargs = drawn((ones, *kept), {"b": np.zeros(4, np.float32)})
    assert (new.dtype, new.shape, new.sharding) == (ones.dtype, (8, 8), ones.sharding)
    assert len(np.unique(np.asarray(new, np.float32))) > 8
    assert all(a is b for a, b in zip(others, kept, strict=True))
    assert np.unique(kwargs["b"]).size == 4


def test_the_bar_knows_its_steps_from_the_start_and_no_warning_tears_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened = recorded(monkeypatch)
    monkeypatch.setattr(tuner, "beyond_tolerance", lambda *_: ["they differ"])
    monkeypatch.setattr(warnings, "warn", lambda *_, **__: happened.append("warned"))
    tuned(progress=True, gradients=True)
    after = happened[happened.index("closed") + 1 :]
    assert after
    assert set(after) == {"warned"}


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What bars will be told: their total, the size of each step, and "closed"."""
    happened: list[Any] = []

    class Bar:
        def step(self, what: str, size: int = 1) -> None:
            happened.append(size)

        def close(self) -> None:
            happened.append("closed")

    def bar(total: int, unit: str) -> Bar:
        happened.append(total)
        return Bar()

    monkeypatch.setattr("jhost._tune.tune.progress_bar", bar)
    return happened


def uneven_layers(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Two streams, of layers on other shapes."""
    return relu_block(relu_block(x, up, down)[:4], up, down)


def refused(*_: Any) -> Any:
    raise errors.ChunksError("no")


GOES_WRONG: dict[str, tuple[str, Any]] = {
    "nothing": ("jhost._tune.tuner.WARMUPS", 1),
    "no candidate lowers": (
        f"{Evaluation.__module__}.Evaluation.measurable",
        lambda *_: [],
    ),
    "none compiles": ("jhost._call.execute.emit", refused),
    "none is right": ("jhost._tune.tuner.beyond_tolerance", lambda *_: ["they differ"]),
    "none is hopeless": ("jhost._tune.tuner._HOPELESS", 1e9),
    "all but one are hopeless": ("jhost._tune.tuner._HOPELESS", 0.0),
}


@budget.first_is_quick(
    ("fun", "rounds", "gradients", "wrong"),
    [
        (relu_block, 1, (0,), "none is hopeless"),  # fewer rounds than candidates
        *((uneven_layers, 5, False, wrong) for wrong in GOES_WRONG),
    ],
)
@pytest.mark.filterwarnings("ignore:.* does not give what the plain function gives")
def test_the_steps_of_the_bar_are_its_total_whatever_goes_wrong(
    monkeypatch: pytest.MonkeyPatch, fun: Any, rounds: int, gradients: Any, wrong: str
) -> None:
    happened = recorded(monkeypatch)
    monkeypatch.setattr(*GOES_WRONG[wrong])
    monkeypatch.setattr(tuner, "CALLS", 1)
    tuned(fun, rounds=rounds, gradients=gradients, progress=True)
    total, *steps, closed = happened
    assert (sum(steps), closed) == (total, "closed")
    assert [step for step in steps if type(step) is not int] == []
    assert total == 2 * rounds * (4 if gradients else 2)


@pytest.mark.parametrize("tqdm", [pytest.param(True, marks=pytest.mark.newest), False])
def test_the_bar_shows_whole_steps_and_ends_with_all(
    tqdm: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuner, "_HOPELESS", 1e9)  # some more, to share the rounds
    if tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    tuned(progress=True, rounds=7)
    counts = re.findall(r"([^ \[]+)/14\b", capfd.readouterr().err)
    assert [count for count in counts if not count.isdecimal()] == []
    assert counts[-1] == "14"


@pytest.mark.parametrize("why", ["no marks", "another process shows it"])
def test_there_is_no_bar_where_nobody_needs_one(
    why: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if why == "no marks":
        tuned(lambda x, up, down: x @ up @ down, progress=True)
        said = "jhost.tune: <lambda>: nothing to tune; "
    else:
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        tuned(progress=True)
        said = ""
    err = capfd.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == bool(said)


def test_a_candidate_that_does_not_compile_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = execute.emit

    def fails(program: Any, mesh: Any) -> Any:
        if "for " in str(program):
            raise MemoryError("no room")
        return right(program, mesh)

    monkeypatch.setattr(execute, "emit", fails)
    (stream,) = tuned().programs[0].streams
    assert [candidate.text for candidate in stream.candidates] == ["not pipelined"]
    assert "collective with 2 chunks is left out: no room" in stream.left_out


# --- What follows it --------------------------------------------------------------- #


@pytest.mark.parametrize("text", ["collective with 2 chunks", "not pipelined"])
def test_a_function_follows_its_tuning_and_says_so(text: str) -> None:
    tuning = favouring(text, usual())
    f = jhost.jit(relu_block, tuning=tuning, **SETTINGS)
    explanation = jhost.explain(f, *ARGS)
    (stream,) = explanation.streams
    assert stream.reason.startswith(f"{text}, measured to take ")
    assert stream.measured == tuning.programs[0].streams[0].times()
    assert stream.predicted == ()
    assert explanation.loops == (text != "not pipelined")
    chex.assert_trees_all_equal(f(*ARGS), relu_block(*ARGS))


def test_gradients_follow_theirs() -> None:
    tuning = usual(gradients=True)
    names = [program.name for program in tuning.programs]
    assert names == [
        "relu_block",
        "relu_block, keeping residuals",
        "relu_block, backward",
    ]
    f = jhost.jit(relu_block, tuning=tuning, **SETTINGS)
    pulled = jax.vjp(f, *ARGS)[1](jnp.ones((8, 8)))
    chex.assert_trees_all_equal(pulled, jax.vjp(relu_block, *ARGS)[1](jnp.ones((8, 8))))
    for program in backward(f, *ARGS):
        reports = remarks(program, StreamReport)
        assert all("measured" in report.reason for report in reports)


def test_gradients_by_some_arguments_follow_theirs() -> None:
    """In a training step: x is no parameter, and the whole is compiled."""
    tuning = tuned(gradients=(1, 2))
    f = jhost.jit(relu_block, tuning=tuning, **SETTINGS)

    def step(x: jax.Array, *weights: jax.Array) -> Any:
        def loss(*weights: jax.Array) -> jax.Array:
            return (f(x, *weights) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1))(*weights)

    forward, back = programs(jax.jit(step), *ARGS)
    for program in (forward, back):
        reports = remarks(program, StreamReport)
        assert reports
        assert all("measured" in report.reason for report in reports)


def test_layouts_trees_and_static_arguments_are_the_functions() -> None:
    """Nothing but what the arguments say of shardings; donated ones are kept."""
    mesh, (x, up, down) = mesh_of(dp=2, tp=4), ARGS

    def block(weights: Any, x: jax.Array, scale: int, act: str) -> Any:
        hidden = getattr(jax.nn, act)(x @ weights["up"]) * scale
        return {"y": jhost.stream(hidden @ weights["down"], axis=0)}, x.sum()

    f = jhost.jit(
        block, mesh=mesh, static_argnums=2, static_argnames="act", donate_argnums=1
    )
    weights = {
        "up": jax.device_put(up, jax.NamedSharding(mesh, P(None, "tp"))),
        "down": jax.device_put(down, jax.NamedSharding(mesh, P("tp"))),
    }
    x = jax.device_put(x, jax.NamedSharding(mesh, P(("dp", "tp"))))
    how: Any = {"cache": False, "progress": False, "rounds": 1, "gradients": 0}
    tuning = jhost.tune(f, weights, x, 3, kwargs={"act": "relu"}, **how)
    fast = f.with_options(tuning=favouring("not pipelined", tuning))
    reason = jhost.explain(fast, weights, x, 3, act="relu").streams[0].reason
    assert reason.startswith("not pipelined, measured to take")
    fast(weights, x, 3, act="relu")  # the first that may take x away


def test_meshes_with_explicit_axes_are_fine() -> None:
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        f = jhost.jit(relu_block)
        args = [jax.device_put(a, s) for a, s in zip(ARGS, SPECS, strict=True)]
        how: Any = {"cache": False, "progress": False, "rounds": 1, "gradients": True}
        tuning = favouring("collective with 2 chunks", jhost.tune(f, *args, **how))
        assert all(program.streams for program in tuning.programs)
        fast = f.with_options(tuning=tuning)
        assert "measured" in jhost.explain(fast, *args).streams[0].reason
        chex.assert_trees_all_equal(fast(*args), f(*args))


def test_several_tunings_serve_several_shapes() -> None:
    small, large = ARGS, (jnp.tile(ARGS[0], (2, 1)), *ARGS[1:])
    tunings = [tuned(relu_block, *args) for args in (small, large)]
    f = jhost.jit(relu_block, tuning=tunings, **SETTINGS)
    for args in (small, large):
        assert "measured" in jhost.explain(f, *args).streams[0].reason


def test_the_lines_and_the_name_of_a_function_do_not_count() -> None:
    def another(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return relu_block(x, up, down)

    f = jhost.jit(another, tuning=usual(), **SETTINGS)
    assert "measured" in jhost.explain(f, *ARGS).streams[0].reason


# --- What does not hold any more --------------------------------------------------- #


def test_other_arguments_are_a_warning_that_says_which() -> None:
    f = jhost.jit(relu_block, tuning=usual(), **SETTINGS)
    with pytest.warns(UserWarning, match=r"arguments: x: f32\[8, 8\].* -> x: f32\[4, "):
        explanation = jhost.explain(f, ARGS[0][:4], *ARGS[1:])
    assert explanation.streams[0].measured == ()


def test_another_function_is_a_warning_that_says_so() -> None:
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.stream(jnp.sin(x @ up) @ down, axis=0)

    f = jhost.jit(block, tuning=usual(), **SETTINGS)
    with pytest.warns(UserWarning, match=r"\* the function: what it computes"):
        f(*ARGS)


@pytest.mark.parametrize(
    ("field", "value"), [("jax", "0.0.1"), ("device_kind", "TPU v9"), ("mesh", "dp=4")]
)
def test_another_environment_is_a_warning_that_says_what_changed(
    field: str, value: str
) -> None:
    tuning = usual()
    environment = dataclasses.replace(tuning.environment, **{field: value})
    tuning = dataclasses.replace(tuning, environment=environment)
    f = jhost.jit(relu_block, tuning=tuning, **SETTINGS)
    with pytest.warns(UserWarning, match=rf"\* {field}: {value} -> "):
        assert jhost.explain(f, *ARGS).streams[0].measured == ()


# --- What is refused --------------------------------------------------------------- #


def test_arguments_of_tune_are_checked() -> None:
    f = jhost.jit(relu_block, **SETTINGS)
    with pytest.raises(
        errors.ArgumentError, match=r"jhost\.tune takes a function made"
    ):
        jhost.tune(relu_block, *ARGS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.OptionError, match="rounds=0"):
        jhost.tune(f, *ARGS, rounds=0)
    beyond: Any = [(3, "3"), (-4, "-4"), ((0, 4, 5), "4, 5")]
    for gradients, which in beyond:
        with pytest.raises(errors.OptionError, match=f"3 .* arguments: {which} is"):
            jhost.tune(f, *ARGS, gradients=gradients)
    scale = jhost.jit(lambda x, n: x[n])
    with pytest.raises(errors.ArgumentError, match="no gradients of <lambda>"):
        jhost.tune(scale, jnp.ones(2), jnp.arange(2, dtype=jnp.int32), gradients=-1)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ARGS]
    with pytest.raises(errors.ArgumentError, match=r"\[0\]\[2\]: ShapeDtypeStruct"):
        jhost.tune(f, *types)
    with pytest.raises(errors.ArgumentError, match="as tuning"):
        jhost.jit(relu_block, tuning="fast")  # pyright: ignore[reportCallIssue, reportArgumentType]


# --- As JSON ----------------------------------------------------------------------- #


def test_a_tuning_is_plain_json() -> None:
    tuning = usual(gradients=True)
    assert jhost.Tuning.from_json(tuning.to_json()) == tuning
    assert json.loads(tuning.to_json())["function"] == "relu_block"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: [], "is no tuning"),
        (lambda fields: fields.pop("jhost_tuning"), "is no tuning"),
        (lambda fields: {**fields, "jhost_tuning": 99}, "format 99, and jhost .* 2"),
        (lambda fields: {**fields, "more": 1}, "Tuning needs the fields function, "),
        (lambda fields: {**fields, "programs": 1}, r"Tuning\.programs is no list"),
        (lambda fields: {**fields, "function": None}, r"Tuning\.function is None"),
        (
            lambda fields: {**fields, "environment": {}},
            r"Tuning\.environment needs the fields jhost, ",
        ),
    ],
    ids=range(7),
)
def test_what_is_no_tuning_is_refused(change: Any, message: str) -> None:
    text = json.dumps(change(json.loads(usual().to_json())))
    with pytest.raises(errors.TuningError, match=message):
        jhost.Tuning.from_json(text)


def with_candidate(tuning: jhost.Tuning, **changed: Any) -> str:
    """The JSON of a tuning whose first candidate has other fields."""
    fields = json.loads(tuning.to_json())
    fields["programs"][0]["streams"][0]["candidates"][0].update(changed)
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chunks": 0}, "chunks is 0, and can be at least 1, or None"),
        ({"chunks": -2}, "chunks is -2, and can be at least 1, or None"),
        ({"streams": 0}, "streams is 0, and can be at least 1"),
        ({"pipeline": "ring"}, "pipeline is 'ring', and can be 'collective', 'p2p'"),
        ({"median": -1.0}, "median is -1.0, and can be seconds"),
    ],
    ids=str,
)
def test_what_no_stream_can_do_is_refused_by_its_field(
    changed: dict[str, Any], message: str
) -> None:
    place = r"Tuning\.programs\[0\]\.streams\[0\]\.candidates\[0\]\."
    with pytest.raises(errors.TuningError, match=place + message):
        jhost.Tuning.from_json(with_candidate(usual(), **changed))
    with pytest.raises(errors.TuningError, match=message):
        dataclasses.replace(usual().programs[0].streams[0].candidates[0], **changed)


def test_a_tuning_of_before_there_was_a_field_is_read() -> None:
    tuning = usual()
    fields = json.loads(tuning.to_json())
    candidates = fields["programs"][0]["streams"][0]["candidates"]
    for each in candidates:
        del each["sums"], each["zigzag"]
    assert jhost.Tuning.from_json(json.dumps(fields)) == tuning
    del candidates[0]["pipeline"]
    with pytest.raises(errors.TuningError, match="needs the fields"):
        jhost.Tuning.from_json(json.dumps(fields))


def test_a_tuning_that_cannot_be_followed_is_ignored_with_a_warning() -> None:
    text = with_candidate(usual(), pipeline="p2p", chunks=7)
    f: Any = jhost.jit(relu_block, tuning=jhost.Tuning.from_json(text), **SETTINGS)
    with pytest.warns(UserWarning, match=r"(?s)is ignored.*[*] .*chunks"):
        result = f(*ARGS)
    chex.assert_trees_all_equal(result, relu_block(*ARGS))
    with pytest.warns(UserWarning, match="is ignored"):
        assert jhost.explain(f, *ARGS).streams[0].pipeline == "off"


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(errors.TuningError, match="is no tuning"):
        jhost.Tuning.from_json("{")


# --- On disk ----------------------------------------------------------------------- #


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_was_measured_is_not_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = tuned(cache=True)
    (path,) = files(cache)
    assert path.parent.name == "tuning-2"
    assert jhost.Tuning.from_json(path.read_text()) == tuning
    monkeypatch.setattr(tuner, "take_turns", None)
    assert tuned(cache=True) == tuning


def test_without_the_cache_nothing_is_written(cache: Path) -> None:
    tuned(cache=False)
    assert files(cache) == []


@pytest.mark.parametrize("kind", ["corrupt", "foreign", "binary", "no chunks"])
def test_a_file_that_is_no_tuning_of_this_is_ignored_and_replaced(
    cache: Path, kind: str
) -> None:
    tuning = tuned(cache=True)
    (path,) = files(cache)
    other = dataclasses.replace(tuning, programs=()).to_json()
    contents = {
        "corrupt": b'{"jhost',
        "foreign": other.encode(),
        "binary": b"\xff\xfe",
        "no chunks": with_candidate(tuning, chunks=0).encode(),
    }
    path.write_bytes(contents[kind])
    said = "chunks is 0" if kind == "no chunks" else ""
    with pytest.warns(UserWarning, match=rf"\.json is ignored: .*{said}"):
        again = tuned(cache=True)
    assert jhost.Tuning.from_json(path.read_text()) == again


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("JHOST_CACHE_DIR", str(blocked))
    with pytest.warns(UserWarning, match="is not kept|is ignored"):
        tuned(cache=True)


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JHOST_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert _tuning_cache.folder() == Path("/somewhere/jhost")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert _tuning_cache.folder() == Path.home() / ".cache/jhost"


_WRITER = """
import sys
from pathlib import Path
from jhost._tuning import Tuning
from jhost._tuning_cache import CacheKey, load, store
tuning = Tuning.from_json(Path(sys.argv[1]).read_text())
key = CacheKey(
    environment=tuning.environment,
    fingerprints=tuple(p.fingerprint for p in tuning.programs),
)
for _ in range(200):
    store(key, tuning)
    assert load(key) == tuning
"""


@pytest.mark.slow
def test_many_processes_may_use_it_at_once(cache: Path, tmp_path: Path) -> None:
    """Both write and read two hundred times; neither ever sees half a file."""
    given = tmp_path / "given.json"
    given.write_text(usual().to_json())
    command = [sys.executable, "-W", "error", "-c", _WRITER, str(given)]
    environment = os.environ | {"PYTHONPATH": str(Path(jhost.__file__).parents[1])}
    writers = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [writer.communicate(timeout=120)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], said
    assert [path.parent.name for path in files(cache) if path != given] == ["tuning-2"]


# --- How far apart results may lie ------------------------------------------------- #


@pytest.mark.parametrize(
    ("given", "wanted", "fine"),
    [
        ([1.0, 2.0], [1.0, 2.0001], True),
        ([1.0, 2.0], [1.0, 2.001], False),
        ([0.0], [0.0], True),
        ([1e-9], [0.0], True),
        ([np.inf, np.nan], [np.inf, np.nan], True),
        ([np.inf, 1.0], [1.0, 1.0], False),
        ([np.nan, 1.0], [1.0, 1.0], False),
        ([1.0, 1.0], [np.nan, 1.0], False),
        ([], [], True),
    ],
)
def test_floats_may_differ_by_a_part_of_the_largest(
    given: list[float], wanted: list[float], fine: bool
) -> None:
    pair = np.array(given, np.float32), np.array(wanted, np.float32)
    assert (beyond_tolerance(*pair) == []) == fine


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_others_may_not_differ(dtype: str) -> None:
    x = np.array([0, 1], dtype)
    assert beyond_tolerance({"n": x}, {"n": x}) == []
    (line,) = beyond_tolerance({"n": x}, {"n": x[::-1]})
    assert line.startswith("['n']: they differ by 1.0e+00")
