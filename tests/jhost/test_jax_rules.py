"""Where JAX keeps a rule for its `jit`, jhost has one too, or its page says why not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import sparse
from jax.experimental.sparse import BCOO

import jhost
from jhost._primitives import jhost_p
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


@pytest.mark.usefixtures("options_not_asked_for")
def test_a_nested_function_s_options_are_missed_with_a_warning() -> None:
    """Where `jax.jit` raises: what jhost wants for itself, it may do without."""
    options = {"xla_cpu_enable_fast_math": True}
    inner = jhost.jit(lambda x: x * 2, compiler_options=options)
    with pytest.raises(ValueError, match="can only be passed to top-level"):
        jax.jit(jax.jit(lambda x: x * 2, compiler_options=options))(1.0)
    with pytest.warns(UserWarning, match="an outer jax.jit"):
        assert jax.jit(inner)(1.0) == 2
