"""Child of test_optimizer_kernels.py: compiles the optimizer's kernels for cards that are not here, a line each."""

from __future__ import annotations

import json

from neuronspark.kernels.launch import ANY, CARDS, CompileCase, Launch, compile_case, register
from nstrain.train import optimizer_kernels as kernels
from nstrain.train.norms import NODE

POINTERS = ("master", "gradient", "exp_avg", "exp_avg_sq", "ema", "divisor", "skip", "rate", "move", "buffer")
NUMBERS = ("beta1", "beta2", "eps", "correction1", "root_correction2")


def types(**others: str) -> dict[str, str]:
    """Types of the arguments that all kernels name alike, and `others`."""
    return {**dict.fromkeys(POINTERS, "*fp32"), **dict.fromkeys(NUMBERS, "fp32"), "sums": "*fp64", **others}


def cases() -> list[CompileCase]:
    """Every kernel, AdamW with each combination of what it may have."""
    register("optimizer", {ANY: Launch({}, num_warps=4)})
    adamw = types(compute="*bf16", decay="*fp64", corrections="*fp64")
    flags = [
        dict(zip(("HAS_COPY", "HAS_EMA", "DECAYS"), map(bool, (n & 1, n & 2, n & 4)), strict=True)) for n in range(8)
    ]
    return [
        *(CompileCase("optimizer", kernels._adamw_kernel, adamw, {**f, "BLOCK": kernels.BLOCK}) for f in flags),
        CompileCase("optimizer", kernels._node_sums_kernel, types(nodes="i32"), {"NODE": NODE, "NODES": kernels.NODES}),
        CompileCase(
            "optimizer",
            kernels._state_sums_kernel,
            types(nodes="i32", stride="i64"),
            {"NODE": NODE, "NODES": kernels.STATE_NODES},
        ),
        CompileCase(
            "optimizer",
            kernels._stretch_sums_kernel,
            types(firsts="*i64", lasts="*i64", out="*fp64"),
            {"SPLITS": kernels.SPLITS, "NODE_BLOCK": kernels.NODE_BLOCK},
        ),
    ]


if __name__ == "__main__":
    for card in CARDS:
        for case in cases():
            found = compile_case(case, card)
            print(
                json.dumps(
                    {
                        "card": card,
                        "kernel": case.kernel.__name__,
                        "spilled": found.spilled_bytes,
                        "registers": found.registers,
                    }
                )
            )
