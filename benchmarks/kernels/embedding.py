"""The embedding's gradient into the tied fp32 gradient: T 16,384 tokens, V 130,560, d 2560, dy in bf16.

Tokens: natural (a power law, as text has), all distinct, all equal. Bytes: dy once, each touched row of the gradient
read and written once. Peer in the same run: torch's embedding backward into a dense bf16 table and its addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from harness import Ceilings, Reading, milliseconds
from torch import Tensor

TOKENS, VOCABULARY, WIDTH = 16_384, 130_560, 2560


def _tokens() -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    uniform = torch.rand(TOKENS, device="cuda", generator=generator, dtype=torch.float64)
    return {
        "natural": (VOCABULARY**uniform).long() - 1,
        "all distinct": torch.randperm(VOCABULARY, device="cuda", generator=generator)[:TOKENS],
        "all equal": torch.full((TOKENS,), 1234, device="cuda"),
    }


def measure(ceilings: Ceilings) -> Iterator[Reading]:
    """Ours and torch's, for each kind of tokens."""
    from neuronspark.kernels.embedding_triton import add_rows_triton

    main = torch.zeros(VOCABULARY, WIDTH, device="cuda")
    dy_Td = torch.randn(TOKENS, WIDTH, device="cuda").bfloat16()

    def torchs(tokens_T: Tensor) -> None:
        main.add_(torch.ops.aten.embedding_dense_backward(dy_Td, tokens_T, VOCABULARY, -1, False))

    for name, tokens_T in _tokens().items():
        moved = 2.0 * TOKENS * WIDTH + 8.0 * WIDTH * int(tokens_T.unique().numel())
        ours = milliseconds(lambda tokens_T=tokens_T: add_rows_triton(main, tokens_T, dy_Td))
        yield Reading(f"embedding gradient, {name}, ours", ours, bytes=moved)
        sort = milliseconds(lambda tokens_T=tokens_T: torch.sort(tokens_T.to(torch.int32), stable=True))
        yield Reading(f"embedding gradient, {name}, of which the sort", sort, bytes=16.0 * TOKENS)
        yield Reading(
            f"embedding gradient, {name}, torch", milliseconds(lambda tokens_T=tokens_T: torchs(tokens_T)), bytes=moved
        )


def search() -> Iterator[tuple[str, Any, float]]:
    """Both passes' candidates, each timed by the whole operator at the tokens that it matters for."""
    from neuronspark.kernels import embedding_triton, launch

    saved, tokens = launch.table(), _tokens()
    main = torch.zeros(VOCABULARY, WIDTH, device="cuda")
    dy_Td = torch.randn(TOKENS, WIDTH, device="cuda").bfloat16()
    try:
        for name, kinds in (
            (embedding_triton.SUM_PIECES, ("natural", "all distinct")),
            (embedding_triton.COMBINE, ("all equal",)),
        ):
            for kind in kinds:
                for chosen in embedding_triton.CANDIDATES[name]:
                    launch.use({**saved, name: {launch.ANY: vars(chosen)}})
                    work = lambda kind=kind: embedding_triton.add_rows_triton(main, tokens[kind], dy_Td)  # noqa: E731
                    yield f"{name} {kind}", chosen, milliseconds(work)
    finally:
        launch.use(saved)
