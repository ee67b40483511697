"""What a jhost function gives, held against what its plain function gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

try:
    import chex
except ImportError as error:
    raise ImportError("jhost.testing needs chex: pip install 'chex>=0.1.92'") from error

from jhost import errors
from jhost._annotate import Pipeline
from jhost._api import JitFunction
from jhost._call.bind import call_of
from jhost._call.program import derived_program
from jhost._compare import beyond_tolerance
from jhost._tune.calls import by_floats, gradients_of
from jhost.lowering.ir.display_names import displayed_remarks
from jhost.lowering.ir.remarks import Note, StreamReport
from jhost.runtime.mesh import automatic, mesh_text


def compare(given: Any, wanted: Any, tolerance: float | None) -> None:
    """`jhost.testing.assert_close`, of arguments that are checked."""
    given, wanted = _arrays("given", given), _arrays("wanted", wanted)
    # Shapes and dtypes first: values that broadcast must not be equal.
    chex.assert_trees_all_equal_shapes_and_dtypes(given, wanted)
    problems = beyond_tolerance(given, wanted, tolerance)
    if problems:
        raise AssertionError("\n".join(problems))


def _arrays(what: str, tree: Any) -> Any:
    """Python's numbers are arrays too, and nothing else is."""

    def array(path: Any, leaf: Any) -> Any:
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            return leaf
        try:
            return jnp.asarray(leaf)
        except TypeError:
            raise errors.ArgumentError(
                "jhost.testing.assert_close takes trees of arrays, but "
                f"{what}{jax.tree_util.keystr(path)} is {leaf!r}."
            ) from None

    return jax.tree_util.tree_map_with_path(array, tree)


class Case:
    """A function on one mesh, and what the plain one gives there."""

    def __init__(
        self,
        f: JitFunction[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        gradients: bool,
    ) -> None:
        self.f = f
        self.args = args
        self.kwargs = kwargs
        self.gradients = gradients
        self.mesh = call_of(f.__jhost_source__, args, kwargs).config.mesh
        mesh = self.mesh
        # Specs without a mesh, in the function, are of the mesh around.
        with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else nullcontext():
            # Once: it is the same for all pipelines.
            self.wanted = self.results(f.__wrapped__, jax.jit, automatic)

    def results(
        self,
        function: Callable[..., Any],
        wrap: Callable[[Any], Any],
        place: Callable[[Any], Any],
    ) -> dict[str, Any]:
        """The value, and the gradients where they are asked for."""
        args, kwargs = jax.tree.map(place, (tuple(self.args), dict(self.kwargs)))
        call, floats = by_floats(function, args, kwargs)
        found = {"value": wrap(call)(*floats)}
        if self.gradients:
            found["gradients"] = wrap(gradients_of(call))(*floats)
        return found

    def check_some_have(self, f: JitFunction[..., Any], pipeline: Pipeline) -> None:
        """Refuses to compare a value that no pipeline can have.

        Raises:
            PipelineError: no stream can have it, as none can on one device.
        """
        call = call_of(f.__jhost_source__, self.args, self.kwargs)
        # As JAX derives programs: what no mark can have is a remark, and no error.
        program = derived_program(call.call_jaxpr, call.config)
        remarks = displayed_remarks(program)
        streams = [each for each in remarks if isinstance(each, StreamReport)]
        wish = f'pipeline="{pipeline}" of jhost.jit cannot be'
        unmet = [str(n) for n in remarks if isinstance(n, Note) and wish in n.form]
        if unmet and all(stream.pipeline != pipeline for stream in streams):
            raise errors.PipelineError(
                f"no stream of {f.__name__} can have pipeline={pipeline!r}, for which "
                "jhost.testing.assert_equals_plain was to compare it.",
                unmet,
            )

    def problems(self, pipeline: Pipeline, tolerance: float | None) -> list[str]:
        """The differences with a pipeline, a line each."""
        f = self.f.with_options(pipeline=pipeline)
        # If no stream has the pipeline, the comparison would pass and say nothing.
        self.check_some_have(f, pipeline)
        given = self.results(f, _as_it_is, _as_it_is)
        where = f"pipeline={pipeline!r} on {self.mesh and mesh_text(self.mesh)}"
        found: list[str] = []
        for what, wanted in self.wanted.items():
            try:
                compare(given[what], wanted, tolerance)
            except AssertionError as error:
                found += [f"{where}, {what}: {line}" for line in str(error).split("\n")]
        return found


def _as_it_is(value: Any) -> Any:
    return value
