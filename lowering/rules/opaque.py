"""The primitives without factors, whose arrays are whole, and why.

Users read the reasons in `explain` and in warnings.  The names hold for JAX 0.10 to
0.12; a test compares them with the primitives that JAX has.
"""

from __future__ import annotations

from jhost.lowering.rules.registry import opaque

# --- Bodies that stay closed --------------------------------------------------- #

opaque(
    "its body was traced for whole arrays, and jhost does not open it here",
    "cond",
    "platform_index",
    "scan",
    "while",
)
opaque(
    "the call has a meaning for JAX or XLA that its inlined body would lose",
    "call_exported",
    "call_hi_primitive",
    "call_hi_primitive_linearized",
    "composite",
    "compute_on",
    "fused_call",
    "custom_vmap_call",
    "program_order",
    "xla_metadata_call",
)
opaque(
    "it stands for a derivative that JAX has not taken yet",
    "custom_jvp_call_jaxpr",
    "custom_lin",
    "remat_opt",
    "unreachable",
)
opaque(
    "no function of JAX leaves an equation of it",
    "select_and_scatter",
    "stage",
    "zeros_like",
)

# --- Code that JAX does not see into ------------------------------------------- #

opaque(
    "the callback expects whole arrays",
    "buffer_callback",
    "debug_callback",
    "debug_print",
    "inspect_sharding",
    "io_callback",
    "pure_callback",
)
opaque(
    "the indices of a sparse array say where its elements are, and not its dims",
    "bcoo_dot_general",
    "bcoo_dot_general_sampled",
    "bcoo_extract",
    "bcoo_fromdense",
    "bcoo_sort_indices",
    "bcoo_spdot_general",
    "bcoo_sum_duplicates",
    "bcoo_todense",
    "bcoo_transpose",
    "bcsr_dot_general",
    "bcsr_extract",
    "bcsr_fromdense",
    "bcsr_todense",
    "coo_fromdense",
    "coo_matmat",
    "coo_matvec",
    "coo_spmm",
    "coo_spmv",
    "coo_todense",
    "csr_fromdense",
    "csr_matmat",
    "csr_matvec",
    "csr_spmm",
    "csr_spmv",
    "csr_todense",
    "spsolve",
    "todense",
)
opaque(
    "it moves arrays between hosts",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
)
opaque("the kernel works on whole sequences", "rnn_bwd", "rnn_fwd")
opaque("the check is for whole arrays", "check", "shape_assertion")
opaque(
    "the kernel does not say how its results come from its operands",
    "cudnn_fusion",
    "ffi_call",
    "mpmd_map",
    "pallas_call",
)
opaque(
    "only the extended dtype knows how its elements are laid out",
    "from_edtype",
    "to_edtype",
)

# --- Values that depend on the whole ------------------------------------------- #

opaque(
    "the bits drawn for a part are not a part of the bits drawn for the whole",
    "random_gamma",
    "rng_bit_generator",
    "rng_uniform",
)
opaque(
    "its result is the size of the whole array",
    "dim_as_value",
    "dimension_size",
)

# --- Places, order and memory -------------------------------------------------- #

opaque(
    "it says where a whole array is, or how it is laid out in memory",
    "layout_constraint",
    "relayout",
    "shard_alike",
    "with_memory_space_constraint",
)
opaque(
    "it orders effects and values, and computes nothing",
    "after_all",
    "create_token",
    "dce_sink",
    "empty2",
    "tie",
)
opaque(
    "a reference names a whole array",
    "accum_grad_in_ref",
    "addupdate",
    "box_get",
    "box_set",
    "broadcast_to",
    "create_linear",
    "empty_ref",
    "free_ref",
    "freeze",
    "get",
    "log_extend",
    "log_read",
    "new_box",
    "new_log",
    "new_ref",
    "pin",
    "run_state",
    "swap",
    "unpin",
)
opaque(
    "it has a meaning only in the body of a `shard_map`",
    "all_gather",
    "all_gather_done",
    "all_gather_invariant",
    "all_gather_reduced",
    "all_gather_reduced_start",
    "all_gather_start",
    "all_to_all",
    "all_to_all_done",
    "all_to_all_start",
    "axis_index",
    "pbroadcast",
    "pbroadcast_done",
    "pbroadcast_dynamic",
    "pbroadcast_start",
    "pmax",
    "pmin",
    "ppermute",
    "ppermute_done",
    "ppermute_start",
    "precv",
    "preduced",
    "psend",
    "psum",
    "psum_done",
    "psum_invariant",
    "psum_invariant_start",
    "psum_start",
    "pvary",
    "ragged_all_to_all",
    "reduce_scatter",
    "reduce_scatter_done",
    "reduce_scatter_start",
    "reduced_vary_cast",
    "reduced_vary_cast_p",
    "unreduced_pmax",
    "unreduced_pmin",
    "unreduced_psum",
    "unreduced_psum_start",
    "unreduced_reduce_scatter",
    "unreduced_reduce_scatter_start",
    "vary_unreduced_cast",
    "vary_unreduced_cast_p",
)
