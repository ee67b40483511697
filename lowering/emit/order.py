"""Order between the steps of a program, as its text has it: a stream's chain of tokens.

XLA only keeps readers of a value behind what makes it.  So the values of one step and
the inputs of the next go through one `lax.optimization_barrier`.  The barriers also
keep XLA from merging the chunks' matmuls and collectives back into one, and from making
transfers synchronous.  Without them a chunked gather and matmul took 4 to 25 % longer
than one of each (four H200s, JAX 0.11.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import lax

from jhost.lowering.emit.barriers import EmittedBarriers, TiedValues, distinct
from jhost.lowering.ir.machine import Machine, StreamKey


@dataclasses.dataclass(frozen=True, slots=True)
class IssuedTransfer:
    """What a communication brings, and the tokens of its stream when it was issued."""

    results: TiedValues
    before: TiedValues


class Order:
    """What each stream of the `machine` last did, and the last computation of all.

    `depth` counts the loops around.  Outside of loops, on the stream that the program
    began on, nothing is ordered, so that XLA may fuse there.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.barriers = EmittedBarriers()
        self.chains: dict[StreamKey, TiedValues] = {}
        # XLA:GPU has one compute queue: steps on other streams come in turn as well.
        self.last_compute: TiedValues = ()
        # The last work outside of loops, where no stream orders it.
        self.last_work: TiedValues = ()
        # What a stream last waited for of another: the work before its next wait.
        self.met: dict[StreamKey, TiedValues] = {}
        self.in_flight: dict[str, IssuedTransfer] = {}
        # By identity of a value that is read outside of loops: what it is read behind.
        self.apart: dict[int, tuple[Any, TiedValues]] = {}
        self.depth = 0

    @property
    def active(self) -> bool:
        """Whether what comes now has a place in an order."""
        return self.depth > 0 or not self.machine.on_default_stream

    @property
    def chain(self) -> TiedValues:
        """The tokens of the current stream."""
        return self.chains.get(self.machine.current, ())

    def join(self, values: TiedValues) -> None:
        """The current stream goes on when the values are there."""
        if self.active:
            self.chains[self.machine.current] = distinct((*self.chain, *values))

    def tie(self, values: Sequence[Any], *deps: Any) -> list[Any]:
        """The values, once the current stream and `deps` get there."""
        if not self.active:
            return list(values)
        return self.barriers.behind(values, (*self.chain, *deps))

    # --- Computations --------------------------------------------------------- #

    def before_compute(self, values: Sequence[Any]) -> list[Any]:
        """The values, once the stream and the compute queue get there."""
        return self.tie(values, *self.last_compute)

    def after_compute(self, outs: Sequence[Any], added: Sequence[Any] = ()) -> None:
        """The step's results stand for it; those `added` outside of kernels may fuse.

        If XLA fused a sum behind a loop into its last matmul, that would wait for the
        last transfer.  So what reads a step's other results is apart from it.
        """
        if self.active and outs:
            self.last_work = ()
            self.chains[self.machine.current] = self.last_compute = tuple(outs)
            fused = {id(value) for value in added}
            self.apart |= {id(out): (out, ()) for out in outs if id(out) not in fused}

    def ran(self, outs: Sequence[Any]) -> None:
        """A loop or a branch ran, whose first result stands for it."""
        if self.active and outs:
            self.chains[self.machine.current] = self.last_compute = (outs[0],)

    def worked(self, result: Any) -> None:
        """The result stands for work, beside which transfers may be under way."""
        if not self.active:
            self.last_work = (result,)

    def leaving(self, ins: Sequence[Any]) -> list[Any]:
        """`ins` of a step outside of loops, apart from what made them."""
        if self.active:
            return list(ins)
        found = [self.apart.get(id(value), (value, None)) for value in ins]
        return [
            value if behind is None else lax.optimization_barrier(value)
            for value, behind in found
        ]

    def arrived(self, value: Any) -> Any:
        """A value, behind the work that its transfer stood beside if it was one's."""
        if self.depth:
            return value
        _, behind = self.apart.get(id(value), (value, ()))
        return self.barriers.behind([value], behind or ())[0]

    # --- Communications ------------------------------------------------------- #

    def before_communication(self, source: Any) -> Any:
        """`source`, available once the stream gets there.

        Outside of loops, what comes next on the stream comes after the communication
        was issued.  In loops XLA would copy a part of an array for that barrier.
        """
        (source,) = self.tie([source])
        if self.active and not self.depth:
            # It stands for all before it.  If they were kept, each later barrier would
            # keep the values that were sent, and those that came: 2 GB of a step of 13B
            # width over fsdp (XLA of JAX 0.11.2).
            self.chains[self.machine.current] = (source,)
        return source

    def issued(self, name: str, result: Any) -> None:
        """The communication is under way; its stream goes on."""
        self.in_flight[name] = IssuedTransfer(
            (result,), () if self.depth else self.chain
        )

    def wait(self, name: str) -> None:
        """The current stream goes on when the communication has ended.

        Outside of loops, so has what stood before it on the stream.  It leaves the
        chain, or all that was ever sent would be kept for the next barrier.  What comes
        is read behind the last work before the wait.  Else XLA would go by its own
        estimate of how long a transfer takes.
        """
        ended = self.in_flight.pop(name)
        if self.active and not self.depth:
            before = {id(value) for value in ended.before}
            chain = tuple(value for value in self.chain if id(value) not in before)
            self.chains[self.machine.current] = chain
            met = self.met.get(self.machine.current, ())
            beside = distinct((*met, *self.last_compute, *self.last_work))
            if beside:
                self.apart |= {id(value): (value, beside) for value in ended.results}
        self.join(ended.results)

    def synchronize(self, stream: StreamKey) -> None:
        """The current stream goes on when the work on `stream` has ended.

        Behind a loop that is its last computation.  If it were the last transfer, XLA
        would issue the next loop's before it is waited for, and make it
        synchronous.
        """
        if self.active:
            met = self.chains.get(stream, ())
            self.met[self.machine.current] = met
            self.join(met)
        else:
            self.chains[self.machine.current] = self.last_compute
