"""Which rates hold here: calibrated under the same conditions, or else shipped."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
from collections.abc import Iterator

import jax

from jhost._calibration import Calibration, Conditions
from jhost._calibration_cache import of_kind
from jhost._text import changes, counted
from jhost.lowering.cost.rates import Rates, rates_of
from jhost.runtime.devices import Devices, is_assumed, links_between_gpus
from jhost.runtime.nccl import nccl_version


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
    if is_assumed() or not (calibrations := of_kind(devices.kind)):
        return None
    holding = [c for c in calibrations if not _changed(c.conditions)]
    # One that was measured between as many processes knows more.
    return max(holding, key=lambda c: c.conditions.processes, default=None)


def _changed(conditions: Conditions) -> list[str]:
    """What is different here, where that matters."""
    now = conditions_here()
    if conditions.processes == 1:
        # What happens inside a process does not depend on how many others there are.
        now = dataclasses.replace(now, processes=1, settings="")
    return changes(conditions, now)


def outdated(devices: Devices) -> Iterator[str]:
    """Why a calibration of such devices does not hold here, for each that does not."""
    for calibration in of_kind(devices.kind):
        if changed := _changed(calibration.conditions):
            yield f"that of {calibration.date}: {', '.join(changed)}"


def age_text(date: str) -> str:
    """How long ago a date is."""
    days = (today() - datetime.date.fromisoformat(date)).days
    return f"{counted(days, 'day')} old"


def today() -> datetime.date:
    """The date of a calibration that is made now."""
    return datetime.datetime.now(datetime.UTC).date()


# Cached, because `nvidia-smi` is a process of its own, and the answer stays.
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
