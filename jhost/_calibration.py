"""Calibrations: what was measured of a host's devices, kept in the user's cache folder.

A calibration holds for devices of a kind, as many as a process has, joined alike, under
the same versions of JAX and NCCL.  In a job of several processes all use process 0's,
so that all choose the same: `jhost.distributed.initialize` hands them round.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jhost import errors
from jhost._cache_folder import file_in, folder, write
from jhost._damaged import damage_refused
from jhost._json import read
from jhost._text import changes, counted, seconds_text
from jhost._version import __version__
from jhost.lowering.cost.fit import Measurements, fitted
from jhost.lowering.cost.rates import Link, Rates, rates_of, rates_to_start_from
from jhost.runtime.devices import Devices, is_assumed, links_between_gpus
from jhost.runtime.nccl import nccl_version

FORMAT = 2
"""Raised when the meaning of the fields changes; others' are refused."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions under which a calibration holds.

    `devices` is the number in one process.  `links` say how GPUs are joined, in the
    words of `nvidia-smi topo`, and `nccl` is a version: both are empty if nothing is
    known.  A calibration of one process holds in any number of processes.  A
    calibration between several `processes` holds between the same number of processes,
    if their NCCL has the same `settings`.
    """

    device_kind: str
    devices: int
    links: str
    jax: str
    nccl: str
    processes: int = 1
    settings: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The rates that `jhost.calibrate` measured.

    `str` is a table that also has the rates that jhost ships.

    Attributes:
        conditions: the devices and versions for which it holds.
        date: the day on which it was made, such as `2026-11-23`, in UTC.
        measurements: seconds of single operations, by size.
    """

    conditions: Conditions
    date: str
    measurements: Measurements

    def __post_init__(self) -> None:
        datetime.date.fromisoformat(self.date)

    @property
    def rates(self) -> Rates:
        """The rates that the cost model uses."""
        kind = self.conditions.device_kind
        found = fitted(self.measurements, rates_to_start_from(kind))
        return dataclasses.replace(found, source=f"calibrated here on {self.date}")

    def __str__(self) -> str:
        here = self.conditions
        shipped = rates_of(here.device_kind, puts=True)
        title = f"calibration of {here.devices} x {here.device_kind}, {self.date}"
        rows = [("", "measured", shipped.source if shipped else "not shipped")]
        before = _figures(shipped) if shipped else {}
        for name, text in _figures(self.rates).items():
            rows.append((name, text, before.get(name, "")))
        if not self.measurements.moved:
            rows.append(("links", "not measured, with one device", ""))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [
            f"  {name:<{widths[0]}}  {new:<{widths[1]}}  {old}".rstrip()
            for name, new, old in rows
        ]
        return "\n".join([title, *lines])

    def to_json(self) -> str:
        """The calibration as text.

        Returns:
            JSON, which `from_json` reads.
        """
        fields = {"jhost_calibration": FORMAT, **dataclasses.asdict(self)}
        return json.dumps(fields, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Reads a calibration that `to_json` wrote.

        Args:
            text: what `to_json` returned.

        Returns:
            The calibration.

        Raises:
            ValueError: the text is not a calibration, or is one of another version.
        """
        with damage_refused(), np.errstate(divide="raise", invalid="raise"):
            fields = json.loads(text)
            known = isinstance(fields, dict) and fields.pop("jhost_calibration", 0)
            if known != FORMAT:
                raise ValueError(f"it is no calibration that jhost {__version__} reads")
            found = read(cls, fields)
            _check(found.rates)
            return found


def _check(rates: Rates) -> None:
    """Refuses rates that no devices have, which the cost model could not reckon with.

    Raises:
        ValueError: they are such.
    """
    numbers = jax.tree.leaves(dataclasses.asdict(rates))
    figures = [n for n in numbers if isinstance(n, int | float)]
    every = (rates.permute, rates.collective, rates.put, rates.between)
    links = [link for link in every if link]
    per_second = [rates.matmul, rates.memory, *(link.bandwidth for link in links)]
    if not all(0 <= n < math.inf for n in figures) or not all(per_second):
        raise ValueError("its measurements are those of no devices")


def _figures(rates: Rates) -> dict[str, str]:
    found = {
        "matmul, bfloat16": f"{rates.matmul / 1e12:.3g} TFLOP/s",
        "memory": f"{rates.memory / 1e12:.3g} TB/s",
        "launch": seconds_text(rates.launch),
        "launch, on the host": seconds_text(rates.host),
    }
    links = {"permute": rates.permute, "collective": rates.collective}
    links |= {"put": rates.put} if rates.put else {}
    links |= {"between processes": rates.between} if rates.between else {}
    for name, link in links.items():
        found |= {f"{name}, {what}": text for what, text in _of_link(link).items()}
    return found


def _of_link(link: Link) -> dict[str, str]:
    between_two = link.between_two or link.bandwidth
    beside = {"beside matmuls": "yes" if link.beside_compute else "no"}
    if link.network:
        beside = {"taken from matmuls beside": f"{link.taken:.0%} of its time"}
    return {
        "bandwidth": f"{link.bandwidth / 1e9:.3g} GB/s",
        "between two": f"{between_two / 1e9:.3g} GB/s",
        "at nothing": seconds_text(link.delay + link.latency),
        "on the host": seconds_text(link.host),
        **beside,
    }


# --- Which rates hold ------------------------------------------------------------ #


def rates_here(devices: Devices, puts: bool = False) -> Rates | None:
    """The rates that hold for some devices: calibrated, else shipped, if there are any.

    They include puts only where `puts` can be had.  Devices that are not this machine's
    have the shipped rates.
    """
    if calibration := calibration_here(devices):
        rates = calibration.rates
        put = rates.put if puts else None
        return dataclasses.replace(rates, reach=devices.reach, put=put)
    return rates_of(devices.kind, devices.reach, puts)


def calibration_here(devices: Devices) -> Calibration | None:
    """The calibration that holds for some devices, if there is one."""
    if is_assumed() or not (calibrations := _of_kind(devices.kind)):
        return None
    holding = [c for c in calibrations if not _changed(c.conditions)]
    # One that was measured between as many processes knows more.
    return max(holding, key=lambda c: c.conditions.processes, default=None)


def _changed(conditions: Conditions) -> list[str]:
    """What is different here, where that matters."""
    now = conditions_here()
    if conditions.processes == 1:
        now = dataclasses.replace(now, processes=1, settings="")
    return changes(conditions, now)


def outdated(devices: Devices) -> Iterator[str]:
    """For each calibration of such devices that does not hold here, why not."""
    for calibration in _of_kind(devices.kind):
        if changed := _changed(calibration.conditions):
            yield f"that of {calibration.date}: {', '.join(changed)}"


def age_text(date: str) -> str:
    """How long ago a date is."""
    days = (today() - datetime.date.fromisoformat(date)).days
    return f"{counted(days, 'day')} old"


def today() -> datetime.date:
    """The date of a calibration that is made now."""
    return datetime.datetime.now(datetime.UTC).date()


@functools.cache
def conditions_here() -> Conditions:
    """What a calibration of this process's devices holds for."""
    local, several = jax.local_devices(), jax.process_count() > 1
    return Conditions(
        device_kind=local[0].device_kind,
        devices=len(local),
        links=links_between_gpus() if local[0].platform == "gpu" else "",
        jax=jax.__version__,
        nccl=nccl_version() if local[0].platform == "gpu" else "",
        processes=jax.process_count(),
        settings=_nccl_settings() if several else "",
    )


def _nccl_settings() -> str:
    """Which ways the user closed to NCCL, or chose for it."""
    return " ".join(f"{n}={os.environ[n]}" for n in _WAYS if n in os.environ)


_WAYS = (
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
)
"""Settings of NCCL that are the same in all processes of a job."""


# --- Files ----------------------------------------------------------------------- #

_shared: Sequence[str] | None = None
"""The texts that process 0 gave this one of several processes."""


def keep(calibration: Calibration) -> None:
    """Puts it into the folder, in place of one that holds for the same.

    Raises:
        OSError: the folder cannot be written.
    """
    write(file_in(_files(), calibration.conditions), calibration.to_json())


def kept_texts() -> list[str]:
    """Each file in the folder."""
    found: list[str] = []
    for path in sorted(_files().glob("*.json")):
        try:
            found.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            _warn(f"{path} is ignored: {error}")
    return found


def share(texts: Sequence[str]) -> None:
    """From now on these are all the calibrations that there are."""
    global _shared
    _shared = tuple(texts)


def add_to_shared(text: str) -> None:
    """One more that all processes have, if process 0 gave them any."""
    if _shared is not None:
        share([text, *_shared])


def _of_kind(kind: str) -> list[Calibration]:
    """Calibrations of that kind of device."""
    if _shared is None and jax.process_count() > 1:
        return []  # another process may have others, and would choose differently
    texts = kept_texts() if _shared is None else _shared
    return [c for c in _parsed(tuple(texts)) if c.conditions.device_kind == kind]


@functools.lru_cache(maxsize=8)
def _parsed(texts: tuple[str, ...]) -> list[Calibration]:
    found: list[Calibration] = []
    for text in texts:
        try:
            found.append(Calibration.from_json(text))
        except ValueError as error:
            _warn(f"a file in {_files()} is ignored: {errors.first_line(error)}")
    return found


def _files() -> Path:
    return folder() / f"calibration-{FORMAT}"


def _warn(text: str) -> None:
    warnings.warn(f"jhost.calibrate: {text}", stacklevel=2)
