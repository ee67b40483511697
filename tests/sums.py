"""Where sums stand, over all chunks and over devices, as a choice may have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, get_args
from unittest import mock

from jhost.lowering.cost.choose_transfers import ChooseTransfers
from jhost.lowering.ir.marks import SumsPlace
from jhost.lowering.loops import lower_streams

EVERY: tuple[SumsPlace, ...] = get_args(SumsPlace)


@contextmanager
def standing(sums: SumsPlace) -> Generator[None]:
    """Streams have those of their loops there, whatever was chosen."""
    choose = lower_streams.choose_pipeline

    def chosen(mark: Any, *rest: Any) -> Any:
        return choose(dataclasses.replace(mark, sums=sums), *rest)

    with mock.patch.object(lower_streams, "choose_pipeline", chosen):
        yield


@contextmanager
def by_permutes(asked: bool = True) -> Generator[None]:
    """What moves outside of loops goes by permutes wherever there is work beside it.

    If that is `asked`; of any size.
    """
    yes = mock.Mock(return_value=True)
    is_asked = mock.patch.multiple(ChooseTransfers, is_open=yes, gains=yes)
    with is_asked if asked else nullcontext():
        yield
