"""Every transform of JAX works on a jhost function, and its result has a stream too.

Each is compared with the plain function's: on one device and over a mesh, compiled and
interpreted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost._call.execute import interpreting
from jhost.testing import assert_close

MakeMesh: TypeAlias = Callable[[Sequence[int], Sequence[str]], Mesh]
Array: TypeAlias = jax.Array
Function: TypeAlias = Callable[..., Any]

SPECS = (P("tp"), P(None, "tp"), P("tp"))


def plain(x: Array, up: Array, down: Array) -> Array:
    return jnp.tanh(x @ up) @ down


def marked(x: Array, up: Array, down: Array) -> Array:
    return jhost.stream(jnp.tanh(x @ up) @ down, axis=0, chunks=2)


@pytest.fixture(params=["one device", "mesh", "mesh, interpreted"])
def compiled(request: pytest.FixtureRequest, make_mesh: MakeMesh) -> Iterator[Function]:
    """`marked`, compiled in several ways."""
    if request.param == "one device":
        yield jhost.jit(marked)
        return
    mesh = make_mesh((4,), ("tp",))
    f = jhost.jit(marked, mesh=mesh, in_shardings=SPECS, out_shardings=P("tp"))
    with interpreting() if "interpreted" in request.param else nullcontext():
        yield f


def arguments(seed: int = 0) -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (8, 8), (8, 16), (16, 8)
    x, up, down = (
        jax.random.normal(key, shape) / 2
        for key, shape in zip(keys, shapes, strict=True)
    )
    return x, up, down


def assert_same(transform: Callable[[Function], Any], compiled: Function) -> None:
    """`transform` gives the same with the compiled function as with the plain one."""
    wanted = jax.jit(lambda: transform(plain))()  # one program to compile
    assert_close(transform(compiled), wanted, tolerance=1e-5)


def loss(f: Callable[..., Array], *args: Array) -> Array:
    return jnp.sum(f(*args) ** 2)


def test_the_function_itself(compiled: Function) -> None:
    assert_same(lambda f: f(*arguments()), compiled)
    assert_same(lambda f: jax.jit(f)(*arguments()), compiled)


def test_jvp(compiled: Function) -> None:
    assert_same(lambda f: jax.jvp(f, arguments(), arguments(1)), compiled)


def test_linearize(compiled: Function) -> None:
    def transform(f: Function) -> Any:
        value, tangent = jax.linearize(f, *arguments())
        return value, tangent(*arguments(1))

    assert_same(transform, compiled)


def test_grad_by_every_argument(compiled: Function) -> None:
    def transform(f: Function) -> Any:
        grad = jax.value_and_grad(functools.partial(loss, f), argnums=(0, 1, 2))
        return grad(*arguments()), jax.jit(grad)(*arguments())

    assert_same(transform, compiled)


def test_grad_by_one_argument(compiled: Function) -> None:
    for number in range(3):
        assert_same(
            lambda f, n=number: jax.grad(functools.partial(loss, f), n)(*arguments()),
            compiled,
        )


def test_vmap(compiled: Function) -> None:
    x, up, down = arguments()
    rows, weights = jnp.stack([x, -x, x + 1]), jnp.stack([up, 2 * up, up - 1], axis=1)
    assert_same(lambda f: jax.vmap(f, (0, 1, None))(rows, weights, down), compiled)
    assert_same(
        lambda f: jax.jit(jax.vmap(f, (1, None, None), 2))(
            rows.swapaxes(0, 1), up, down
        ),
        compiled,
    )


def test_grad_of_vmap_and_vmap_of_grad(compiled: Function) -> None:
    x, up, down = arguments()
    rows = jnp.stack([x, -x])
    assert_same(
        lambda f: jax.grad(
            lambda up: jnp.sum(jax.vmap(f, (0, None, None))(rows, up, down) ** 2)
        )(up),
        compiled,
    )
    assert_same(
        lambda f: jax.vmap(jax.grad(functools.partial(loss, f)), (0, None, None))(
            rows, up, down
        ),
        compiled,
    )


def test_checkpoint(compiled: Function) -> None:
    def transform(f: Function) -> Any:
        return [
            jax.grad(functools.partial(loss, remat), (0, 1))(*arguments())
            for remat in (
                jax.checkpoint(f),
                jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
            )
        ]

    assert_same(transform, compiled)


def test_scan_over_layers_and_its_gradient(compiled: Function) -> None:
    def transform(f: Function) -> Any:
        layers = [arguments(seed)[1:] for seed in range(3)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

        def model(x: Array, weights: Any) -> Array:
            def layer(x: Array, weights: tuple[Array, Array]) -> tuple[Array, None]:
                return x + f(x, *weights), None

            return jax.lax.scan(layer, x, weights)[0]

        value = model(arguments()[0], stacked)
        grad = jax.grad(lambda x, weights: jnp.sum(model(x, weights) ** 2), (0, 1))
        return value, grad(arguments()[0], stacked)

    assert_same(transform, compiled)


def test_second_derivatives(compiled: Function) -> None:
    def transform(f: Function) -> Any:
        of_x = jax.grad(functools.partial(loss, f))
        _, tangent = jax.jvp(of_x, arguments(), arguments(1))  # forward over reverse
        of_square = jax.grad(lambda *args: jnp.sum(of_x(*args) ** 2))
        return tangent, of_square(*arguments())  # reverse over reverse

    assert_same(transform, compiled)


def test_a_hessian(compiled: Function) -> None:
    x, up, down = arguments()

    def transform(f: Function) -> Any:
        def scalar(scale: Array) -> Array:
            return jnp.sum(f(x, up * scale, down) ** 2)

        return jax.hessian(scalar)(jnp.float32(0.5))

    assert_same(transform, compiled)


# --- Derived programs are pipelined ------------------------------------------------ #


def gathers(f: Function, *args: Array) -> int:
    return jax.jit(f).lower(*args).as_text().count("stablehlo.all_gather")


@pytest.fixture
def block(make_mesh: MakeMesh) -> Callable[[int], Function]:
    """`block(chunks)`: `marked` over a mesh, in that many chunks."""

    def make(chunks: int) -> Callable[..., Array]:
        return jhost.jit(
            lambda x, up, down: jhost.stream(plain(x, up, down), axis=0),
            mesh=make_mesh((4,), ("tp",)),
            in_shardings=SPECS,
            out_shardings=P("tp"),
            chunks=chunks,
            pipeline="collective",
        )

    return make


@pytest.mark.usefixtures("uncombined")
def test_a_tangent_program_communicates_in_chunks(block: Any) -> None:
    def jvp(f: Function) -> Function:
        return lambda x: jax.jvp(lambda x: f(x, *arguments()[1:]), (x,), (x,))

    x = arguments()[0]
    assert gathers(jvp(block(1)), x) == 2  # x, and its tangent
    assert gathers(jvp(block(2)), x) == 4


@pytest.mark.usefixtures("uncombined")
def test_a_backward_program_communicates_in_chunks(block: Any) -> None:
    def grad(f: Function) -> Function:
        return jax.grad(functools.partial(loss, f), (0, 1, 2))

    whole = gathers(grad(block(1)), *arguments())
    assert whole >= 2  # x forward, and the cotangent of the result
    assert gathers(grad(block(2)), *arguments()) == 2 * whole


def test_a_batched_program_communicates_in_chunks(block: Any) -> None:
    x, up, down = arguments()
    rows = jnp.stack([x, x])
    for chunks in (1, 2):
        batched = jax.vmap(block(chunks), (0, None, None))
        assert gathers(batched, rows, up, down) == chunks


@pytest.mark.usefixtures("uncombined")
def test_a_checkpointed_program_communicates_in_chunks(block: Any) -> None:
    def grad(f: Function) -> Function:
        return jax.grad(functools.partial(loss, jax.checkpoint(f)), (0, 1, 2))

    whole = gathers(grad(block(1)), *arguments())
    assert gathers(grad(block(2)), *arguments()) == 2 * whole
