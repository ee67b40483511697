"""Programs in several processes, as `jax.distributed` runs them, on CPUs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import pytest

from jhost import distributed, errors
from jhost.runtime.compiler_options import SYMMETRIC_BUFFERS
from tests.run_in_processes import digests, hybrid_runs, pattern_runs
from tests.tables import DOCS
from tests.test_readme import blocks
from tests.xla_flags import QUICKLY

SCRIPT = Path(__file__).parent / "run_in_processes.py"
LIMIT = 240

Process: TypeAlias = "subprocess.Popen[str]"
Lines: TypeAlias = list[list[dict[str, Any]]]
"""What each process said."""

ERRORS = list(blocks(DOCS / "errors.md"))
PREAMBLE = ERRORS[0].text


pytestmark = pytest.mark.slow


@contextlib.contextmanager
def started(scenario: str, count: int, devices: int = 2) -> Generator[list[Process]]:
    """Processes of some devices each, that end at the end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": QUICKLY,
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
    }
    # -P: beside the script stands tests/jhost, which is not jhost.
    command = [sys.executable, "-P", str(SCRIPT), scenario, str(port), str(count)]
    processes = [
        subprocess.Popen(
            [*command, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def said(scenario: str, count: int, devices: int = 2, told: str = "") -> Lines:
    """What each process said; all of them ended well."""
    with started(scenario, count, devices) as processes:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(told)
            process.stdin.close()
            process.stdin = None
        ends = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, ends
    return [list(spoken(out.splitlines())) for out, _ in ends]


def spoken(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What a process says among lines that gloo prints."""
    return (json.loads(line) for line in lines if line.startswith("{"))


def by_scenario(processes: Lines) -> dict[str, Lines]:
    """What each process said in each of the scenarios that it went through."""
    found: dict[str, Lines] = {}
    for number, lines in enumerate(processes):
        now: list[dict[str, Any]] = []
        for line in lines:
            if "scenario" in line:
                each = found.setdefault(line["scenario"], [[] for _ in processes])
                now = each[number]
            else:
                now.append(line)
    return found


# A process takes longer to start than most of what it runs here: so a few go through
# many scenarios, one after another.


@pytest.fixture(scope="module")
def of_two() -> dict[str, Lines]:
    """Of two processes with two devices each."""
    scenarios = (
        "symmetric_buffers,twice,another_order,differences,page,patterns,hybrid,"
        "on_their_own"
    )
    return by_scenario(said(scenarios, 2, told=examples("ProcessMismatchError")))


def examples(error: str) -> str:
    """What stands before all examples of the page, and those of an error."""
    texts = [block.text for block in ERRORS if block.heading == error]
    if error == "ProcessTimeoutError":
        texts.reverse()  # one of the processes does not wait for the other's error
    return json.dumps([PREAMBLE, *texts])


@pytest.fixture(scope="module")
def of_four() -> dict[str, Lines]:
    """Of four processes with a device each, of which the third is killed in a loop."""
    scenarios = "briefly_alive,meetings,hybrid,another_statement,impatient,absent,loop"
    with started(scenarios, 4, devices=1) as processes:
        found = by_scenario([until_they_loop(process) for process in processes])
        found["ends"] = [ends_of_the_others(processes, 2, signal.SIGKILL)]
    return found


def until_they_loop(process: Process) -> list[dict[str, Any]]:
    """What a process says before its loop, of which it then has run three turns."""
    assert process.stdout is not None
    lines, ran = spoken(process.stdout), {"ran": True}
    before = list(itertools.takewhile(lambda line: line != ran, lines))
    assert list(itertools.islice(lines, 2)) == [ran] * 2, before
    return before


def ends_of_the_others(
    processes: Sequence[Process], victim: int, by: signal.Signals
) -> list[dict[str, Any]]:
    processes[victim].send_signal(by)
    others = [p for n, p in enumerate(processes) if n != victim]
    errs = [process.communicate(timeout=LIMIT)[1] for process in others]
    pairs = zip(others, errs, strict=True)
    return [{"code": process.returncode, "err": err} for process, err in pairs]


def merged(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: found for line in lines for name, found in line.items()}


# --- Right ------------------------------------------------------------------------ #


def test_patterns_give_the_bits_that_one_process_gives(
    of_two: dict[str, Lines],
) -> None:
    """Values, and gradients of the larger ones in an outer jit, by either pipeline.

    Of two devices of a process, one sends to the other and one to another process.
    """
    alone = {n: digests(found) for n, found in pattern_runs(jax.devices()[:4])}
    assert len(alone) == 11 + 5
    assert together(map(merged, of_two["patterns"])) == alone


def together(found: Iterable[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The parts of all processes, which agree where two have the same."""
    parts: dict[str, dict[str, str]] = {}
    for process in found:
        for name, own in process.items():
            for part, digest in own.items():
                known = parts.setdefault(name, {}).setdefault(part, digest)
                assert known == digest, (name, part)
    return parts


def test_data_and_tensor_parallelism_give_the_bits_of_one_process(
    of_two: dict[str, Lines], of_four: dict[str, Lines]
) -> None:
    """tp within a process, and over two; weights lie on all devices."""
    mesh = distributed.make_mesh({"dp": 2, "tp": 2}, devices=jax.devices()[:4])
    alone = {name: digests(result) for name, result in hybrid_runs(mesh)}
    assert len(alone) == 4
    for several in (of_two, of_four):
        assert together(map(merged, several["hybrid"])) == alone


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lines, Path]:
    """What two processes say that calibrate, and the folder they keep it in.

    They then go through the examples of the page that wait for each other.
    """
    cache = tmp_path_factory.mktemp("cache")
    told = examples("ProcessTimeoutError")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JHOST_CACHE_DIR", str(cache))
        return said("calibrates,impatient,page", 2, told=told), cache


def test_processes_calibrate_the_network_between_them(
    calibrated: tuple[Lines, Path],
) -> None:
    """And all go by what process 0 found, which its folder keeps."""
    said, folder = calibrated
    one, other = (lines[0] for lines in said)
    assert one == other
    assert 1e6 < one["bandwidth"] < 1e12
    assert 0 <= one["latency"] < 1
    assert 0 <= one["taken"] <= 1
    (kept,) = folder.rglob("calibration-*/*.json")
    conditions = json.loads(kept.read_text())["conditions"]
    assert conditions["processes"] == 2


def test_processes_meet_once_for_a_program(
    of_two: dict[str, Lines], of_four: dict[str, Lines]
) -> None:
    for number, counts in enumerate(map(merged, of_four["meetings"])):
        assert counts == {
            "explained, lowered, compiled and traced": 0,
            "called": 1,
            "compiled twice": 1,
            "called on half of the devices": 2 if number < 2 else 1,
        }
    assert of_two["on_their_own"] == [[{"met": 0}]] * 2


# --- Different programs ------------------------------------------------------------ #


def test_a_process_with_another_statement_is_named_by_all(
    of_four: dict[str, Lines],
) -> None:
    ends = of_four["another_statement"]
    assert all(lines == ends[0] for lines in ends)
    called, jitted, gradient, compiled, last = ends[0]
    usual = "processes 0, 1, 2"
    for line in (called, jitted, gradient, compiled):
        assert line["error"] == "ProcessMismatchError"
        assert f"not all run the mine of {usual}" in line["text"]
        (offender,) = re.findall(r"^  [*] (.*)$", line["text"], re.M)
        theirs, ours = offender.split(f", where {usual} have")
        assert theirs.startswith("process 3, in mine: `")
        # The gradients of the two differ in more than one statement.
        assert line is gradient or ("= tanh(" in theirs and "= sin(" in ours)
    assert last["error"] is None


@pytest.fixture
def differences(of_two: dict[str, Lines]) -> list[dict[str, Any]]:
    """What two processes say whose programs differ in one way after another."""
    ends = of_two["differences"]
    assert ends[0] == ends[1]
    return ends[0]


def test_parameters_and_options_that_differ_are_named(
    differences: list[dict[str, Any]],
) -> None:
    parameter, option, dump = differences[:3]
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in parameter[
        "text"
    ].replace("<", "").replace(">", "")
    assert "`XLA's options xla_cpu_enable_fast_math=False`" in option["text"]
    assert dump == {"error": None}


def test_what_else_makes_an_executable_is_named(
    differences: list[dict[str, Any]],
) -> None:
    donated, *closed, static, of_an_object = differences[3:]
    assert "not all run the mine of process 0" in donated["text"]
    assert "process 1, in mine: `x is donated`, where process 0 has" in donated["text"]
    for line in closed:
        assert "is closed over`" in line["text"]
    assert "`argument 1 is static: True`, where process" in static["text"]
    assert of_an_object == {"error": None}


def test_another_order_of_programs_is_an_error_in_all(
    of_two: dict[str, Lines],
) -> None:
    ends = of_two["another_order"]
    assert ends[0] == ends[1]
    assert [line["error"] for line in ends[0]] == ["ProcessMismatchError"] * 2
    assert "in block: `result: f32" in ends[0][0]["text"]


def test_who_does_not_come_is_named(of_four: dict[str, Lines]) -> None:
    *waiting, last = of_four["absent"]
    assert last == []
    for (line,) in waiting:
        assert line["error"] == "ProcessTimeoutError"
        assert "waited 2 s before the first run of block" in line["text"]
        assert "* process 3 has not come" in line["text"]
        assert line["text"].count("* process") == 1


def test_one_example_of_the_page_raises_and_the_other_runs(
    of_two: dict[str, Lines], calibrated: tuple[Lines, Path]
) -> None:
    late = by_scenario(calibrated[0])["page"]
    for ends, raised in (
        (of_two["page"], [["ProcessMismatchError"] * 2, [None, None]]),
        (late, [[None, None], ["ProcessTimeoutError", None]]),
    ):
        turns = zip(*ends, strict=True)
        assert [[line["error"] for line in turn] for turn in turns] == raised


# --- Deaths ------------------------------------------------------------------------ #


@pytest.mark.parametrize(
    ("victim", "by"),
    [
        (0, signal.SIGKILL),  # which runs the coordination service
        (1, signal.SIGSTOP),
    ],
)
def test_when_a_process_dies_in_a_loop_the_other_ends(
    victim: int, by: signal.Signals
) -> None:
    """After ten seconds without a heartbeat, though collectives wait for ever."""
    with started("briefly_alive,loop", 2) as processes:
        for process in processes:
            until_they_loop(process)
        (end,) = ends_of_the_others(processes, victim, by)
    assert died_with_another(end)


def test_when_one_of_four_dies_in_a_loop_the_others_end(
    of_four: dict[str, Lines],
) -> None:
    (ends,) = of_four["ends"]
    assert list(map(died_with_another, ends)) == [True] * 3


def died_with_another(end: dict[str, Any]) -> bool:
    texts = "another task died", "Connection closed by peer"
    return end["code"] != 0 and any(text in end["err"] for text in texts)


# --- Initializing ------------------------------------------------------------------ #


def test_initialize_is_early() -> None:
    """As the page shows."""
    wrong, right = (b.text for b in ERRORS if b.heading == "InitializeError")
    (((late,),), ((early,),)) = (
        said("page", 1, told=json.dumps(["", example])) for example in (wrong, right)
    )
    assert late["error"] == "InitializeError"
    assert "comes too late: JAX has started its backend" in late["text"]
    assert early["error"] is None


def test_initialize_is_called_once(of_two: dict[str, Lines]) -> None:
    for (line,) in of_two["twice"]:
        assert line["error"] == "InitializeError"
        assert "Call it once" in line["text"]


def test_initialize_is_too_late_once_there_are_devices() -> None:
    assert jax.devices()
    with pytest.raises(errors.InitializeError, match="before any computation"):
        distributed.initialize("localhost:1234", 2, 0)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e10])
def test_a_timeout_is_above_zero_and_ends(seconds: float) -> None:
    with pytest.raises(errors.OptionError, match=f"program_timeout_seconds={seconds}"):
        distributed.initialize(program_timeout_seconds=seconds)


@pytest.mark.parametrize("seconds", ["a", True, [1]])
def test_a_timeout_is_a_number(seconds: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="takes a number of seconds"):
        distributed.initialize(program_timeout_seconds=seconds)


def test_flags_of_the_user_stand() -> None:
    with_flags = distributed._with_flags  # pyright: ignore[reportPrivateUsage]
    (name,) = SYMMETRIC_BUFFERS
    assert with_flags("", SYMMETRIC_BUFFERS) == f"--{name}=true"
    assert with_flags("--a=1", SYMMETRIC_BUFFERS) == f"--a=1 --{name}=true"
    assert with_flags(f"--{name}=false", SYMMETRIC_BUFFERS) == f"--{name}=false"


def test_xla_takes_the_settings_of_the_process(
    of_two: dict[str, Lines],
) -> None:
    """An unknown name among them would end the process when JAX starts its backend."""
    flags = "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true"
    assert of_two["symmetric_buffers"] == [[{"flags": flags}]] * 2
