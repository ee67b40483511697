"""Who computes a step, by name: each makes what has `lower`, as `jax.jit` does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost
from benchmarks.step.whole import hand
from benchmarks.step.whole.model import Layers, specs_of_state, train_step
from benchmarks.step.whole.sizes import Case
from jhost.runtime.compiler_options import EARLY_COLLECTIVES

Mark: TypeAlias = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Global:
    """Arrays of all devices with their layouts, and marks or none."""

    case: Case
    mesh: Mesh
    marked: bool

    def gathered(self, x: jax.Array) -> jax.Array:
        return x

    def mark(self, product: jax.Array) -> jax.Array:
        return jhost.stream(product, axis=1) if self.marked else product

    def features(self, x: jax.Array) -> jax.Array:
        return self._laid(x, self.case.columns)

    def rows(self, product: jax.Array) -> jax.Array:
        return self._laid(self.mark(product), self.case.rows)

    def weight(self, w: jax.Array, spec: P) -> jax.Array:
        return w.astype(jnp.bfloat16)

    def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        return self._laid(table[tokens], self.case.rows)

    def _laid(self, x: jax.Array, spec: P) -> jax.Array:
        return constrain(x, NamedSharding(self.mesh, spec))


@dataclasses.dataclass(frozen=True)
class Alone:
    """No communication: what a device has stands in for what all have.

    It is written, and added up, as a collective would do it on each device, behind
    barriers, so that products are computed whole.
    """

    case: Case

    def gathered(self, x: jax.Array) -> jax.Array:
        return self._copies(x, "tp", 1)

    def mark(self, product: jax.Array) -> jax.Array:
        return product

    def features(self, x: jax.Array) -> jax.Array:
        return x

    def rows(self, product: jax.Array) -> jax.Array:
        count = self.case.size("tp")
        if count == 1:
            return product
        whole = lax.optimization_barrier(product)
        parts = whole.reshape(whole.shape[0], count, -1, whole.shape[2])
        return parts.sum(1)

    def weight(self, w: jax.Array, spec: P) -> jax.Array:
        narrow = w.astype(jnp.bfloat16)
        if "fsdp" not in spec:
            return narrow
        return self._copies(narrow, "fsdp", spec.index("fsdp"))

    def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        own = tokens[:, : tokens.shape[1] // self.case.size("tp")]
        return self._copies(table[own % table.shape[0]], "fsdp", 2)

    def _copies(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        count = self.case.size(axis)
        if count == 1:
            return x
        return lax.optimization_barrier(jnp.concatenate([x] * count, axis=dim))


@dataclasses.dataclass(frozen=True)
class Arm:
    """How a step becomes a function that compiles, with these options for XLA."""

    make: Callable[[Case, Mesh], Any]
    wanted: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compared: bool = True
    """Whether its losses are those of `jit`."""


def jitted(case: Case, mesh: Mesh, layers: Layers | None = None) -> Any:
    """`jax.jit`, layouts said."""
    place = Global(case, mesh, marked=False)
    step = functools.partial(train_step, case, place, layers=layers)
    ins, outs = (
        jax.tree.map(
            functools.partial(NamedSharding, mesh),
            specs,
            is_leaf=lambda leaf: isinstance(leaf, P),
        )
        for specs in shardings(case)
    )
    return jax.jit(step, in_shardings=ins, out_shardings=outs, donate_argnums=0)


def by_hand(case: Case, mesh: Mesh) -> Any:
    """The same, but for the layers, which are a cycle written by hand."""
    return jitted(case, mesh, hand.layers(case, mesh))


def hosted(
    pipeline: Any, *, marked: bool = False, finds: bool = True
) -> Callable[[Case, Mesh], Any]:
    """`jhost.jit` around the same step."""

    def make(case: Case, mesh: Mesh) -> Any:
        step = functools.partial(train_step, case, Global(case, mesh, marked))
        ins, outs = shardings(case)
        return jhost.jit(
            step,
            mesh=mesh,
            in_shardings=ins,
            out_shardings=outs,
            donate_argnums=0,
            pipeline=pipeline,
            streams="auto" if finds else "marked",
        )

    return make


def compute(case: Case, mesh: Mesh) -> Any:
    """One device's part on each device, without communication."""
    step = functools.partial(train_step, case, Alone(case))
    ins, outs = shardings(case)
    part = jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    return jax.jit(part, donate_argnums=0)


def shardings(case: Case) -> tuple[Any, Any]:
    """Of what a step takes, and of what it returns."""
    state = specs_of_state(case)
    return (state, case.token_spec), (state, P())


_PIPELINED = ("all_gather", "reduce_scatter", "all_reduce")

_MAXTEXT: Mapping[str, Any] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_command_buffer": "",
    "xla_gpu_enable_highest_priority_async_stream": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 30,
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 27,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1 << 27,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    # One option by two names: before 2026 it was yes or no.
    **{
        f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"
        for kind in _PIPELINED
    },
    **{f"xla_gpu_enable_pipelined_{kind}": True for kind in _PIPELINED},
}
"""https://github.com/AI-Hypercomputer/maxtext, src/maxtext/configs/gpu/a3/llama_2_7b/
16vm.sh and llama_3.1_405b/128vm.sh, August 2026."""

ARMS: Mapping[str, Arm] = {
    "jit": Arm(jitted),
    "tuned": Arm(jitted, EARLY_COLLECTIVES),
    "maxtext": Arm(jitted, _MAXTEXT),
    "hand": Arm(by_hand, EARLY_COLLECTIVES),
    "jhost": Arm(hosted("auto")),
    "unfound": Arm(hosted("auto", finds=False)),
    "p2p": Arm(hosted("p2p")),
    "marked": Arm(hosted("auto", marked=True)),
    "marked_p2p": Arm(hosted("p2p", marked=True)),
    "off": Arm(hosted("off")),
    "compute": Arm(compute, compared=False),
}
"""In the order in which they take turns; losses are compared with the first's."""
