"""What jhost reads may hold anything: it says so, or reads it, and never stumbles."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from jhost import Calibration, Tuning, _calibration, _calibration_cache, errors
from jhost._tuning import FORMAT, Environment
from jhost._tuning_cache import CacheKey, load
from jhost.runtime.profile.schedule import parse_schedule

parsed: Any = vars(_calibration_cache)["_parsed"]

DEEP = b"[" * 100_000
TEXTS = [b"", b"null", b"NaN", b"1e999", b"\xff\xfe", b"\x00", DEEP, b"9" * 5000]

TUNING: dict[str, Any] = {
    "jhost_tuning": FORMAT,
    "function": "f",
    "environment": {
        **dict.fromkeys(("jhost", "jax", "jaxlib", "platform", "device_kind"), ""),
        **{"devices": 1, "processes": 1, "mesh": ""},
    },
    "programs": [
        {
            **{"name": "f", "fingerprint": "", "arguments": ["x"]},
            "streams": [
                {
                    **{"value": "", "where": "", "axis": 0, "marks": [0]},
                    "candidates": [
                        {
                            **{"text": "", "pipeline": "p2p", "chunks": 2},
                            **{"streams": None, "minimum": 1.0, "median": 1},
                            "predicted": None,
                        }
                    ],
                    "left_out": [],
                }
            ],
        }
    ],
}
MEASURED = Path(__file__).parents[1] / "targets" / "calibration-2x-h100.json"
CALIBRATION: dict[str, Any] = json.loads(MEASURED.read_text())

MODULE = """HloModule jit_f, is_scheduled=true, num_partitions=4

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %done = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (x: f32[8]) -> f32[32] {
  %x = f32[8]{0} parameter(0)
  %again = f32[8]{0} call(%x), to_apply=%body
  ROOT %all = f32[32]{0} all-gather(%again), replica_groups=[1,4]<=[4], dimensions={0}
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("JHOST_CACHE_DIR", str(tmp_path))
    return tmp_path


# --- Texts -------------------------------------------------------------------------- #


def places(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value in a document stands."""
    yield place
    children: Any = ()
    if isinstance(document, dict):
        children = document.items()
    elif isinstance(document, list):
        children = enumerate(document)
    for key, child in children:
        yield from places(child, (*place, key))


def with_value(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copied = document.copy()
    copied[place[0]] = with_value(document[place[0]], place[1:], value)
    return copied


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    # Far from what was measured, and what no float holds.
    | st.sampled_from([10**400, -1, 0, 0.0, 5e-324, 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@st.composite
def documents(draw: Callable[..., Any], document: Any) -> bytes:
    """A document with another value somewhere, or with bytes that are no JSON."""
    place = draw(st.sampled_from(list(places(document))))
    return cut(draw, json.dumps(with_value(document, place, draw(ANYTHING))).encode())


def cut(draw: Callable[..., Any], text: bytes) -> bytes:
    """The text, half of the time with other bytes in the place of some."""
    if draw(st.booleans()):
        return text
    start = draw(st.integers(0, len(text)))
    return text[:start] + draw(st.binary(max_size=4)) + text[start + draw(SHIFT) :]


SHIFT = st.integers(0, 30)


@st.composite
def modules(draw: Callable[..., Any]) -> str:
    """A module's text, with other bytes in some places."""
    text = MODULE.encode()
    for _ in range(draw(st.integers(0, 3))):
        text = cut(draw, text)
    return text.decode(errors="replace")


# --- Readers ------------------------------------------------------------------------ #

of_files = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@of_files
@given(documents(TUNING) | st.binary())
@example(json.dumps(TUNING).encode())
def test_a_kept_tuning_is_read_or_ignored_with_a_warning(
    cache: Path, text: bytes
) -> None:
    key = CacheKey(environment=Environment(**TUNING["environment"]), fingerprints=("",))
    key.path().parent.mkdir(parents=True, exist_ok=True)
    key.path().write_bytes(text)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tuning = load(key)
    assert tuning is None or str(tuning)
    assert [str(each.message).split(": ")[0] for each in said] in ([], ["jhost.tune"])
    assert (tuning is None) == bool(said)


@of_files
@given(documents(CALIBRATION) | st.binary())
@example(json.dumps(CALIBRATION).encode())
def test_a_kept_calibration_is_read_or_ignored_with_a_warning(
    cache: Path, text: bytes
) -> None:
    folder = cache / f"calibration-{_calibration.FORMAT}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "one.json").write_bytes(text)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = parsed(tuple(_calibration_cache.kept_texts()))
    assert all(each.rates.memory > 0 and str(each) for each in found)
    kinds = [str(each.message).split(": ")[0] for each in said]
    assert set(kinds) <= {"jhost.calibrate"}


@given(modules() | st.text())
@example(MODULE)
def test_a_schedule_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(errors.ScheduleError):
        assert str(parse_schedule(text))


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:8]))
def test_what_is_nothing_is_refused(text: bytes, cache: Path) -> None:
    decoded = text.decode(errors="replace")
    with pytest.raises(errors.TuningError):
        Tuning.from_json(decoded)
    with pytest.raises(ValueError):  # noqa: PT011  # whatever it says
        Calibration.from_json(decoded)
    with pytest.raises(errors.ScheduleError):
        parse_schedule(decoded)


def test_a_folder_in_a_file_s_place_is_ignored_with_a_warning(cache: Path) -> None:
    key = CacheKey(environment=Environment(**TUNING["environment"]), fingerprints=("",))
    key.path().mkdir(parents=True)
    with pytest.warns(UserWarning, match="is ignored"):
        assert load(key) is None
    (cache / f"calibration-{_calibration.FORMAT}" / "one.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match="is ignored"):
        assert _calibration_cache.kept_texts() == []


def test_examples_are_what_is_read(cache: Path) -> None:
    assert str(Tuning.from_json(json.dumps(TUNING)))
    assert Calibration.from_json(json.dumps(CALIBRATION)).rates.memory
    assert len(parse_schedule(MODULE).communications) == 2
