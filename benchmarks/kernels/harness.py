"""Every operator's kernels on one GPU: time, rate, and the ratio to a ceiling measured in the same run.

    python benchmarks/kernels/harness.py [operator ...] [--search] [--json FILE]

A file beside this one is an operator's benchmark; its `measure(ceilings)` yields `Reading`s. With --search its
`search()` yields (name, launch configuration, milliseconds) of the candidates for its pinned configurations.

Ceilings: a device-to-device copy (bytes read plus bytes written) and a bf16 product of 8192 x 8192 x 8192, both on
random data. Times are medians of event timings with the L2 cache flushed between runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from nstrain.gpu.ceilings import Ceilings, measure_ceilings  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Reading:
    """One timed thing."""

    what: str
    """Operator, pass and shape; a peer's name if it is not ours."""
    ms: float
    flops: float = 0.0
    """Operations counted as the benchmark's docstring says; 0 where bytes are what counts."""
    bytes: float = 0.0
    """The fewest bytes that must move: each input read once, each output written once."""

    def rate(self, ceilings: Ceilings) -> tuple[float, str, float]:
        """(rate, its unit, share of the ceiling) by the one of the two floors that takes longer."""
        by_flops = self.flops / ceilings.bf16_tflop_s
        by_bytes = self.bytes / ceilings.copy_tb_s
        if by_flops >= by_bytes:
            rate, unit, ceiling = self.flops / self.ms / 1e9, "TFLOP/s", ceilings.bf16_tflop_s
        else:
            rate, unit, ceiling = self.bytes / self.ms / 1e9, "TB/s", ceilings.copy_tb_s
        return rate, unit, rate / ceiling


def milliseconds(work: Callable[[], Any], warmup_ms: int = 20, repeat_ms: int = 80) -> float:
    """Median time of a call on the device."""
    from triton.testing import do_bench

    return float(do_bench(work, warmup=warmup_ms, rep=repeat_ms, return_mode="median"))


def forward_backward(function: Callable[..., torch.Tensor], inputs: Iterable[torch.Tensor]) -> Callable[[], None]:
    """A forward and a backward pass from a fixed random gradient, for `milliseconds`."""
    inputs = list(inputs)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    gradient = torch.randn_like(function(*inputs))

    def run() -> None:
        torch.autograd.grad(function(*inputs), wanted, gradient)

    return run


def main() -> None:
    """Measure the named operators, or all."""
    operators = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("harness", "sanitize"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", help=f"which (default: all): {', '.join(operators)}")
    parser.add_argument("--search", action="store_true", help="time the candidates for the pinned configurations")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ceilings = measure_ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {ceilings}", flush=True)
    rows, failed = [], False
    for operator in arguments.operators or operators:
        try:
            module = importlib.import_module(operator)
            if arguments.search:
                for name, launch, ms in module.search():
                    print(f"{name:<40} {ms:9.4f} ms  {launch}", flush=True)
                continue
            for reading in module.measure(ceilings):
                rate, unit, share = reading.rate(ceilings)
                print(f"{reading.what:<64} {reading.ms:9.4f} ms {rate:8.2f} {unit:<8} {share:6.1%}", flush=True)
                rows.append({**dataclasses.asdict(reading), "rate": rate, "unit": unit, "share": share})
        except Exception:
            failed = True
            print(f"{operator} FAILED\n{traceback.format_exc(limit=4)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"ceilings": dataclasses.asdict(ceilings), "readings": rows}, indent=2))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
