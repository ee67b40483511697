"""The steps of random programs: one primitive each, on values of random shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

import jhost
from tests.random_rows import LOOKUPS, UPDATES

Values: TypeAlias = list[Any]
Step: TypeAlias = Callable[[Values], Any]


@dataclasses.dataclass(frozen=True, repr=False)
class Kinds:
    """What the steps of a program may be, and the dtype of its values.

    They may be `mapped` over devices, and have `branches` that their numbers choose.
    """

    dtype: Any
    elementwise: Mapping[str, Callable[[Any, Any], Any]]
    alone: Mapping[str, Callable[[Any, tuple[int, ...], int], Any]]
    mapped: bool = True
    branches: bool = True


def elementwise(
    draw: Any, shapes: Sequence[tuple[int, ...]], kinds: Kinds
) -> tuple[str, Step]:
    """One of the primitives that work element by element, on values of one shape."""
    i = draw(st.integers(0, len(shapes) - 1))
    j = draw(st.sampled_from([k for k, s in enumerate(shapes) if s == shapes[i]]))
    name = draw(st.sampled_from(sorted(kinds.elementwise)))
    function = kinds.elementwise[name]
    return f"{name}({i}, {j})", lambda values: function(values[i], values[j])


def _of(x: Any, number: int) -> np.ndarray:
    """A number of the type of `x`; of unsigned ones, modulo their range."""
    return np.array(number).astype(x.dtype)


_ELEMENTWISE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "neg": lambda x, y: lax.neg(x),
    "sign": lambda x, y: lax.sign(x),
    "abs": lambda x, y: lax.abs(x),
    "not": lambda x, y: lax.bitwise_not(x),
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "rem": lambda x, y: lax.rem(x, lax.max(y, _of(x, 1))),
    "select_n": lambda x, y: lax.select(lax.lt(x, y), x, y),
    "clamp": lambda x, y: lax.clamp(_of(x, -2), x, _of(x, 2)),
    "integer_pow": lambda x, y: lax.integer_pow(x, 2),
    "shift_left": lambda x, y: lax.shift_left(x, _of(x, 1)),
    "convert_element_type": lambda x, y: (lax.gt(x, y)).astype(x.dtype),
    "convert to less": lambda x, y: x.astype(jnp.int8).astype(x.dtype),
    "convert to more": lambda x, y: (x.astype(jnp.int32) >> np.int32(1)).astype(
        x.dtype
    ),
    "copy": lambda x, y: jnp.copy(x),
    "jit": lambda x, y: jax.jit(lambda a, b: a * 2 - b)(x, y),
    "remat2": lambda x, y: jax.checkpoint(lambda a, b: a + b * b)(x, y),
    "serial": lambda x, y: jhost.serial(x),
    "optimization_barrier": lambda x, y: lax.add(*lax.optimization_barrier((x, y))),
}


def alone(
    draw: Any, shapes: Sequence[tuple[int, ...]], kinds: Kinds
) -> tuple[str, Step]:
    """One of the primitives that rearrange or reduce a value."""
    i = draw(st.integers(0, len(shapes) - 1))
    shape = shapes[i]
    makers = [name for name in kinds.alone if shape or name == "broadcast_in_dim"]
    if 0 in shape:
        makers = [name for name in makers if name in _OF_NOTHING]
    name = draw(st.sampled_from(makers))
    dim = draw(st.integers(0, max(len(shape) - 1, 0)))
    text, function = kinds.alone[name](draw, shape, dim)
    return f"{name}({i}{text})", lambda values: function(values[i])


def _reshape(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    sizes = list(shape)
    if len(sizes) > 1 and draw(st.booleans()):
        dim = min(dim, len(sizes) - 2)
        sizes[dim : dim + 2] = [sizes[dim] * sizes[dim + 1]]
    else:
        outer = draw(st.sampled_from([d for d in range(1, 13) if shape[dim] % d == 0]))
        sizes[dim : dim + 1] = [outer, shape[dim] // outer]
    return f", {tuple(sizes)}", lambda x: lax.reshape(x, tuple(sizes))


def _along(function: Any) -> Any:
    return lambda draw, shape, dim: (f", {dim}", lambda x: function(x, axis=dim))


def _slice(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    start = draw(st.integers(0, shape[dim] - 1))
    stop = draw(st.integers(start + 1, shape[dim]))
    return f", {dim}, {start}:{stop}", lambda x: lax.slice_in_dim(
        x, start, stop, axis=dim
    )


def _dynamic_slice(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    size = draw(st.integers(1, shape[dim]))

    def function(x: Any) -> Any:
        start = lax.reshape(x, (x.size,))[0].astype(np.int32)
        return lax.dynamic_slice_in_dim(x, start, size, axis=dim)

    return f", {dim}, {size}", function


def _dynamic_update(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    def function(x: Any) -> Any:
        update = lax.slice_in_dim(x, 0, 1, axis=dim)
        update = lax.bitwise_or(update, _of(x, 7))
        return lax.dynamic_update_slice_in_dim(x, update, shape[dim] - 1, axis=dim)

    return f", {dim}", function


def _pad(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    config = [(0, 0, 0)] * len(shape)
    config[dim] = (draw(st.integers(0, 2)), draw(st.integers(0, 2)), 0)
    return f", {config}", lambda x: lax.pad(x, np.array(5, x.dtype), config)


def _transpose(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    order = draw(st.permutations(range(len(shape))))
    return f", {order}", lambda x: lax.transpose(x, order)


def _broadcast(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    size = draw(st.integers(1, 4))
    return f", {size}", lambda x: jnp.broadcast_to(x, (size, *shape))


def _solve(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    """By a matrix that turns rows, which is exact."""
    turned = np.roll(np.eye(shape[max(0, len(shape) - 2)], dtype=np.float32), 1, 0)
    return "", lambda x: jnp.linalg.solve(turned, x)


def _iota(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    return f", {dim}", lambda x: x + lax.broadcasted_iota(x.dtype, shape, dim)


_ALONE: dict[str, Callable[[Any, tuple[int, ...], int], Any]] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "expand_dims": lambda draw, shape, dim: ("", lambda x: lax.expand_dims(x, [dim])),
    "squeeze": lambda draw, shape, dim: ("", jnp.squeeze),
    "concatenate": lambda draw, shape, dim: (
        f", {dim}",
        lambda x: lax.concatenate([x, x], dim),
    ),
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "rev": lambda draw, shape, dim: (f", {dim}", lambda x: lax.rev(x, [dim])),
    "iota": _iota,
    **LOOKUPS,
    **UPDATES,
    "reduce_sum": _along(lambda x, axis: jnp.sum(x, axis, dtype=x.dtype)),
    "reduce_max": _along(jnp.max),
    "reduce_min": _along(jnp.min),
    "reduce_prod": _along(lambda x, axis: jnp.prod(x, axis, dtype=x.dtype)),
    "reduce_and": _along(lambda x, axis: jnp.all(x > 0, axis).astype(x.dtype)),
    "reduce_or": _along(lambda x, axis: jnp.any(x > 0, axis).astype(x.dtype)),
    "argmax": _along(lambda x, axis: lax.argmax(x, axis, jnp.int32).astype(x.dtype)),
    "argmin": _along(lambda x, axis: lax.argmin(x, axis, jnp.int32).astype(x.dtype)),
    "cumsum": _along(lax.cumsum),
    "cummax": _along(lax.cummax),
    "sort": _along(lambda x, axis: lax.sort(x, dimension=axis)),
    "top_k": lambda draw, shape, dim: ("", lambda x: lax.top_k(x, 1)[0]),
    "while": lambda draw, shape, dim: (
        "",
        lambda x: lax.fori_loop(0, 2, lambda i, y: y + x, x),
    ),
}


_OF_NOTHING = (
    "transpose broadcast_in_dim expand_dims concatenate pad rev iota reduce_sum "
    "reduce_prod cumsum sort while"
).split()
"""What a value without elements has as well."""


WHOLE = Kinds(np.int32, _ELEMENTWISE, _ALONE)
"""All that works on integers."""

INT8 = dataclasses.replace(WHOLE, dtype=np.int8)
"""All of it on narrow ones, whose sums and products wrap round."""

UINT8 = Kinds(np.uint8, {n: f for n, f in _ELEMENTWISE.items() if n != "abs"}, _ALONE)
"""All that unsigned ones have."""

_RING = "add sub mul neg copy serial optimization_barrier"

_ARRANGING = (
    "reshape transpose broadcast_in_dim expand_dims squeeze concatenate slice rev"
)

INT4 = Kinds(
    jnp.int4,
    {name: _ELEMENTWISE[name] for name in _RING.split()},
    {name: _ALONE[name] for name in f"{_ARRANGING} reduce_sum".split()},
    mapped=False,
    branches=False,
)
"""Where it does not matter when numbers wrap round, which XLA:CPU does late."""

_LOGICAL = "and or xor not max min select_n copy serial"

BOOLEANS = Kinds(
    np.bool_,
    {name: _ELEMENTWISE[name] for name in _LOGICAL.split()},
    {
        name: _ALONE[name]
        for name in f"{_ARRANGING} pad reduce_max reduce_min argmax gather sort".split()
    },
    mapped=False,
)
"""What works on booleans."""


# --- Rules of the user's ------------------------------------------------------------ #

# None is the true derivative, so that one that is lost shows.


@jax.custom_jvp
def _square(x: Any) -> Any:
    return x * x


@_square.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return _square(*primals), np.float32(3) * primals[0] * tangents[0]


@jax.custom_jvp
def _product(x: Any, y: Any) -> Any:
    return jax.jit(lambda a, b: a * b)(x, y)


# By one operand alone, and of what the function gives.
_product.defjvps(lambda t, result, x, y: t * (result + np.float32(1)), None)


@jax.custom_jvp
def _scaled(x: Any, y: Any) -> Any:
    return x * y


@functools.partial(_scaled.defjvp, symbolic_zeros=True)
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    """Told which tangents are zeros, whatever the numbers: those are left out."""
    result = _scaled(*primals)
    moving = [
        tangent * (primal + np.float32(1))
        for tangent, primal in zip(tangents, primals[::-1], strict=True)
        if not isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    ]
    return result, sum(moving, start=jnp.zeros_like(result))


@jax.custom_vjp
def _of_the_first(x: Any, y: Any) -> Any:
    return x - y


# None is a cotangent of zeros.
_of_the_first.defvjp(
    lambda x, y: (_of_the_first(x, y), y), lambda y, ct: (ct * (y + ct), None)
)


@jax.custom_vjp
def _absolute(x: Any) -> Any:
    return lax.abs(x)


_absolute.defvjp(
    lambda x: (_absolute(x), _square(x)), lambda square, ct: (ct * (square - ct),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _power(exponent: int, x: Any) -> Any:
    return lax.integer_pow(x, exponent)


_power.defvjp(
    lambda exponent, x: (_power(exponent, x), x), lambda exponent, x, ct: (x + ct,)
)

FORWARD_RULES: dict[str, Callable[[Any, Any], Any]] = {
    "custom_jvp": lambda x, y: _square(x) * y,
    "custom_jvp of two": _product,
    "custom_jvp told of zeros": lambda x, y: _scaled(x, lax.stop_gradient(y)) + y,
    "relu": lambda x, y: jax.nn.relu(x) - y,
    "relu6": lambda x, y: jax.nn.relu6(x) + y,
}

REVERSE_RULES: dict[str, Callable[[Any, Any], Any]] = {
    "custom_vjp": lambda x, y: _absolute(x) * y,
    "custom_vjp with a number": lambda x, y: _power(2, x) + y,
    "custom_vjp of the first": _of_the_first,
}

# --- What has a gradient ------------------------------------------------------------ #

_DIFFERENTIABLE = (
    "add sub mul neg max min select_n integer_pow copy jit remat2 serial "
    "optimization_barrier"
)

_REARRANGING = (
    "reshape transpose broadcast_in_dim expand_dims squeeze concatenate pad slice rev "
    "gather while reduce_sum reduce_max cumsum"
)

SMOOTH = Kinds(
    np.float32,
    {
        **{name: _ELEMENTWISE[name] for name in _DIFFERENTIABLE.split()},
        "max with 0": lambda x, y: jnp.maximum(x, 0),
        "clamp": lambda x, y: lax.clamp(np.float32(-2), x, np.float32(2)),
        "stop_gradient": lambda x, y: lax.stop_gradient(x) + y,
        **FORWARD_RULES,
        **REVERSE_RULES,
    },
    {**{name: _ALONE[name] for name in _REARRANGING.split()}, "solve": _solve},
)
"""What has a gradient, and keeps whole numbers, or halves of them, in floats."""

_SIGNED = "add sub mul neg select_n copy jit"

ZEROS = Kinds(
    np.float32,
    {name: _ELEMENTWISE[name] for name in _SIGNED.split()},
    {
        **{name: _ALONE[name] for name in _ARRANGING.split()},
        **{name: _ALONE[name] for name in ("reduce_sum", "cumsum", "pad")},
        **LOOKUPS,
        **UPDATES,
    },
)
"""Where the sign of a zero is JAX's own, in floats."""


def contraction(
    draw: Any, shapes: Sequence[tuple[int, ...]], kinds: Kinds
) -> tuple[str, Step]:
    """A dot_general over dims of equal size, with batch dims where they are too."""
    ranked = [i for i, shape in enumerate(shapes) if shape]
    if not ranked:
        return elementwise(draw, shapes, kinds)
    i = draw(st.sampled_from(ranked))
    dim = draw(st.integers(0, len(shapes[i]) - 1))
    fitting = [
        (j, other)
        for j in ranked
        for other, size in enumerate(shapes[j])
        if size == shapes[i][dim] and len(shapes[i]) + len(shapes[j]) <= 5
    ]
    if not fitting:
        return elementwise(draw, shapes, kinds)
    j, other = draw(st.sampled_from(fitting))
    if draw(st.booleans()) and dim == other == 0 and len(shapes[i]) == 1:
        dims = (((), ()), ((dim,), (other,)))
    else:
        dims = (((dim,), (other,)), ((), ()))
    return f"dot_general({i}, {j}, {dims})", lambda v: lax.dot_general(v[i], v[j], dims)
