"""AdamW, the gradient norms and the optimizer's summaries over flat buffers, against torch's fused AdamW.

Bytes of AdamW with a bf16 copy: master, gradient and two moments read (16), the same written with the gradient as
zeros (16), the copy written (2): 34 an element, and 8 more where the moving average moves; torch's writes no gradient
and no copy: 28. Norms: 4 read. Summaries: 12 read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import Ceilings, Reading, milliseconds

ELEMENTS = 1 << 29


def measure(ceilings: Ceilings) -> Iterator[Reading]:
    """512M elements in one group."""
    from nstrain.train.norms import NODE
    from nstrain.train.optimizer_kernels import adamw, node_sums, state_sums, stretch_sums

    master, gradient, exp_avg = (torch.randn(ELEMENTS, device="cuda") for _ in range(3))
    exp_avg_sq = torch.rand(ELEMENTS, device="cuda")
    compute = master.bfloat16()
    scalar = lambda value, dtype=torch.float32: torch.tensor(value, dtype=dtype, device="cuda")  # noqa: E731
    divisor, skip, rate, step = scalar(2.0), scalar(0.0), scalar(1e-6), scalar(100.0)
    decay, corrections = scalar(0.1, torch.float64), scalar([0.9, 0.5], torch.float64)

    ema = torch.zeros(ELEMENTS, device="cuda")

    def ours(average: torch.Tensor | None, move: torch.Tensor) -> None:
        state, numbers = (master, gradient, exp_avg, exp_avg_sq, compute, average), (0.9, 0.95, 1e-8)
        adamw(*state, divisor, skip, rate, decay, move, corrections, *numbers)

    def theirs() -> None:
        torch._fused_adamw_(
            [master], [gradient], [exp_avg], [exp_avg_sq], [], [step],
            lr=rate, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    still, moving = scalar(0.0), scalar(1e-3)
    yield Reading("AdamW with bf16 copy and reset", milliseconds(lambda: ours(None, still)), bytes=34.0 * ELEMENTS)
    yield Reading("  and a moving average, not begun", milliseconds(lambda: ours(ema, still)), bytes=34.0 * ELEMENTS)
    yield Reading("  and a moving average", milliseconds(lambda: ours(ema, moving)), bytes=42.0 * ELEMENTS)
    yield Reading("  torch fused AdamW (no copy, no reset)", milliseconds(theirs), bytes=28.0 * ELEMENTS)
    gradient.normal_()
    first, last = (torch.tensor([place], device="cuda") for place in (0, ELEMENTS // NODE))
    yield Reading(
        "gradient norm",
        milliseconds(lambda: stretch_sums(node_sums(gradient, NODE), first, last)),
        bytes=4.0 * ELEMENTS,
    )
    yield Reading("  torch.linalg.vector_norm", milliseconds(lambda: gradient.norm()), bytes=4.0 * ELEMENTS)
    sums = torch.empty(4, ELEMENTS // NODE, dtype=torch.float64, device="cuda")

    def summaries() -> None:
        state_sums(master, exp_avg, exp_avg_sq, NODE, 0.9, 0.5, 1e-8, out=sums)
        for of_kind in sums:
            stretch_sums(of_kind, first, last)

    yield Reading("optimizer summaries", milliseconds(summaries), bytes=12.0 * ELEMENTS)
