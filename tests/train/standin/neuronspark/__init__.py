"""A model package of our own, named in host.json by tests that run the trainer process: it imports and trains fast.

It has the names that `nstrain.train.model` asks a model package for.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))
from tiny_model import TinyModel


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    width: int = 24
    rope_max_seq_len: int = 64

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def with_vocabulary(self, token_count: int) -> ModelConfig:
        return dataclasses.replace(self, vocab_size=-(-token_count // 128) * 128)


class NeuronSpark(TinyModel):
    def __init__(self, config: ModelConfig, device: torch.device, *, seed: int | None) -> None:
        super().__init__(config.vocab_size, config.width, seed)
        self.to(device)


def preset_names() -> list[str]:
    return ["stand-in"]


def load_preset(name: str) -> ModelConfig:
    return ModelConfig(vocab_size=128)
