"""The model's probes: what its layers do on some rows, by part and name, reduced as it is seen. Off in training.

A probe goes through the model once, layer by layer, with the layers' own methods and operators: the residual stream is
that of `token_losses` to the bit. What a reading needs is recomputed from what the layer forms anyway, in blocks, and
reduced to [rows, members] at once; after a layer nothing of it is left but its readings. Formulas are in
probe_dendritic.py, probe_hippocampal.py and probe_attention.py, and for users in docs/reference/metrics.md.

Memory: a probe of B rows of L tokens holds, beside what its layers' forward holds without a gradient, at most
`extra_bytes` at any time. It is linear in L with a small factor: 230 MB for a row of 32,768 tokens of ns-2b, where the
layer's forward itself needs a few GB.

Shapes: B rows, L tokens, T = B L, d width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuronspark.config import DENDRITIC, HIPPOCAMPAL, ModelConfig
from neuronspark.dendritic import DendriticLayer
from neuronspark.hippocampal import HippocampalLayer
from neuronspark.kernels.pool_read import QUERY_BLOCK_TOKENS
from neuronspark.probe_attention import ATTENTION_READINGS, heads_at_once
from neuronspark.probe_dendritic import DENDRITIC_READINGS, LONG_DENDRITIC_READINGS, probe_dendritic
from neuronspark.probe_hippocampal import (
    HIPPOCAMPAL_READINGS,
    LONG_HIPPOCAMPAL_READINGS,
    MEMORY_READINGS,
    extended_pairs,
    probe_hippocampal,
)
from neuronspark.probe_rows import BLOCK_TOKENS, PartReadings, ProbedRows

if TYPE_CHECKING:
    from neuronspark.model import NeuronSpark

ROWS = "rows"
"""The part that holds what belongs to the rows and to no layer."""
DENDRITIC_ROW_READINGS = ("dendritic/boundaries",)
HIPPOCAMPAL_ROW_READINGS = ("hippocampal/rope_ext_pairs_frac",)

Readings = dict[str, PartReadings]
"""Readings by part (`rows`, layer00, ...) and name: [rows, members] in float64. A member is a head, a channel, or the
whole layer (1). NaN where a row has no such thing: a ratio at boundaries for a row without any."""


@torch.no_grad()
def probe(model: NeuronSpark, tokens: Tensor, eos_id: int, train_length: int, *, attention: bool = True) -> Readings:
    """The readings of rows [B, L + 1], L >= 2, of which the last token is a target and not read.

    `eos_id` ends a document; `train_length` is the training row length in tokens: segments are this long, and queries
    of a row's last `train_length` positions are asked how far back they look. Without `attention` the attn_...
    readings, whose cost grows with the row's length, are left out. A row of padding (-100) is read as tokens 0: give it
    no weight. Raises ValueError for rows of fewer than two tokens or more than the model's longest, and for a
    train_length below 1.
    """
    h_Td, rows = _start(model, tokens, eos_id, train_length)
    readings: Readings = {ROWS: _row_readings(model.config, rows, tokens.device)}
    for part, _, part_readings in visit(model, h_Td, rows, attention):
        readings[part] = part_readings
    return readings


def visit(
    model: NeuronSpark, h_Td: Tensor, rows: ProbedRows, attention: bool
) -> Iterator[tuple[str, Tensor, PartReadings]]:
    """Every layer's name, the residual stream after it, and its readings, from the stream before the first layer."""
    for name, layer in model.named_children():
        if isinstance(layer, DendriticLayer):
            h_Td, readings = probe_dendritic(layer, h_Td, rows)
        else:
            assert isinstance(layer, HippocampalLayer)
            h_Td, readings = probe_hippocampal(layer, h_Td, model.rotary, rows, attention)
        yield name, h_Td, readings


def _start(model: NeuronSpark, tokens: Tensor, eos_id: int, train_length: int) -> tuple[Tensor, ProbedRows]:
    """The residual stream before the first layer, and what is asked."""
    h_Td = model.embed(tokens)
    if tokens.shape[1] < 3:
        raise ValueError(f"rows of {tokens.shape[1] - 1} token: a probe needs rows of at least 2, to see a state decay")
    if train_length < 1:
        raise ValueError(f"train_length is {train_length}: expected the training row length, at least 1 token")
    return h_Td, ProbedRows.of(tokens[:, :-1], eos_id, train_length)


def _row_readings(config: ModelConfig, rows: ProbedRows, device: torch.device) -> PartReadings:
    readings: PartReadings = {}
    if DENDRITIC in config.layers:
        readings["dendritic/boundaries"] = rows.boundaries
    if HIPPOCAMPAL in config.layers:
        share = len(extended_pairs(config, rows.train_length)) / (config.pool_head_width // 2)
        share_B1 = torch.full((rows.rows, 1), share, dtype=torch.float64, device=device)
        readings["hippocampal/rope_ext_pairs_frac"] = share_B1
    return readings


def extra_bytes(config: ModelConfig, rows: int, row_tokens: int, element_bytes: int) -> int:
    """The most a probe holds at a time beside a layer's forward and the readings; `element_bytes` of an activation.

    The sum of what its parts hold one after the other, each at its largest, with w bytes of an at least fp32 number:

        3 w b C                       three blocks of b = max(1024, B) tokens of the widest potentials, C channels
        z L (2 q w + a w + 4 w)       two blocks of weights of q = 64 queries of z heads, their keys in fp32 unless they
                                      are so already (a channels of an address), and clocks; z so that z L q <= 2^23
        16 B L h                      the distance profile of h heads, and a passing copy
        20 B L n                      the slots read, n a token, in order, with a memory
        32 B L                        boundary masks and counts of spikes
    """
    wide = max(4, element_bytes)
    tokens = rows * row_tokens
    widest = max(config.inner_width, config.ffn_width, config.width, config.trace_width)
    total = 3 * wide * max(BLOCK_TOKENS, rows) * widest + 32 * tokens
    if HIPPOCAMPAL in config.layers:
        heads = min(config.pool_heads, heads_at_once(row_tokens))
        keys = wide * (config.pool_head_width + config.match_width) if element_bytes < wide else 0
        total += heads * row_tokens * (2 * QUERY_BLOCK_TOKENS * wide + keys + 4 * wide)
        total += 16 * tokens * config.pool_heads
    if config.memory_layers:
        total += 20 * tokens * config.memory_heads * config.memory_top_k
    return total


def reading_names() -> tuple[str, ...]:
    """Every reading that a model of this package may have; <k> stands for a bin's or segment's number."""
    dendritic = (*DENDRITIC_ROW_READINGS, *DENDRITIC_READINGS, *LONG_DENDRITIC_READINGS)
    hippocampal = (*HIPPOCAMPAL_ROW_READINGS, *HIPPOCAMPAL_READINGS, *LONG_HIPPOCAMPAL_READINGS)
    return (*dendritic, *hippocampal, *MEMORY_READINGS, *ATTENTION_READINGS)


def probe_members(config: ModelConfig) -> dict[str, dict[str, int]]:
    """What a probe of a model of this configuration gives: by part and reading, the number of members.

    <k> stands for a bin's or segment's number. Readings of long rows are on long rows only, the attn_... ones on rows
    that are asked for them.
    """
    members: dict[str, dict[str, int]] = {ROWS: {}}
    if DENDRITIC in config.layers:
        members[ROWS] |= dict.fromkeys(DENDRITIC_ROW_READINGS, 1)
    if HIPPOCAMPAL in config.layers:
        members[ROWS] |= dict.fromkeys(HIPPOCAMPAL_ROW_READINGS, 1)
    for index, kind in enumerate(config.layers):
        if kind == DENDRITIC:
            names = dict.fromkeys((*DENDRITIC_READINGS, *LONG_DENDRITIC_READINGS), config.dendritic_heads)
        else:
            pool = (*HIPPOCAMPAL_READINGS, *LONG_HIPPOCAMPAL_READINGS, *ATTENTION_READINGS)
            names = dict.fromkeys(pool, config.pool_heads) | {"hippocampal/decay_tau": config.trace_width}
        if index in config.memory_layers:
            names |= dict.fromkeys(MEMORY_READINGS, 1) | {"hippocampal/pkm_entropy": config.memory_heads}
        members[f"layer{index:02d}"] = {name: 1 if "firing" in name else count for name, count in names.items()}
    return members


def absent_readings(config: ModelConfig) -> dict[str, str]:
    """The readings that a model of this configuration never has, and why."""
    absent: dict[str, str] = {}
    for name in reading_names():
        if name.startswith("dendritic/") and DENDRITIC not in config.layers:
            absent[name] = "the model has no dendritic layer"
        elif name.startswith("hippocampal/") and HIPPOCAMPAL not in config.layers:
            absent[name] = "the model has no hippocampal layer"
        elif name in MEMORY_READINGS and not config.memory_layers:
            absent[name] = "no layer of the model has a product-key memory"
    return absent
