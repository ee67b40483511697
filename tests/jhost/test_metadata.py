"""Scopes and XLA metadata that a user sets reach XLA, as they do from `jax.jit`."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P

import jhost
from jhost.testing import mesh_of

X = np.ones((8, 8), np.float32)


def tagged(x: jax.Array) -> jax.Array:
    with set_xla_metadata(_scheduling_group_id="7", tag="mine"):
        return jnp.sin(x @ x)


def product(x: jax.Array) -> Any:
    return set_xla_metadata(x @ x, tag="value")


def scoped(x: jax.Array) -> jax.Array:
    with jax.named_scope("inner"):
        return x @ x


def scan(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0]


def loop(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, scoped, x)


def branch(x: jax.Array) -> jax.Array:
    return jax.lax.cond(jnp.sum(x) > 0, scoped, lambda x: x + 1, x)


def gradient(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return jax.grad(lambda x: jnp.sum(f(x)))


def in_scope(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """As the function, in a scope that is set around what JAX traces once."""

    def scoped(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return f(x)

    return scoped


JITS: dict[str, Any] = {
    "one device": jhost.jit,
    "four devices": jhost.jit(mesh=mesh_of({"tp": 4}), in_shardings=P("tp")),
}


def tags(f: Any) -> dict[str, int]:
    """How often each attribute is in what is lowered."""
    text = f.lower(X).as_text()
    return collections.Counter(re.findall(r"\b(tag|_scheduling_group_id) = ", text))


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize(
    "f",
    [tagged, product, scan(tagged), scan(product), gradient(tagged), in_scope(tagged)],
    ids=range(6),
)
def test_metadata_is_on_what_it_was_set_for(f: Any, jit: str) -> None:
    assert tags(JITS[jit](f)) == tags(jax.jit(f))


def test_each_chunk_has_the_metadata() -> None:
    f = JITS["four devices"](lambda x: jhost.stream(tagged(x), axis=0, chunks=2))
    f = f.with_options(pipeline="collective")
    assert tags(f) == {name: 2 * count for name, count in tags(jax.jit(tagged)).items()}


def scopes(f: Any) -> set[tuple[str, ...]]:
    """The user's scopes that each matmul is in."""
    names = re.findall(
        r'op_name="([^"]*dot_general[^"]*)"', f.lower(X).compile().as_text()
    )
    assert names
    return {tuple(re.findall(r"outer|inner", name)) for name in names}


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize(
    ("f", "derived"),
    [
        (f, derived)
        for f in (scoped, jax.jit(scoped), scan(scoped), loop, branch)
        for derived in (lambda f: f, gradient)
        if (f, derived) != (loop, gradient)  # JAX has none
    ],
    ids=range(9),
)
def test_matmuls_are_in_the_scopes_around_them(f: Any, derived: Any, jit: str) -> None:
    f = derived(in_scope(f))
    assert scopes(JITS[jit](f)) == scopes(jax.jit(f)) == {("outer", "inner")}
