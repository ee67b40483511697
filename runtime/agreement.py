"""Do all processes of a mesh run the same program?  They compare before they run it.

If processes run different programs, nothing fails: collectives wait for each other
forever.  So each process publishes a digest of the program that it is about to run, by
the coordination service of `jax.distributed`.  If digests differ, the processes publish
the texts too, and every process raises.

Meetings are counted for each set of processes.  A digest that a set has agreed on is
not compared again, because JAX's caches may differ by process: one process may compile
again what another still has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TypeAlias

import jax
from jax.sharding import Mesh

from jhost import errors
from jhost._jax import Coordination, coordination
from jhost.runtime.mesh import AnyMesh

Processes: TypeAlias = tuple[int, ...]

DEFAULT_TIMEOUT = 300.0


@dataclasses.dataclass(slots=True)
class _Meetings:
    """What this process has compared since the coordination service started."""

    client: Coordination | None = None
    counts: dict[Processes, int] = dataclasses.field(default_factory=dict)
    agreed: set[tuple[Processes, str]] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, slots=True)
class _Announced:
    """The program that a process is about to run, as it publishes it."""

    digest: str
    name: str


_lock = threading.Lock()
_meetings = _Meetings()
_timeout: float | None = DEFAULT_TIMEOUT


def set_timeout(seconds: float | None) -> None:
    """Set how long a process waits for the others; None turns comparing off."""
    global _timeout
    _timeout = seconds


def processes_of(mesh: AnyMesh | None) -> Processes:
    """The processes that own devices of `mesh`, in order."""
    if not isinstance(mesh, Mesh):
        return ()
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def compare_programs(
    name: str, mesh: AnyMesh | None, describe: Callable[[], Sequence[str]]
) -> None:
    """Waits until all processes of `mesh` are here, and sees that they run the same.

    Args:
        name: the program's name, for messages.
        mesh: the mesh it runs on; with one process nothing happens.
        describe: gives the lines of text that must be equal, a line for each statement.

    Raises:
        ProcessMismatchError: the processes run different programs.
        ProcessTimeoutError: some process has not come within the time that
            `jhost.distributed.initialize` was given.
    """
    processes, client = processes_of(mesh), coordination()
    if len(processes) < 2 or client is None or _timeout is None:
        return
    if jax.process_index() in processes:
        lines = describe()
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        # One thread at a time, or two threads would take one number for two meetings.
        with _lock:
            _meet(client, processes, _Announced(digest, name), lines, _timeout)


def _meet(
    client: Coordination,
    processes: Processes,
    program: _Announced,
    lines: Sequence[str],
    timeout: float,
) -> None:
    global _meetings
    if _meetings.client is not client:
        _meetings = _Meetings(client)
    if (processes, program.digest) in _meetings.agreed:
        return
    number = _meetings.counts.get(processes, 0)
    _meetings.counts[processes] = number + 1
    meeting = _Meeting(client, processes, number, timeout)
    meeting.compare(program, lines)
    _meetings.agreed.add((processes, program.digest))


@dataclasses.dataclass(frozen=True, slots=True)
class _Meeting:
    """One exchange between some processes."""

    client: Coordination
    processes: Processes
    number: int
    timeout: float

    def compare(self, program: _Announced, lines: Sequence[str]) -> None:
        mine = f"{self._key('programs')}{jax.process_index()}"
        told = f"{program.digest} {program.name}"
        self.client.key_value_set(mine, told, allow_overwrite=True)
        late = self._wait("programs")
        # If some are late, those that are here may differ already, which says more.
        found = self._programs()
        if len({other.digest for other in found.values()}) > 1:
            raise _mismatch(found, {} if late else self._exchange(lines)) from late
        if late:
            raise _timed_out(self, program.name, found) from late

    def _exchange(self, lines: Sequence[str]) -> Mapping[int, list[str]]:
        """The lines of every process.

        Each of them has seen that digests differ, so each of them publishes its lines.
        """
        mine = f"{self._key('lines')}{jax.process_index()}"
        self.client.key_value_set_bytes(mine, packed(lines), allow_overwrite=True)
        self._wait("lines")
        told = self.client.key_value_dir_get_bytes(self._key("lines"))
        return {_process(k): zlib.decompress(v).decode().split("\n") for k, v in told}

    def _programs(self) -> dict[int, _Announced]:
        told = dict(self.client.key_value_dir_get(self._key("programs")))
        programs = {_process(k): _Announced(*v.split(" ", 1)) for k, v in told.items()}
        return dict(sorted(programs.items()))

    def _wait(self, what: str) -> Exception | None:
        """Waits for the others; gives the error if they do not come."""
        milliseconds = int(self.timeout * 1000)
        try:
            self.client.wait_at_barrier(
                self._key(what), milliseconds, list(self.processes)
            )
        except jax.errors.JaxRuntimeError as error:
            return error
        return None

    def _key(self, what: str) -> str:
        # A digest, because a list of thousands of processes is no name.
        group = hashlib.sha256(repr(self.processes).encode()).hexdigest()[:16]
        return f"jhost/{group}/{self.number}/{what}/"


def packed(lines: Sequence[str]) -> bytes:
    """The lines of a program, as a process publishes them."""
    return zlib.compress("\n".join(lines).encode())


def _process(key: str) -> int:
    return int(key.rsplit("/", 1)[1])


# --- Messages ---------------------------------------------------------------------- #


def _timed_out(
    meeting: _Meeting, name: str, found: Mapping[int, _Announced]
) -> errors.ProcessTimeoutError:
    missing = [process for process in meeting.processes if process not in found]
    offenders = [f"process {process} has not come" for process in missing]
    return errors.ProcessTimeoutError(
        f"Process {jax.process_index()} waited {meeting.timeout:g} s before the first "
        f"run of {name} for the other processes of its mesh. All of them have to run "
        "the same programs in the same order; one that is slow to come here needs a "
        "larger jhost.distributed.initialize(program_timeout_seconds=...).",
        offenders or ["all came, but too late for some"],
    )


def _mismatch(
    found: Mapping[int, _Announced], lines: Mapping[int, Sequence[str]]
) -> errors.ProcessMismatchError:
    """The error, which compares others with the most common program, or the first."""
    groups: dict[str, list[int]] = {}
    for process, program in found.items():
        groups.setdefault(program.digest, []).append(process)
    usual, *others = sorted(groups.values(), key=lambda group: (-len(group), group))
    return errors.ProcessMismatchError(
        f"The processes of a mesh have to run the same program, but not all run the "
        f"{found[usual[0]].name} of {_processes_text(usual)}. Arguments, chunks=, "
        f"configuration, versions and the order of calls make the program, so they "
        f"must not depend on the process.",
        [text for other in others for text in _differences(usual, other, found, lines)],
    )


def _differences(
    usual: Sequence[int],
    other: Sequence[int],
    found: Mapping[int, _Announced],
    lines: Mapping[int, Sequence[str]],
) -> Iterator[str]:
    """How the program of the processes `other` differs from the program of `usual`."""
    who = f"{_processes_text(other)}, in {found[other[0]].name}"
    ours, theirs = lines.get(usual[0]), lines.get(other[0])
    if ours is None or theirs is None:
        yield f"{who}: another program"
        return
    has = "have" if len(usual) > 1 else "has"
    pairs = zip_longest(ours, theirs, fillvalue="no more")
    our, their = next((a, b) for a, b in pairs if a != b)
    letters = enumerate(zip_longest(our, their))
    start = next(number for number, (a, b) in letters if a != b)
    yield (
        f"{who}: `{_excerpt(their, start)}`, where {_processes_text(usual)} {has} "
        f"`{_excerpt(our, start)}`"
    )


def _excerpt(line: str, difference: int, width: int = 200) -> str:
    """A line; if it is long (an inner program), the part around its difference."""
    if len(line) <= width:
        return line
    start = max(0, difference - width // 2)
    before, after = "..." if start else "", "..." if start + width < len(line) else ""
    return f"{before}{line[start : start + width]}{after}"


def _processes_text(processes: Sequence[int]) -> str:
    shown = ", ".join(map(str, processes[:8])) + (", ..." if len(processes) > 8 else "")
    return f"process{'es' if len(processes) > 1 else ''} {shown}"
