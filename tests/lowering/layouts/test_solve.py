"""Which layout each value gets, and what moves where layouts differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.effects import written
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Scan, Select
from jhost.lowering.layouts.convert_to_communications import ConvertToCommunications
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts
from jhost.lowering.pipeline import run_passes
from tests.lowering.traced import built

shard = jhost.shard
FREE = P.UNCONSTRAINED


def solved(fun: Callable[..., Any], *args: Any, **mesh: int) -> Program:
    """`fun` with the layouts decided and the communications explicit."""
    sequence = (PropagateLayouts(), ConvertToCommunications())
    return run_passes(built(fun, *args, **mesh), sequence)


def moved(program: Program) -> list[str]:
    """What moves, in order: the kind, the value that it is of, over which axes."""
    texts: list[str] = []
    for stmt in program.body:
        if isinstance(stmt, Communicate):
            texts.append(f"{stmt.kind} {stmt.source.name} {','.join(stmt.axes)}")
        elif isinstance(stmt, Select):
            texts.append(f"Select {stmt.source.name}")
    return texts


def layouts(program: Program) -> Mapping[str, str]:
    """The layout of each value: `dp+tp, -` is one dim over both axes, one whole."""
    texts: dict[str, str] = {}
    for buffer in (*program.params, *itertools.chain(*map(written, program.body))):
        texts[buffer.name] = ", ".join("+".join(d.axes) or "-" for d in buffer.dims)
    return texts


# --- Matmuls ------------------------------------------------------------------------ #


def mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    x = shard(x, P("tp", None))
    w, v = shard(w, P(None, "tp")), shard(v, P("tp", None))
    return shard(jnp.maximum(x @ w, 0) @ v, P("tp", None))


def test_an_mlp_gathers_its_input_and_scatters_its_output() -> None:
    program = solved(mlp, (8, 16), (16, 32), (32, 16), tp=4)
    assert moved(program) == ["AllGather x tp", "ReduceScatter y_partial tp"]


def test_an_mlp_on_a_mesh_of_data_and_tensor_parallelism() -> None:
    """The rows stay over dp, and only tp sums up."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = shard(x, P("dp", None))
        w, v = shard(w, P(None, "tp")), shard(v, P("tp", None))
        return shard(jnp.maximum(x @ w, 0) @ v, P("dp", None))

    program = solved(f, (8, 16), (16, 32), (32, 16), dp=2, tp=4)
    assert moved(program) == ["AllReduce y_partial tp"]
    assert layouts(program)["v_1"] == "dp, tp"


def test_rows_over_both_axes_are_gathered_over_one() -> None:
    """dp x tp with sequence parallelism: each axis is handled on its own."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = shard(x, P(("dp", "tp"), None))
        w, v = shard(w, P(None, "tp")), shard(v, P("tp", None))
        return shard(jnp.maximum(x @ w, 0) @ v, P(("dp", "tp"), None))

    program = solved(f, (8, 16), (16, 32), (32, 16), dp=2, tp=4)
    assert moved(program) == ["AllGather x tp", "ReduceScatter y_partial tp"]


def test_fully_sharded_weights_are_gathered() -> None:
    """dp shards the batch and, at rest, the weights too."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return shard(x, P("dp", None)) @ shard(w, P("dp", None))

    assert moved(solved(f, (1024, 8), (8, 8), dp=4)) == ["AllGather w dp"]


def rows_and_columns(x: jax.Array, w: jax.Array) -> jax.Array:
    return shard(x, P("tp", None)) @ shard(w, P(None, "tp"))


@pytest.mark.parametrize(
    ("rows", "columns", "gathered"), [(8, 64, "x"), (64, 8, "w"), (8, 16, "x")]
)
def test_the_fewest_bytes_win(rows: int, columns: int, gathered: str) -> None:
    program = solved(rows_and_columns, (rows, 8), (8, columns), tp=4)
    assert moved(program) == [f"AllGather {gathered} tp"]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_what_follows_wishes_for_nothing_of_its_own(depth: int) -> None:
    """An activation takes the product as it is; whole it would cost a gather of all."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        y = rows_and_columns(x, w)
        for _ in range(depth):
            y = jnp.tanh(y)
        return y

    program = solved(f, (8, 6), (6, 32), tp=2)
    assert moved(program) == ["AllGather x tp"]
    assert layouts(program)["y"] == "-, tp"


def test_bytes_count_and_not_elements() -> None:
    """x has fewer elements than w, but more bytes."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = shard(x, P("tp", None)), shard(w, P(None, "tp"))
        return jax.lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    w = jax.ShapeDtypeStruct((8, 12), jnp.bfloat16)
    assert moved(solved(f, (8, 8), w, tp=4)) == ["AllGather w tp"]


def test_a_tie_leaves_the_larger_operand() -> None:
    """Either 6 elements of a shard of x move, or as many of one of w."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return shard(x, P("tp", None)) + shard(w, P(None, "tp"))

    assert moved(solved(f, (8, 1), (8, 4), tp=4)) == ["AllGather x tp"]


def test_of_as_many_bytes_the_fewest_communications_are_taken() -> None:
    """Either 64 elements of w move, or 32 of x and 32 of the result."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return shard(rows_and_columns(x, w), P("tp", None))

    assert moved(solved(f, (8, 4), (4, 16), tp=4)) == ["AllGather w tp"]


def test_a_contraction_over_both_operands_needs_no_gather() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return shard(x, P(None, "tp")) @ shard(w, P("tp", None))

    program = solved(f, (8, 8), (8, 8), tp=4)
    assert moved(program) == ["AllReduce y_partial tp"]


# --- What the user gave stays ------------------------------------------------------- #

SPECS = {"-, -": P(), "tp, -": P("tp", None), "-, tp": P(None, "tp")}


@pytest.mark.parametrize("first", SPECS)
@pytest.mark.parametrize("second", SPECS)
def test_constraints_never_change(first: str, second: str) -> None:
    """Whatever the neighbours would like; `tanh` alone would need no move at all."""

    def f(x: jax.Array) -> jax.Array:
        y = shard(jnp.tanh(shard(x, SPECS[first])), SPECS[second])
        return shard(jnp.tanh(y), SPECS[first])

    program = solved(f, (8, 8), tp=4)
    at_rest = layouts(program)
    assert [at_rest[name] for name in "xvy"] == [first, second, first]


def test_a_value_read_in_two_layouts_has_one_of_its_own() -> None:
    """A constraint on a value with other readers is a copy of it."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = shard(x, P("tp"))
        y = jnp.tanh(x)
        return shard(y, P(None, "tp")), y

    program = solved(f, (8, 8), tp=4)
    assert layouts(program)["y"] == "-, tp"
    assert layouts(program)["z"] == "tp, -"


def test_two_constraints_in_a_row_are_a_reshard() -> None:
    def f(x: jax.Array) -> jax.Array:
        return shard(shard(x, P("tp", None)), P(None, "tp"))

    assert moved(solved(f, (8, 8), tp=4)) == ["AllToAll x tp"]


def test_a_mesh_axis_of_one_device_shards_nothing() -> None:
    def f(x: jax.Array) -> jax.Array:
        return shard(jnp.tanh(shard(x, P("tp"))), P(None, "tp"))

    program = solved(f, (8, 8), tp=1)
    assert moved(program) == []
    assert set(layouts(program).values()) == {"-, -"}


# --- What the user left open -------------------------------------------------------- #


def test_an_open_parameter_takes_what_its_consumer_wants() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ shard(w, P("tp", None))

    program = solved(f, (8, 8), (8, 8), tp=4)
    assert layouts(program)["x"] == "-, tp"
    assert moved(program) == ["AllReduce y_partial tp"]


def test_a_wish_goes_back_through_many_operations() -> None:
    def f(x: jax.Array) -> jax.Array:
        y = jnp.swapaxes(jnp.tanh(x) * 2, 0, 1)
        return shard(jnp.reshape(y, (2, 4, 8)), P("tp", None, None))

    program = solved(f, (8, 8), tp=2)
    assert layouts(program)["x"] == "-, tp"
    assert moved(program) == []


def test_a_wish_of_iterations_goes_back_to_the_scan_that_stacks() -> None:
    """The stack is whole in none of them, though it costs nothing to cut it there."""

    def f(x: jax.Array, o: jax.Array) -> jax.Array:
        def layers(carried: jax.Array) -> jax.Array:
            # A forward of a gradient stacks what it carries.
            layer = lambda c, made: (jnp.tanh(c - made), c)  # noqa: E731
            return lax.scan(layer, carried, stack)[1]

        stack = lax.map(lambda row: jnp.broadcast_to(row, (8, 4)), o)
        return lax.map(layers, shard(x, P(None, "tp")))

    program = solved(f, (2, 8, 4), (3, 4), tp=4)
    assert [text for text in layouts(program).values() if "tp" in text] == [
        "-, tp, -",  # x
        "-, tp, -",  # the stack
        "-, -, tp, -",
    ]


def test_a_wish_goes_back_through_a_barrier() -> None:
    """So does a cotangent's that a scan carries, whose first is made anywhere."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None))
        return lax.scan(layer, shard(x, P("tp")), w)[0].sum()

    program = solved(jax.grad(f, 1), (64, 8), (3, 8, 8), tp=4)
    assert moved(program) == []
    _, backward = [stmt for stmt in program.body if isinstance(stmt, Scan)]
    (weights,) = moved(backward.body)
    assert weights.startswith("AllReduce")


def test_an_open_parameter_that_nobody_wants_sharded_is_whole() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ shard(w, P(None, "tp"))

    program = solved(f, (8, 8), (8, 8), tp=4)
    assert layouts(program)["x"] == "-, -"
    assert moved(program) == []


def test_an_open_result_stays_as_it_is_made() -> None:
    program = solved(lambda x: jnp.tanh(shard(x, P("tp"))), (8, 8), tp=4)
    assert layouts(program)["y"] == "tp, -"


def test_free_dims_follow_their_neighbours_and_given_ones_stay() -> None:
    def f(x: jax.Array) -> jax.Array:
        return shard(jnp.tanh(shard(x, P("dp"))), P(FREE, "tp"))

    program = solved(f, (8, 8), dp=2, tp=4)
    assert layouts(program)["y"] == "dp, tp"


@pytest.mark.parametrize(
    ("given", "at_rest", "steps"),
    [
        (P(FREE, "tp"), "-, tp", ["AllToAll y_produced tp"]),
        (P(None, FREE), "-, -", ["AllGather y_produced tp"]),
        (P(FREE, None), "tp, -", []),
        (P(FREE, FREE), "tp, -", []),
    ],
)
def test_a_dim_given_beside_a_free_one_is_as_given(
    given: P, at_rest: str, steps: list[str]
) -> None:
    """Even where the axis is on the free dim of the operand."""

    def f(x: jax.Array) -> jax.Array:
        return shard(jnp.tanh(shard(x, P("tp", None))), given)

    program = solved(f, (8, 8), tp=4)
    assert layouts(program)["y"] == at_rest
    assert moved(program) == steps


def test_a_parameter_with_a_free_dim_keeps_the_given_one() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return shard(x, P(FREE, "tp")) + shard(w, P("dp", None))

    program = solved(f, (8, 8), (8, 8), dp=2, tp=4)
    assert layouts(program)["x"] == "dp, tp"
    assert moved(program) == ["Select w"]


# --- Where it does not fit ---------------------------------------------------------- #


def test_a_dim_that_does_not_divide_stays_whole() -> None:
    """A quarter of the 24 elements is one and a half of the six rows."""

    def f(x: jax.Array) -> jax.Array:
        return shard(jnp.reshape(x, (24,)), P("tp"))

    program = solved(f, (6, 4), tp=4)
    assert layouts(program)["x"] == "-, -"
    assert moved(program) == ["Select y_produced"]


def test_a_reshape_to_a_dim_that_does_not_divide_gathers() -> None:
    """Of [2, 12] no device of four has a quarter of the outermost dim."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.reshape(shard(x, P("tp")), (2, 12)), axis=0)

    assert moved(solved(f, (24,), tp=4)) == ["AllGather x tp"]


def test_an_opaque_operation_gets_its_operands_whole() -> None:
    def f(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            return carry + row, carry

        return jax.lax.scan(body, jnp.zeros(8), shard(x, P("tp")))[1]

    program = solved(f, (8, 8), tp=4)
    assert moved(program) == ["AllGather x tp"]


def test_an_operand_gathered_for_two_readers_is_gathered_once() -> None:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w, v = shard(x, P("tp")), shard(w, P(None, "tp")), shard(v, P(None, "tp"))
        return x @ w, x @ v

    program = solved(f, (4, 8), (8, 64), (8, 64), tp=4)
    assert moved(program) == ["AllGather x tp"]


# --- The whole program in view ------------------------------------------------------ #


def test_an_input_of_several_weights_is_gathered_once_instead_of_each() -> None:
    """One weight alone would be cheaper to gather than the input, three are not."""

    def f(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        x = shard(x, P("tp", None))
        return [x @ shard(w, P(None, "tp")) for w in weights]

    assert moved(solved(f, (16, 8), (8, 8), tp=4)) == ["AllGather w tp"]
    program = solved(f, (16, 8), (8, 8), (8, 8), (8, 8), tp=4)
    assert moved(program) == ["AllGather x tp"]


@pytest.mark.parametrize("spec", [P("tp", None), P(None, "tp")])
def test_a_weight_and_its_transpose_are_gathered_once(spec: P) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        w = shard(w, spec)
        return (shard(x, P("tp", None)) @ w) @ w.T

    assert moved(solved(f, (64, 16), (16, 8), tp=4)) == ["AllGather w tp"]


def test_a_wide_weight_stays_where_it_is() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        w = shard(w, P(None, "tp"))
        return shard((shard(x, P("tp", None)) @ w) @ w.T, P("tp", None))

    program = solved(f, (8, 8), (8, 64), tp=4)
    assert moved(program) == ["AllGather x tp", "ReduceScatter y_partial tp"]


def test_no_contraction_is_repeated_for_fewer_bytes_later() -> None:
    """Of whole operands each device would make all of the product."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.tanh(shard(x, P("tp", None)) @ w)
        return shard(jnp.sort(y, axis=0), P())

    program = solved(f, (8, 4), (4, 64), tp=4)
    assert moved(program) == ["AllGather v_1 tp"]


def test_a_sort_along_a_sharded_dim_works_on_columns() -> None:
    def f(x: jax.Array) -> jax.Array:
        return shard(jnp.sort(shard(x, P("tp", None)), axis=0), P("tp", None))

    kinds = [each.split()[0] for each in moved(solved(f, (8, 4), tp=4))]
    assert kinds == ["AllToAll", "AllToAll"]


def test_a_program_without_a_mesh_is_left_alone() -> None:
    program = built(lambda x: jnp.tanh(x), (8, 8))
    assert PropagateLayouts().apply(program) == program
