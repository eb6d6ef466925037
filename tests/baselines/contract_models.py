"""Small models of every kind that the trainer's contract is tested on, and what the tests do to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import baselines
import torch
from torch import Tensor, nn

import neuronspark
from nstrain.train.flat import FlatParameters
from nstrain.train.model import TrainableModel, parameter_places

VOCABULARY, LONGEST = 64, 200


@dataclasses.dataclass(frozen=True)
class Kind:
    """A package's model at one small size."""

    package: Any
    config: Any

    def build(self, device: torch.device | str = "cpu", **options: Any) -> Any:
        """The model; the same weights each time."""
        return self.package.NeuronSpark(self.config, device, **{"seed": 0, **options})


def _baseline(layers: str) -> Kind:
    config = baselines.ModelConfig(
        vocab_size=VOCABULARY,
        width=32,
        layers=layers,
        rope_max_seq_len=LONGEST,
        ffn_width=48,
        head_width=16,
        state_head_width=8,
        state_width=8,
        state_groups=2,
    )
    return Kind(baselines, config)


_NEURONSPARK = neuronspark.ModelConfig(
    vocab_size=VOCABULARY,
    width=32,
    layers="DH",
    rope_max_seq_len=LONGEST,
    ffn_width=48,
    dendritic_head_width=8,
    state_width=8,
    state_groups=2,
    pool_head_width=16,
    trace_width=8,
    match_width=8,
)

BASELINES = {"llama": _baseline("AA"), "mamba2": _baseline("SS"), "hybrid": _baseline("SA")}
KINDS = {"neuronspark": Kind(neuronspark, _NEURONSPARK), **BASELINES}


def rows_of(rows: int, tokens: int, seed: int = 0) -> Tensor:
    """Random rows [B, L + 1]."""
    return torch.randint(0, VOCABULARY, (rows, tokens + 1), generator=torch.Generator().manual_seed(seed))


def scale_of(value: float = 1.0, device: torch.device | str = "cpu") -> Tensor:
    """A loss scale."""
    return torch.tensor(value, device=device)


def away_from_the_start(model: nn.Module) -> None:
    """Move every weight a little, so that none is where it has no influence or a special one."""
    with torch.no_grad():
        for index, p in enumerate(model.parameters()):
            drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
            p += (0.1 * drawn).to(p)


def on_flat_buffers(model: TrainableModel) -> FlatParameters:
    """Parameters and gradients as the trainer lays them out; everything is on the flat buffers afterwards."""
    return FlatParameters(parameter_places(model))


def gradients(model: Any, tokens: Tensor, scale: float) -> dict[str, Tensor]:
    """The loss under "loss", and what one backward leaves in every parameter's main_grad, cleared before."""
    for p in model.parameters():
        p.main_grad.zero_()
        assert p.grad is None
    loss, _ = model.loss(tokens, scale_of(scale, tokens.device))
    loss.backward()
    found = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **found}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names under which two results differ in a bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]
