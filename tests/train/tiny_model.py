"""A small model of our own that satisfies the contract of `nstrain.train.model.TrainableModel`.

It has every optimizer group, a tied embedding and a context of one token, and leaves its gradients in `.grad` (the
route for models without operators of their own). Tests use it to know exactly what a gradient is made of.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

GradientFault = Callable[[int], None]


class TinyModel(nn.Module):
    """embedding -> two layers (matrix, memory table, neuron gain) -> norm -> tied head; V tokens, d channels."""

    def __init__(self, vocab_size: int = 64, width: int = 24, seed: int | None = 0, dtype: torch.dtype = torch.float32):
        super().__init__()
        random = torch.Generator().manual_seed(seed or 0)
        scale = float("nan") if seed is None else 1.0  # what a checkpoint does not replace is seen

        def drawn(*shape: int, std: float = 0.1) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, generator=random) * std * scale).to(dtype))

        self.embedding = drawn(vocab_size, width, std=0.3)
        for layer in range(2):
            self.register_parameter(f"w{layer}", drawn(width, 2 * width))
            self.register_parameter(f"memory{layer}", drawn(16, width))
            self.register_parameter(f"gain{layer}", nn.Parameter(torch.ones(width) * scale))
        self.norm = nn.Parameter(torch.ones(width) * scale)
        self.mode = ""
        self.refreshed = 0
        self.losses_taken = 0
        self.before_loss: GradientFault = lambda _: None
        """Called with the number of micro-batches seen before, so that a test can spoil a gradient."""

    def groups(self) -> dict[str, list[str]]:
        return {
            "embedding": ["embedding"],
            "norm": ["norm"],
            "matrix": ["w0", "w1"],
            "memory": ["memory0", "memory1"],
            "neuron": ["gain0", "gain1"],
        }

    def parts(self) -> dict[str, list[str]]:
        layers = {f"layer{i:02d}": [f"{name}{i}" for name in ("w", "memory", "gain")] for i in range(2)}
        return {"embedding": ["embedding"], **layers, "norm": ["norm"]}

    def _losses(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = tokens[:, :-1].clamp(min=0), tokens[:, 1:]
        h = nn.functional.embedding(inputs, self.embedding).float()
        for layer in range(2):
            w, memory, gain = (getattr(self, f"{name}{layer}") for name in ("w", "memory", "gain"))
            before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1)
            mixed = torch.tanh(torch.cat([h, before], dim=-1) @ w.float().t())
            h = h + gain * (mixed + torch.softmax(mixed @ memory.float().t(), -1) @ memory.float())
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * self.norm
        logits = h @ self.embedding.float().t()
        real = targets >= 0
        picked = torch.log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        losses = torch.where(real, -picked, torch.zeros_like(picked))
        z = torch.where(real, torch.logsumexp(logits, -1).square(), torch.zeros_like(picked))
        return losses, z

    def loss(self, tokens: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.before_loss(self.losses_taken)
        self.losses_taken += 1
        losses, z = self._losses(tokens)
        ce_sum, z_sum = losses.sum(), 1e-4 * z.sum()
        return (ce_sum + z_sum) * scale, {"ce_sum": ce_sum.detach(), "z_sum": z_sum.detach()}

    def token_losses(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return self._losses(tokens)[0]

    def absent_readings(self) -> dict[str, str]:
        return dict.fromkeys(("dendritic/*", "hippocampal/*"), "the tiny model has no layers of that kind")

    def refresh(self) -> None:
        self.refreshed += 1

    def recompute(self, mode: str) -> None:
        self.mode = mode
