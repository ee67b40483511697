"""Calibrations: measurements of a host's devices, kept in the user's cache folder.

A calibration holds for devices of a kind, as many as a process has, joined alike, under
the same versions of JAX and NCCL.  In a job of several processes all use process 0's,
so that all choose the same: `jhost.distributed.initialize` hands them round.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math

import jax
import numpy as np

from jhost._damaged import damage_refused
from jhost._json import read
from jhost._text import seconds_text
from jhost._version import __version__
from jhost.lowering.cost.fit import Measurements, fitted
from jhost.lowering.cost.rates import Link, Rates, rates_of, rates_to_start_from

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
        # A `ValueError` where it is none, as for other fields of a damaged file.
        datetime.date.fromisoformat(self.date)

    @property
    def rates(self) -> Rates:
        """The rates that the cost model uses."""
        kind = self.conditions.device_kind
        found = fitted(self.measurements, rates_to_start_from(kind))
        return dataclasses.replace(found, source=f"calibrated here on {self.date}")

    def __str__(self) -> str:
        here = self.conditions
        # With puts: whatever was measured has its shipped number beside it.
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
        # NumPy would only warn where a damaged measurement divides by 0.
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
        ValueError: a rate is negative or not finite, or something takes for ever.
    """
    numbers = jax.tree.leaves(dataclasses.asdict(rates))
    figures = [n for n in numbers if isinstance(n, int | float)]
    every = (rates.permute, rates.collective, rates.put, rates.between)
    links = [link for link in every if link]
    # The simulation divides by these.
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
    if link.network or link.taken:
        beside = {"taken from matmuls beside": f"{link.taken:.0%} of its time"}
    return {
        "bandwidth": f"{link.bandwidth / 1e9:.3g} GB/s",
        "between two": f"{between_two / 1e9:.3g} GB/s",
        "at nothing": seconds_text(link.delay + link.latency),
        "on the host": seconds_text(link.host),
        **beside,
    }
