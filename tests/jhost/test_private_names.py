"""How many of JAX's private names jhost uses: few, and none that has a public twin."""

from __future__ import annotations

import ast
import functools
import inspect
import warnings
from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path

import jhost._jax
import jhost.lowering
import jhost.runtime

MOST = 50
"""This number may only fall: the next JAX may drop any of these names."""

PUBLIC = (
    "jax",
    "jax.core",
    "jax.custom_derivatives",
    "jax.errors",
    "jax.extend.backend",
    "jax.extend.core",
    "jax.extend.core.primitives",
    "jax.extend.linear_util",
    "jax.extend.source_info_util",
    "jax.interpreters.ad",
    "jax.interpreters.batching",
    "jax.interpreters.mlir",
    "jax.interpreters.partial_eval",
)

NOT_IN_BOTH = {
    "jax._src.core.custom_typechecks",  # deprecated in 0.10, not public in 0.12
    "jax._src.core.trace_ctx",  # likewise
    "jax._src.core.ClosedJaxpr",  # gone from 0.11 on
    "jax._src.interpreters.ad.jvp_jaxpr",  # public in 0.12 alone
    "jax._src.interpreters.partial_eval.new_eqn_recipe",  # likewise
}


def is_module(name: str) -> bool:
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:  # a function's attribute
        return False


def names_in(tree: ast.Module) -> Iterator[str]:
    """The private names that a module of jhost uses, each with JAX's module."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.startswith("jax._src"):
                for alias in node.names:
                    full = f"{module}.{alias.name}"
                    if is_module(full):
                        modules[alias.asname or alias.name] = full
                    else:
                        yield full
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                for part in ast.walk(value):
                    match part:
                        case ast.Call(
                            func=ast.Name(id="import_module"),
                            args=[ast.Constant(value=str(module))],
                        ) if module.startswith("jax._src"):
                            modules[name] = module
                        case _:
                            pass
            case _:
                pass
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                if name in modules:
                    yield f"{modules[name]}.{attribute}"
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[ast.Name(id=name), ast.Constant(value=str(attribute)), *_],
            ):
                if name in modules:
                    yield f"{modules[name]}.{attribute}"
            case _:
                pass


@functools.cache
def private_names() -> frozenset[str]:
    folder = Path(inspect.getfile(jhost._jax)).parent
    trees = (ast.parse(path.read_text()) for path in sorted(folder.glob("*.py")))
    return frozenset(name for tree in trees for name in names_in(tree))


def public_twins(name: str) -> list[str]:
    """The public modules that have the same object by the same name, as it stands."""
    module, _, attribute = name.rpartition(".")
    own = getattr(import_module(module), attribute, None) if is_module(module) else None
    twins: list[str] = []
    for public in PUBLIC:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is deprecated is no twin
            try:
                found = getattr(import_module(public), attribute, None)
            except DeprecationWarning:
                continue
        if own is not None and found is own:
            twins.append(f"{public}.{attribute}")
    return twins


def test_private_names_become_no_more() -> None:
    assert len(private_names()) <= MOST, sorted(private_names())


def test_no_private_name_has_a_public_twin() -> None:
    twins = {name: public_twins(name) for name in private_names() - NOT_IN_BOTH}
    assert not {name: found for name, found in twins.items() if found}


def test_all_that_stands_between_is_used() -> None:
    """Each name that `jhost._jax` gives is imported by a module in front of it."""
    (own,) = (Path(folder) for folder in jhost._jax.__path__)
    folders = (*jhost.__path__, *jhost.lowering.__path__, *jhost.runtime.__path__)
    paths = (path for folder in folders for path in Path(folder).rglob("*.py"))
    sources = (path.read_text() for path in paths if own not in path.parents)
    imported = {
        name
        for source in sources
        if "from jhost._jax import" in source
        for module, name in imports_of(source)
        if module == "jhost._jax"
    }
    given = imports_of((own / "__init__.py").read_text())
    names = {name for module, name in given if module.startswith("jhost")}
    assert names <= imported, names - imported


def imports_of(source: str) -> set[tuple[str, str]]:
    """The modules that a source imports from, each with a name."""
    return {
        (str(node.module), alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
