"""Which NCCL there is, and why it cannot put, as far as it is seen without a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, Mesh

from jhost.runtime import nccl
from jhost.runtime.devices import assumed, devices_of


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is remembered of other tests, nor by them."""
    yield
    nccl.nccl_version.cache_clear()
    nccl._failure.cache_clear()  # pyright: ignore[reportPrivateUsage]


class Library:
    """What `ctypes` would give of an NCCL of that version."""

    def __init__(self, number: int, failed: int = 0) -> None:
        self.number = number
        self.failed = failed

    def ncclGetVersion(self, pointer: Any) -> int:
        pointer._obj.value = self.number
        return self.failed


@pytest.mark.parametrize(
    ("library", "version"),
    [
        (Library(22809), "2.28.9"),
        (Library(23203), "2.32.3"),
        (Library(0, failed=1), ""),
        (object(), ""),
    ],
)
def test_the_library_that_is_loaded_says_its_version(
    library: object, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    nccl.nccl_version.cache_clear()
    assert nccl.nccl_version() == version


def test_without_the_library_there_is_no_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_: str) -> object:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)
    nccl.nccl_version.cache_clear()
    assert nccl.nccl_version() == ""


def test_puts_are_for_gpus_that_are_there(make_mesh: Callable[..., Mesh]) -> None:
    meshes = make_mesh((2,), ("tp",)), AbstractMesh((2,), ("tp",)), None
    reasons = {nccl.why_no_puts(mesh) for mesh in meshes}
    with assumed("NVIDIA H200"):
        reasons |= {nccl.why_no_puts(mesh) for mesh in meshes}
    assert reasons == {"puts need GPUs of this process"}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`gpus(nccl, ...)`: devices are GPUs with that NCCL, which a trial cannot tell."""
    real = devices_of

    def there(version: str, **more: Any) -> None:
        monkeypatch.setattr(
            nccl,
            "devices_of",
            lambda mesh: dataclasses.replace(real(mesh), platform="gpu", **more),
        )
        monkeypatch.setattr(nccl, "nccl_version", lambda: version)

    return there


@pytest.mark.parametrize(
    ("version", "more", "reason"),
    [
        ("2.32.3", {}, ""),
        ("2.29.0", {}, ""),
        ("3.0.0", {}, ""),
        ("2.28.9", {}, "NCCL 2.28.9 has no puts; 2.29 was the first to have them"),
        ("2.9.1", {}, "NCCL 2.9.1 has no puts; 2.29 was the first to have them"),
        ("", {}, "NCCL was not found"),
        (
            "2.32.3",
            {"processes": 2},
            "puts need the GPUs of one process, and these belong to several",
        ),
    ],
)
def test_why_there_are_none(
    version: str,
    more: dict[str, Any],
    reason: str,
    gpus: Callable[..., None],
    make_mesh: Callable[..., Mesh],
) -> None:
    gpus(version, **more)
    assert nccl.why_no_puts(make_mesh((4,), ("tp",))) == reason


def test_devices_that_are_not_here_put_nothing(
    gpus: Callable[..., None],
    make_mesh: Callable[..., Mesh],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = make_mesh((4,), ("tp",))
    gpus("2.32.3")
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[4:])
    assert nccl.why_no_puts(mesh) == "puts need GPUs of this process"


def test_one_device_puts_nothing(
    gpus: Callable[..., None], make_mesh: Callable[..., Mesh]
) -> None:
    gpus("2.32.3")
    reason = nccl.why_no_puts(make_mesh((1,), ("tp",)))
    assert reason == "there is one device, so nothing moves"


def test_a_trial_that_fails_says_how(
    gpus: Callable[..., None],
    make_mesh: Callable[..., Mesh],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus("2.32.3")
    mesh = make_mesh((4,), ("tp",))
    monkeypatch.setattr(nccl, "PUTS", {"xla_gpu_there_is_no_such_option": 0})
    assert "xla_gpu_there_is_no_such_option" in nccl.why_no_puts(mesh)


def test_a_trial_sees_what_comes(
    gpus: Callable[..., None],
    make_mesh: Callable[..., Mesh],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus("2.32.3")
    monkeypatch.setattr(nccl.lax, "ppermute", lambda x, *_: x)
    reason = nccl.why_no_puts(make_mesh((4,), ("tp",)))
    assert reason == "a put brought other values than sent"


def test_a_trial_is_apart_from_the_mesh_that_is_set(
    gpus: Callable[..., None], make_mesh: Callable[..., Mesh]
) -> None:
    gpus("2.32.3")
    with jax.set_mesh(make_mesh((2,), ("tp",))):
        assert nccl.why_no_puts(make_mesh((4,), ("tp",))) == ""
    step = jax.jit(lambda x: x + len(nccl.why_no_puts(make_mesh((8,), ("tp",)))))
    assert float(step(1.0)) == 1.0
