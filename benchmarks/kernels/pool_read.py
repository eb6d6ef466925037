"""The pool read at ns-2b's widths (address 64 + 32, value 64) and at 128 + 32 / 128, in bf16, forward and backward.

Shapes: 4 rows of 40 heads and 4096 tokens, 1 row of 32,768, and 4 rows of 20 heads, 128 wide, of 4096. Operations are
counted for the pairs of the causal triangle: forward 2 (a + d) a pair, L (L + 1) / 2 pairs a row and head; backward 2.5
times that, whatever is recomputed. Clock steps of 1e-4 to 2e-2 a token, as at a model's start. Ours is replayed from
CUDA graphs, as the trainer runs it.

Peers in the same run: flex_attention, compiled, whose score_mod adds a bias a key (the clock and the tag, with its
gradient if it gives one), on the same queries, keys and values; and as a plain ceiling PyTorch's flash attention, which
has no bias, with queries and keys as wide as the values (its own a + d is what is counted). A peer that fails is
reported and left out.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Ceilings, Reading, forward_backward, milliseconds
from torch import Tensor

SHAPES = ((4, 40, 4096, 96, 64), (1, 40, 32768, 96, 64), (4, 20, 4096, 160, 128))
"""(rows, heads, tokens, address, value)."""
BACKWARD_TO_FORWARD = 2.5


@dataclasses.dataclass(frozen=True)
class _Case:
    """The operator's inputs at one shape."""

    shape: tuple[int, int, int, int, int]
    inputs: list[Tensor]
    """query, key, value, clock_step, log_write."""
    dread: Tensor

    @property
    def flops(self) -> float:
        """Of a forward."""
        rows, heads, tokens, address, value = self.shape
        return rows * heads * tokens * (tokens + 1) * (address + value)

    def __str__(self) -> str:
        rows, heads, tokens, address, value = self.shape
        return f"{rows} x {heads} x {tokens}, {address}/{value}"


def _case(shape: tuple[int, int, int, int, int]) -> _Case:
    rows, heads, tokens, address, value = shape

    def normal(*widths: int) -> Tensor:
        return torch.randn(rows, heads, tokens, *widths, device="cuda")

    scale = (4 / address**0.5) ** 0.5
    dense = [(normal(address) * scale).bfloat16(), (normal(address) * scale).bfloat16(), normal(value).bfloat16()]
    clock_bias = torch.linspace(-9, -4, heads, device="cuda")[:, None]
    biases = [torch.nn.functional.softplus(normal() * 0.5 + clock_bias), torch.nn.functional.logsigmoid(3 + normal())]
    inputs = [tensor.requires_grad_() for tensor in (*dense, *biases)]
    return _Case(shape, inputs, normal(value).bfloat16())


def _replayed(work: Callable[[], Any]) -> Callable[[], None]:
    """The work as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measure(ceilings: Ceilings) -> Iterator[Reading]:
    """Every shape: ours, then the peers."""
    for shape in SHAPES:
        case = _case(shape)
        yield from _ours(case)
        for name, peer in (("flex_attention", _flex), ("flash, no bias", _flash)):
            try:
                yield from peer(case, name)
            except Exception:
                print(f"{name} {case}: did not run\n{traceback.format_exc(limit=3)}", flush=True)
        del case
        torch.cuda.empty_cache()


def _ours(case: _Case) -> Iterator[Reading]:
    from neuronspark.kernels.pool_read_triton import pool_read_triton

    both = 1 + BACKWARD_TO_FORWARD
    with torch.no_grad():
        forward_ms = milliseconds(_replayed(lambda: pool_read_triton(*case.inputs)))
    yield Reading(f"pool_read forward {case}", forward_ms, case.flops)
    both_ms = milliseconds(_replayed(forward_backward(pool_read_triton, case.inputs)))
    yield Reading(f"pool_read forward + backward {case}", both_ms, both * case.flops)
    yield Reading(f"pool_read backward (difference) {case}", both_ms - forward_ms, BACKWARD_TO_FORWARD * case.flops)
    *_, address, value = case.shape
    done = {"forward": address + value, "query_gradient": 2 * address + value, "key_gradient": 2 * (address + value)}
    scans = {"clock": 12.0, "step_gradient": 12.0}
    for kernel, work in _passes(case).items():
        flops = case.flops / (address + value) * done.get(kernel, 0)
        moved = scans.get(kernel, 0.0) * case.inputs[3].numel()
        yield Reading(f"  {kernel} alone, all operations it does, {case}", milliseconds(work), flops, moved)


def _flex(case: _Case, name: str) -> Iterator[Reading]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value, step, log_write = case.inputs
    tokens = query.shape[2]
    clock = step.detach().double().cumsum(-1)
    bias = (clock - clock[..., -1:] + log_write.detach()).float().requires_grad_()
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, tokens, tokens, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        def with_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score + bias[b, h, kv]

        return compiled(query, key, value, score_mod=with_bias, block_mask=mask, scale=1.0)

    with torch.no_grad():
        forward_ms = milliseconds(lambda: attend(query, key, value, bias))
    yield Reading(f"{name} forward {case}", forward_ms, case.flops)
    both = (1 + BACKWARD_TO_FORWARD) * case.flops
    for what, bias_used in (("with the bias's gradient", bias), ("without the bias's gradient", bias.detach())):
        try:
            ms = milliseconds(forward_backward(attend, (query, key, value, bias_used)))
            yield Reading(f"{name} forward + backward {what} {case}", ms, both)
        except Exception:
            print(f"{name} {what} {case}: did not run\n{traceback.format_exc(limit=1)}", flush=True)


def _flash(case: _Case, name: str) -> Iterator[Reading]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    rows, heads, tokens, _, value_width = case.shape
    value = case.inputs[2]
    query, key = (case.inputs[i].detach()[..., :value_width].contiguous().requires_grad_() for i in (0, 1))
    flops = rows * heads * tokens * (tokens + 1) * 2.0 * value_width

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with torch.no_grad():
            forward_ms = milliseconds(lambda: attend(query, key, value))
        yield Reading(f"{name} forward {case}", forward_ms, flops)
        both_ms = milliseconds(forward_backward(attend, (query, key, value)))
        yield Reading(f"{name} forward + backward {case}", both_ms, (1 + BACKWARD_TO_FORWARD) * flops)


def _passes(case: _Case) -> dict[str, Callable[..., Any]]:
    """Each kernel of a forward and a backward as a call of its own, which takes a launch configuration."""
    from neuronspark.kernels import pool_read_triton as ours

    query, key, value, step, log_write = (tensor.detach() for tensor in case.inputs)
    constants = ours.widths(query.shape[-1], value.shape[-1], query.dtype)
    clock = ours.run_clock(step, log_write)
    read, lse = ours.run_forward(constants, query, key, value, clock)
    same = (constants, query, key, value, clock, lse, case.dread)
    _, inner, row = ours.run_query_gradient(*same, read)
    _, _, column = ours.run_key_gradient(*same, inner)
    return {
        "clock": lambda: ours.run_clock(step, log_write),
        "forward": lambda launch=None: ours.run_forward(constants, query, key, value, clock, launch),
        "query_gradient": lambda launch=None: ours.run_query_gradient(*same, read, launch),
        "key_gradient": lambda launch=None: ours.run_key_gradient(*same, inner, launch),
        "step_gradient": lambda: ours.run_step_gradient(column, row),
    }


def search() -> Iterator[tuple[str, Any, float]]:
    """Milliseconds of every candidate configuration, at 4 rows of 4096 tokens, 64 and 128 wide."""
    from neuronspark.kernels.pool_read_triton import CANDIDATES

    for shape, width_class in ((SHAPES[0], 64), (SHAPES[2], 128)):
        passes = _passes(_case(shape))
        for kernel in ("forward", "query_gradient", "key_gradient"):
            name = f"pool_read_{kernel}/{width_class}"
            for launch in CANDIDATES[name]:
                try:
                    yield name, launch, milliseconds(functools.partial(passes[kernel], launch))
                except Exception:
                    print(f"{name} {launch}: did not run\n{traceback.format_exc(limit=1)}", flush=True)
