"""`jhost.calibrate`: measures what this machine's devices do per second."""

from __future__ import annotations

import warnings

import jax

from jhost._calibrate.measure import Measuring
from jhost._calibration import (
    Calibration,
    conditions_here,
    keep as keep_calibration,
    today,
)
from jhost._progress import no_progress, progress as progress_bar
from jhost.lowering.cost.rates import rates_to_start_from

_ON_CPU = {"budget": 0.02, "scale": 0.02}
"""Nothing overlaps there, so that a rough idea will do."""


def calibrate(*, keep: bool = True, progress: bool = True) -> Calibration:
    """Measures what the devices of this process do per second, in one to two minutes.

    From then on `pipeline="auto"` uses these rates on such devices: matmuls at the
    clocks of steady work, memory, launches, permutes (by copies, and by puts if NCCL
    can) and collectives by size. jhost lowers all functions again.  Nothing else should
    run on the devices meanwhile.

    Args:
        keep: store the rates in the user's cache folder, for all programs that run
            later.
        progress: show a bar, or lines if tqdm is not installed, on standard error.

    Returns:
        The measured rates; `str` is a table beside the rates that jhost ships.

    Example:
        >>> import jhost
        >>> print(jhost.calibrate())  # doctest: +SKIP
        calibration of 4 x NVIDIA H200, 2026-11-23
        ...
    """
    devices = jax.local_devices()
    start = rates_to_start_from(devices[0].device_kind)
    effort = _ON_CPU if devices[0].platform == "cpu" else {}
    measuring = Measuring(devices, start, **effort)
    bar = progress_bar(measuring.steps(), unit="step") if progress else no_progress()
    try:
        measurements = measuring.run(bar)
    finally:
        bar.close()
    found = Calibration(
        conditions=conditions_here(),
        date=today().isoformat(),
        measurements=measurements,
    )
    if keep:
        _kept(found)
    return found


def _kept(calibration: Calibration) -> None:
    try:
        keep_calibration(calibration)
    except OSError as error:
        warnings.warn(
            f"jhost.calibrate: the calibration is not kept: {error}", stacklevel=3
        )
    jax.clear_caches()
