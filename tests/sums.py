"""Where sums stand, over all chunks and over devices, as a choice may have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, get_args
from unittest import mock

from jhost.lowering.cost.choose_transfers import ChooseTransfers
from jhost.lowering.ir.marks import Sums
from jhost.lowering.loops import combine_small, planned

EVERY: tuple[Sums, ...] = get_args(Sums)


@contextmanager
def standing(sums: Sums) -> Generator[None]:
    """Streams have those of their loops there, whatever was chosen."""
    choose = planned.choose_pipeline

    def chosen(mark: Any, *rest: Any) -> Any:
        return choose(dataclasses.replace(mark, sums=sums), *rest)

    with mock.patch.object(planned, "choose_pipeline", chosen):
        yield


@contextmanager
def by_permutes(asked: bool = True) -> Generator[None]:
    """What moves outside of loops goes by permutes wherever there is work beside it.

    If that is `asked`; of any size, so that none is small and goes with others.
    """
    yes = mock.Mock(return_value=True)
    is_asked = mock.patch.multiple(ChooseTransfers, is_open=yes, gains=yes)
    none_small = mock.patch.object(combine_small, "SMALL", 0)
    with ExitStack() as stack:
        for patch in (is_asked, none_small) if asked else ():
            stack.enter_context(patch)
        yield
