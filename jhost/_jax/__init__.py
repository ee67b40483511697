"""JAX's private parts and version differences, behind typed functions.

Nothing else in jhost imports `jax._src` or asks which JAX this is.

- `primitives.py`: call and marker primitives, with JAX's rules for them.
- `computations.py`: primitives that a JAX function defines.
- `linearization.py`, `partial_evaluation.py`, `split.py`: a call split in two.
- `tracing.py`: functions traced as `jax.jit` does it.
- `stages.py`: JAX's stages of compilation, extended.
- `thunks.py`: the queues that XLA's runtime chose for an executable.
- `jaxprs.py`: questions about a traced program, and its evaluation.
- `eqns.py`, `scans.py`, `dead_code.py`: new equations and programs.
- `typed.py`: programs on explicit meshes, without their types.
- `manual.py`: bodies of `jax.shard_map`.
- `lines.py`: the user's lines.
- `caches.py`: caches that `jax.clear_caches` empties.
- `processes.py`: this process among others.
- `v010.py`: what JAX 0.10 lacks.
"""

from __future__ import annotations

from jhost._jax.caches import cached as cached, cached_by_jaxpr as cached_by_jaxpr
from jhost._jax.computations import (
    Kernels as Kernels,
    def_jvp as def_jvp,
    def_transpose as def_transpose,
    define_primitive as define_primitive,
    is_own as is_own,
    varying_alike as varying_alike,
    without_last_dim as without_last_dim,
)
from jhost._jax.dead_code import without_dead_code as without_dead_code
from jhost._jax.eqns import (
    Atom as Atom,
    ClosedJaxpr as ClosedJaxpr,
    calls as calls,
    close as close,
    constraint as constraint,
    fresh_var as fresh_var,
    new_eqn as new_eqn,
    primitive_name as primitive_name,
    programs_in as programs_in,
    resized_var as resized_var,
    rewritten as rewritten,
    with_each_eqn as with_each_eqn,
    with_operand_names as with_operand_names,
    with_own_operands as with_own_operands,
)
from jhost._jax.jaxprs import (
    arg_names as arg_names,
    as_weak as as_weak,
    aval_of as aval_of,
    evaluate as evaluate,
    evaluate_by as evaluate_by,
    hashes_positions as hashes_positions,
    is_array as is_array,
    is_type as is_type,
    is_wide as is_wide,
    itemsize as itemsize,
    makes_threefry_keys as makes_threefry_keys,
    result_paths as result_paths,
    type_of as type_of,
    with_width as with_width,
)
from jhost._jax.lines import (
    NO_LINE as NO_LINE,
    Position as Position,
    at_line_of as at_line_of,
    file_title as file_title,
    is_in_backward as is_in_backward,
    is_transposed as is_transposed,
    source_line as source_line,
    user_context as user_context,
    user_position as user_position,
)
from jhost._jax.manual import (
    DimAxes as DimAxes,
    ShardMap as ShardMap,
    inside_manual as inside_manual,
    shard_map_of as shard_map_of,
    traced_on_mesh as traced_on_mesh,
    untyped_params as untyped_params,
    without_mesh as without_mesh,
    without_types as without_types,
)
from jhost._jax.primitives import (
    def_impl as def_impl,
    def_split as def_split,
    define_call_primitive as define_call_primitive,
    define_marker_primitive as define_marker_primitive,
    register_lowering as register_lowering,
    with_all_operands as with_all_operands,
)
from jhost._jax.processes import (
    Coordination as Coordination,
    backend_is_up as backend_is_up,
    coordination as coordination,
    from_process_0 as from_process_0,
    process_number as process_number,
)
from jhost._jax.scaled import scaled_matmul_p as scaled_matmul_p
from jhost._jax.scans import (
    scan_counts as scan_counts,
    scan_like as scan_like,
    stacked_var as stacked_var,
    zeros_on_host as zeros_on_host,
)
from jhost._jax.split import (
    Derivation as Derivation,
    Residual as Residual,
    Split as Split,
)
from jhost._jax.stages import take_over as take_over
from jhost._jax.thunks import communication_streams as communication_streams
from jhost._jax.tracing import (
    ArgNames as ArgNames,
    ArgNums as ArgNums,
    Inline as Inline,
    StaticArguments as StaticArguments,
    TracedCall as TracedCall,
    forget_traces as forget_traces,
    is_linearized as is_linearized,
    is_reference as is_reference,
    is_tracing as is_tracing,
    jit_is_disabled as jit_is_disabled,
    mesh_of_tracer as mesh_of_tracer,
    shardings_given as shardings_given,
    static_arguments as static_arguments,
    trace as trace,
    under_outer_trace as under_outer_trace,
)
from jhost._jax.typed import untyped as untyped
