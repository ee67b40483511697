"""The candidates for an open stream mark, and which of them is chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jhost.lowering.cost.evaluator import Evaluator
from jhost.lowering.cost.outcomes import SUMS, Outcome, chunks_of, gain_of, ranking_text
from jhost.lowering.cost.rates import Rates
from jhost.lowering.ir.bodies import adds_up
from jhost.lowering.ir.marks import StreamChoice

_AHEAD = 0.75
"""Up to this share of a program's time, launching it leaves the host ahead of it."""

_COUNTS = (4, 2, 8)
"""Chunk counts of a collective pipeline, the default first."""


class Evaluation:
    """The candidates for some marks alike of a section; its other marks do not change.

    `evaluator` lowers and times them.  With `to_measure`, candidates include those that
    cannot win by prediction.
    """

    def __init__(self, evaluator: Evaluator, *, to_measure: bool = False) -> None:
        self.evaluator = evaluator
        self.to_measure = to_measure
        self.outcomes: list[Outcome] = []

    def best(self, mark: StreamChoice) -> StreamChoice:
        """`mark` with its choice, the reason, and the predictions it was chosen by."""
        self.evaluate_all(mark, lambda outcome: [self.with_sums_elsewhere(outcome)])
        if not self.outcomes:
            return mark  # the loops will say what is wrong with it
        chosen = self.chosen()
        others = [outcome for outcome in self.outcomes if outcome is not chosen]
        others.sort(key=lambda outcome: outcome.seconds)
        chosen = self.on_fewer_streams(self.in_order_of_position(chosen))
        ranked = [chosen, *others]
        return dataclasses.replace(
            chosen.mark,
            wished=mark.wished,
            reason=self.reason(ranked),
            predicted=tuple((o.text, o.seconds) for o in ranked),
        )

    def chosen(self) -> Outcome:
        """The simplest outcome, unless a later one gains enough over it."""
        chosen, *others = self.outcomes
        for outcome in others:
            # Each must gain over the simpler ones before it, not only over no pipeline.
            if outcome.seconds < self.gain * chosen.seconds:
                chosen = outcome
        return chosen

    def may_lose_early(self) -> bool:
        """Whether all candidates may lose to no loop with collectives begun early.

        What those hide, they take from the work beside them in part.
        """
        best = min((each.seconds for each in self.outcomes), default=0.0)
        taken = self.known.collective.taken
        plain = [each for each in self.outcomes if each.mark.unpipelined]
        return any(best > each.compute + taken * each.moving for each in plain)

    @property
    def gain(self) -> float:
        """What a candidate's time must be below, as a share of a simpler one's."""
        return gain_of(self.known)

    def measurable(self, mark: StreamChoice) -> list[Outcome]:
        """All candidates that make different programs."""
        self.evaluate_all(mark, self.with_variants)
        # Several candidates may lower to one program.  It is measured once, for the
        # simplest of them.
        programs = {str(outcome.program): outcome for outcome in self.outcomes[::-1]}
        return [o for o in self.outcomes if programs[str(o.program)] is o]

    def reason(self, ranked: Sequence[Outcome]) -> str:
        """The predictions for the choice and for the other candidates, in words."""
        rows = [(outcome.text, outcome.seconds) for outcome in ranked]
        how = "estimated from data sheets" if self.known.estimated else "predicted"
        return ranking_text(how, rows, self.evaluator.refusals)

    def with_variants(self, outcome: Outcome) -> list[Outcome]:
        """An outcome; for a p2p pipeline also on fewer streams, and with other sums."""
        if outcome.mark.spec.pipeline != "p2p":
            return [outcome]
        variants = [
            outcome.mark.with_spec(streams=2),
            *(outcome.mark.with_spec(sums=sums) for sums in SUMS),
        ]
        return [outcome, *filter(None, map(self.evaluate, variants))]

    # --- The candidates --------------------------------------------------------- #

    def evaluate_all(
        self, mark: StreamChoice, found: Callable[[Outcome], Sequence[Outcome]]
    ) -> None:
        """Evaluate all that a mark leaves open.

        `found` makes one or more outcomes of each, and these go to `self.outcomes`.
        """

        def added(candidate: StreamChoice) -> Sequence[Outcome]:
            outcome = self.evaluate(candidate)
            outcomes = [] if outcome is None else found(outcome)
            self.outcomes += outcomes
            return outcomes

        for candidate in self.without_permutes(mark):
            added(candidate)
        p2p = self.p2p(mark)
        if p2p is not None and (outcomes := added(p2p)):
            if more := self.in_more_chunks(p2p, outcomes[-1]):
                added(more)

    def without_permutes(self, mark: StreamChoice) -> Iterator[StreamChoice]:
        """The candidates that need no permutes.

        The simplest comes first, because later ones must gain over it.
        """
        pipeline, chunks = mark.spec.pipeline, mark.spec.chunks
        given = chunks is not None
        if pipeline is None and not given:
            if self.others_pipelined() and not self.to_measure:
                yield mark  # it joins their stream
            yield mark.without_loop()
        if pipeline in (None, "collective"):
            # Chunks hide nothing where a collective cannot run beside computation.
            beside = self.to_measure or self.known.collective.beside_compute
            for count in [chunks] if given else _COUNTS if beside else []:
                yield mark.with_spec(pipeline="collective", chunks=count)

    def p2p(self, mark: StreamChoice) -> StreamChoice | None:
        """A p2p pipeline, if the mark leaves it open and permutes hide anything."""
        beside = self.to_measure or self.known.permute.beside_compute
        if mark.spec.pipeline not in (None, "p2p") or not beside:
            return None
        named = self.to_measure or mark.spec.pipeline is not None
        return dataclasses.replace(mark.with_spec(pipeline="p2p"), by_name=named)

    def in_more_chunks(
        self, p2p: StreamChoice, outcome: Outcome
    ) -> StreamChoice | None:
        """A p2p candidate with twice the chunks, if more overlap could make it win."""
        chunks = None if p2p.spec.chunks is not None else chunks_of(outcome)
        # More chunks hide more, but each chunk costs launches.
        if chunks is None or not self.hides_too_little(outcome):
            return None
        return p2p.with_spec(chunks=2 * chunks)

    def others_pipelined(self) -> bool:
        """Whether another mark has a pipeline; its stream may reach the value."""
        marks, numbers = self.evaluator.marks, self.evaluator.section.numbers
        others = (mark for n, mark in enumerate(marks) if n not in numbers)
        return any(isinstance(m, StreamChoice) and m.spec.pipeline for m in others)

    def hides_too_little(self, outcome: Outcome) -> bool:
        """Whether an outcome would win if more chunks hid all that it moves."""
        if self.to_measure:
            return True
        return outcome.compute < self.gain * self.chosen().seconds

    @property
    def known(self) -> Rates:
        rates = self.evaluator.rates
        assert rates is not None, "only candidates to measure need no rates"
        return rates

    def with_sums_elsewhere(self, outcome: Outcome) -> Outcome:
        """The outcome, or a faster one that makes the loops' sums outside of them."""
        mark = outcome.mark
        if (
            mark.spec.pipeline == "collective"
            or mark.unpipelined
            or not adds_up(outcome.program)
        ):
            return outcome
        for sums in SUMS:
            outcome = self.if_faster(outcome, mark.with_spec(sums=sums))
        return outcome

    def in_order_of_position(self, outcome: Outcome) -> Outcome:
        """The outcome, or one without zigzag order, where its exchanges do not pay."""
        if outcome.mark.spec.pipeline != "p2p":
            return outcome
        return self.if_faster(outcome, outcome.mark.with_spec(zigzag=False))

    def evaluate(self, candidate: StreamChoice) -> Outcome | None:
        # The simplest candidate may have permutes already, outside of loops.
        simplest = self.outcomes[0].program if self.outcomes else None
        return self.evaluator.evaluate(candidate, simplest)

    def if_faster(self, outcome: Outcome, mark: StreamChoice) -> Outcome:
        """The outcome of `mark` if it is another program and takes no longer."""
        other = self.evaluate(mark)
        if other is None or not other.seconds <= outcome.seconds:
            return outcome
        if other.seconds < outcome.seconds:  # one program takes one time
            return other
        if other.program.body is outcome.program.body:
            return outcome
        return outcome if str(other.program) == str(outcome.program) else other

    def on_fewer_streams(self, outcome: Outcome) -> Outcome:
        """The outcome on two streams, if that costs nothing and the host is ahead.

        A transfer is then launched an iteration before it is needed, and not all of
        them before the first matmul.  Queries, keys and values of a 70B model took
        0.50 ms instead of 0.59 with this, gathered on four H200s.
        """
        mark = outcome.mark
        # If the host is not ahead of the devices, launching later means moving later.
        if mark.spec.pipeline != "p2p" or outcome.host_share > _AHEAD:
            return outcome
        return self.if_faster(outcome, mark.with_spec(streams=2))
