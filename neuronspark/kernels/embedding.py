"""Reading the embedding table, with a gradient whose bits do not depend on the run.

On a CPU `index_add_` walks the tokens one after another; on a GPU they are sorted, by the kernels of
`embedding_triton` or, for the reference, by torch's embedding backward. Neither races, as a scattered accumulation
would. Shapes: T tokens, V table rows, d channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuronspark.kernels.backend import use_triton
from neuronspark.kernels.gradient import deliver, main_gradient


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_Vd: Tensor, tokens_T: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.table = table_Vd
        return table_Vd.index_select(0, tokens_T)

    @staticmethod
    def backward(ctx: Any, dy_Td: Tensor) -> tuple[Tensor | None, None]:
        (tokens_T,) = ctx.saved_tensors
        table: Tensor = ctx.table
        main = main_gradient(table)
        by_kernels = use_triton(dy_Td)
        if dy_Td.device.type != "cpu" and not by_kernels:
            dense = torch.ops.aten.embedding_dense_backward(dy_Td, tokens_T, table.shape[0], -1, False)
            return deliver(table, dense), None
        target = torch.zeros_like(table) if main is None else main
        if by_kernels:
            from neuronspark.kernels.embedding_triton import add_rows_triton

            add_rows_triton(target, tokens_T, dy_Td)
        else:
            target.index_add_(0, tokens_T, dy_Td.to(target.dtype))
        return (target if main is None else None), None


def lookup(table_Vd: Tensor, tokens_T: Tensor) -> Tensor:
    """The table's rows of the tokens (each >= 0)."""
    return _Lookup.apply(table_Vd, tokens_T)
