"""Slices of arrays, at static or traced starts: how aliases are read and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """`[start : start + size]` of each dim; a dim with groups, of each equal part.

    A start is an int or a traced scalar.  `dropped` dims (of size 1) are squeezed out.
    """

    shape: tuple[int, ...]
    starts: tuple[Any, ...]
    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    dropped: frozenset[int] = frozenset()

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the part that the window shows."""
        sizes = zip(self.sizes, self.groups, strict=True)
        return tuple(n * g for d, (n, g) in enumerate(sizes) if d not in self.dropped)

    @property
    def kept(self) -> list[int]:
        """The source's dim for each dim that the window shows."""
        return [dim for dim in range(len(self.shape)) if dim not in self.dropped]

    def is_whole(self, dim: int) -> bool:
        """Whether all of `dim` shows."""
        return self.sizes[dim] * self.groups[dim] == self.shape[dim]

    @property
    def covers(self) -> bool:
        """Whether all of the source shows."""
        return all(map(self.is_whole, range(len(self.shape))))

    # Slicing happens on the source with each dim of groups seen as two dims.

    @property
    def split_shape(self) -> tuple[int, ...]:
        """The source's shape, split."""
        parts = [n // g for n, g in zip(self.shape, self.groups, strict=True)]
        return self._split(parts)

    @property
    def split_sizes(self) -> tuple[int, ...]:
        """The same shape with the dims in groups split."""
        return self._split(self.sizes)

    @property
    def split_starts(self) -> list[Any]:
        """The start of the slice along each dim, with the dims in groups split."""
        starts = zip(self.starts, self.groups, strict=True)
        return [n for s, g in starts for n in ((s,) if g == 1 else (0, s))]

    def split_dim(self, dim: int) -> int:
        """The dim inside the groups of `dim`."""
        return dim + sum(groups > 1 for groups in self.groups[: dim + 1])

    def _split(self, parts: Sequence[int]) -> tuple[int, ...]:
        dims = zip(parts, self.groups, strict=True)
        return tuple(n for p, g in dims for n in ((p,) if g == 1 else (g, p)))


def window(
    shape: tuple[int, ...], dim: int, start: Any, size: int, groups: int, drop: bool
) -> Window:
    """A window that shows a part of `dim` and the other dims whole."""
    return Window(
        shape=shape,
        starts=tuple(start if d == dim else 0 for d in range(len(shape))),
        sizes=tuple(size if d == dim else n for d, n in enumerate(shape)),
        groups=tuple(groups if d == dim else 1 for d in range(len(shape))),
        dropped=frozenset({dim}) if drop else frozenset(),
    )


def take(value: Any, windows: Sequence[Window]) -> Any:
    """The part of `value` that is seen through all windows, one behind another."""
    for w in windows:
        value = _slice(value.reshape(w.split_shape), w).reshape(w.out_shape)
    return value


def put(value: Any, windows: Sequence[Window], part: Any) -> Any:
    """`value` with `part` where the windows show it."""
    first, *rest = windows
    if rest:
        part = put(take(value, [first]), rest, part)
    split = value.reshape(first.split_shape)
    starts = _index_scalars(first.split_starts)
    # No start is negative.  JAX would otherwise compare and select at each.
    updated = lax.dynamic_update_slice(
        split, part.reshape(first.split_sizes), starts, allow_negative_indices=False
    )
    return updated.reshape(value.shape)


def merged(windows: Sequence[Window]) -> tuple[Window, ...]:
    """An equal view of as few windows as possible."""
    result: list[Window] = []
    for w in windows:
        composed = _compose(result[-1], w) if result else None
        if composed is not None:
            result.pop()
        result.append(composed or w)
    return tuple(result)


def joined(
    shape: tuple[int, ...], parts: Sequence[tuple[Sequence[Window], Any]]
) -> Any | None:
    """The array that static parts tile along one dim; None if they do not."""
    if not parts or any(len(windows) != 1 for windows, _ in parts):
        return None
    values = [(windows[0], value) for windows, value in parts]
    dims = {d for w, _ in values for d in range(len(shape)) if not w.is_whole(d)}
    if len(dims) != 1 or len({w.groups for w, _ in values}) != 1:
        return None
    (dim,) = dims
    if not all(isinstance(w.starts[dim], int) for w, _ in values):
        return None
    values.sort(key=lambda part: part[0].starts[dim])
    end = 0
    for w, _ in values:
        if w.starts[dim] != end:
            return None
        end += w.sizes[dim]
    if end * values[0][0].groups[dim] != shape[dim]:
        return None
    pieces = [value.reshape(w.split_sizes) for w, value in values]
    return lax.concatenate(pieces, values[0][0].split_dim(dim)).reshape(shape)


def _compose(outer: Window, inner: Window) -> Window | None:
    """One window for `inner` of `outer`, unless a dim would be grouped twice."""
    starts, sizes, groups = list(outer.starts), list(outer.sizes), list(outer.groups)
    for dim, root in enumerate(outer.kept):
        if inner.is_whole(dim):
            continue
        if outer.is_whole(root):
            starts[root], groups[root] = inner.starts[dim], inner.groups[dim]
        elif outer.groups[root] == inner.groups[dim] == 1:
            starts[root] = starts[root] + inner.starts[dim]
        else:
            return None
        sizes[root] = inner.sizes[dim]
    dropped = outer.dropped | {outer.kept[dim] for dim in inner.dropped}
    return dataclasses.replace(
        outer,
        starts=tuple(starts),
        sizes=tuple(sizes),
        groups=tuple(groups),
        dropped=dropped,
    )


def _slice(value: Any, w: Window) -> Any:
    starts, sizes = w.split_starts, w.split_sizes
    if all(isinstance(start, int) for start in starts):
        limits = [start + size for start, size in zip(starts, sizes, strict=True)]
        return lax.slice(value, starts, limits)
    return lax.dynamic_slice(
        value, _index_scalars(starts), sizes, allow_negative_indices=False
    )


def _index_scalars(starts: Sequence[Any]) -> list[Any]:
    return [jnp.asarray(start, jnp.int32) for start in starts]
