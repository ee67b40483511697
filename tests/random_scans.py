"""Random scans of layers whose weights are sharded, which hypothesis draws for tests.

A body multiplies by slices of weights, and by a weight that all iterations share.
Beside that it carries values of any dtype, and has control flow and other scans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jhost
from tests.lowering.hand_built import mesh_of

Function: TypeAlias = Callable[..., Any]
Layer: TypeAlias = Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]

WIDTH = 4

SPECS: Mapping[str, Sequence[P]] = {
    "up": (P(None, "d"), P(None, None, "d"), P("d"), P()),
    "down": (P(None, None, "d"), P(None, "d"), P()),
    "shared": (P("d"), P(None, "d"), P()),
    "gain": (P(None, "d"), P()),
}
"""How a weight may lie on the devices, by its name."""

SLICED = ("up", "down", "gain")

# --- Steps of a body ---------------------------------------------------------------- #


def _small(x: jax.Array) -> jax.Array:
    """Within -2 and 2, with a derivative of 0 or 1."""
    least, most = np.array(-2).astype(x.dtype), np.array(2).astype(x.dtype)
    return lax.clamp(least, x, most)


def _one(x: jax.Array) -> jax.Array:
    return jnp.ones((), x.dtype)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(
        x,
        w.astype(x.dtype),
        (((x.ndim - 1,), (0,)), ((), ())),
        preferred_element_type=x.dtype,
    )


def _by_branch(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    return lax.cond(
        _any(x),
        lambda: _small(_product(x, w["up"])),
        lambda: x - w["gain"].astype(x.dtype),
    )


def _by_switch(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    """One of three branches, of which two multiply by different weights."""
    branches = (
        lambda: _small(_product(x, w["up"])),
        lambda: _small(_product(x, w["down"])),
        lambda: -x,
    )
    return lax.switch(jnp.sum(lax.stop_gradient(x) > 0) % 3, branches)


def _any(x: jax.Array) -> jax.Array:
    return jnp.sum(lax.stop_gradient(x) > 0) % 2 == 0


def _by_scan(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    """Three times, as if they were layers of their own."""
    three = jnp.stack([w["up"], -w["up"], w["up"] + _one(w["up"])])
    return lax.scan(lambda x, w: (_small(_product(x, w)), None), x, three)[0]


def _by_shared_scan(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    """All layers' weights in each layer."""
    return lax.scan(lambda x, w: (_small(_product(x, w)), None), x, w["every"])[0]


def _by_count(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    """By the layer of this iteration, as a `fori_loop` finds it."""
    if not len(w["every"]):
        return x
    return _small(_product(x, w["every"][w["count"]]))


def _by_fori(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    return lax.fori_loop(0, 2, lambda _, x: _small(_product(x, w["shared"])), x)


def _by_while(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    def body(state: Any) -> Any:
        count, x = state
        return count + 1, _small(_product(x, w["down"]))

    last = jnp.sum(x > 0) % 3
    return lax.while_loop(lambda state: state[0] < last, body, (0, x))[1]


@jax.custom_vjp
def _with_vjp(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product whose gradients are those of the negative, and nothing's tangent."""
    return _small(_product(x, w))


def _pulled(kept: Any, cotangent: jax.Array) -> Any:
    return jax.vjp(lambda x, w: _small(_product(x, w)), *kept)[1](-cotangent)


_with_vjp.defvjp(lambda x, w: (_with_vjp(x, w), (x, w)), _pulled)


@jax.custom_jvp
def _with_jvp(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product whose tangents are those of the negative."""
    return _small(_product(x, w))


@_with_jvp.defjvp
def _pushed(at: Any, tangents: Any) -> Any:
    value, tangent = jax.jvp(lambda x, w: _small(_product(x, w)), at, tangents)
    return value, -tangent


def _by_checkpointed_branch(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    again = jax.checkpoint(lambda x, u: _small(_product(x, u)))
    return lax.cond(_any(x), lambda: again(x, w["down"]), lambda: again(-x, w["up"]))


def _behind_a_barrier(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    x, up = lax.optimization_barrier((x, w["up"]))
    return _small(_product(x, up))


def _normed(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    return _small(x - jnp.sum(x, -1, keepdims=True, dtype=x.dtype)) * w["gain"].astype(
        x.dtype
    )


STEPS: Mapping[str, Layer] = {
    "up": lambda x, w: _small(_product(x, w["up"])),
    "down": lambda x, w: x + _small(_product(x, w["down"])),
    "both": lambda x, w: _small(_product(_small(_product(x, w["up"])), w["down"])),
    "named": lambda x, w: _small(checkpoint_name(_product(x, w["up"]), "h")),
    "transposed": lambda x, w: _small(_product(x, w["up"].T)),
    "shared": lambda x, w: _small(_product(x, w["shared"])),
    "made": lambda x, w: _small(_product(x, w["up"] + _one(w["up"]))),
    "gain": lambda x, w: x * w["gain"].astype(x.dtype),
    "norm": _normed,
    "cond": _by_branch,
    "switch": _by_switch,
    "scan": _by_scan,
    "every": _by_shared_scan,
    "count": _by_count,
    "fori": _by_fori,
    "while": _by_while,
    "serial": lambda x, w: jhost.serial(x),
    "checkpoint": lambda x, w: jax.checkpoint(lambda x, u: _small(_product(x, u)))(
        x, w["down"]
    ),
    "checkpoint in cond": _by_checkpointed_branch,
    "barrier": _behind_a_barrier,
    "vjp": lambda x, w: _with_vjp(x, w["up"]),
    "jvp": lambda x, w: _with_jvp(x, w["down"]),
    "weights": lambda x, w: x + jnp.sum(w["up"], dtype=w["up"].dtype).astype(x.dtype),
}

_WITH_GRADIENT = tuple(name for name in STEPS if name != "while")
_WITH_TANGENT = tuple(name for name in _WITH_GRADIENT if name != "vjp")

_POLICIES = jax.checkpoint_policies

POLICIES: Mapping[str, Any] = {
    "nothing": None,
    "everything": _POLICIES.everything_saveable,
    "dots": _POLICIES.dots_saveable,
    "dots without batch dims": _POLICIES.dots_with_no_batch_dims_saveable,
    "names": _POLICIES.save_only_these_names("h"),
    "all but names": _POLICIES.save_anything_except_these_names("h"),
    "any but names": _POLICIES.save_any_names_but_these("h"),
    "either": _POLICIES.save_from_both_policies(
        _POLICIES.save_only_these_names("h"), _POLICIES.dots_saveable
    ),
    "offload": _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "offload dots": _POLICIES.offload_dot_with_no_batch_dims(
        offload_src="device", offload_dst="pinned_host"
    ),
}

# --- Values that are carried besides ------------------------------------------------ #

CARRIED = (
    "int2 uint2 int4 uint4 int8 uint8 int16 uint16 int32 uint32 bool float4_e2m1fn "
    "float8_e4m3fn float8_e5m2 float8_e8m0fnu float16 bfloat16 float32 complex64"
).split()

NARROWEST = "int2 uint2 int4 uint4 float4_e2m1fn float8_e8m0fnu".split()
"""Those that have no arithmetic of their own."""


def _wide_of(dtype: Any) -> Any:
    return np.float32 if jnp.issubdtype(dtype, jnp.floating) else np.int32


def moved_on(value: jax.Array, x: jax.Array) -> jax.Array:
    """The next value of one that is carried, by what is computed meanwhile."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.split(value, 1)[0]
    if value.dtype == np.bool_:
        return value ^ _any(x)
    count = jnp.sum(lax.stop_gradient(x) > 0).astype(np.int32) % 2
    more = count.astype(value.dtype)
    if value.dtype in map(np.dtype, NARROWEST):
        wide = value.astype(_wide_of(value.dtype))
        return (wide * (count + 1).astype(wide.dtype)).astype(value.dtype)
    return (value * more + more).astype(value.dtype) - value


# --- Cases -------------------------------------------------------------------------- #


@dataclasses.dataclass(frozen=True)
class ScanCase:
    """A scan, what is taken of it, and where its operands are."""

    devices: int
    length: int
    dtype: str
    of_weights: str
    steps: tuple[str, ...]
    extra: str
    """The dtype of another value that is carried, "key" or none."""
    stacks: tuple[str, ...]
    reverse: bool
    unroll: int
    counted: bool
    """Whether a `fori_loop` reads the layers by its count, and stacks nothing."""
    policy: str
    """By which the body is computed again, or none."""
    prevents_cse: bool
    around: str
    taken: str
    outside: bool
    """Whether what is taken is taken of the jhost function."""
    specs: tuple[tuple[str, P], ...]
    rows: P
    batch: int
    """The number of rows: with few of them these move, and not the weights."""
    donated: bool

    def count(self) -> None:
        """Tells hypothesis's statistics of what kind the case is."""
        kinds = (self.taken, self.around, f"checkpoint {self.policy}", self.extra)
        for kind in (*kinds, f"length {self.length}", *self.steps):
            hypothesis.event(kind)

    def layers(self, x: jax.Array, weights: Mapping[str, jax.Array]) -> Any:
        """The scan, with all that it gives."""
        sliced = {name: weights[name] for name in SLICED}
        weights = {**weights, "every": weights["up"]}

        def body(carry: Any, w: Any) -> Any:
            x, extra, count = carry
            more = {name: weights[name] for name in ("shared", "every")}
            w = {**w, **more, "count": count}
            given = x
            for name in self.steps:
                x = STEPS[name](x, w)
            extra = moved_on(extra, x)
            kept = {
                "sum": jnp.sum(x, 1, dtype=x.dtype),
                "rows": x,
                "given": given,
                "gain": w["gain"],
                "up": w["up"],
                "extra": extra,
            }
            stacked = {name: kept[name] for name in self.stacks}
            return (x, extra, count + np.int32(1)), stacked

        if self.policy:
            body = jax.checkpoint(
                body, policy=POLICIES[self.policy], prevent_cse=self.prevents_cse
            )
        first = x, self.first_extra(), jnp.zeros((), np.int32)
        if self.counted:

            def numbered(n: jax.Array, carry: Any) -> Any:
                return body(carry, {name: w[n] for name, w in sliced.items()})[0]

            x, extra, _ = lax.fori_loop(
                0, self.length, numbered, first, unroll=self.unroll
            )
            return x, extra, {}
        (x, extra, _), ys = lax.scan(
            body, first, sliced, self.length, self.reverse, self.unroll
        )
        return x, extra, ys

    def first_extra(self) -> Any:
        if self.extra == "key":
            return jax.random.key(3)
        return jnp.ones((2,) if self.extra else (), self.extra or "int32")

    def function(self, x: jax.Array, weights: Mapping[str, jax.Array]) -> Any:
        return _readable(_AROUND[self.around](self.layers, x, weights))

    def loss(self, x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
        return sum(
            (
                jnp.sum(leaf * _weights_of(leaf)).astype(np.float32)
                for leaf in jax.tree.leaves(self.function(x, weights))
                if leaf.dtype in (np.float32, jnp.bfloat16, np.float16)
            ),
            start=jnp.zeros((), np.float32),
        )

    def by(self, jit: Callable[[Function], Function]) -> Function:
        """What is taken of the function, compiled by `jit` inside of that or around."""
        take = _TAKEN[self.taken]
        if self.taken == "forward":
            return jit(self.function)
        if self.outside:
            return take(jit(self.loss))
        return jit(take(self.loss))

    def arguments(self) -> tuple[Any, Any]:
        random = np.random.default_rng(0)

        def numbers(dtype: str, *shape: int) -> np.ndarray:
            return random.integers(-1, 2, shape).astype(np.int8).astype(dtype)

        square = (WIDTH, WIDTH)
        weights = {
            "up": numbers(self.of_weights, self.length, *square),
            "down": numbers(self.of_weights, self.length, *square),
            "gain": numbers(self.of_weights, self.length, WIDTH),
            "shared": numbers(self.of_weights, *square),
        }
        batches = (2,) * (self.around in ("microbatches", "vmap"))
        return numbers(self.dtype, *batches, self.batch, WIDTH), weights

    @property
    def exact(self) -> float:
        """Up to here the narrower dtype has whole numbers, and sums of them."""
        narrow = {"bfloat16": 2.0**7, "float16": 2.0**10}
        return min(narrow.get(name, 2.0**20) for name in (self.dtype, self.of_weights))

    def settings(self) -> dict[str, Any]:
        rows = (
            P(None, *self.rows)
            if self.around in ("microbatches", "vmap")
            else self.rows
        )
        return {
            "mesh": mesh_of(d=self.devices),
            "in_shardings": (rows, dict(self.specs)),
            "compiler_options": {"xla_backend_optimization_level": 0},
            **({"donate_argnums": 0} if self.donated else {}),
        }


def _weights_of(leaf: jax.Array) -> jax.Array:
    count = lax.iota(np.int32, leaf.size) % 3 - 1
    return count.reshape(leaf.shape).astype(leaf.dtype)


def _readable(tree: Any) -> Any:
    """Keys as numbers."""
    return jax.tree.map(
        lambda leaf: (
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        ),
        tree,
    )


# --- What stands around, and what is taken ------------------------------------------ #


def _microbatches(layers: Function, x: jax.Array, weights: Any) -> Any:
    def one(total: jax.Array, x: jax.Array) -> Any:
        y, extra, ys = layers(x, weights)
        return _small(total + y), (extra, ys)

    return lax.scan(one, jnp.zeros_like(x[0]), x)


def _twice(layers: Function, x: jax.Array, weights: Any) -> Any:
    first = layers(x, weights)
    return first, layers(_small(_product(first[0], weights["shared"])), weights)


def _in_a_branch(layers: Function, x: jax.Array, weights: Any) -> Any:
    given = jax.eval_shape(layers, x, weights)
    no = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), given)  # noqa: E731
    return lax.cond(_any(x), no, lambda: layers(x, weights))


def _in_a_while(layers: Function, x: jax.Array, weights: Any) -> Any:
    def again(state: Any) -> Any:
        count, x = state
        return count + 1, layers(x, weights)[0]

    return lax.while_loop(lambda state: state[0] < 2, again, (0, x))[1]


_AROUND: Mapping[str, Callable[[Function, Any, Any], Any]] = {
    "": lambda layers, x, weights: layers(x, weights),
    "microbatches": _microbatches,
    "twice": _twice,
    "cond": _in_a_branch,
    "while": _in_a_while,
    "vmap": lambda layers, x, weights: jax.vmap(lambda x: layers(x, weights))(x),
    "vmap of weights": lambda layers, x, weights: jax.vmap(layers, in_axes=(None, 0))(
        x, jax.tree.map(lambda w: jnp.stack([w, -w]), weights)
    ),
    "checkpoint": lambda layers, x, weights: jax.checkpoint(layers)(x, weights),
}


def _gradient(f: Function) -> Function:
    return jax.grad(f, (0, 1))


def _tangent(f: Function) -> Function:
    def taken(x: Any, weights: Any) -> Any:
        ones = jax.tree.map(lambda a: _weights_of(jnp.asarray(a)), (x, weights))
        return jax.jvp(f, (x, weights), ones)

    return taken


def _batched(f: Function) -> Function:
    def taken(x: Any, weights: Any) -> Any:
        return jax.vmap(_gradient(f), (0, None))(jnp.stack([x, -x]), weights)

    return taken


def _squares(f: Function) -> Function:
    def taken(x: Any, weights: Any) -> Any:
        gradients = jax.tree.leaves(jax.grad(f, (0, 1))(x, weights))
        return sum(
            jnp.sum(_small(g) * _weights_of(g)).astype(np.float32) for g in gradients
        )

    return taken


_TAKEN: Mapping[str, Callable[[Function], Function]] = {
    "forward": lambda f: f,
    "gradient": _gradient,
    "tangent": _tangent,
    "gradient of gradient": lambda f: _gradient(_squares(f)),
    "tangent of gradient": lambda f: _tangent(_squares(f)),
    "gradient of tangent": lambda f: _gradient(lambda *args: _tangent(f)(*args)[1]),
    "batched gradients": _batched,
    "value and gradient": lambda f: jax.value_and_grad(f, 1),
}

_LENGTHS = (3, 4, 2, 5, 1, 0)


@st.composite
def scans(draw: st.DrawFn, taken: Sequence[str] = tuple(_TAKEN)) -> ScanCase:
    """Cases of which any of `taken` is taken."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    of_case = one(*taken)
    forward = of_case == "forward"
    floats = ("float32", "float32", "bfloat16", "float16")
    dtype = one(*floats, *(("int32", "int8", "uint32") if forward else ()))
    length = one(*_LENGTHS)
    pushed = "tangent" in of_case
    steps = sorted(STEPS if forward else _WITH_TANGENT if pushed else _WITH_GRADIENT)
    least = draw(
        st.lists(st.sampled_from(["up", "down", "both"]), min_size=1, max_size=1)
    )
    more = draw(st.lists(st.sampled_from(steps), max_size=3))
    # JAX has no second derivative of what is offloaded.
    policies = [p for p in POLICIES if "of" not in of_case or "offload" not in p]
    around = [a for a in _AROUND if forward or a != "while"]
    chosen: dict[str, P] = {}
    devices = one(2, 2, 4)
    for name, specs in SPECS.items():
        fitting = [
            spec
            for spec in specs
            if not (spec and spec[0] and name in SLICED) or length % devices == 0
        ]
        chosen[name] = one(*fitting)
    # As over tp: what moves depends on the iteration before, so work moves to it.
    over_tp = devices == 2 and draw(st.booleans())
    if over_tp:
        chosen |= {"up": P(None, None, "d"), "down": P(None, "d")}
        least = ["both"]
    of_weights = dtype if dtype.startswith(("int", "uint")) else one(dtype, "float32")
    return ScanCase(
        devices=devices,
        length=length,
        dtype=dtype,
        of_weights=of_weights,
        steps=tuple(draw(st.permutations([*least, *more]))),
        extra=one("", "", "key", *CARRIED),
        stacks=tuple(
            draw(
                st.lists(
                    st.sampled_from(["sum", "rows", "given", "gain", "up", "extra"]),
                    max_size=2,
                    unique=True,
                )
            )
        ),
        reverse=one(False, True),
        unroll=one(1, 1, 2, 3) if length else 1,
        counted=bool(length) and one(False, False, True),
        policy=one("", "", *policies),
        prevents_cse=one(True, False),
        around=one("", "", *around),
        taken=of_case,
        outside=one(False, True),
        specs=tuple(chosen.items()),
        rows=P("d") if over_tp else one(P("d"), P("d"), P()),
        batch=2 if over_tp else 4,
        donated=one(False, False, True) and forward,
    )
