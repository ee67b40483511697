"""`jhost.calibrate`: measures what this machine's devices do per second."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import jax

from jhost._calibrate.between import MeasuringBetween
from jhost._calibrate.measure import Measuring
from jhost._calibration import Calibration
from jhost._calibration_cache import add_to_shared, keep as keep_calibration
from jhost._calibration_holds import conditions_here, today
from jhost._jax import from_process_0, process_number
from jhost._progress import no_progress, progress as progress_bar
from jhost.lowering.cost.fit import Measurements
from jhost.lowering.cost.rates import rates_to_start_from

_ON_CPU = {"budget": 0.02, "scale": 0.02}
"""Nothing overlaps there, so that a rough idea will do."""


def calibrate(*, keep: bool = True, progress: bool = True) -> Calibration:
    """Measures how fast the devices of this process are, in one to two minutes.

    It measures matmuls at the clocks of steady work, memory, launches, permutes (by
    copies, and by puts if NCCL can put) and collectives, by size.  From then on
    `pipeline="auto"` uses these rates on such devices, and jhost lowers all functions
    again.  Nothing else should run on the devices meanwhile.

    In a job of several processes (`jhost.distributed.initialize`) all of them call it.
    It then also measures the network: collectives between the processes, and how much
    longer matmuls take beside a collective.  All processes get the rates that process 0
    measured.  The folder of process 0 keeps the rates for jobs with the same number of
    processes.

    Args:
        keep: store the rates in the user's cache folder, for all programs that run
            later.
        progress: show a bar, or lines if tqdm is not installed, on standard error.

    Returns:
        The measured rates.  `str` is a table with the rates that jhost ships beside
        them.

    Example:
        >>> import jhost
        >>> print(jhost.calibrate())  # doctest: +SKIP
        calibration of 4 x NVIDIA H200, 2026-11-23
        ...
    """
    found = Calibration(
        conditions=conditions_here(),
        date=today().isoformat(),
        measurements=_measured(progress),
    )
    if jax.process_count() > 1:
        # Processes that choose by other rates would run other programs.
        found = _of_process_0(found)
    if keep:
        _kept(found)
    return found


def _measured(progress: bool) -> Measurements:
    devices = jax.local_devices()
    start = rates_to_start_from(devices[0].device_kind)
    effort = _ON_CPU if devices[0].platform == "cpu" else {}
    here = Measuring(devices, start, **effort)
    between = MeasuringBetween(start, **effort) if jax.process_count() > 1 else None
    steps = here.steps() + (between.steps() if between else 0)
    shown = progress and process_number() == 0
    bar = progress_bar(steps, unit="step") if shown else no_progress()
    try:
        found = here.run(bar)
        if between is None:
            return found
        return dataclasses.replace(found, between=between.measure(bar))
    finally:
        bar.close()


_calls = itertools.count()
"""How often the processes have called it, which is as often in each."""


def _of_process_0(found: Calibration) -> Calibration:
    """What process 0 found: all have to choose alike."""
    text = from_process_0(f"jhost/calibrated/{next(_calls)}", found.to_json)
    return Calibration.from_json(text)


def _kept(calibration: Calibration) -> None:
    # Shared first: this job uses it, even if no folder can be written.
    add_to_shared(calibration.to_json())
    try:
        if process_number() == 0:
            keep_calibration(calibration)
    except OSError as error:
        warnings.warn(
            f"jhost.calibrate: the calibration is not kept: {error}", stacklevel=3
        )
    # Functions that were lowered before went by other rates.
    jax.clear_caches()
