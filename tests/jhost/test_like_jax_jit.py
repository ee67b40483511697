"""What a function of `jax.jit` is, has, refuses and remembers: `jhost.jit` too."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost
from jhost._call import build
from jhost.lowering.pipeline import build_program
from jhost.testing import mesh_of

X = np.arange(32, dtype=np.float32).reshape(8, 4)

STAGES: dict[str, Callable[[Any], Any]] = {
    "function": lambda f: f,
    "traced": lambda f: f.trace(X, X),
    "lowered": lambda f: f.lower(X, X),
    "compiled": lambda f: f.lower(X, X).compile(),
}


def f(x: jax.Array, y: jax.Array) -> jax.Array:
    return x * 2


def public(each: Any) -> set[str]:
    return {name for name in dir(each) if not name.startswith("_")}


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of({"tp": 4})


# --- What it has ------------------------------------------------------------------- #


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_what_jax_s_has(stage: str) -> None:
    """What the next JAX's stages have more is missed here, and not by a user."""
    theirs, ours = (STAGES[stage](jit(f)) for jit in (jax.jit, jhost.jit))
    assert public(theirs) <= public(ours)
    for name in public(theirs):
        getattr(ours, name)  # no property fails
        assert callable(getattr(theirs, name)) == callable(getattr(ours, name)), name


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        ("function", jax.stages.Wrapped),
        ("traced", jax.stages.Traced),
        ("lowered", jax.stages.Lowered),
        ("compiled", jax.stages.Compiled),
    ],
)
def test_every_stage_is_one_of_jax_s(stage: str, kind: type) -> None:
    assert isinstance(STAGES[stage](jhost.jit(f)), kind)


def test_every_argument_of_jax_jit_is_one_of_jhost_s() -> None:
    """But the deprecated `device` and `backend`: a mesh says where."""
    theirs, ours = (inspect.signature(jit).parameters for jit in (jax.jit, jhost.jit))
    assert theirs.keys() - ours.keys() == {"fun", "device", "backend"}
    shared = ours.keys() & theirs.keys() - {"in_shardings", "out_shardings"}
    assert all(ours[name].default == theirs[name].default for name in shared)


def test_stages_say_what_jax_s_say(mesh: Mesh) -> None:
    rows = NamedSharding(mesh, P("tp"))
    how: dict[str, Any] = {"in_shardings": rows, "out_shardings": rows}
    theirs, ours = (jit(f, **how, donate_argnums=1) for jit in (jax.jit, jhost.jit))
    lowered, given = theirs.lower(X, X), ours.lower(X, X)
    for name in ("in_avals", "in_tree", "out_tree", "donate_argnums"):
        assert getattr(given, name) == getattr(lowered, name), name
    made, compiled = lowered.compile(), given.compile()
    assert compiled.input_shardings == made.input_shardings
    assert compiled.output_shardings == made.output_shardings
    assert jax.tree.structure(compiled.args_info) == jax.tree.structure(made.args_info)
    assert compiled.out_info.sharding == made.out_info.sharding


def test_the_traced_function_is_lowered_as_the_function() -> None:
    lowered = jhost.jit(f).trace(X, X).lower(lowering_platforms=("cpu",))
    assert isinstance(lowered, jhost.Lowered)
    assert lowered.host_ir == jhost.jit(f).lower(X, X).host_ir


def test_options_may_be_given_where_it_is_compiled() -> None:
    lowered = jhost.jit(f).lower(X, X)
    compiled = lowered.compile({"xla_embed_ir_in_executable": True})
    np.testing.assert_array_equal(compiled(X, X), 2 * X)
    with pytest.raises(jhost.errors.CompilerOptionError, match="no_such_option"):
        lowered.compile(compiler_options={"no_such_option": 1})


@pytest.mark.parametrize("level", [0, "O9"])
def test_the_level_of_optimization_is_an_option_as_jax_has_it(level: Any) -> None:
    said: list[str] = []
    for jit in (jax.jit, jhost.jit):
        g = jit(lambda x: x + 1, compiler_options={"optimization_level": level})
        try:
            said.append(str(g(X)))
        except (TypeError, ValueError) as refusal:
            said.append(str(refusal))
    assert said[0] == said[1]


@pytest.mark.parametrize("keep", [False, True])
def test_unused_arguments_may_be_kept(keep: bool) -> None:
    compiled = jhost.jit(f, keep_unused=keep).lower(X, X).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.argument_size_in_bytes == (2 if keep else 1) * X.nbytes
    np.testing.assert_array_equal(compiled(X, X), 2 * X)


def test_inline_changes_nothing_of_a_result() -> None:
    inlined = jhost.jit(f, inline=True)
    np.testing.assert_array_equal(jax.jit(lambda x: inlined(x, x) + 1)(X), 2 * X + 1)


@pytest.mark.usefixtures("compiled_anew")  # XLA stores nothing that was stored before
@pytest.mark.parametrize("donate", [None, 0])
def test_what_is_compiled_can_be_stored(mesh: Mesh, donate: int | None) -> None:
    def step(state: dict[str, jax.Array], x: jax.Array) -> Any:
        y = jhost.stream(x @ state["w"], axis=0, chunks=2)
        return {"w": state["w"] + 1, "n": state["n"] + 1}, y

    state = {"w": jnp.ones((4, 8)), "n": np.int32(0)}
    given = {"w": P(None, "tp"), "n": P()}
    jitted = jhost.jit(
        step,
        mesh=mesh,
        in_shardings=(given, P("tp")),
        out_shardings=(given, P("tp")),
        pipeline="collective",
        donate_argnums=donate,
    )
    compiled = jitted.lower(state, X).compile()
    devices = list(mesh.devices.flat)
    loaded = deserialize_and_load(*serialize(compiled), execution_devices=devices)
    for each in (loaded, compiled):
        new, y = each(jax.device_put(state, given_on(mesh, given)), X)
        np.testing.assert_array_equal(y, X @ np.ones((4, 8)))
        np.testing.assert_array_equal(new["w"], np.full((4, 8), 2))
        assert new["n"] == 1
        assert y.sharding.spec == P("tp")


def given_on(mesh: Mesh, specs: Any) -> Any:
    is_spec: Any = lambda spec: isinstance(spec, P)  # noqa: E731
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)


# --- What it refuses --------------------------------------------------------------- #


def generator(x: Any) -> Iterator[Any]:
    yield x


REFUSED: dict[str, Callable[[Any], Any]] = {
    "static and donated": lambda jit: jit(f, static_argnums=0, donate_argnames="x"),
    "static and donated names": lambda jit: jit(
        f, static_argnames="x", donate_argnames=["x", "y"]
    ),
    "a generator": lambda jit: jit(generator),
    "a static method": lambda jit: jit(staticmethod(f)),
    "a static number too high": lambda jit: jit(f, static_argnums=2),
    "a static number too low": lambda jit: jit(f, static_argnums=-3),
    "a donated number too high": lambda jit: jit(f, donate_argnums=2),
    "a static name not there": lambda jit: jit(f, static_argnames="z"),
    "a donated name not there": lambda jit: jit(f, donate_argnames="z"),
    "names of no signature": lambda jit: jit(int, donate_argnames="x"),
    "a static list": lambda jit: jit(f, static_argnums=1)(X, [1]),
    "a static array": lambda jit: jit(f, static_argnums=1)(X, jnp.ones(1)),
    "a static keyword": lambda jit: jit(f, static_argnames="y")(X, y={}),
    "no argument": lambda jit: jit(f)(X),
    "one argument too many": lambda jit: jit(f)(X, X, X),
    "an unknown keyword": lambda jit: jit(f)(X, X, z=X),
    "a result that is no array": lambda jit: jit(lambda x: "x")(X),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_jax_jit_refuses_is_refused_in_its_words(what: str) -> None:
    said: list[tuple[type, str]] = []
    for jit in (jax.jit, jhost.jit):
        with pytest.raises((TypeError, ValueError)) as refusal:
            REFUSED[what](jit)
        said.append((refusal.type, str(refusal.value)))
    assert said[0] == said[1]


def test_shardings_that_are_no_prefix_are_refused_without_a_mesh() -> None:
    given: Any = jhost.jit(f).with_options
    with pytest.raises(jhost.errors.OptionError, match="tree prefix"):
        given(in_shardings=(None,))(X, X)
    with pytest.raises(jhost.errors.OptionError, match="kwargs"):
        given(in_shardings=(None, None))(X, y=X)


@pytest.mark.parametrize("name", ["in_shardings", "out_shardings"])
def test_specs_of_arguments_and_results_leave_no_dim_open(
    name: str, mesh: Mesh
) -> None:
    spec = P(P.UNCONSTRAINED, "tp")
    named: Any = {name: NamedSharding(mesh, spec)}
    given: Any = {name: {"w": spec}}
    for call in (
        lambda: jax.jit(f, **named),
        lambda: jhost.jit(f, **named),
        lambda: jhost.jit(f, mesh=mesh, **given),
    ):
        with pytest.raises(ValueError, match="Unconstrained dims are not allowed"):
            call()


# --- What it remembers ------------------------------------------------------------- #


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each jaxpr that is lowered to Host IR."""
    jaxprs: list[Any] = []

    def counted(jaxpr: Any, **settings: Any) -> Any:
        jaxprs.append(jaxpr)
        return build_program(jaxpr, **settings)

    monkeypatch.setattr(build, "build_program", counted)
    return jaxprs


def test_a_call_after_compile_lowers_and_compiles_nothing(
    mesh: Mesh, lowered: list[Any]
) -> None:
    """Also where specs are written otherwise, as JAX's own results have them."""
    compiled: list[str] = []

    def count(event: str, *_: Any, **__: Any) -> None:
        compiled.extend([event] * ("backend_compile" in event))

    g: Any = jhost.jit(lambda x: jhost.stream(x @ x.T, axis=0), mesh=mesh)
    x = jax.device_put(X, NamedSharding(mesh, P("tp", None)))
    g.lower(jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=x.sharding)).compile()
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        g(x)
        g(jax.device_put(x, NamedSharding(mesh, P("tp"))))
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert len(lowered) == 1
    assert not compiled


def test_clear_cache_forgets_what_was_compiled() -> None:
    g: Any = jhost.jit(lambda x: x + 1)
    g(X)
    assert g._cache_size() == 1
    g.clear_cache()
    assert g._cache_size() == 0
