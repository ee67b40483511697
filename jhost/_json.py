"""Frozen dataclasses out of parsed JSON, each value checked against its type."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
import typing
from typing import Any, TypeVar

from jhost.errors import first_line

T = TypeVar("T")


def read(kind: type[T], value: Any) -> T:
    """`value` as `kind`, a dataclass of scalars, dataclasses, and tuples of them.

    A field that has a default may be left out.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    return _read(kind, value, kind.__name__)


def _read(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _fields(kind, value, path)
    if isinstance(value, dict):  # of a dataclass, where None may stand as well
        kind = next(filter(dataclasses.is_dataclass, typing.get_args(kind)), kind)
        if dataclasses.is_dataclass(kind):
            return _fields(kind, value, path)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{path} is no list")
        (each, _) = typing.get_args(kind)
        return tuple(_read(each, v, f"{path}[{i}]") for i, v in enumerate(value))
    kinds = _types(kind)
    # `True` is an int by accident, and a float may be written without its point.
    accepted = {int if isinstance(value, int) and k is float else k for k in kinds}
    if type(value) not in accepted:
        raise ValueError(f"{path} is {reprlib.repr(value)}")
    if float not in kinds or not isinstance(value, int | float):
        return value
    return _finite(value, path)


def _finite(value: float, path: str) -> float:
    """JSON has no NaN and no infinity, though `json` reads and writes both."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{path} is {number}")
    return number


def _types(kind: Any) -> tuple[Any, ...]:
    """The types of a scalar, a `Literal` or a union of such."""
    match typing.get_origin(kind):
        case origin if origin in (types.UnionType, typing.Union):
            return tuple(k for each in typing.get_args(kind) for k in _types(each))
        case origin if origin is typing.Literal:
            return tuple(map(type, typing.get_args(kind)))
        case _:
            return (kind,)


def _fields(kind: Any, value: Any, path: str) -> Any:
    hints = typing.get_type_hints(kind)
    needed = {
        field.name for field in dataclasses.fields(kind) if not _has_default(field)
    }
    if not isinstance(value, dict) or not needed <= set(value) <= set(hints):
        raise ValueError(f"{path} needs the fields {', '.join(hints)}")
    fields = {n: _read(hints[n], v, f"{path}.{n}") for n, v in value.items()}
    try:
        return kind(**fields)
    except ValueError as error:  # of the kind's own checks, which name the field
        raise ValueError(f"{path}.{first_line(error)}") from error


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing
