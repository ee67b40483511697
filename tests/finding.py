"""Streams that nobody marked, found wherever something moves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from jhost._call import program as call_program
from jhost.lowering.cost import choose_found, stream_bounds
from jhost.lowering.cost.find_streams import FindStreams
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.ir.graph import graph_of
from jhost.lowering.ir.program import Program
from jhost.lowering.streams.found import found_streams
from jhost.lowering.streams.found_stream import FoundStream


@contextmanager
def everywhere() -> Generator[None]:
    """Each stream that is found is pipelined whatever it gains, as if on H200s."""
    rates = rates_of("NVIDIA H200")
    assert rates is not None
    # So slow that any transfer could hide behind any product.
    slow = dataclasses.replace(rates, matmul=1e6, memory=1e6)
    least = mock.Mock(return_value=-math.inf)
    with (
        mock.patch.object(call_program, "rates_here", return_value=slow),
        mock.patch.multiple(
            choose_found, _NOTABLE=1e9, _CLOSE=0.0, _WON_BACK=1e9, least_gain=least
        ),
        mock.patch.object(stream_bounds.StreamBounds, "streams_of", _every_stream),
        mock.patch.object(FindStreams, "if_faster", _always),
    ):
        yield


def _always(_: FindStreams, __: Program, chosen: Program, ___: Any) -> Program:
    return chosen


def _every_stream(
    bounds: stream_bounds.StreamBounds, program: Program, carried: object, spares: bool
) -> list[FoundStream]:
    mesh: dict[str, Any] = dict(program.mesh.shape)
    return found_streams(
        program,
        graph_of(program),
        lambda s: bounds.seconds(s, mesh),
        lambda s: bounds.uneven(s, mesh),
        spares,
    )
