"""Profiles as `jax.profiler` writes them, made of a few events by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.profiler import ProfileData


@dataclasses.dataclass(frozen=True)
class Ran:
    """An event on a line, from `start` to `end` in microseconds."""

    name: str
    start: float
    end: float
    stats: Mapping[str, str | int] = dataclasses.field(default_factory=dict[str, Any])


Lines = Mapping[str, Sequence[Ran]]


def kernel(
    operation: str,
    start: float,
    end: float,
    *,
    module: str = "jit_f",
    op_name: str = "",
) -> Ran:
    """A kernel of an instruction, as a GPU's profile has it."""
    stats = {
        "correlation_id": 7,
        "name": op_name,
        "hlo_op": operation,
        "hlo_module": module,
    }
    return Ran(f"kernel_of_{operation}", start, end, stats)


def profile(planes: Mapping[str, Lines]) -> Any:
    """The profile with those planes, each of lines, each of events."""
    text = "\n".join(_plane(name, lines) for name, lines in planes.items())
    return ProfileData.from_serialized_xspace(
        ProfileData.text_proto_to_serialized_xspace(text)
    )


def _plane(name: str, lines: Lines) -> str:
    events = [event for line in lines.values() for event in line]
    names = list(dict.fromkeys(event.name for event in events))
    stats = list(dict.fromkeys(stat for event in events for stat in event.stats))
    parts = [f'name: "{name}"']
    parts += _metadata("event_metadata", names)
    parts += _metadata("stat_metadata", stats)
    parts += [
        f'lines {{ name: "{line}" {" ".join(_events(ran, names, stats))} }}'
        for line, ran in lines.items()
    ]
    return f"planes {{ {' '.join(parts)} }}"


def _metadata(kind: str, names: Sequence[str]) -> list[str]:
    return [
        f'{kind} {{ key: {n} value {{ id: {n} name: "{name}" }} }}'
        for n, name in enumerate(names, start=1)
    ]


def _events(
    ran: Sequence[Ran], names: Sequence[str], stats: Sequence[str]
) -> Iterator[str]:
    for event in ran:
        values = " ".join(
            f"stats {{ metadata_id: {stats.index(name) + 1} {_value(value)} }}"
            for name, value in event.stats.items()
        )
        yield (
            f"events {{ metadata_id: {names.index(event.name) + 1} "
            f"offset_ps: {round(event.start * 1e6)} "
            f"duration_ps: {round((event.end - event.start) * 1e6)} {values} }}"
        )


def _value(value: str | int) -> str:
    is_text = isinstance(value, str)
    return f'str_value: "{value}"' if is_text else f"int64_value: {value}"
