"""Product-key memory: addressing and reading, forward and backward, and each pass alone.

Shapes: T 16,384 tokens, 512^2 slots of V 2560 channels, k 32 slots a head, half queries of 128, bf16, the table's
gradient into an fp32 main_grad; 1 head and 4 heads; random queries, and for the table's gradient also the worst case,
all tokens alike (each slot read has T pairs). FLOPs: two a multiply-add of scores (2 s K Q T forward, twice that
backward) and of reads (2 n V T forward, twice that backward); selection is not counted.
Bytes are the fewest: queries and keys once; the slots' rows that are read, each once (counted in this run); the read,
its gradient, slots and weights once; of the fp32 gradient the touched rows, read and written. "a row a pair" counts
the same time by the rows that are gathered, one for every token and slot, which is what moves unless L2 holds a row.
Peer in the same run: torch's embedding_bag with weights for the reading part, its table gradient dense, in bf16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Ceilings, Reading, milliseconds
from torch import Tensor
from torch.nn import functional

from neuronspark.kernels import launch
from neuronspark.kernels import product_key_triton as passes
from neuronspark.kernels.product_key import product_key_address, product_key_read

TOKENS, KEYS, TOP_K, HALF_QUERY, WIDTH = 16_384, 512, 32, 128, 2560
SLOTS = KEYS**2


class _Case:
    """The inputs of one number of heads, and what they cost at least."""

    def __init__(self, heads: int) -> None:
        generator = torch.Generator("cuda").manual_seed(heads)

        def random(*shape: int, std: float = 1.0) -> Tensor:
            return torch.randn(shape, device="cuda", generator=generator).mul_(std).bfloat16().requires_grad_()

        self.heads, self.reads = heads, heads * TOP_K
        self.query = random(TOKENS, heads, 2, HALF_QUERY)
        self.keys = random(2 * heads * KEYS, HALF_QUERY, std=1 / math.sqrt(HALF_QUERY))
        self.table = random(SLOTS, WIDTH, std=1 / math.sqrt(WIDTH))
        for parameter in (self.keys, self.table):
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")  # type: ignore[attr-defined]
        self.pull = random(TOKENS, WIDTH).detach()
        slots, weights = product_key_address(self.query, self.keys, TOP_K)
        self.slots, self.weights = slots.flatten(1), weights.detach().flatten(1)
        self.touched = self.slots.unique().numel()
        self.score_flops = 2.0 * 2 * heads * KEYS * HALF_QUERY * TOKENS
        self.read_flops = 2.0 * self.reads * WIDTH * TOKENS
        self.pair_bytes = 8.0 * TOKENS * self.reads
        self.address_bytes = 2.0 * (self.query.numel() + self.keys.numel()) + self.pair_bytes
        self.rows_bytes = 2.0 * self.touched * WIDTH
        self.stream_bytes = 2.0 * TOKENS * WIDTH
        self.gather_bytes = 2.0 * TOKENS * self.reads * WIDTH

    def forward(self) -> Tensor:
        return product_key_read(self.table, *product_key_address(self.query, self.keys, TOP_K))


def _forward_backward(case: _Case, forward: Callable[[], Tensor]) -> Callable[[], None]:
    def run() -> None:
        for leaf in (case.query, case.keys, case.table):
            leaf.grad = None
        forward().backward(case.pull)

    return run


def _passes(case: _Case) -> dict[str, tuple[Callable[[], Any], float, float, str]]:
    """Each pass alone: its call, FLOPs, fewest bytes, and the name of its launch configuration."""
    scores = torch.randn(2 * case.heads, TOKENS, KEYS, device="cuda")
    shape = (TOKENS, case.heads, TOP_K)
    slots, weights = case.slots.view(shape), case.weights.view(shape)
    target: Tensor = case.table.main_grad  # type: ignore[attr-defined]
    score_bytes = 1.0 * scores.numel()
    read_bytes = case.rows_bytes + case.stream_bytes + case.pair_bytes
    gradient_bytes = case.stream_bytes + case.pair_bytes + 8.0 * case.touched * WIDTH
    alike = case.slots[:1].expand(TOKENS, -1).contiguous()
    alike_bytes = case.stream_bytes + case.pair_bytes + 8.0 * case.reads * WIDTH
    # fmt: off
    return {
        "select": (lambda: passes.select(scores, TOP_K), 0.0, 4 * score_bytes + case.pair_bytes, passes.SELECT),
        "score gradients": (
            lambda: passes.score_gradients(slots, weights, weights, KEYS, torch.bfloat16),
            0.0, 2 * score_bytes + 1.5 * case.pair_bytes, passes.SCORE_GRADIENTS,
        ),
        "read": (
            lambda: passes.read(case.table, case.slots, case.weights), case.read_flops, read_bytes, passes.READ,
        ),
        "weight gradients": (
            lambda: passes.weight_gradients(case.table, case.slots, case.pull),
            case.read_flops, read_bytes, passes.WEIGHT_GRADIENTS,
        ),
        "table gradient": (
            lambda: passes.add_table_gradient(target, case.slots, case.weights, case.pull),
            case.read_flops, gradient_bytes, passes.TABLE_GRADIENT,
        ),
        "table gradient, tokens alike": (
            lambda: passes.add_table_gradient(target, alike, case.weights, case.pull),
            case.read_flops, alike_bytes, passes.TABLE_GRADIENT,
        ),
    }
    # fmt: on


def _peer(case: _Case) -> Callable[[], Tensor]:
    slots, weights = case.slots.long(), case.weights.bfloat16().requires_grad_()
    return lambda: functional.embedding_bag(slots, case.table, mode="sum", per_sample_weights=weights)


def measure(ceilings: Ceilings) -> Iterator[Reading]:
    """The readings of the module's docstring; a failure of one is printed by the harness after the others' rows."""
    failures: list[str] = []
    for heads in (1, 4):
        case = _Case(heads)
        name = f"product key, {heads} head{'s' * (heads > 1)}"
        flops = case.score_flops + case.read_flops
        forward_bytes = case.address_bytes + case.rows_bytes + case.stream_bytes
        both_bytes = 2 * forward_bytes + case.address_bytes + case.stream_bytes + 8.0 * case.touched * WIDTH
        todo: list[tuple[str, Callable[[], Any], float, float]] = [
            ("forward", case.forward, flops, forward_bytes),
            ("forward + backward", _forward_backward(case, case.forward), 3 * flops, both_bytes),
        ]
        todo += [(what, work, *cost) for what, (work, *cost, _) in _passes(case).items()]  # type: ignore[list-item]
        read_bytes = case.rows_bytes + case.stream_bytes + case.pair_bytes
        todo += [
            # In bf16 its backward to the table does not exist.
            ("embedding_bag (peer of read)", _peer(case), case.read_flops, read_bytes),
        ]
        for what, work, work_flops, work_bytes in todo:
            try:
                ms = milliseconds(work)
            except Exception as error:
                failures.append(f"{name}: {what}: {type(error).__name__}: {error}")
                continue
            yield Reading(f"{name}: {what}", ms, work_flops, work_bytes)
            if what in ("read", "weight gradients"):
                yield Reading(f"{name}: {what}, a row a pair", ms, 0.0, case.gather_bytes + case.stream_bytes)
        del case, todo
        torch.cuda.empty_cache()
    if failures:
        raise RuntimeError(f"failed: {failures}")


def search() -> Iterator[tuple[str, launch.Launch, float]]:
    """Times of the candidates for each pinned configuration, at one head."""
    case, saved = _Case(1), launch.table()
    try:
        for what, (work, _, _, name) in _passes(case).items():
            for candidate in passes.CANDIDATES[name]:
                launch.use({**saved, name: {launch.ANY: dataclasses.asdict(candidate)}})
                yield f"{name} ({what})", candidate, milliseconds(work)
    finally:
        launch.use(saved)
