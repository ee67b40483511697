"""A simulation of how long a Host IR program takes, by which `auto` decides.

Loops are unrolled (`tasks.py`), and every statement takes its place on a queue as XLA
would run it on a GPU (`clock.py`).  The host's launches are counted apart, because the
host runs ahead where it can.  A program takes as long as its devices or its launches,
whichever is more.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence, Set as AbstractSet
from functools import partial

from jhost.lowering.cost.clock import ends_of
from jhost.lowering.cost.leave_to_xla import left_to_xla
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.task import Task
from jhost.lowering.cost.tasks import unrolled
from jhost.lowering.ir.derived import derived_with
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Prediction


def predict(
    program: Program,
    rates: Rates,
    *,
    in_pieces: AbstractSet[str] = frozenset(),
    carried: Mapping[str, str] | None = None,
    followed: bool = False,
    early: bool = False,
) -> Prediction:
    """How long `program` takes on devices of those rates.

    Args:
        program: the program, which may be a part of a larger one.
        rates: the rates of the devices.
        in_pieces: the params and results that pass from loop to loop in the chunks in
            which they are made.
        carried: for each param that an equal program before this one makes, the name of
            the result that makes it.  The prediction is then what a second program of
            the row adds to the first.
        followed: whether other work follows.  Transfers between processes that nothing
            in the program reads are then not waited for.
        early: whether XLA has options to begin collectives early.  It has them for a
            program with a remark that says so, too.

    Returns:
        The seconds of the program, and of its parts.
    """
    left = left_to_xla(program)
    early = early or (left is not None and left.early)
    return _predicted(program, rates, in_pieces, carried or {}, followed, early)


# A derived value may serve programs with other remarks, so it reads none.
@derived_with
def _predicted(
    program: Program,
    rates: Rates,
    in_pieces: AbstractSet[str],
    carried: Mapping[str, str],
    followed: bool,
    early: bool,
) -> Prediction:
    # In a body, collectives that cannot run beside matmuls run beside nothing: XLA does
    # not move them far enough by itself.  Six layers of Llama 8B in a scan, forward and
    # backward without pipelines, took 84.3 ms on two H200s, and the sum of computations
    # and collectives is 83.9 ms.
    tasks = _tasks(program, rates, in_pieces, carried, early)
    total = _total(tasks, followed)
    if carried:
        tasks = tasks[: len(tasks) // 2]
        # What the second program of the row adds: the first may wait for its params.
        total -= _total(tasks, followed)
    host = sum(task.host for task in tasks)
    if not program.is_body:  # once in a program
        # The threads of all devices meet before the first peer copy.
        host += program.mesh.size * max((task.meet for task in tasks), default=0.0)
    parts = [task.inside or _by_itself(task) for task in tasks]
    return Prediction(
        total=max(total, host),
        compute=sum(part.compute for part in parts),
        communication=sum(part.communication for part in parts),
        host=host,
    )


@derived_with
def _tasks(
    program: Program,
    rates: Rates,
    in_pieces: AbstractSet[str],
    carried: Mapping[str, str],
    early: bool,
) -> Sequence[Task]:
    """The tasks of a program, which is timed with other work behind it and without."""
    rates = rates.by_kernels if early else rates
    inside = partial(predict, rates=rates, early=early)
    return unrolled(
        program, rates, inside, in_pieces=in_pieces, carried=carried, early=early
    )


def _tasks_by_itself(program: Program, rates: Rates) -> Sequence[Task]:
    """The tasks of a program by itself."""
    return _tasks(program, rates, frozenset(), {}, early=False)


def seconds_in_bodies(program: Program, rates: Rates) -> float:
    """How long the bodies of a program's control flow take, of all its time."""
    tasks = _tasks_by_itself(program, rates)
    return sum(task.seconds for task in tasks if task.inside is not None)


def _by_itself(task: Task) -> Prediction:
    if task.transfer:
        return Prediction(communication=task.seconds)
    return Prediction(compute=task.seconds)


# --- When it is done ---------------------------------------------------------- #


def _total(tasks: Sequence[Task], followed: bool) -> float:
    return _finish(tasks, _leaving(tasks) if followed else ())


def _leaving(tasks: Sequence[Task]) -> set[int]:
    """The transfers between processes that nothing in the program waits for.

    Their results may still be copied or renamed on the way out; these tasks leave too.
    """
    awaited: set[int] = set()
    leaving: set[int] = set()
    for number, task in reversed(list(enumerate(tasks))):
        if number in awaited:
            awaited |= task.after
        elif task.between or any(tasks[before].between for before in task.after):
            leaving.add(number)
        elif task.seconds:  # a task of 0 seconds is another name for a result
            awaited |= task.after
    return leaving


def _finish(tasks: Sequence[Task], leaving: Container[int] = ()) -> float:
    """The end of the last task that is not `leaving`."""
    ends = (end for number, end in ends_of(tasks).items() if number not in leaving)
    return max(ends, default=0.0)
