"""The head: linear cross-entropy, forward and backward, and the validation's token losses.

Shapes: T 16,384 tokens, V 130,560, d 2048 and 2560, bf16, one target in 16 ignored, the table's gradient into an fp32
main_grad. FLOPs: 6 T d V (three products), 2 T d V for the token losses. Bytes: h, the table and dh once, the fp32
gradient read and written once; the chunks' logits are not counted.
The row's kernel alone: 3328 tokens' logits, read once and written once (its second sweep should hit the cache).
Peers in the same run: Liger's fused linear cross-entropy (its gradient in the table's dtype, and accumulated in fp32),
and plain torch with whole fp32 logits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Ceilings, Reading, milliseconds
from torch import Tensor
from torch.nn import functional

TOKENS, VOCABULARY, WIDTHS = 16_384, 130_560, (2048, 2560)


def _inputs(width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, table, targets and the scale: logits of standard deviation 3."""
    generator = torch.Generator("cuda").manual_seed(width)
    h_Td = torch.randn(TOKENS, width, device="cuda", generator=generator).mul_(3 / width**0.5)
    table_Vd = torch.randn(VOCABULARY, width, device="cuda", generator=generator)
    targets_T = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda", generator=generator)
    targets_T[::16] = -100
    scale = torch.tensor([1 / TOKENS], device="cuda")
    return h_Td.bfloat16().requires_grad_(), table_Vd.bfloat16().requires_grad_(), targets_T, scale


def _backward(loss: Callable[[], Tensor], *leaves: Tensor) -> Callable[[], None]:
    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss().sum().backward()

    return run


def _long(work: Callable[[], Any]) -> float:
    """Median over enough calls of some 50 ms each."""
    return milliseconds(work, warmup_ms=200, repeat_ms=800)


def _peak(work: Callable[[], Any]) -> str:
    """Bytes that a call takes beside its inputs, at most."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB"


def _ours(width: int) -> Callable[[], None]:
    from neuronspark.kernels.cross_entropy import linear_cross_entropy

    h_Td, table_Vd, targets_T, scale = _inputs(width)
    table_Vd.main_grad = torch.zeros(VOCABULARY, width, device="cuda")  # type: ignore[attr-defined]
    return _backward(lambda: linear_cross_entropy(h_Td, table_Vd, targets_T, scale, 0.0)[0], h_Td)


def _liger(width: int, accumulate: torch.dtype | None) -> Callable[[], None]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    h_Td, table_Vd, targets_T, scale = _inputs(width)
    head = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=accumulate)
    return _backward(lambda: head(table_Vd, h_Td, targets_T) * scale, h_Td, table_Vd)


def _plain(width: int) -> Callable[[], None]:
    h_Td, table_Vd, targets_T, scale = _inputs(width)
    whole = lambda: functional.cross_entropy((h_Td @ table_Vd.t()).float(), targets_T, reduction="sum")  # noqa: E731
    return _backward(lambda: whole() * scale, h_Td, table_Vd)


def _contenders(width: int) -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    yield "ours", lambda: _ours(width)
    if importlib.util.find_spec("liger_kernel"):
        yield "Liger", lambda: _liger(width, None)
        yield "Liger, fp32 sums", lambda: _liger(width, torch.float32)
    else:
        print("cross_entropy: liger_kernel is not installed, so it is not measured", flush=True)
    yield "plain torch", lambda: _plain(width)


def _rows_work(gradient: bool, tokens: int = 3328) -> Callable[[], None]:
    from neuronspark.kernels.cross_entropy_triton import _rows

    fresh = torch.randn(tokens, VOCABULARY, device="cuda").mul_(3).bfloat16()
    targets_T = torch.randint(0, VOCABULARY, (tokens,), device="cuda")
    ce_T, lse_T = torch.empty(tokens, device="cuda"), torch.empty(tokens, device="cuda")
    scale = torch.tensor([1.0], device="cuda")
    return lambda: _rows(fresh, targets_T, ce_T, lse_T, scale, 0.0, gradient)


def measure(ceilings: Ceilings) -> Iterator[Reading]:
    """Everything of the docstring; one contender's failure does not stop the others."""
    wrong = []
    for width in WIDTHS:
        flops = 6.0 * TOKENS * width * VOCABULARY
        moved = 2.0 * width * (2 * TOKENS + VOCABULARY) + 8.0 * VOCABULARY * width
        for name, prepare in _contenders(width):
            try:
                work = prepare()
                work()
                memory, ms = _peak(work), _long(work)
            except Exception as error:
                wrong.append(f"{name}, d {width}: {type(error).__name__}: {error}")
                continue
            finally:
                torch.cuda.empty_cache()
            yield Reading(f"linear cross-entropy fwd+bwd d {width}, {name}, {memory}", ms, flops, moved)
            del work
        yield _token_losses(width)
    for gradient in (True, False):
        logits_bytes = 2.0 * 3328 * VOCABULARY
        yield Reading(
            f"its row kernel alone, 3328 tokens, {'with' if gradient else 'without'} gradient",
            milliseconds(_rows_work(gradient)),
            bytes=logits_bytes * (2 if gradient else 1),
        )
    if wrong:
        raise RuntimeError(f"failed: {wrong}")


def _token_losses(width: int) -> Reading:
    from neuronspark.kernels.cross_entropy import token_cross_entropy

    h_Td, table_Vd, targets_T, _ = _inputs(width)
    ms = _long(lambda: token_cross_entropy(h_Td, table_Vd, targets_T))
    moved = 2.0 * width * (TOKENS + VOCABULARY)
    return Reading(f"token cross-entropy d {width}, ours", ms, 2.0 * TOKENS * width * VOCABULARY, moved)


def search() -> Iterator[tuple[str, Any, float]]:
    """Tokens to a chunk at both widths (the whole operator timed), and the row's kernel alone."""
    from neuronspark.kernels import cross_entropy_triton, launch

    saved = launch.table()
    with_candidate = lambda name, chosen: launch.use({**saved, name: {launch.ANY: vars(chosen)}})  # noqa: E731
    try:
        for chosen in cross_entropy_triton.CANDIDATES[cross_entropy_triton.ROW]:
            with_candidate(cross_entropy_triton.ROW, chosen)
            for gradient in (True, False):
                yield f"{cross_entropy_triton.ROW} gradient={gradient}", chosen, milliseconds(_rows_work(gradient))
        for width in WIDTHS:
            work = _ours(width)
            for chosen in cross_entropy_triton.CANDIDATES[cross_entropy_triton.CHUNK]:
                with_candidate(cross_entropy_triton.CHUNK, chosen)
                work()
                yield f"{cross_entropy_triton.CHUNK} d={width}", chosen, _long(work)
    finally:
        launch.use(saved)
