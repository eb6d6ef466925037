# mypy: disable-error-code="no-untyped-def"
"""The passes of the product-key memory as Triton kernels. Contract: product_key_reference.py; shapes: product_key.py.

select            A program, one warp, has both halves' scores [2, K] of a token and head in registers. k times the
                  largest (of equal ones that with the lowest index: a maximum of scores, then a minimum of the indices
                  that have it) is noted and taken out; then the same among the k x k sums, which never leave the
                  registers; then the softmax. Reads the scores once, 4 s K bytes a token.
score_gradients   The same programs: [2, K] summed in registers in the order of the slots, written once.
read              A program has a token and a block of channels, a thread 8 of these (16 bytes of bf16); the loop over
                  the slots is unrolled PAIRS times, so that their rows are under way together. Moves n V elements a
                  token, each row once for every token that reads it, less what the L2 cache still holds of it.
weight_gradients  A program has a token and PAIRS of its slots, over all channels: the same rows once more.
table gradient    The T n pairs (token, slot) are sorted by slot, stable, so by token within a slot: a run. They are cut
                  into chunks of CHUNK pairs. A program of `_add_runs` has a chunk and a block of channels, walks along
                  the pairs and keeps the sum of the run it is in. The chunk in which a run begins adds its part to the
                  target; a chunk that begins inside a run writes its part of that run to `carried`. Where a run goes on
                  past the chunk in which it began, a program of `_add_carried` adds those parts, in order.
                  So an element of the target is read and written by one program of each kernel, and sums are fp32 in
                  the order of the tokens, in parts of CHUNK pairs. A slot that all tokens read (those of padding rows
                  are alike) costs no program more than CHUNK pairs or T h / CHUNK parts. Moves a row of dread a pair,
                  and a row of the target in and out a slot that was read; other slots cost nothing. A thread has 4
                  channels of both, so that no row changes its layout on the way.

No atomics, nothing read back; every shape is known from the inputs' shapes; torch.sort is stable and deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuronspark.kernels.launch import ANY, CompileCase, Launch, pinned, register

NO_INDEX = tl.constexpr(2**31 - 1)
"""Above every key and slot: what has been taken, and padding."""


# --- kernels -------------------------------------------------------------------------------------------------


# No specialisation on multiples of 16: it would give a thread four neighbouring keys, and by that way 128 of the sums.
@triton.jit(do_not_specialize=["tokens", "heads", "keys", "top_k"])
def _select(scores, slots, weights, tokens, heads, keys, top_k, BLOCK_KEYS: tl.constexpr, BLOCK_RANKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # token * heads + head
    token = row // heads
    side = 2 * (row % heads) + tl.arange(0, 2)[:, None]
    key = tl.arange(0, BLOCK_KEYS)[None, :]
    rank = tl.arange(0, BLOCK_RANKS)
    score = tl.load(scores + (side * tokens + token) * keys + key, mask=key < keys, other=float("-inf"))
    score = tl.where(score == score, score, float("inf"))  # NaN: chosen, and NaN again in the softmax
    index = tl.where(key < keys, key, NO_INDEX) + tl.zeros([2, BLOCK_KEYS], tl.int32)
    best = tl.full([2, BLOCK_RANKS], float("-inf"), tl.float32)
    best_index = tl.zeros([2, BLOCK_RANKS], tl.int32)
    for turn in range(top_k):
        top = tl.max(score, 1)[:, None]
        first = tl.min(tl.where(score == top, index, NO_INDEX), 1)[:, None]
        best = tl.where(rank[None, :] == turn, top, best)
        best_index = tl.where(rank[None, :] == turn, first, best_index)
        score = tl.where(index == first, float("-inf"), score)
        index = tl.where(index == first, NO_INDEX, index)

    half = tl.arange(0, 2)[:, None]
    first_score = tl.max(tl.where(half == 0, best, float("-inf")), 0)[:, None]
    second_score = tl.max(tl.where(half == 1, best, float("-inf")), 0)[None, :]
    first_key = tl.sum(tl.where(half == 0, best_index, 0), 0)[:, None]
    second_key = tl.sum(tl.where(half == 1, best_index, 0), 0)[None, :]
    valid = (rank[:, None] < top_k) & (rank[None, :] < top_k)
    total = tl.where(valid, first_score + second_score, float("-inf"))
    total = tl.where(total == total, total, float("inf"))
    slot = tl.where(valid, first_key * keys + second_key, NO_INDEX)
    total = tl.reshape(total, [BLOCK_RANKS * BLOCK_RANKS])
    slot = tl.reshape(slot, [BLOCK_RANKS * BLOCK_RANKS])
    logit = tl.full([BLOCK_RANKS], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK_RANKS], tl.int32)
    for turn in range(top_k):
        top = tl.max(total, 0)
        first = tl.min(tl.where(total == top, slot, NO_INDEX), 0)
        logit = tl.where(rank == turn, top, logit)
        chosen = tl.where(rank == turn, first, chosen)
        total = tl.where(slot == first, float("-inf"), total)
        slot = tl.where(slot == first, NO_INDEX, slot)

    share = tl.exp(logit - tl.max(logit, 0))
    tl.store(slots + row * top_k + rank, chosen, mask=rank < top_k)
    tl.store(weights + row * top_k + rank, share / tl.sum(share, 0), mask=rank < top_k)


@triton.jit(do_not_specialize=["tokens"])
def _score_gradients(
    slots, weights, dweights, dscores, tokens,
    HEADS: tl.constexpr, KEYS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = row // HEADS
    half = tl.arange(0, 2)[:, None]
    side = 2 * (row % HEADS) + half
    key = tl.arange(0, BLOCK_KEYS)[None, :]
    rank = tl.arange(0, BLOCK_RANKS)
    weight = tl.load(weights + row * TOP_K + rank, mask=rank < TOP_K, other=0.0)
    mean = tl.sum(weight * tl.load(dweights + row * TOP_K + rank, mask=rank < TOP_K, other=0.0), 0)
    gradient = tl.zeros([2, BLOCK_KEYS], tl.float32)
    for turn in range(TOP_K):
        at = row * TOP_K + turn
        slot = tl.load(slots + at)
        pull = tl.load(weights + at) * (tl.load(dweights + at) - mean)
        gradient += tl.where(key == tl.where(half == 0, slot // KEYS, slot % KEYS), pull, 0.0)
    gradient = gradient.to(dscores.dtype.element_ty)
    tl.store(dscores + (side * tokens + token) * KEYS + key, gradient, mask=key < KEYS)


@triton.jit
def _read(
    table, slots, weights, out, READS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK_V: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    total = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, READS, PAIRS):
        for i in tl.static_range(PAIRS):
            pair = first + i
            slot = tl.load(slots + token * READS + pair, mask=pair < READS, other=0).to(tl.int64)
            weight = tl.load(weights + token * READS + pair, mask=pair < READS, other=0.0)
            row = tl.load(table + slot * WIDTH + channel, mask=(channel < WIDTH) & (pair < READS), other=0.0)
            total += weight * row.to(tl.float32)
    tl.store(out + token * WIDTH + channel, total.to(out.dtype.element_ty), mask=channel < WIDTH)


@triton.jit
def _weight_gradients(
    table, slots, dread, dweights,
    READS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < READS
    slot = tl.load(slots + token * READS + pair, mask=inside, other=0).to(tl.int64)
    total = tl.zeros([PAIRS, BLOCK_V], tl.float32)
    for first in range(0, WIDTH, BLOCK_V):
        channel = first + tl.arange(0, BLOCK_V)[None, :]
        pull = tl.load(dread + token * WIDTH + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
        mask = inside[:, None] & (channel < WIDTH)
        rows = tl.load(table + slot[:, None] * WIDTH + channel, mask=mask, other=0.0)
        total += rows.to(tl.float32) * pull
    tl.store(dweights + token * READS + pair, tl.sum(total, 1), mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def _add_runs(
    sorted_slots, sorted_tokens, sorted_weights, dread, target, carried, pairs,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * CHUNK
    channel = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    real = channel < WIDTH
    slot = tl.load(sorted_slots + start).to(tl.int64)
    is_carried = slot == tl.load(sorted_slots + start - 1, mask=start > 0, other=-1)
    total = tl.zeros([BLOCK_V], tl.float32)
    for at in range(start, tl.minimum(start + CHUNK, pairs)):
        row = dread + tl.load(sorted_tokens + at) * WIDTH + channel
        total += tl.load(sorted_weights + at) * tl.load(row, mask=real, other=0.0).to(tl.float32)
        following = tl.load(sorted_slots + at + 1, mask=at + 1 < pairs, other=-1).to(tl.int64)
        is_last = (following != slot) | (at + 1 == start + CHUNK)
        begun_here = real & (is_last & (is_carried == 0))
        kept = tl.load(target + slot * WIDTH + channel, mask=begun_here, other=0.0)
        tl.store(target + slot * WIDTH + channel, kept + total, mask=begun_here)
        tl.store(carried + chunk * WIDTH + channel, total, mask=real & (is_last & is_carried))
        total = tl.where(is_last, 0.0, total)
        is_carried = is_carried & (is_last == 0)
        slot = following


@triton.jit
def _add_carried(
    sorted_slots, run_ends, target, carried, WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr
):
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * CHUNK
    channel = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    real = channel < WIDTH
    slot = tl.load(sorted_slots + start + CHUNK - 1).to(tl.int64)  # that of the run which may cross the border
    run_end = tl.load(run_ends + chunk)
    begins_here = tl.load(sorted_slots + start - 1, mask=start > 0, other=-1) != slot
    if (run_end > start + CHUNK) & begins_here:
        row = target + slot * WIDTH + channel
        total = tl.load(row, mask=real, other=0.0)
        for part in range(chunk + 1, tl.cdiv(run_end, CHUNK)):
            total += tl.load(carried + part * WIDTH + channel, mask=real, other=0.0)
        tl.store(row, total, mask=real)


# --- launches ------------------------------------------------------------------------------------------------

SELECT = register("product_key_select", {ANY: Launch({}, num_warps=1)})
SCORE_GRADIENTS = register("product_key_score_gradients", {ANY: Launch({}, num_warps=1)})
READ = register("product_key_read", {ANY: Launch({"PAIRS": 8, "BLOCK_V": 512}, num_warps=2)})
WEIGHT_GRADIENTS = register("product_key_weight_gradients", {ANY: Launch({"PAIRS": 4, "BLOCK_V": 256}, num_warps=1)})
TABLE_GRADIENT = register("product_key_table_gradient", {ANY: Launch({"CHUNK": 128, "BLOCK_V": 512}, num_warps=4)})

CANDIDATES: dict[str, list[Launch]] = {
    SELECT: [Launch({}, num_warps=1), Launch({}, num_warps=2)],
    SCORE_GRADIENTS: [Launch({}, num_warps=1), Launch({}, num_warps=2)],
    READ: [
        Launch({"PAIRS": 8, "BLOCK_V": 512}, num_warps=2),
        Launch({"PAIRS": 8, "BLOCK_V": 256}, num_warps=1),
        Launch({"PAIRS": 16, "BLOCK_V": 512}, num_warps=2),
        Launch({"PAIRS": 8, "BLOCK_V": 1024}, num_warps=4),
    ],
    WEIGHT_GRADIENTS: [
        Launch({"PAIRS": 4, "BLOCK_V": 256}, num_warps=1),
        Launch({"PAIRS": 8, "BLOCK_V": 256}, num_warps=1),
        Launch({"PAIRS": 4, "BLOCK_V": 512}, num_warps=1),
        Launch({"PAIRS": 8, "BLOCK_V": 512}, num_warps=2),
    ],
    TABLE_GRADIENT: [
        Launch({"CHUNK": 128, "BLOCK_V": 512}, num_warps=4),
        Launch({"CHUNK": 64, "BLOCK_V": 512}, num_warps=4),
        Launch({"CHUNK": 32, "BLOCK_V": 512}, num_warps=4),
        Launch({"CHUNK": 128, "BLOCK_V": 256}, num_warps=2),
        Launch({"CHUNK": 128, "BLOCK_V": 128}, num_warps=1),
    ],
}
"""Configurations worth timing on a card, by kernel; the first of each is the pinned one."""


def _options(name: str, tensor: Tensor, **largest: int) -> dict[str, int]:
    """The pinned launch for a tensor's device, its blocks cut down to powers of two that the named sizes need."""
    options = pinned(name, tensor.device).options()
    return {**options, **{block: min(options[block], triton.next_power_of_2(size)) for block, size in largest.items()}}


def select(scores_sTK: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """product_key_reference.select for fp32 scores."""
    lists, tokens, keys = scores_sTK.shape
    slots_Thk = scores_sTK.new_empty(tokens, lists // 2, top_k, dtype=torch.int32)
    weights_Thk = scores_sTK.new_empty(tokens, lists // 2, top_k)
    blocks = {"BLOCK_KEYS": triton.next_power_of_2(keys), "BLOCK_RANKS": triton.next_power_of_2(top_k)}
    _select[(tokens * (lists // 2),)](
        scores_sTK, slots_Thk, weights_Thk, tokens, lists // 2, keys, top_k, **blocks, **_options(SELECT, scores_sTK)
    )
    return slots_Thk, weights_Thk


def score_gradients(
    slots_Thk: Tensor, weights_Thk: Tensor, dweights_Thk: Tensor, keys: int, dtype: torch.dtype
) -> Tensor:
    """product_key_reference.score_gradients."""
    tokens, heads, top_k = slots_Thk.shape
    dscores_sTK = weights_Thk.new_empty(2 * heads, tokens, keys, dtype=dtype)
    blocks = {"BLOCK_KEYS": triton.next_power_of_2(keys), "BLOCK_RANKS": triton.next_power_of_2(top_k)}
    _score_gradients[(tokens * heads,)](
        slots_Thk, weights_Thk, dweights_Thk.contiguous(), dscores_sTK, tokens, HEADS=heads, KEYS=keys, TOP_K=top_k,
        **blocks, **_options(SCORE_GRADIENTS, weights_Thk),
    )  # fmt: skip
    return dscores_sTK


def read(table_SV: Tensor, slots_Tn: Tensor, weights_Tn: Tensor) -> Tensor:
    """product_key_reference.read."""
    (tokens, reads), width = slots_Tn.shape, table_SV.shape[1]
    out_TV = table_SV.new_empty(tokens, width)
    options = _options(READ, table_SV, PAIRS=reads, BLOCK_V=width)
    grid = (tokens, triton.cdiv(width, options["BLOCK_V"]))
    _read[grid](table_SV, slots_Tn, weights_Tn, out_TV, READS=reads, WIDTH=width, **options)
    return out_TV


def weight_gradients(table_SV: Tensor, slots_Tn: Tensor, dread_TV: Tensor) -> Tensor:
    """product_key_reference.weight_gradients."""
    (tokens, reads), width = slots_Tn.shape, table_SV.shape[1]
    dweights_Tn = torch.empty(slots_Tn.shape, dtype=torch.float32, device=table_SV.device)
    options = _options(WEIGHT_GRADIENTS, table_SV, PAIRS=reads, BLOCK_V=width)
    grid = (tokens, triton.cdiv(reads, options["PAIRS"]))
    _weight_gradients[grid](table_SV, slots_Tn, dread_TV, dweights_Tn, READS=reads, WIDTH=width, **options)
    return dweights_Tn


def add_table_gradient(target_SV: Tensor, slots_Tn: Tensor, weights_Tn: Tensor, dread_TV: Tensor) -> None:
    """product_key_reference.add_table_gradient for an fp32 target."""
    width, pairs = target_SV.shape[1], slots_Tn.numel()
    sorted_slots, order = slots_Tn.flatten().sort(stable=True)
    sorted_tokens = order.div(slots_Tn.shape[1], rounding_mode="floor")
    sorted_weights = weights_Tn.flatten().index_select(0, order)
    options = _options(TABLE_GRADIENT, target_SV, BLOCK_V=width)
    grid = (triton.cdiv(pairs, options["CHUNK"]), triton.cdiv(width, options["BLOCK_V"]))
    carried = target_SV.new_empty(grid[0], width)
    _add_runs[grid](
        sorted_slots, sorted_tokens, sorted_weights, dread_TV, target_SV, carried, pairs, WIDTH=width, **options
    )
    chunk = options["CHUNK"]
    if grid[0] > 1:
        run_ends = torch.searchsorted(sorted_slots, sorted_slots[chunk - 1 : -1 : chunk].contiguous(), right=True)
        _add_carried[(grid[0] - 1, grid[1])](sorted_slots, run_ends, target_SV, carried, WIDTH=width, **options)


def compile_cases() -> list[CompileCase]:
    """Every kernel with the types of training in bf16 and in fp32, at the largest blocks of keys and ranks in use."""
    blocks = {"BLOCK_KEYS": 512, "BLOCK_RANKS": 32}
    chosen: dict[str, str | int] = {"slots": "*i32", "weights": "*fp32", "tokens": 16384}
    walk = {"sorted_slots": "*i32", "carried": "*fp32", "target": "*fp32"}
    run: dict[str, str | int] = {**walk, "sorted_tokens": "*i64", "sorted_weights": "*fp32", "pairs": 16384 * 32}
    read = {"slots": "*i32"}
    cases = [
        CompileCase(SELECT, _select, {**chosen, "scores": "*fp32", "heads": 1, "keys": 512, "top_k": 32}, blocks),
        CompileCase(TABLE_GRADIENT, _add_carried, {**walk, "run_ends": "*i64"}, {"WIDTH": 2560}),
    ]
    for heads, width, dtype in ((1, 2560, "*bf16"), (4, 2560, "*bf16"), (1, 2560, "*fp32"), (3, 200, "*fp32")):
        lists = {**blocks, "HEADS": heads, "KEYS": 512, "TOP_K": 32}
        sizes = {"READS": heads * 32, "WIDTH": width}
        cases += [
            CompileCase(SCORE_GRADIENTS, _score_gradients, {**chosen, "dweights": "*fp32", "dscores": dtype}, lists),
            CompileCase(READ, _read, {**read, "weights": "*fp32", "table": dtype, "out": dtype}, sizes),
            CompileCase(
                WEIGHT_GRADIENTS,
                _weight_gradients,
                {**read, "table": dtype, "dread": dtype, "dweights": "*fp32"},
                sizes,
            ),
            CompileCase(TABLE_GRADIENT, _add_runs, {**run, "dread": dtype}, {"WIDTH": width}),
        ]
    return cases
