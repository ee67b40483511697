"""Explains a call that failed, where jhost can say more than JAX did."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jhost import errors
from jhost._call import shardings
from jhost._call.arguments import by_name
from jhost._call.given_shardings import CallKey
from jhost._call.meshes import check_context
from jhost._call.source import Source
from jhost._jax import TracedCall, arg_names
from jhost.runtime.accepted_options import explain_refusal
from jhost.runtime.mesh import foreign_arrays, mesh_text


@contextmanager
def explaining_failures(
    source: Source, key: CallKey, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Generator[None]:
    """Runs the block, with `explain_failure` for its errors."""
    try:
        yield
    # JAX's classes for arrays on other devices, and for options that XLA refuses.
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        explain_failure(source, error, key, args, kwargs)
        raise


def explain_failure(
    source: Source,
    error: Exception,
    key: CallKey,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Raise jhost's own error where it can say more than JAX's did."""
    if isinstance(error, errors.JhostError):
        return
    try:
        mesh, _ = source.with_mesh(key, args, kwargs)
    except errors.JhostError as problem:
        raise problem from error
    except Exception:
        mesh = key[0]  # the mistake is in the function, and not in its arguments
    key, leaves = (mesh, key[1]), by_name(source.fun, args, kwargs)
    if mesh is not None and (offenders := foreign_arrays(leaves, mesh)):
        raise errors.MeshMismatchError(
            f"{source.name} runs on {mesh_text(mesh)}, but got arrays on other "
            f"devices. Move them with jax.device_put(x, NamedSharding(mesh, "
            "spec)), or give jhost.jit their mesh.",
            offenders,
        ) from error
    explain_refusal(error, source.name, source.settings.compiler_options or {})
    try:
        check_context(source.name, mesh)
        traced = source.trace(key, args, kwargs)
        source.call_jaxpr(key, traced)  # names what does not fit
        _check_has_devices(source, key, source.leaves(args, kwargs))
        _check_layouts(source, key, traced, source.leaves(args, kwargs))
    except (errors.JhostError, TypeError) as problem:  # TypeError: arguments miss
        raise problem from error
    except Exception:
        return  # the call itself is wrong, and JAX's own error says how


def _check_has_devices(source: Source, key: CallKey, leaves: Sequence[Any]) -> None:
    """Raises an error if neither the mesh nor the arguments name the devices."""
    if not isinstance(key[0], AbstractMesh):
        return
    # As for `jax.jit`, shardings over an abstract mesh are for no arrays.
    if source.given.all or not any(map(shardings.own, leaves)):
        raise errors.NoMeshError(
            f"{source.name} would run on {mesh_text(key[0])}, an abstract mesh, "
            "which has no devices. Call it under jax.set_mesh, with a mesh of devices."
        )


def _check_layouts(
    source: Source, key: CallKey, traced: TracedCall, leaves: Sequence[Any]
) -> None:
    """Raises an error if arrays are sharded in another way than `in_shardings` say."""
    if not isinstance(key[0], jax.sharding.Mesh):
        return
    names = arg_names(traced.jaxpr)[len(traced.consts) :]
    ins, _ = source.given.specs(traced)
    if offenders := shardings.misplaced(names, leaves, ins, key[0]):
        raise errors.OptionError(
            f"Arguments of {source.name} have other shardings than in_shardings. Like "
            f"jax.jit, jhost does not move such arrays by itself. Move them with "
            f"jax.device_put(x, NamedSharding(mesh, spec)), or give None to take them "
            f"as they are.",
            offenders,
        )
