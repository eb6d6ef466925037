"""Which operator each Triton kernel belongs to, for whoever sums a profile up by operator.

A profiler shows a kernel by its function's name alone, so no two kernels of the package share one. A kernel that is in
no operator here fails a test. Matrix products are cuBLAS's, those of the head and of the weights' gradients too, and
have no kernel here.
"""

from __future__ import annotations

KERNELS = {
    "pool read": (
        "clock_kernel",
        "step_gradient_kernel",
        "forward_kernel",
        "query_gradient_kernel",
        "key_gradient_kernel",
    ),
    "dendritic scan": (
        "sum_decays_kernel",
        "walk_states_kernel",
        "outputs_kernel",
        "gradients_kernel",
        "decay_gradients_kernel",
        "part_sums_kernel",
    ),
    "trace scan": ("_ends_kernel", "_carry_kernel", "_trace_kernel", "_adjoint_ends_kernel", "_trace_backward_kernel"),
    "norms": ("_row_norm_forward_kernel", "_row_norm_backward_kernel"),
    "neurons": ("_release_forward_kernel", "_release_backward_kernel"),
    "addresses": ("_addresses_forward_kernel", "_addresses_backward_kernel"),
    "arbitration": ("_arbitration_forward_kernel", "_arbitration_backward_kernel"),
    "product-key memory": (
        "_select",
        "_score_gradients",
        "_read",
        "_weight_gradients",
        "_add_runs",
        "_add_carried",
    ),
    "head": ("_row_kernel", "_scaled_kernel"),
    "embedding": ("_sum_pieces_kernel", "_combine_kernel"),
    "sums of parameters' gradients": ("_sum_partials_kernel",),
}
"""Kernels by operator. Norms include the neurons that are fused with one; the head is its cross-entropy."""

KERNEL_OPERATORS = {kernel: operator for operator, kernels in KERNELS.items() for kernel in kernels}
"""The operator of each kernel, by the kernel's name."""
