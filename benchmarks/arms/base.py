"""What an arm is: from a case, the function that it times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost
from benchmarks.case import Case, Operand

Function: TypeAlias = Callable[..., Any]


class Unavailable(Exception):
    """An arm that cannot run a case here; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Built:
    """The function of an arm, for one instance, and how it is to be called.

    `options` are the XLA options of a `jax.jit` around one instance or several.
    `call` is what a user calls for one instance where that is not such a `jax.jit`.
    Arms that compute something else than the case are not `checked`.
    """

    instance: Function
    operands: tuple[Operand, ...]
    options: Mapping[str, Any] | None = None
    call: Function | None = None
    checked: bool = True
    explain: Callable[[Sequence[Any]], jhost.Explanation] | None = None

    def once(self) -> Function:
        """One op per call."""
        return self.call or jax.jit(self.instance, compiler_options=self._options())

    def program(self) -> Any:
        """Several instances in one program: takes a set of operands for each."""
        return jax.jit(tied(self.instance), compiler_options=self._options())

    def _options(self) -> dict[str, Any] | None:
        return dict(self.options) if self.options else None


Arm: TypeAlias = Callable[[Case, Mesh, bool], list[Built]]
"""From a case, a mesh and whether gradients are wanted: the variants to try."""


def tied(instance: Function) -> Function:
    """Instances one after another: each one's operands wait for the last result."""

    def program(*sets: Sequence[jax.Array]) -> list[Any]:
        results: list[Any] = []
        for operands in sets:
            if results:
                # Both sides are returned: XLA drops a barrier's unused elements, and
                # merges instances that are tied by them alone.
                operands, results[-1] = jax.lax.optimization_barrier(
                    (tuple(operands), results[-1])
                )
            results.append(instance(*operands))
        return results

    return program


def case_operands(case: Case, backward: bool) -> tuple[Operand, ...]:
    """The operands of an instance: the case's, then what a backward pass is given."""
    return (*case.operands, case.cotangent()) if backward else case.operands


COTANGENT = "after the result"
"""Since when a backward pass has what it starts from, for records: as in a step.  XLA
would gather one that is there from the start during the forward pass."""


def forward_or_both(function: Function, backward: bool) -> Function:
    """`function`, or it and its gradients by all operands from a given cotangent."""
    return _with_gradients(function) if backward else function


def _with_gradients(function: Function) -> Function:
    def both(*operands_and_cotangent: Any) -> Any:
        *operands, cotangent = operands_and_cotangent
        result, pull = jax.vjp(function, *operands)
        cotangent, result = jax.lax.optimization_barrier((cotangent, result))
        return (result, *pull(cotangent))

    return both


def constrained(function: Function, case: Case, mesh: Mesh) -> Function:
    """`function` with results (and gradients) laid out as the case has them."""
    shardings = [NamedSharding(mesh, s) for s in (case.out_spec, *case.specs)]

    def laid_out(*operands: Any) -> Any:
        result = function(*operands)
        place = jax.lax.with_sharding_constraint
        if not isinstance(result, tuple):
            return place(result, shardings[0])
        pairs = zip(result, shardings, strict=True)
        return tuple(place(value, sharding) for value, sharding in pairs)

    return laid_out


def per_device(
    function: Function, mesh: Mesh, specs: Sequence[P], out: Any, *, check: bool = True
) -> Function:
    """`jax.shard_map` of a function of one device's parts."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=tuple(specs), out_specs=out, check_vma=check
    )


def need_gpus(mesh: Mesh) -> None:
    """Raises Unavailable on other devices."""
    if mesh.devices.flat[0].platform != "gpu":
        raise Unavailable("needs GPUs")
