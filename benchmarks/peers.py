"""What one would train a Llama with instead: torch.compile, autocast and torch's fused AdamW, outside of our trainer.

    python benchmarks/peers.py --preset llama-2b --seq-len 4096 --rows 4 --accum 8 [--body transformers] [--json]

One line beside those of `nstrain bench --model llama-2b` (our operators, graphs and optimizer on the same sizes) and of
`nstrain bench --model ns-2b`. A whole update is timed: accumulated micro-batches of random tokens, clipping by the
norm, AdamW on fp32 weights; products in bf16. The body is compiled: plain torch (`PlainLlama`), or transformers' Qwen3,
a Llama with QK norm, where that is installed. The head's loss is ours in all of them: torch's would hold the logits.

6 N counts every parameter once; model FLOPs are counted as `nstrain model show` counts the preset's. On a GPU it takes
the card's lease first, as `nstrain bench` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "models")]

from baselines import ModelConfig, load_preset  # noqa: E402

from neuronspark.kernels.cross_entropy import linear_cross_entropy  # noqa: E402
from nstrain.gpu.borrowed import borrowed_gpu  # noqa: E402
from nstrain.gpu.readings import gpu_on  # noqa: E402

Body = Callable[[Tensor], Tensor]
WARM_UP_UPDATES = 2


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, in the dtype of x."""
    return functional.rms_norm(x, x.shape[-1:], eps=eps) * gain.to(x.dtype)


class PlainLayer(nn.Module):
    """The baseline's attention layer as anyone would write it; the same parameters in the same order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, ffn, heads = config.width, config.ffn_width, (config.heads, config.head_width)
        self.eps = config.norm_eps
        self.norm = nn.Parameter(torch.ones(width))
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(width, width) * width**-0.5) for _ in range(3))
        self.q_norm, self.k_norm = (nn.Parameter(torch.ones(heads)) for _ in range(2))
        out_scale = (2 * len(config.layers)) ** -0.5
        self.w_o = nn.Parameter(torch.randn(width, width) * width**-0.5 * out_scale)
        self.ffn_norm = nn.Parameter(torch.ones(width))
        self.w_gate, self.w_up = (nn.Parameter(torch.randn(ffn, width) * width**-0.5) for _ in range(2))
        self.w_down = nn.Parameter(torch.randn(width, ffn) * ffn**-0.5 * out_scale)

    def forward(self, h_BLw: Tensor, cos_L1p: Tensor, sin_L1p: Tensor) -> Tensor:
        """The residual stream after the layer."""

        def turned(x_BLhd: Tensor, gain_hd: Tensor) -> Tensor:
            first, second = normed(x_BLhd, gain_hd, self.eps).chunk(2, -1)
            pairs = (first * cos_L1p - second * sin_L1p, second * cos_L1p + first * sin_L1p)
            return torch.cat(pairs, -1).to(x_BLhd.dtype).transpose(1, 2)

        x_BLw = normed(h_BLw, self.norm, self.eps)
        q, k, v = (
            functional.linear(x_BLw, weight).unflatten(-1, self.q_norm.shape)
            for weight in (self.w_q, self.w_k, self.w_v)
        )
        read_BhLd = functional.scaled_dot_product_attention(
            turned(q, self.q_norm), turned(k, self.k_norm), v.transpose(1, 2), is_causal=True
        )
        h_BLw = h_BLw + functional.linear(read_BhLd.transpose(1, 2).flatten(2), self.w_o)
        x_BLw = normed(h_BLw, self.ffn_norm, self.eps)
        inner = functional.silu(functional.linear(x_BLw, self.w_gate)) * functional.linear(x_BLw, self.w_up)
        return h_BLw + functional.linear(inner, self.w_down)


class PlainLlama(nn.Module):
    """The Llama baseline in plain torch, up to its head."""

    def __init__(self, config: ModelConfig, row_tokens: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.embedding = nn.Parameter(torch.randn(config.vocab_size, config.width) * 0.02)
        self.norm = nn.Parameter(torch.ones(config.width))
        self.layers = nn.ModuleList(PlainLayer(config) for _ in config.layers)
        pair = torch.arange(0, config.head_width, 2, dtype=torch.float64) / config.head_width
        angle = torch.arange(row_tokens, dtype=torch.float64)[:, None, None] * config.rope_base**-pair
        self.register_buffer("cos", angle.cos().float())
        self.register_buffer("sin", angle.sin().float())

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Normalised hidden states [B, L, w]."""
        h_BLw = functional.embedding(tokens_BL, self.embedding)
        if torch.is_autocast_enabled(h_BLw.device.type):
            h_BLw = h_BLw.to(torch.get_autocast_dtype(h_BLw.device.type))
        for layer in self.layers:
            h_BLw = layer(h_BLw, self.cos, self.sin)
        return normed(h_BLw, self.norm, self.eps)


def plain_llama(config: ModelConfig, row_tokens: int) -> tuple[nn.Module, Body, Tensor]:
    """(the model, its body from tokens to normalised hidden states, the tied table)."""
    model = PlainLlama(config, row_tokens)
    return model, model, model.embedding


def transformers_llama(config: ModelConfig, row_tokens: int) -> tuple[nn.Module, Body, Tensor]:
    """The same of transformers' Qwen3. Exits with a message if that is not installed."""
    try:
        from transformers import Qwen3Config, Qwen3Model
    except ImportError as error:
        sys.exit(f"--body transformers: {error}; install transformers, or use --body plain")
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.ffn_width,
            num_hidden_layers=len(config.layers),
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            head_dim=config.head_width,
            max_position_embeddings=row_tokens,
            rms_norm_eps=config.norm_eps,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    return model, lambda tokens_BL: model(input_ids=tokens_BL).last_hidden_state, model.get_input_embeddings().weight


BODIES = {"plain": plain_llama, "transformers": transformers_llama}


@dataclasses.dataclass(frozen=True)
class PeerReading:
    """What was measured."""

    preset: str
    body: str
    compiled: bool
    device: str
    torch: str
    row_tokens: int
    rows: int
    accum: int
    parameters: int
    first_update_s: float
    """Compilation included."""
    update_s: float
    """Median of the timed updates."""
    tokens_per_s: float
    six_n_tflop_s: float
    model_tflop_s: float
    peak_gib: float | None
    losses: list[float]


def measure(plan: argparse.Namespace) -> PeerReading:
    """Train on random tokens and time whole updates."""
    device = torch.device(plan.device)
    config = load_preset(plan.preset)
    torch.manual_seed(0)
    with device:
        model, body, table = BODIES[plan.body](config, plan.seq_len)
    if not plan.no_compile:
        body = torch.compile(body, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = plan.rows * plan.accum * plan.seq_len
    scale = torch.tensor(1 / tokens, device=device)

    def update(seed: int) -> float:
        draw = torch.Generator(device=device).manual_seed(seed)
        shape = (plan.accum, plan.rows, plan.seq_len + 1)
        batch = torch.randint(0, config.vocab_size, shape, generator=draw, device=device)
        total = torch.zeros((), device=device)
        for rows in batch:
            with torch.autocast(device.type, torch.bfloat16):
                h_Tw = body(rows[:, :-1]).flatten(0, 1)
                half = h_Tw.bfloat16(), table.bfloat16()
                loss, _, _ = linear_cross_entropy(*half, rows[:, 1:].flatten(), scale, 0.0)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item()  # waits for the device

    seconds, losses = [], []
    for seed in range(WARM_UP_UPDATES + plan.updates):
        if seed == WARM_UP_UPDATES and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        losses.append(update(seed))
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    update_s = statistics.median(seconds[WARM_UP_UPDATES:])
    parameters = sum(p.numel() for p in model.parameters())
    return PeerReading(
        preset=plan.preset,
        body=plan.body,
        compiled=not plan.no_compile,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        torch=torch.__version__,
        row_tokens=plan.seq_len,
        rows=plan.rows,
        accum=plan.accum,
        parameters=parameters,
        first_update_s=seconds[0],
        update_s=update_s,
        tokens_per_s=tokens / update_s,
        six_n_tflop_s=6 * parameters * tokens / update_s / 1e12,
        model_tflop_s=config.flops_per_token(plan.seq_len) * tokens / update_s / 1e12,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        losses=losses,
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure one configuration and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-2b", help="sizes: a llama preset of benchmarks/models/baselines")
    parser.add_argument("--body", choices=sorted(BODIES), default="plain")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--accum", type=int, default=8, help="micro-batches of an update")
    parser.add_argument("--updates", type=int, default=5, help="timed, after two to warm up")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    plan = parser.parse_args(arguments)
    if not plan.preset.startswith("llama"):
        parser.error(f"--preset {plan.preset}: the peers are Llamas")
    with borrowed_gpu(gpu_on(plan.device)):
        reading = measure(plan)
    if plan.json:
        print(json.dumps(dataclasses.asdict(reading)))
        return
    memory = "" if reading.peak_gib is None else f", peak {reading.peak_gib:.1f} GiB"
    how = f"{reading.body}, compiled" if reading.compiled else reading.body
    print(
        f"{reading.preset} ({how}), {reading.parameters:,} parameters; "
        f"{reading.rows} x {reading.accum} rows of {reading.row_tokens:,}: {reading.tokens_per_s:,.0f} tokens/s, "
        f"6 N {reading.six_n_tflop_s:.3g} TFLOP/s, model {reading.model_tflop_s:.3g} TFLOP/s{memory}; {reading.device}"
    )


if __name__ == "__main__":
    main()
