"""Several processes of one machine, each with its share of the devices.

The command that was called starts itself again for each, and waits for all. When one
fails, or time is up, the others are ended: they may wait in a collective for ever.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import jax

import jhost
from jhost._progress import Progress, no_progress, progress

_NUMBER, _COUNT, _PORT, _SHARE = (
    f"JHOST_BENCHMARK_{name}" for name in ("PROCESS", "PROCESSES", "PORT", "DEVICES")
)

OUT_OF_TIME = 124
"""The exit status, as that of `timeout`."""


def join_or_start(
    module: str, argv: Sequence[str] | None, processes: int, devices: int
) -> None:
    """Becomes one of the processes, or starts all of them and ends as they do.

    With one process it does nothing.  Called before anything asks JAX for devices.

    Args:
        module: what was called, as in `python -m module`.
        argv: its arguments; None for those of this process.
        processes: how many are wanted.
        devices: how many they share.

    Raises:
        ValueError: the devices cannot be shared equally.
    """
    if not join() and processes > 1:
        given = sys.argv[1:] if argv is None else argv
        sys.exit(start(module, given, processes, devices))


def progress_of_all(total: int) -> Progress:
    """A bar of so many cases, which process 0 shows for all."""
    return no_progress() if jax.process_index() else progress(total)


def start(
    module: str,
    argv: Sequence[str],
    processes: int,
    devices: int,
    variables: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> int:
    """Runs `python -m module` in so many processes, which share so many devices.

    Args:
        module: what they run, as in `python -m module`.
        argv: its arguments.
        processes: how many there are.
        devices: how many they share.
        variables: more for their environment.
        seconds: when to end them; None for never.

    Returns:
        The exit status: of the first process that failed, 124 if time was up, or 0.

    Raises:
        ValueError: the devices cannot be shared equally.
    """
    if devices % processes:
        raise ValueError(
            f"--processes: {devices} devices cannot be shared equally by {processes}"
        )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    share = devices // processes
    common = {
        _COUNT: processes,
        _PORT: port,
        _SHARE: share,
        "JAX_NUM_CPU_DEVICES": share,
    }
    fixed = {name: str(value) for name, value in common.items()}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            env=os.environ | (variables or {}) | fixed | {_NUMBER: str(number)},
        )
        for number in range(processes)
    ]
    try:
        return _first_failure(running, seconds)
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL)  # of one that has ended, nothing
            process.wait()


def _first_failure(
    running: Sequence[subprocess.Popen[bytes]], seconds: float | None
) -> int:
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        statuses = [process.poll() for process in running]
        if failed := [status for status in statuses if status]:
            return failed[0]
        if None not in statuses:
            return 0
        if deadline is not None and time.monotonic() > deadline:
            print(f"still running after {seconds:.0f} s, so ended", file=sys.stderr)
            return OUT_OF_TIME
        time.sleep(0.2)


def join() -> bool:
    """Makes this one of the processes that `start` has started, if it is."""
    if _NUMBER not in os.environ:
        return False
    number, count, port, share = (
        int(os.environ[name]) for name in (_NUMBER, _COUNT, _PORT, _SHARE)
    )
    own = list(range(number * share, (number + 1) * share))
    jhost.distributed.initialize(f"localhost:{port}", count, number, own)
    return True
