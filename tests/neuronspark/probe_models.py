"""Small models and rows for the tests of the probes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuronspark import ModelConfig, NeuronSpark

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "width": 32,
    "layers": "DDH",
    "rope_max_seq_len": 300,
    "ffn_width": 48,
    "dendritic_head_width": 8,
    "state_width": 8,
    "state_groups": 2,
    "pool_head_width": 16,
    "trace_width": 8,
    "match_width": 8,
}
MEMORY: dict[str, Any] = {
    "layers": "DHH",
    "memory_layers": [2],
    "memory_keys": 8,
    "memory_top_k": 3,
    "memory_heads": 2,
    "memory_query_width": 16,
    "memory_value_width": 12,
}
EOS = 3


def build(dtype: torch.dtype = torch.float64, **changes: Any) -> NeuronSpark:
    """A model away from the symmetric start, so that every parameter matters."""
    model = NeuronSpark(ModelConfig.from_dict({**SMALL, **changes}), "cpu", seed=0, compute_dtype=dtype)
    with torch.no_grad():
        for index, p in enumerate(model.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(index)).to(p.dtype)
    return model


def rows_of(rows: int, tokens: int, seed: int = 0, eos_every: int = 9) -> Tensor:
    """Rows [rows, tokens] of random tokens; about one in `eos_every` is an EOS."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(EOS + 1, SMALL["vocab_size"], (rows, tokens), generator=generator)
    return torch.where(torch.rand(rows, tokens, generator=generator) < 1 / eos_every, EOS, tokens_BL)
