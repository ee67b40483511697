"""References (`jax.new_ref`): a function that changes one is compiled by `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import error_check  # noqa: TID251 - there is no public one yet
from jax.experimental import random
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jhost
from jhost import errors
from jhost.testing import assert_close
from tests.lowering.hand_built import mesh_of

Jit: TypeAlias = Callable[..., Any]

X: Any = np.arange(8, dtype=np.float32)

each_jit = pytest.mark.parametrize(
    "jit",
    [jhost.jit, lambda f: jhost.jit(f, mesh=mesh_of(tp=4))],
    ids=["no mesh", "mesh"],
)


def closed_over(jit: Jit) -> Any:
    ref = jax.new_ref(jnp.zeros(8))

    def add(x: jax.Array) -> jax.Array:
        ref[...] += x
        return x * 2

    f = jit(add)
    return f(X), f(X + 1), ref[...]


def given_in_a_tree(jit: Jit) -> Any:
    refs = {"sum": jax.new_ref(jnp.zeros(8)), "parts": [jax.new_ref(jnp.ones(4))]}

    @jit
    def add(refs: Any, x: jax.Array) -> None:
        refs["sum"][...] += x
        refs["parts"][0][1:3] *= x[5:7]

    add(refs, X)
    return jax.tree.map(lambda ref: ref[...], refs)


def made_inside(jit: Jit) -> Any:
    @jit
    def sine(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[...] = jnp.sin(ref[...])
        return jax.freeze(ref)

    gradient = jax.grad(lambda x: sine(x).sum())
    return sine(X), gradient(X), jax.vmap(sine)(np.stack([X, -X]))


def made_in_a_scan(x: jax.Array) -> jax.Array:
    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        double, ones = jax.new_ref(x), jax.new_ref(jnp.zeros(4))
        double[...] *= 2
        ones[...] += 1
        return jax.freeze(double) + ones[...].sum(), None

    return lax.scan(step, x, None, length=3)[0]


def made_in_a_body(jit: Jit) -> Any:
    f = jit(made_in_a_scan)
    gradient = jit(jax.grad(lambda x: made_in_a_scan(x).sum()))
    around = jax.grad(lambda x: f(x).sum())
    return f(X), gradient(X), around(X), jax.vmap(f)(np.stack([X, -X]))


def in_loops(jit: Jit) -> Any:
    ref = jax.new_ref(jnp.zeros(8))

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        ref[...] += x
        return x + 1, None

    inside = jit(lambda x: lax.scan(step, x, None, length=3)[0])
    around = jit(lambda x: step(x, None)[0])
    last, _ = lax.scan(lambda x, _: (around(x), None), inside(X), None, length=2)
    return last, ref[...]


def in_others(jit: Jit) -> Any:
    ref = jax.new_ref(jnp.zeros(8))

    @jit
    def add(there: Any, x: jax.Array) -> None:
        there[...] += x

    @jit
    def outer(x: jax.Array) -> jax.Array:
        own = jax.new_ref(x)
        add(own, x)
        add(ref, x)
        return own[...]

    return outer(X), jax.jit(lambda x: outer(x) + 1)(X), ref[...]


def drawn(jit: Jit) -> Any:
    generator = random.stateful_rng(0)
    noise = jit(lambda x: x + jax.random.normal(generator.key(), x.shape))
    given = jit(lambda g, x: x + jax.random.normal(g.key(), x.shape))
    return noise(X), noise(X), given(generator, X)


def reported(jit: Jit) -> Any:
    @jit
    def checked(x: jax.Array) -> jax.Array:
        error_check.set_error_if(x > 3, "too large")
        return x * 2

    results = [checked(X - 9)]
    error_check.raise_if_error()
    results.append(checked(X))
    with pytest.raises(error_check.JaxValueError, match="too large"):
        error_check.raise_if_error()
    return results


PROGRAMS = [
    closed_over,
    given_in_a_tree,
    made_inside,
    made_in_a_body,
    in_loops,
    in_others,
]


@each_jit
@pytest.mark.parametrize("program", [*PROGRAMS, drawn, reported])
def test_what_is_written_is_there(program: Callable[[Jit], Any], jit: Jit) -> None:
    with jax.numpy_dtype_promotion("standard"):
        assert_close(program(jit), program(jax.jit), tolerance=1e-6)


def test_a_reference_may_be_over_the_mesh() -> None:
    mesh = mesh_of(tp=4)
    rows = NamedSharding(mesh, P("tp"))
    ref = jax.new_ref(jax.device_put(jnp.zeros(8), rows))

    @jhost.jit(mesh=mesh, in_shardings=P("tp"), out_shardings=P())
    def add(x: jax.Array) -> jax.Array:
        ref[...] += x
        return x * 2

    y = add(X)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P()), 1)
    assert ref[...].sharding.is_equivalent_to(rows, 1)
    assert_close((y, ref[...]), (2 * X, X))


def test_a_reference_may_be_made_in_a_body_on_a_mesh_with_explicit_axes() -> None:
    mesh = jax.make_mesh((4,), ("tp",), (AxisType.Explicit,), devices=jax.devices()[:4])
    x = jax.device_put(X, NamedSharding(mesh, P("tp")))
    with jax.set_mesh(mesh):
        for f in (made_in_a_scan, jax.grad(lambda x: made_in_a_scan(x).sum())):
            given, wanted = jhost.jit(f)(x), jax.jit(f)(x)
            np.testing.assert_array_equal(given, wanted)
            assert given.sharding == wanted.sharding


def adding() -> tuple[Callable[[Any], Any], Any]:
    """A function that changes what it closes over, and that."""
    ref = jax.new_ref(jnp.zeros(8))

    def add(x: Any) -> Any:
        ref[...] += x
        return x * 2

    return add, ref


@each_jit
def test_a_function_left_whole_has_the_stages_of_jit(jit: Jit) -> None:
    def what_stages_have(jit: Jit) -> dict[str, Any]:
        add, ref = adding()
        f = jit(add)
        traced, lowered = f.trace(X), f.lower(X)
        compiled = lowered.compile({"xla_cpu_enable_fast_math": False})
        again = traced.lower().compile()
        return {
            "results": (compiled(X), again(X), f(X)),
            "written": ref[...],
            "jaxpr": str(traced.jaxpr),
            "text": "stablehlo.add" in lowered.as_text(),
            "compiled": "add" in compiled.as_text(),
            "cost": (lowered.cost_analysis(), compiled.cost_analysis()),
            "trees": (lowered.in_tree, lowered.out_tree, compiled.in_tree),
            "types": f.eval_shape(X),
        }

    given, wanted = what_stages_have(jit), what_stages_have(jax.jit)
    for part in ("results", "written"):
        assert_close(given.pop(part), wanted.pop(part))
    assert given == wanted


def test_a_reference_made_inside_is_lowered_with_shardings() -> None:
    rows = NamedSharding(mesh_of(tp=4), P("tp"))
    f = jhost.jit(made_and_frozen, in_shardings=rows, out_shardings=rows)
    lowered = f.lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    assert lowered.out_info == f.eval_shape(X)
    compiled = lowered.compile()
    assert compiled.mesh == rows.mesh
    assert compiled.output_shardings.is_equivalent_to(rows, 1)
    x = jax.device_put(X, rows)
    assert_close(compiled(x), np.sin(X), tolerance=1e-6)
    assert str(compiled.schedule()).startswith("schedule: 0 communications")
    assert_close(jax.export.export(f)(x).call(x), np.sin(X), tolerance=1e-6)


def made_and_frozen(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(jnp.sin(x))
    return jax.freeze(ref)


def test_explain_says_why_a_function_is_left_whole() -> None:
    of_a_reference = jax.ShapeDtypeStruct((8,), jnp.float32, is_ref=True)
    read = jhost.jit(lambda ref: ref[...] + 1, mesh=mesh_of(tp=4), chunks=2)
    lowered = read.lower(of_a_reference)
    every = [
        jhost.explain(read, of_a_reference),
        lowered.explain(),
        lowered.compile().explain(),
    ]
    for explanation in every:
        whole, why, *_, unmarked = explanation.notes
        assert whole.startswith("<lambda> is compiled by jax.jit as a whole")
        assert why == "ref: a reference (jax.new_ref), which is changed where it is"
        assert unmarked.startswith("nothing is marked: chunks=2")
        assert not explanation.loops


def test_a_function_left_whole_has_no_program_to_show() -> None:
    lowered = jhost.jit(adding()[0], mesh=mesh_of(tp=4)).lower(X)
    calls: list[Callable[[], Any]] = [
        lambda: lowered.host_ir,
        lambda: lowered.compile().host_ir,
        lambda: lowered.interpret(X),
    ]
    for call in calls:
        with pytest.raises(errors.UnsupportedError, match="as a whole"):
            call()


def test_options_reach_a_function_left_whole() -> None:
    f = jhost.jit(adding()[0], compiler_options={"xla_no_such_option": 1})
    with pytest.raises(errors.CompilerOptionError, match="xla_no_such_option"):
        f(X)


def test_a_stream_beside_a_reference_is_refused() -> None:
    add, _ = adding()
    f = jhost.jit(lambda x: jhost.stream(add(x), axis=0), mesh=mesh_of(tp=4))
    for call in (f, f.lower, f.trace):
        with pytest.raises(errors.UnsupportedError, match="Ref"):
            call(X)


def test_a_class_may_check_what_it_holds() -> None:
    """JAX makes such trees of arrays and of plain objects, and of nothing else."""

    @jax.tree_util.register_pytree_node_class
    class Checked:
        def __init__(self, x: Any) -> None:
            assert type(x) is object or isinstance(x, jax.Array), x
            self.x = x

        def tree_flatten(self) -> tuple[Any, None]:
            return (self.x,), None

        @classmethod
        def tree_unflatten(cls, _: None, children: Any) -> Any:
            return cls(*children)

    mesh = mesh_of(tp=4)
    every: list[dict[str, Any]] = [
        {},
        {"mesh": mesh},
        {"mesh": mesh, "in_shardings": P("tp")},
    ]
    for how in every:
        given = jhost.jit(lambda c: Checked(c.x + 1), **how)(Checked(jnp.asarray(X)))
        assert_close(given.x, X + 1)
