"""Steps of random programs that hold steps: loops, branches, and calls of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

import jhost
from tests.random_steps import Kinds, Step

Shape: TypeAlias = tuple[int, ...]
Draw: TypeAlias = Callable[[Any, Sequence[Shape], Kinds], tuple[str, Step]]
"""Draws a step on values of some shapes."""


class Body:
    """Some steps on values of those shapes, which give the last value of a shape."""

    def __init__(
        self, draw: Any, shapes: Sequence[Shape], kinds: Kinds, steps: Sequence[Draw]
    ) -> None:
        self.steps: list[Step] = []
        self.shapes = list(shapes)
        names: list[str] = []
        for _ in range(draw(st.integers(1, 3))):
            name, step = draw(st.sampled_from(steps))(draw, self.shapes, kinds)
            result = jax.eval_shape(
                lambda *values, step=step: step(list(values)),
                *(jax.ShapeDtypeStruct(shape, kinds.dtype) for shape in self.shapes),
            )
            if result.size <= 500 and result.ndim <= 4:
                self.steps.append(step)
                self.shapes.append(result.shape)
                names.append(name)
        self.name = f"[{', '.join(names)}]"

    def __call__(self, *given: Any) -> list[Any]:
        values = list(given)
        for step in self.steps:
            values.append(step(values))
        return values

    def of_shape(self, shape: Shape, *given: Any) -> Any:
        """The last value of a shape that one of the given has."""
        place = max(n for n, other in enumerate(self.shapes) if other == shape)
        return self(*given)[place]


def holding(
    draw: Any,
    shapes: Sequence[Shape],
    kinds: Kinds,
    steps: Sequence[Draw],
    called: Sequence[Draw],
) -> tuple[str, Step]:
    """A step that holds some of `steps`, or in a jhost function some of `called`."""
    makers = [_scan, _fori, _checkpoint, _nested]
    if kinds.branches:
        makers += [_cond, _map]
    if np.issubdtype(kinds.dtype, np.integer):
        makers.append(_while)  # has no gradient
    maker = draw(st.sampled_from(makers))
    return maker(draw, shapes, kinds, called if maker is _nested else steps)


def _scan(
    draw: Any, shapes: Sequence[Shape], kinds: Kinds, steps: Sequence[Draw]
) -> tuple[str, Step]:
    """Over the rows of one value, with another one carried and a third as it is."""
    rows = [n for n, shape in enumerate(shapes) if shape and shape[0] <= 4]
    if not rows:
        return _fori(draw, shapes, kinds, steps)
    i, k = (draw(st.integers(0, len(shapes) - 1)) for _ in range(2))
    j = draw(st.sampled_from(rows))
    body = Body(draw, [shapes[i], shapes[j][1:], shapes[k]], kinds, steps)
    reverse, stacked = draw(st.booleans()), draw(st.booleans())

    def step(values: list[Any]) -> Any:
        def one(carry: Any, row: Any) -> tuple[Any, Any]:
            made = body(carry, row, values[k])
            return body.of_shape(shapes[i], carry, row, values[k]), made[-1]

        carry, ys = lax.scan(one, values[i], values[j], reverse=reverse)
        return ys if stacked else carry

    return f"scan({i}, {j}, {k}, {body.name}, {reverse}, {stacked})", step


def _fori(
    draw: Any, shapes: Sequence[Shape], kinds: Kinds, steps: Sequence[Draw]
) -> tuple[str, Step]:
    i = draw(st.integers(0, len(shapes) - 1))
    body, count = Body(draw, [shapes[i]], kinds, steps), draw(st.integers(0, 3))

    def step(values: list[Any]) -> Any:
        def one(_: Any, carry: Any) -> Any:
            return body.of_shape(shapes[i], carry)

        return lax.fori_loop(0, count, one, values[i])

    return f"fori_loop({i}, {body.name}, {count})", step


def _while(
    draw: Any, shapes: Sequence[Shape], kinds: Kinds, steps: Sequence[Draw]
) -> tuple[str, Step]:
    """As often as the values say: at most three times."""
    i, k = (draw(st.integers(0, len(shapes) - 1)) for _ in range(2))
    body = Body(draw, [shapes[i], shapes[k]], kinds, steps)

    def step(values: list[Any]) -> Any:
        limit = jnp.sum(values[k]) % 4

        def one(state: tuple[Any, Any]) -> tuple[Any, Any]:
            count, carry = state
            return count + 1, body.of_shape(shapes[i], carry, values[k])

        return lax.while_loop(lambda s: s[0] < limit, one, (0, values[i]))[1]

    return f"while_loop({i}, {k}, {body.name})", step


def _cond(
    draw: Any, shapes: Sequence[Shape], kinds: Kinds, steps: Sequence[Draw]
) -> tuple[str, Step]:
    """By what the values add up to; of two branches or three."""
    i, k = (draw(st.integers(0, len(shapes) - 1)) for _ in range(2))
    given = [shapes[i], shapes[k]]
    bodies = [Body(draw, given, kinds, steps) for _ in range(draw(st.integers(2, 3)))]

    def step(values: list[Any]) -> Any:
        index = jnp.sum(values[k]).astype(np.int32) % len(bodies)
        branches = [
            lambda *args, body=body: body.of_shape(shapes[i], *args) for body in bodies
        ]
        return lax.switch(index, branches, values[i], values[k])

    return f"switch({i}, {k}, {', '.join(body.name for body in bodies)})", step


def _checkpoint(
    draw: Any, shapes: Sequence[Shape], kinds: Kinds, steps: Sequence[Draw]
) -> tuple[str, Step]:
    i, k = (draw(st.integers(0, len(shapes) - 1)) for _ in range(2))
    body = Body(draw, [shapes[i], shapes[k]], kinds, steps)
    policy = draw(st.sampled_from([None, jax.checkpoint_policies.dots_saveable]))

    def step(values: list[Any]) -> Any:
        def function(*args: Any) -> Any:
            return body(*args)[-1]

        return jax.checkpoint(function, policy=policy)(values[i], values[k])

    return f"checkpoint({i}, {k}, {body.name})", step


def _nested(
    draw: Any, shapes: Sequence[Shape], kinds: Kinds, steps: Sequence[Draw]
) -> tuple[str, Step]:
    """A jhost function, which keeps its own settings."""
    i, k = (draw(st.integers(0, len(shapes) - 1)) for _ in range(2))
    body = Body(draw, [shapes[i], shapes[k]], kinds, steps)
    chunks = draw(st.sampled_from(["auto", 1, 2]))

    def step(values: list[Any]) -> Any:
        def function(*args: Any) -> Any:
            return body(*args)[-1]

        return jhost.jit(function, chunks=chunks)(values[i], values[k])

    return f"jhost.jit({i}, {k}, {body.name}, {chunks})", step


def _map(
    draw: Any, shapes: Sequence[Shape], kinds: Kinds, steps: Sequence[Draw]
) -> tuple[str, Step]:
    rows = [n for n, shape in enumerate(shapes) if shape and shape[0] <= 4]
    if not rows:
        return _cond(draw, shapes, kinds, steps)
    j, k = draw(st.sampled_from(rows)), draw(st.integers(0, len(shapes) - 1))
    body = Body(draw, [shapes[j][1:], shapes[k]], kinds, steps)

    def step(values: list[Any]) -> Any:
        return lax.map(lambda row: body(row, values[k])[-1], values[j])

    return f"map({j}, {k}, {body.name})", step
