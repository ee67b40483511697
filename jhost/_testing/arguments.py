"""What the functions of `jhost.testing` refuse: each wrong argument by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from jhost import errors
from jhost._annotate import as_int


def check_axes(axes: Any) -> None:
    """Refuses all but a dict of names and sizes, for at least one device."""
    pairs = dict(cast(Mapping[Any, Any], axes)) if isinstance(axes, Mapping) else None
    if pairs is None or not all(
        isinstance(name, str) and as_int(size) is not None
        for name, size in pairs.items()
    ):
        raise errors.ArgumentError(
            f"A mesh is a dict of axes and sizes, such as {{'tp': 4}}, not {axes!r}."
        )
    if min(pairs.values(), default=1) < 1:
        raise errors.OptionError(f"A mesh {axes} has an axis of less than one device.")


def check_tolerance(function: str, tolerance: Any) -> None:
    """Refuses all but None and numbers of at least 0."""
    if tolerance is None:
        return
    # A bool is an int in Python.
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
        raise errors.ArgumentError(
            f"jhost.testing.{function} takes a number as tolerance, but got "
            f"{tolerance!r}."
        )
    # Written so that a NaN is refused as well.
    if not tolerance >= 0:
        raise errors.OptionError(
            f"jhost.testing.{function} got tolerance={tolerance!r}; it needs at least "
            "0."
        )


def check_several(**given: Any) -> None:
    """Refuses values that are no sequence, or an empty one: it compares nothing."""
    for name, values in given.items():
        if values is None:
            continue
        # A text is a sequence too, of letters.
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise errors.ArgumentError(
                f"jhost.testing.assert_equals_plain takes a list as {name}, but got "
                f"{values!r}."
            )
        if not values:
            raise errors.OptionError(
                f"jhost.testing.assert_equals_plain got {name}={values!r}, with which "
                f"it would compare nothing. Give one, or leave out {name}=."
            )


def check_gradients(gradients: Any) -> None:
    """Refuses all but a bool."""
    if not isinstance(gradients, bool):
        raise errors.ArgumentError(
            "jhost.testing.assert_equals_plain takes a bool as gradients, but got "
            f"{gradients!r}."
        )


def check_program(loops: Any, communications: Any) -> None:
    """Refuses loops that are no number, and communications that are no list."""
    if loops is not None and as_int(loops) is None:
        raise errors.ArgumentError(
            f"jhost.testing.assert_program takes an int as loops, but got {loops!r}."
        )
    some = communications is None or isinstance(communications, Iterable)
    if isinstance(communications, str) or not some:
        raise errors.ArgumentError(
            "jhost.testing.assert_program takes a list as communications, such as "
            f"['AllGather over tp'], but got {communications!r}."
        )
