"""What a process says of the others; `tests/test_processes.py` has real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from jhost import errors
from jhost.runtime import agreement


class Service:
    """A coordination service that knows this process, 0, and what others told it."""

    def __init__(self, *told: tuple[int, str, list[str]], fails: bool = False) -> None:
        self.told, self.fails = told, fails
        self.kept: dict[str, Any] = {}

    def key_value_set(
        self, key: str, value: str, allow_overwrite: bool = False
    ) -> None:
        self.kept[key] = value
        folder = key.removesuffix("0")
        for process, digest, _ in self.told:
            self.kept[f"{folder}{process}"] = digest or value

    def key_value_set_bytes(
        self, key: str, value: bytes, allow_overwrite: bool = False
    ) -> None:
        self.kept[key] = value
        folder = key.removesuffix("0")
        for process, _, lines in self.told:
            self.kept[f"{folder}{process}"] = agreement.packed(lines)

    def key_value_dir_get(self, key: str) -> list[tuple[str, Any]]:
        return [item for item in self.kept.items() if item[0].startswith(key)]

    key_value_dir_get_bytes = key_value_dir_get

    def wait_at_barrier(self, barrier_id: str, ms: int, process_ids: list[int]) -> None:
        if self.fails:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out.")


@pytest.fixture
def compare(
    monkeypatch: pytest.MonkeyPatch, make_mesh: Callable[..., Mesh]
) -> Callable[..., None]:
    """Compares a program of these lines with those that a service was told."""

    def compare(service: Service, lines: list[str], processes: int = 2) -> None:
        among = tuple(range(processes))
        monkeypatch.setattr(agreement, "coordination", lambda: service)
        monkeypatch.setattr(agreement, "processes_of", lambda mesh: among)
        mesh = make_mesh((4,), ("tp",))
        agreement.compare_programs("f", mesh, lambda: lines)

    return compare


def test_those_who_differ_from_most_are_named(compare: Callable[..., None]) -> None:
    others = [(1, "x g", ["a", "c"]), (2, "", []), (3, "y h", ["a", "b", "d"])]
    with pytest.raises(errors.ProcessMismatchError) as raised:
        compare(Service(*others), ["a", "b"], processes=4)
    lines = str(raised.value).splitlines()
    assert "not all run the f of processes 0, 2." in lines[0]
    assert lines[1:3] == [
        "  * process 1, in g: `c`, where processes 0, 2 have `b`",
        "  * process 3, in h: `d`, where processes 0, 2 have `no more`",
    ]


def test_of_long_lines_the_difference_is_shown(compare: Callable[..., None]) -> None:
    long = "=" * 1000
    with pytest.raises(errors.ProcessMismatchError) as raised:
        compare(Service((1, "x f", [f"{long}b{long}"])), [f"{long}a{long}"])
    line = str(raised.value).splitlines()[1]
    assert "=b=" in line
    assert "=a=" in line
    assert len(line) < 500


def test_who_comes_too_late_is_told(compare: Callable[..., None]) -> None:
    with pytest.raises(errors.ProcessTimeoutError, match="too late for some"):
        compare(Service((1, "", []), fails=True), ["a"])


def test_what_has_been_agreed_on_is_not_compared_again(
    compare: Callable[..., None],
) -> None:
    service = Service((1, "", []))
    compare(service, ["a"])
    kept = dict(service.kept)
    compare(service, ["a"])
    assert service.kept == kept
    compare(service, ["b"])
    assert len(service.kept) == 2 * len(kept)


def test_without_a_timeout_nothing_is_compared(
    compare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_timeout", None)
    service = Service((1, "x g", ["b"]))
    compare(service, ["a"])
    assert not service.kept
