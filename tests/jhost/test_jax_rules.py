"""Where JAX keeps a rule for its `jit`, jhost has one too, or its page says why not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.experimental.sparse import BCOO
from jax.sharding import PartitionSpec as P

import jhost
from jhost import errors
from jhost._primitives import jhost_p
from tests.lowering.hand_built import mesh_of
from tests.tables import DOCS, rows

# Where rules are that JAX does not import by itself.
MODULES = (
    "jax.experimental.jet",
    "jax.experimental.checkify",
    "jax.experimental.roofline",
    "jax.experimental.sparse.transform",
    "jax._src.pallas.cost_estimate",
    "jax._src.pallas.fuser.block_spec",
    "jax._src.state.discharge",
)


def tables_with(primitive: Any) -> Iterator[tuple[str, Any]]:
    """The tables of rules that have one for a primitive, each by one of its names."""
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("jax"):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, dict | set) and id(value) not in seen:
                seen.add(id(value))
                if primitive in value:
                    yield f"{name.removeprefix('jax.')}.{attribute}", value


def named_on_the_page() -> set[str]:
    """The tables of JAX's that the page of transforms says jhost has no rule in."""
    names = [name for row in rows(DOCS / "transforms.md") for name in row[0].split(",")]
    return {name.strip("` ") for name in names}


def test_each_table_with_a_rule_for_jit_has_one_for_a_jhost_function() -> None:
    for module in MODULES:
        importlib.import_module(module)
    jit_p = jax.make_jaxpr(jax.jit(lambda x: x * 2))(1.0).eqns[0].primitive
    found = dict(tables_with(jit_p))
    assert len(found) > 15
    lacking = {name for name, table in found.items() if jhost_p not in table}
    assert lacking <= named_on_the_page()


def test_a_sparse_array_is_refused_by_jax() -> None:
    f = sparse.sparsify(jhost.jit(lambda x: x * 2))
    with pytest.raises(NotImplementedError, match="sparse rule for jhost"):
        f(BCOO.fromdense(jnp.eye(3)))


OPTIONS = {"xla_embed_ir_in_executable": True}

Jit: TypeAlias = Callable[..., Any]

# Some make a program of what is called, of which it becomes a part.
AROUND: dict[str, Callable[[Any, Jit], Any]] = {
    "jit": lambda f, jit: jit(lambda x: f(x))(1.0),
    "jit with the same": lambda f, jit: jit(f, compiler_options=OPTIONS)(1.0),
    "loop": lambda f, _: lax.fori_loop(0, 2, lambda _, x: f(x), 1.0),
    "gradient": lambda f, jit: jit(jax.grad(f))(1.0),
    "lowered around": lambda f, jit: jit(lambda x: f(x)).lower(1.0),
    "shard_map": lambda f, _: mapped(f)(np.ones(4, np.float32)),
    "alone": lambda f, _: f(1.0),
    "vmap": lambda f, _: jax.vmap(f)(np.ones(2, np.float32)),
    "lower": lambda f, _: f.lower(1.0).compile(),
    "eval_shape": lambda f, _: jax.eval_shape(f, 1.0),
    "linear_transpose": lambda f, _: jax.linear_transpose(f, 1.0)(1.0),
    "compile time": lambda f, _: jax.jit(lambda x: x + at_compile_time(f, 1.0))(1.0),
    "export": lambda f, _: jax.export.export(f)(1.0),
    "disable_jit": lambda f, jit: without_jit(jit(lambda x: f(x)), 1.0),
}


def mapped(f: Any) -> Any:
    over: Any = jax.shard_map
    return over(f, mesh=mesh_of(tp=4), in_specs=P("tp"), out_specs=P("tp"))


def without_jit(f: Any, *args: Any) -> Any:
    with jax.disable_jit():
        return f(*args)


def at_compile_time(f: Any, *args: Any) -> Any:
    with jax.ensure_compile_time_eval():
        return f(*args)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("outer", [jax.jit, jhost.jit], ids=["jax.jit", "jhost.jit"])
def test_options_of_a_nested_function_are_refused_as_by_jax(
    around: Callable[[Any, Jit], Any], outer: Jit
) -> None:
    words = "`compiler_options` can only be passed to top-level `jax.jit`"
    try:
        around(jax.jit(lambda x: x * 2, compiler_options=OPTIONS), outer)
    except ValueError:
        with pytest.raises(ValueError, match=words):
            around(jhost.jit(lambda x: x * 2, compiler_options=OPTIONS), outer)
    else:
        around(jhost.jit(lambda x: x * 2, compiler_options=OPTIONS), outer)


def test_options_are_no_matter_where_nothing_is_compiled_with_them() -> None:
    """Here `jax.jit` raises, though nothing is lost yet."""
    f = jhost.jit(lambda x: x * 2, compiler_options=OPTIONS)
    assert jax.make_jaxpr(f)(1.0).out_avals == [jax.typeof(f(1.0))]
    assert jax.grad(jax.checkpoint(f))(1.0) == 2
    assert jhost.explain(jax.grad(f), 1.0).programs


def test_options_of_a_function_left_whole_are_refused_as_well() -> None:
    f = jhost.jit(lambda x: jax.new_ref(x)[...] + 1, compiler_options=OPTIONS)
    assert f(1.0) == 2
    with pytest.raises(ValueError, match="can only be passed to top-level"):
        jax.jit(f)(1.0)


def test_no_options_may_be_given_anywhere() -> None:
    inner = jhost.jit(lambda x: x * 2, compiler_options={})
    assert jax.jit(inner)(1.0) == jhost.jit(lambda x: inner(x))(1.0) == 2


def test_a_nested_function_with_options_is_named() -> None:
    @jhost.jit(compiler_options=OPTIONS)
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    named = r"compiler_options=\{'xla_embed.*on a nested jhost.jit with name: double"
    with pytest.raises(errors.CompilerOptionError, match=named):
        jax.jit(jax.grad(double))(1.0)
