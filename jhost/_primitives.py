"""The primitives that carry what jhost needs to know through JAX's transforms.

Markers are the identity, with a stream or a sharding as parameters.  They stand in the
jaxpr that `jhost_p` calls, and in every program that JAX derives from it.  The lowering
removes them.  `jhost._call.execute` implements and lowers `jhost_p`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from jhost import errors
from jhost._jax import define_call_primitive, define_marker_primitive

DimSpec: TypeAlias = tuple[str, ...] | None
"""The mesh axes that shard a dim, major first; None leaves the choice to jhost."""

Spec: TypeAlias = tuple[DimSpec, ...]
"""An entry for each dim."""


def _shift_axis(
    params: dict[str, Any], dim: int, names: tuple[str, ...] | None
) -> dict[str, Any]:
    axis = params["axis"]
    # The mapped dim gets the place `dim`, and moves the dims from there on back.
    return {**params, "axis": axis + 1 if dim <= axis else axis}


def _keep_params(
    params: dict[str, Any], dim: int, names: tuple[str, ...] | None
) -> dict[str, Any]:
    return params


def _insert_entry(
    params: dict[str, Any], dim: int, names: tuple[str, ...] | None
) -> dict[str, Any]:
    """Puts in the axes of `spmd_axis_name`, or None as `with_sharding_constraint` does.

    An entry that says unsharded would gather a batch that the caller has sharded.
    """
    spec: Spec = params["spec"]
    taken = {axis for entry in spec for axis in entry or ()}
    if repeated := taken.intersection(names or ()):
        raise errors.DuplicateAxisError(
            f"jhost.shard got a spec that uses mesh axis {sorted(repeated)}, under a "
            f"jax.vmap with spmd_axis_name={names}, which shards the mapped dim by the "
            "same axis. Leave the axis out of one of them."
        )
    return {"spec": (*spec[:dim], names, *spec[dim:])}


def _of_the_cotangent(params: dict[str, Any]) -> dict[str, Any]:
    """The shards that were asked for; of a dim that was to be whole, nothing.

    The cotangent of a gathered value is a sum over devices, and may be scattered.
    """
    return {"spec": tuple(axes or None for axes in params["spec"])}


stream_p = define_marker_primitive("stream", _shift_axis)
"""`axis: int`, `chunks: int | "auto" | None`, `pipeline: str | None`."""

serial_p = define_marker_primitive("serial", _keep_params)
"""No parameters."""

shard_p = define_marker_primitive("shard", _insert_entry, _of_the_cotangent)
"""`spec: Spec`, as long as the operand has dims."""

jhost_p = define_call_primitive("jhost")
"""`call_jaxpr`, with the markers in it, and what `jhost._call.config` adds."""
