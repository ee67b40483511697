"""A tuning as a page: a bar for each candidate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jhost._tuning import Candidate, TunedProgram, Tuning

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from jhost._page import Bar, bars, element, fold, listed, titled
from jhost._text import seconds_text


def page_of_tuning(tuning: Tuning) -> Element:
    programs = [fold(each.title, *_streams(each)) for each in tuning.programs]
    return fold(tuning.title, *programs)


def _streams(program: TunedProgram) -> Iterator[Element]:
    yield element("p", ", ".join(program.arguments))
    for stream in program.streams:
        rows = [
            bar
            for number, each in enumerate(stream.candidates)
            for bar in _bars(each, ", chosen" * (number == 0))
        ]
        yield from titled(
            stream.title,
            *(element("p", text) for text in _gain_texts(stream.candidates)),
            bars(rows, "time of one call", seconds_text),
            listed(stream.left_out),
        )


def _gain_texts(candidates: Sequence[Candidate]) -> Iterator[str]:
    """The chosen way beside no pipeline, by medians."""
    plain = next((each for each in candidates if each.pipeline is None), None)
    if plain is None or len(candidates) == 1:
        return
    chosen = candidates[0]
    if chosen is plain:
        yield "no pipeline is at least 3 % faster than none"
    elif chosen.median:
        yield (
            f"{chosen.text} takes {seconds_text(chosen.median)}, and {plain.text} "
            f"{seconds_text(plain.median)}: the choice is "
            f"{plain.median / chosen.median:.2f} times as fast"
        )


def _bars(candidate: Candidate, chosen: str) -> Iterator[Bar]:
    """A bar for the measured time, and one for the predicted time below it."""
    median, minimum = map(seconds_text, (candidate.median, candidate.minimum))
    measured = (("measured", candidate.median),)
    # The median is what the choice goes by.  A minimum is how fast it could be.
    yield Bar(candidate.text, measured, f"median {median}, minimum {minimum}{chosen}")
    if candidate.predicted is not None:
        predicted = (("predicted", candidate.predicted),)
        yield Bar("", predicted, f"predicted {seconds_text(candidate.predicted)}")
