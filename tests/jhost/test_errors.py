"""What jhost refuses, in whose words, and that nothing is left half done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import jhost
from jhost import errors

MakeMesh = Callable[[Sequence[int], Sequence[str]], Mesh]

X = jnp.arange(64.0).reshape(8, 8)


@pytest.fixture
def mesh(make_mesh: MakeMesh) -> Mesh:
    return make_mesh((4,), ("tp",))


@pytest.fixture
def half(make_mesh: MakeMesh) -> Mesh:
    return make_mesh((2,), ("tp",))


def identity(x: jax.Array) -> jax.Array:
    return x


def options(**given: Any) -> dict[str, Any]:
    """Some of `jhost.jit`'s arguments."""
    return given


# --- Shardings ------------------------------------------------------------------ #


def test_all_shards_that_do_not_divide_are_named_at_once(mesh: Mesh) -> None:
    @jhost.jit(mesh=mesh, in_shardings=P("tp"), out_shardings={"sum": P(None, "tp")})
    def model(params: dict[str, jax.Array], rows: jax.Array) -> dict[str, jax.Array]:
        return {"sum": params["w"] + rows[:7]}

    with pytest.raises(errors.DivisibilityError) as raised:
        model({"w": X[:7, :6], "b": X}, X[:, :6])
    text = str(raised.value)
    assert "jhost.jit of model cannot be laid out" in text
    assert "params['w'] of shape (7, 6): P('tp') shards dim 0 of size 7" in text
    assert "result['sum'] of shape (7, 6)" in text
    assert "'tp' (4), but 4 does not divide 7 (7 = 1 * 4 + 3)" in text
    assert "params['b']" not in text
    assert "rows" not in text


def test_two_axes_on_one_dim_count_as_their_product(make_mesh: MakeMesh) -> None:
    grid = make_mesh((2, 4), ("dp", "tp"))
    f = jhost.jit(identity, mesh=grid, in_shardings=P(("dp", "tp")))
    np.testing.assert_array_equal(f(X), X)
    text = r"'dp' \(2\) and 'tp' \(4\), but 8 does not divide 4"
    with pytest.raises(errors.DivisibilityError, match=text):
        f(X[:4])


def test_a_spec_longer_than_the_rank_is_refused(mesh: Mesh) -> None:
    f = jhost.jit(identity, mesh=mesh, in_shardings=P(None, None, "tp"))
    text = r"x of shape \(8, 8\): P\(None, None, 'tp'\) has 3 entries for 2 dims"
    with pytest.raises(errors.SpecRankError, match=text):
        f(X)


def test_all_unknown_axes_are_named_at_once(mesh: Mesh) -> None:
    f = jhost.jit(
        lambda x, tree: x,
        mesh=mesh,
        in_shardings=(P("dp"), {"w": P(None, ("tp", "pp"))}),
        out_shardings=P("tpp"),
    )
    with pytest.raises(errors.UnknownAxisError) as raised:
        f(X, {"w": X})
    text = str(raised.value)
    assert "in_shardings[0]: P('dp') names axis 'dp'; the mesh has 'tp' (4)" in text
    assert "in_shardings[1]['w']: P(None, ('tp', 'pp')) names axis 'pp'" in text
    assert "out_shardings: P('tpp') names axis 'tpp'" in text


def test_an_axis_used_twice_is_refused(mesh: Mesh) -> None:
    for name in ("in_shardings", "out_shardings"):
        f = jhost.jit(identity, **options(mesh=mesh, **{name: P("tp", "tp")}))
        text = rf"{name}: P\('tp', 'tp'\) uses axis 'tp' twice"
        with pytest.raises(errors.DuplicateAxisError, match=text):
            f(X)


def test_shards_inside_the_function_are_refused_by_their_lines(mesh: Mesh) -> None:
    @jhost.jit(mesh=mesh)
    def model(x: jax.Array) -> jax.Array:
        y = jhost.shard(x * 2, P("pp"))
        return jhost.shard(y + 1, P(None, "dp"))

    with pytest.raises(errors.UnknownAxisError) as raised:
        model(X)
    text = str(raised.value)
    assert text.count("at test_errors.py:") == text.count("model)") == 2
    assert "names axis 'pp'" in text
    assert "names axis 'dp'" in text


def test_shards_inside_the_function_need_not_divide(mesh: Mesh) -> None:
    """Unlike those of parameters and results, as in JAX: they are padded."""
    f = jhost.jit(lambda x: jhost.shard(x[:7] * 2, P("tp")) + 1, mesh=mesh)
    np.testing.assert_array_equal(f(X), X[:7] * 2 + 1)


def test_the_same_is_refused_inside_jax_transforms(mesh: Mesh) -> None:
    f = jhost.jit(identity, mesh=mesh, in_shardings=P("tp"))
    grad, batched = jax.grad(lambda x: f(x).sum()), jax.vmap(f, in_axes=1)
    for transformed in (f, f.lower, jax.jit(f), grad, batched):
        with pytest.raises(errors.DivisibilityError, match="4 does not divide 7"):
            transformed(X[:7])


@pytest.mark.parametrize("name", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize("sharding", ["tp", 4, SingleDeviceSharding(jax.devices()[0])])
def test_what_is_no_sharding_over_a_mesh_is_refused(name: str, sharding: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=rf"{name}\[0\]\['w'\]: "):
        jhost.jit(identity, **options(**{name: ({"w": sharding},)}))


# --- Meshes and devices ----------------------------------------------------------- #


def test_specs_without_a_mesh_are_refused() -> None:
    f = jhost.jit(identity, in_shardings=P("tp"), out_shardings=P(None, "tp"))
    for call in (f, f.lower, jax.jit(f)):
        with pytest.raises(errors.NoMeshError, match=r"(?s)P\('tp',?\).*P\(None, 'tp'"):
            call(X)


def test_a_shard_without_a_mesh_is_refused() -> None:
    f = jhost.jit(lambda x: jhost.shard(x, P("tp")))
    with pytest.raises(errors.NoMeshError, match=r"jhost\.shard needs a mesh"):
        f(X)


def test_shardings_over_two_meshes_are_refused(mesh: Mesh, half: Mesh) -> None:
    f = jhost.jit(
        identity,
        in_shardings=NamedSharding(mesh, P("tp")),
        out_shardings=NamedSharding(half, P("tp")),
    )
    with pytest.raises(errors.MeshMismatchError, match=r"(?s)tp=4.*tp=2"):
        f(X)


def test_all_arrays_on_other_devices_are_named_at_once(mesh: Mesh, half: Mesh) -> None:
    def model(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return params["w"] + params["b"] + x

    f = jhost.jit(model, mesh=mesh, in_shardings=P("tp"))
    there = jax.device_put(X, NamedSharding(half, P("tp")))
    alone = jax.device_put(X, jax.devices()[5])
    for call in (f, f.lower):
        with pytest.raises(errors.MeshMismatchError) as raised:
            call({"w": there, "b": X}, alone)
        text = str(raised.value)
        assert "model runs on mesh(tp=4) on devices 0, 1, 2, 3" in text
        assert "params['w'] of shape (8, 8) is on devices 0, 1" in text
        assert "x of shape (8, 8) is on device 5" in text
        assert "params['b']" not in text
    here = jax.device_put(X, NamedSharding(mesh, P("tp")))
    np.testing.assert_array_equal(f({"w": here, "b": X}, X), 3 * X)


def test_arguments_sharded_over_another_mesh_are_named(mesh: Mesh, half: Mesh) -> None:
    f = jhost.jit(lambda x, y, z: x + y + z, mesh=mesh)
    there = jax.device_put(X, NamedSharding(half, P("tp")))
    with pytest.raises(errors.MeshMismatchError) as raised:
        f(there, X, there)
    assert [line[4] for line in str(raised.value).splitlines() if "*" in line] == [
        "x",
        "z",
    ]


def test_all_arrays_that_lie_otherwise_are_named_at_once(mesh: Mesh) -> None:
    def model(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return params["w"] + params["b"] + x

    f = jhost.jit(model, mesh=mesh, in_shardings=(P("tp"), P(None, "tp")))
    columns, rows = (NamedSharding(mesh, spec) for spec in (P(None, "tp"), P("tp")))
    for call in (f, f.lower):
        with pytest.raises(
            errors.OptionError, match="Arguments of model have other"
        ) as raised:
            call(jax.device_put({"w": X, "b": X}, {"w": columns, "b": rows}), X)
        assert [each for each in str(raised.value).splitlines() if "*" in each] == [
            "  * params['w'] of shape (8, 8): P('tp') is asked for, and the array has "
            "P(None, 'tp')"
        ]
    here = jax.device_put(X, rows)
    np.testing.assert_array_equal(f({"w": here, "b": X}, X), 3 * X)


def test_an_argument_that_is_missing_is_named_also_after_a_call(mesh: Mesh) -> None:
    f: Any = jhost.jit(lambda x, y: x + y, mesh=mesh, in_shardings=(P("tp"), P("tp")))
    for _ in range(2):
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            f(X)
        np.testing.assert_array_equal(f(X, X), 2 * X)


def test_what_is_no_mesh_is_refused() -> None:
    mesh: Any = "tp"
    with pytest.raises(errors.ArgumentError, match="as mesh, but got 'tp'"):
        jhost.jit(identity, mesh=mesh)


# --- Streams ----------------------------------------------------------------------- #


def test_two_stream_dims_of_one_value_are_refused() -> None:
    f = jhost.jit(lambda x: jhost.stream(jhost.stream(x + 1, axis=0), axis=1))
    with pytest.raises(errors.StreamConflictError, match=r"(?s)axis=0.*axis=1"):
        f(X)


def test_all_streams_on_whole_dims_are_named_at_once() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jhost.stream(jnp.sort(x, axis=0), axis=0, chunks=2)
        return y, jhost.stream(jnp.cumsum(x, axis=1), axis=1, chunks=2)

    with pytest.raises(errors.StreamDimError) as raised:
        jhost.jit(f)(X)
    text = str(raised.value)
    assert "f asks for streams" in text
    assert "sort needs dim 0 whole" in text
    assert "cumsum needs dim 1 whole" in text


def test_a_p2p_pipeline_where_nothing_moves_is_refused(mesh: Mesh) -> None:
    f = jhost.jit(
        lambda x: jhost.stream(x * 2, axis=0, pipeline="p2p"),
        mesh=mesh,
        in_shardings=P("tp"),
    )
    with pytest.raises(errors.PipelineError, match=r"axis=0 at test_errors\.py:"):
        f(X)


def test_more_chunks_than_a_device_has_rows_are_refused(mesh: Mesh) -> None:
    f = jhost.jit(
        lambda x: jhost.stream(x * 2, axis=0, chunks=3),
        mesh=mesh,
        in_shardings=P("tp"),
    )
    with pytest.raises(errors.ChunksError, match="3 chunks were asked for"):
        f(X)


# --- Options ------------------------------------------------------------------------ #


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"chunks": 0}, errors.ChunksError, "chunks=0, but needs at least 1"),
        ({"chunks": "all"}, errors.ArgumentError, "but got 'all'"),
        ({"chunks": True}, errors.ArgumentError, "but got True"),
        ({"pipeline": "ring"}, errors.OptionError, "'ring', .* 'p2p', 'collective'"),
        ({"pipeline": None}, errors.OptionError, "pipeline=None"),
        ({"compiler_options": [1]}, errors.ArgumentError, r"but got \[1\]"),
        ({"compiler_options": {1: 2}}, errors.ArgumentError, "1: 2"),
        ({"compiler_options": {"a": None}}, errors.ArgumentError, "'a': None"),
    ],
    ids=str,
)
def test_options_are_refused_where_they_are_given(
    options: dict[str, Any], error: type[errors.JhostError], text: str
) -> None:
    with pytest.raises(error, match=text):
        jhost.jit(identity, **options)
    with pytest.raises(error, match=text):
        jhost.jit(**options)


@pytest.mark.skipif(not hasattr(jax, "CompilerEffortLevel"), reason="since JAX 0.12")
def test_an_option_may_be_the_member_of_an_enum() -> None:
    level: Any = jax.CompilerEffortLevel.O1
    f = jhost.jit(identity, compiler_options={"optimization_level": level})
    assert f(X).shape == X.shape


def test_what_cannot_be_called_is_refused() -> None:
    function: Any = 3
    with pytest.raises(errors.ArgumentError, match="takes a function, but got 3"):
        jhost.jit(function)


def test_only_a_jhost_function_can_be_explained() -> None:
    function: Any = identity
    with pytest.raises(
        errors.ArgumentError, match="identity, which calls no jhost function"
    ):
        jhost.explain(function, X)


@pytest.mark.parametrize(
    "options",
    [{"xla_no_such_option": True}, {"xla_embed_ir_in_executable": "perhaps"}],
    ids=str,
)
def test_a_compiler_option_that_xla_refuses_is_named(options: dict[str, Any]) -> None:
    good = {"xla_cpu_enable_fast_math": True}
    f = jhost.jit(identity, compiler_options={**options, **good})
    for call in (f, lambda x: f.lower(x).compile(), jax.grad(lambda x: f(x).sum())):
        with pytest.raises(errors.CompilerOptionError) as raised:
            call(X)
        (offender,) = [line for line in str(raised.value).splitlines() if "*" in line]
        ((name, value),) = options.items()
        assert offender.startswith(f"  * {name}={value!r}: ")


# --- JAX's own errors ------------------------------------------------------------ #


def test_wrong_shapes_and_types_are_jax_s_own_errors_and_nothing_stays(
    mesh: Mesh,
) -> None:
    x, y, text = X, X[:5], "text"
    specs = (P("tp"), P(None, "tp"))
    for settings in (options(), options(mesh=mesh, in_shardings=specs)):
        f = jhost.jit(lambda x, y: x @ y, **settings)
        plain = jax.jit(lambda x, y: x @ y)
        for wrong in ((x, y), (x, text), (x, X.astype(jnp.int32))):
            with pytest.raises((TypeError, jax.dtypes.TypePromotionError)) as expected:
                plain(*wrong)
            with pytest.raises(expected.type) as raised:
                f(*wrong)
            assert raised.type is expected.type
            assert str(raised.value)[:30] == str(expected.value)[:30]
            np.testing.assert_array_equal(f(X, X), X @ X)


def test_too_few_arguments_are_a_type_error() -> None:
    f: Any = jhost.jit(lambda x, y: x + y)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        f(X)


def test_the_user_s_own_errors_pass_unchanged(mesh: Mesh) -> None:
    def fails(x: jax.Array) -> jax.Array:
        raise ValueError("mine")

    for settings in (options(), options(mesh=mesh, in_shardings=P("tp"))):
        with pytest.raises(ValueError, match="mine"):
            jhost.jit(fails, **settings)(X)


def test_a_value_is_not_known_while_tracing() -> None:
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jhost.jit(lambda x: x if x.sum() > 0 else -x)(X)


TREE = {"w": X, "b": X}


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        (
            "in_shardings",
            ({"w": P()}, P()),
            r"in_shardings\[0\] is a dict of \['w'\], .* a dict of \['b'\], \['w'\]",
        ),
        (
            "in_shardings",
            (P(), {"w": P(), "b": P()}),
            r"in_shardings\[1\] is a dict of \['b'\], \['w'\], .* for one array",
        ),
        (
            "in_shardings",
            (P(), P(), P()),
            r"in_shardings is a tuple of \[0\], \[1\], \[2\], .* of \[0\], \[1\]",
        ),
        ("out_shardings", {"a": P()}, r"a dict of \['a'\], .* of \['b'\], \['w'\]"),
        ("out_shardings", {"w": [P()], "b": P()}, r"\['w'\] is a list of \[0\]"),
    ],
    ids=str,
)
def test_shardings_that_are_no_prefix_are_refused(
    name: str, given: Any, told: str, mesh: Mesh
) -> None:
    settings: Any = {"mesh": mesh, name: given}
    f = jhost.jit(lambda tree, x: jax.tree.map(lambda y: y + x, tree), **settings)
    with pytest.raises(errors.OptionError, match=told):
        f(TREE, X)


def test_meshes_of_the_same_devices_in_another_order_are_told_apart(
    mesh: Mesh,
) -> None:
    turned = Mesh(mesh.devices[::-1], mesh.axis_names)
    f: Any = jhost.jit(identity, mesh=mesh, in_shardings=NamedSharding(turned, P("tp")))
    with pytest.raises(errors.MeshMismatchError, match=r"(?s)0, 1, 2, 3.*3, 2, 1, 0"):
        f(X)


def test_every_error_is_a_builtin_one_too_and_names_its_section() -> None:
    for cls in errors.JhostError.__subclasses__():
        values = (ValueError, TypeError, IndexError)
        assert issubclass(cls, (*values, RuntimeError, ImportError, TimeoutError))
        text = str(cls("What is wrong.", ["one", "two"]))
        assert text.splitlines()[1:3] == ["  * one", "  * two"]
        assert text.endswith(f"help(jhost.errors.{cls.__name__})")
