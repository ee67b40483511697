"""Order between the steps of a loop: a stream is a chain of tokens.

XLA keeps no order but that of values.  So the values of one step and the inputs of the
next go through one `lax.optimization_barrier`.  The barriers also keep XLA from merging
the chunks' matmuls and collectives back into one, and from making transfers
synchronous.  Without them a chunked gather and matmul took 4 to 25 % longer than one of
each (four H200s, JAX 0.11.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax

from jhost.lowering.ir.machine import Machine, StreamKey

Values = tuple[Any, ...]


@dataclasses.dataclass
class Order:
    """What each stream of the `machine` last did, and the last computation of all.

    `depth` counts the loops around.  Outside of loops, on the stream that the program
    began on, nothing is ordered, so that XLA may fuse there.
    """

    machine: Machine
    chains: dict[StreamKey, Values] = dataclasses.field(
        default_factory=dict[StreamKey, Values]
    )
    last_compute: Values = ()
    last_work: Values = ()
    """What stands for the last work outside of loops, where no stream orders it."""
    in_flight: dict[str, Values] = dataclasses.field(default_factory=dict[str, Values])
    before: dict[str, Values] = dataclasses.field(default_factory=dict[str, Values])
    """What stood before each communication outside of loops, on its stream."""
    depth: int = 0
    accumulators: dict[int, tuple[Any, Any]] = dataclasses.field(
        default_factory=dict[int, tuple[Any, Any]]
    )
    """By identity: an accumulator's value, and what it has become.

    That is itself, what a barrier made of it, or None once something is added to it.
    """
    made: dict[int, Any] = dataclasses.field(default_factory=dict[int, Any])
    """By identity, what the loops' steps made."""
    received: dict[int, tuple[Any, Values]] = dataclasses.field(
        default_factory=dict[int, tuple[Any, Values]]
    )
    """By identity, the values that came on streams outside of loops.

    Each has with it the results that had been computed when it was waited for.
    """

    @property
    def active(self) -> bool:
        """Whether what comes now has a place in an order."""
        return self.depth > 0 or not self.machine.on_default_stream

    def chain(self) -> Values:
        """The tokens of the current stream."""
        return self.chains.get(self.machine.current, ())

    def before_compute(
        self, ins: Sequence[Any], chosen: Sequence[int], beside: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """`ins`, the `chosen` ones once the stream and the compute queue get there.

        What stands `beside` them has to be complete by then as well.
        """
        # XLA:GPU has one compute queue: steps on other streams come in turn as well.
        deps = _distinct((*self.chain(), *self.last_compute))
        tied = self._tie([*(ins[k] for k in chosen), *beside], deps)
        tied, beside = tied[: len(chosen)], tied[len(chosen) :]
        result = list(ins)
        for k, value in zip(chosen, tied, strict=True):
            result[k] = value
        return result, beside

    def after_compute(self, outs: Sequence[Any], added: Sequence[Any] = ()) -> None:
        """The step's results stand for it.

        XLA may fuse sums that were `added` outside of kernels with their readers.
        """
        if self.active and outs:
            self.last_work = ()
            self.chains[self.machine.current] = self.last_compute = tuple(outs)
            apart = {id(value) for value in added}
            self.made |= {id(out): out for out in outs if id(out) not in apart}

    def worked(self, result: Any) -> None:
        """The result stands for work, beside which transfers may be under way."""
        if not self.active:
            self.last_work = (result,)

    def leaving(self, ins: Sequence[Any]) -> list[Any]:
        """`ins` of a step outside all loops, which is not fused into one inside.

        If XLA fused a sum into the last matmul of a loop, the matmul would wait for the
        last transfer.  A received value is read once the work beside it is computed.
        """
        return list(ins) if self.active else [self._left(value) for value in ins]

    def _left(self, value: Any) -> Any:
        if id(value) in self.made:
            return lax.optimization_barrier(value)
        _, beside = self.received.get(id(value), (None, ()))
        return self._behind([value], beside)[0]

    def accumulated(self, old: Any | None, new: Any) -> None:
        """`new` is an accumulator with something added to `old`, if it had a value.

        A barrier that only waits for an accumulator would keep it alive, and XLA would
        copy it before it is added to in place: so one thread goes through them all.
        """
        if self.active:
            self.accumulators[id(new)] = new, new
            if old is not None:
                self.accumulators[id(old)] = old, None

    def latest(self, value: Any) -> Any:
        """What an accumulator's value has become; any other value is itself."""
        while (found := self.accumulators.get(id(value))) and found[1] is not value:
            value = found[1]
        return value

    def before_communication(self, sources: Sequence[Any]) -> list[Any]:
        """`sources`, available once the stream gets there.

        Outside of loops, what comes next on the stream comes after the communication
        was issued.  In loops XLA would copy a part of an array for that barrier.
        """
        tied = self._tie(sources, self.chain())
        if not self.depth:
            self._join(tuple(tied))
        return tied

    def issued(self, name: str, results: Sequence[Any]) -> None:
        """The communication is under way; its stream goes on."""
        self.in_flight[name] = tuple(results)
        if not self.depth:
            self.before[name] = self.chain()

    def wait(self, name: str) -> None:
        """The current stream goes on when the communication has ended.

        Outside of loops, so has what stood before it on the stream.  It leaves the
        chain, or all that was ever sent would be kept for the next barrier.
        """
        results = self.in_flight.pop(name)
        before = {id(value) for value in self.before.pop(name, ())}
        if self.active and not self.depth:
            chain = tuple(value for value in self.chain() if id(value) not in before)
            self.chains[self.machine.current] = chain
            # Else XLA would go by its own estimate of how long a transfer takes.
            beside = _distinct((*chain, *self.last_compute, *self.last_work))
            self.received |= {id(value): (value, beside) for value in results}
        self._join(results)

    def synchronize(self, stream: StreamKey) -> None:
        """The current stream goes on when what is on `stream` has ended.

        Behind a loop that is its last computation.  Were it the last transfer, XLA
        would issue those of the next loop before it is waited for, and make it
        synchronous.
        """
        if self.active:
            self._join(self.chains.get(stream, ()))
        else:
            self.chains[self.machine.current] = self.last_compute

    def _join(self, values: Values) -> None:
        if self.active:
            self.chains[self.machine.current] = _distinct((*self.chain(), *values))

    def _tie(self, values: Sequence[Any], deps: Iterable[Any]) -> list[Any]:
        return self._behind(values, deps) if self.active else list(values)

    def _behind(self, values: Sequence[Any], deps: Iterable[Any]) -> list[Any]:
        """The values, once `deps` are there."""
        own = {id(value) for value in values}
        others = _distinct(map(self.latest, deps))
        # None is an accumulator that something was added to since.  To wait for its old
        # value would keep it alive, and XLA would copy it.
        others = [d for d in others if d is not None and id(d) not in own]
        if not (values and others):
            return list(values)
        # A barrier result that nobody uses keeps its operand in the barrier as long as
        # the operand has other users, as a step's results have.
        tied = lax.optimization_barrier((*values, *others))
        for old, new in zip(others, tied[len(values) :], strict=True):
            if id(old) in self.accumulators:
                self.accumulators[id(old)] = old, new
                self.accumulators[id(new)] = new, new
        return list(tied[: len(values)])


def _distinct(values: Iterable[Any]) -> Values:
    return tuple({id(value): value for value in values}.values())
