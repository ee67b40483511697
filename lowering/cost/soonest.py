"""A lower bound of a program's time, wherever its transfers stand."""

from __future__ import annotations

import dataclasses
from functools import partial

from jhost.lowering.cost.clock import ends_of
from jhost.lowering.cost.rates import Link, Rates
from jhost.lowering.cost.simulate import predict
from jhost.lowering.cost.tasks import unrolled
from jhost.lowering.ir.program import Program


def soonest(program: Program, rates: Rates) -> float:
    """The seconds of a program whose transfers start as soon as they can.

    Its work keeps its order, and bodies take what they take.
    """
    inside = partial(predict, rates=rates)
    tasks = unrolled(program, _at_best(rates), inside)
    return max(ends_of(tasks).values(), default=0.0)


def _at_best(rates: Rates) -> Rates:
    """The same rates, if all transfers ran beside work, by the fastest links."""
    near = _best(*filter(None, (rates.permute, rates.collective, rates.put)))
    return dataclasses.replace(
        rates,
        permute=near,
        collective=near,
        network=_best(rates.network),
        between=rates.between and _best(rates.between),
        put=None,
    )


def _best(*links: Link) -> Link:
    """A link by which no transfer takes longer, or waits for more, than by others."""
    return Link(
        latency=min(link.latency for link in links),
        bandwidth=max(link.bandwidth for link in links),
        host=0.0,
        beside_compute=True,
        network=links[0].network,
    )
