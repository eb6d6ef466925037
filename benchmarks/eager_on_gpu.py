"""The plain PyTorch model on a GPU: is it right, does it repeat its bits in torch's deterministic mode, how fast is it?

    python benchmarks/eager_on_gpu.py            # one CUDA device; prints a short table

The kernels that make it fast are another matter; this says what a line on `device: cuda` does without them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from neuronspark import NeuronSpark, load_preset


def gradients(model: NeuronSpark, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss and every gradient of one forward and backward pass."""
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=tokens.device)  # type: ignore[attr-defined]
    scale = torch.tensor(1.0 / (tokens[:, 1:].numel()), device=tokens.device)
    loss, _ = model.loss(tokens, scale)
    loss.backward()
    return loss.item(), {name: p.main_grad.clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


def main() -> None:
    """Compare with the CPU, repeat, and time."""
    torch.set_deterministic_debug_mode("error")
    config = load_preset("tiny-32k").with_vocabulary(8192)
    tokens = torch.randint(0, 8192, (8, 257), generator=torch.Generator().manual_seed(0))
    cpu_loss, cpu = gradients(NeuronSpark(config, "cpu", seed=0), tokens)
    for dtype in (torch.float32, torch.bfloat16):
        model = NeuronSpark(config, "cuda", seed=0, compute_dtype=dtype)
        first_loss, first = gradients(model, tokens.cuda())
        second_loss, second = gradients(model, tokens.cuda())
        same = first_loss == second_loss and all(torch.equal(first[name], second[name]) for name in first)
        error = max(((first[name].cpu() - cpu[name]).norm() / cpu[name].norm().clamp(min=1e-12)).item() for name in cpu)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            gradients(model, tokens.cuda())
        torch.cuda.synchronize()
        speed = 10 * tokens[:, 1:].numel() / (time.perf_counter() - began)
        print(
            f"{dtype!s:>15}  loss {first_loss:.6f} (cpu {cpu_loss:.6f})  worst gradient error {error:.2e}  "
            f"repeats its bits: {same}  {speed:,.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
