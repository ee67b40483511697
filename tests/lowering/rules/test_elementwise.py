"""Elementwise primitives: one equation each, and the ways that operands broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from jhost.lowering.rules.elementwise import ELEMENTWISE

_COUNT = np.arange(1, 4, dtype=np.int32)
_OPERANDS = {
    "b": _COUNT > 1,
    "c": _COUNT.astype(np.complex64) * 1j,
    "f": _COUNT.astype(np.float32) / 16,
    "i": _COUNT,
    "k": jax.random.split(jax.random.key(0), 3),
    "u": _COUNT.astype(np.uint32),
}
# The operands of the primitives that have others than one array of floats.
_KINDS = {
    **dict.fromkeys(("clz", "integer_pow", "not", "population_count"), "i"),
    **dict.fromkeys(("add", "add_any", "atan2", "complex", "div"), "ff"),
    **dict.fromkeys(("eq", "eq_to", "ge", "gt", "le", "le_to"), "ff"),
    **dict.fromkeys(("igamma", "igamma_grad_a", "igammac", "lt", "lt_to"), "ff"),
    **dict.fromkeys(("max", "min", "mul", "ne", "nextafter", "polygamma"), "ff"),
    **dict.fromkeys(("pow", "rem", "sub", "zeta"), "ff"),
    **dict.fromkeys(("and", "mulhi", "or", "shift_left", "xor"), "ii"),
    **dict.fromkeys(("shift_right_arithmetic", "shift_right_logical"), "ii"),
    **dict.fromkeys(("clamp", "regularized_incomplete_beta"), "fff"),
    **dict.fromkeys(("conj", "imag", "real"), "c"),
    **dict.fromkeys(("philox2x32",), "uuu"),
    **dict.fromkeys(("threefry2x32",), "uuuu"),
    **dict.fromkeys(("philox4x32",), "u" * 6),
    **dict.fromkeys(("threefry4x32",), "u" * 8),
    "random_clone": "k",
    "select_n": "bff",
}
_PARAMS: dict[str, dict[str, Any]] = {
    "convert_element_type": {"new_dtype": np.float16},
    "integer_pow": {"y": 3},
    "name": {"name": "x"},
    "polynomial": {"coeffs": (1.0, 2.0)},
    "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 3},
    "xla_metadata_value": {"xla_metadata_kvs": (("key", "value"),)},
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_primitive_can_be_cut(
    name: str,
    jax_primitives: dict[str, Primitive],
    check_rule: Callable[..., set[str]],
) -> None:
    if name not in jax_primitives:
        pytest.skip(f"JAX {jax.__version__} has no {name}")
    function = getattr(lax, name, jax_primitives[name].bind)
    args = [_OPERANDS[kind] for kind in _KINDS.get(name, "f")]
    params = _PARAMS.get(name, {})
    assert name in check_rule(lambda *args: function(*args, **params), *args)


def test_a_scalar_operand_is_not_cut(check_rule: Callable[..., set[str]]) -> None:
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    check_rule(lambda x: x + 1, x)
    check_rule(lambda x: lax.clamp(1, x, 4), x)
    check_rule(lambda on, x: lax.select_n(on, x, -x), np.bool_(True), x)


def test_an_operand_of_size_1_is_stretched(
    jax_primitives: dict[str, Primitive], check_rule: Callable[..., set[str]]
) -> None:
    key, count = np.ones((1, 3), np.uint32), np.arange(6, dtype=np.uint32).reshape(2, 3)
    cipher = jax_primitives["threefry2x32"].bind
    check_rule(lambda *args: cipher(*args), key, key, count, count)


def test_a_barrier_cuts_each_operand_by_itself(
    check_rule: Callable[..., set[str]],
) -> None:
    check_rule(lax.optimization_barrier, (jnp.arange(3), jnp.ones((2, 4))))


def test_a_sharding_constraint_is_the_identity_of_a_part(
    make_mesh: Callable[..., jax.sharding.Mesh], check_rule: Callable[..., set[str]]
) -> None:
    spec = jax.sharding.PartitionSpec("tp")
    sharding = jax.sharding.NamedSharding(make_mesh((2,), ("tp",)), spec)
    names = check_rule(
        lambda x: lax.with_sharding_constraint(x, sharding), np.arange(4)
    )
    assert "sharding_constraint" in names


def test_a_reshard_is_the_identity_of_a_part(
    check_rule: Callable[..., set[str]],
) -> None:
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        names = check_rule(
            lambda x: jax.sharding.reshard(x, jax.sharding.PartitionSpec("tp")),
            np.arange(4),
        )
    assert "reshard" in names
