"""What a simulation knows of one statement."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jhost.lowering.ir.remarks import Prediction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One statement of one iteration, or a part of its work.

    Attributes:
        seconds: on the device; 0 where it only gives a value another name.
        host: seconds on the launching thread.
        after: the numbers of the tasks that it waits for.
        delay: as in `Link`: seconds between its operands and its start.
        gap: as in `Link`: seconds after the transfer that it queued behind.
        meet: as in `Link`: seconds more for each device, once in a program.
        transfer: whether it moves bytes between devices.
        network: whether those bytes leave the host.
        copied: whether a copy engine moves them, and no kernel.
        between: whether they move between processes.
        exclusive: whether nothing computes beside this transfer.
        unordered: whether XLA decides when this transfer starts.
        early: whether it may then start while another is under way.
        taken: how many seconds longer the work beside it takes.
        copy: "cut" takes a part out of an array, as soon as it can; "put" puts a part
            in its place, when the array is read; None is no copy.
        inside: for a control flow statement, the prediction for its bodies.
        name: the name of the communication that it is a part of.
    """

    seconds: float
    host: float
    after: frozenset[int]
    delay: float = 0.0
    gap: float = 0.0
    meet: float = 0.0
    transfer: bool = False
    network: bool = False
    copied: bool = False
    between: bool = False
    exclusive: bool = False
    unordered: bool = False
    early: bool = False
    taken: float = 0.0
    copy: Literal["cut", "put"] | None = None
    inside: Prediction | None = None
    name: str = ""
