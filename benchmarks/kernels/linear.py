"""Weight gradients: first the probe that fp32 accumulation by cuBLAS rests on, then the ways to accumulate, timed.

The probe, in two processes of its own: does addmm(out_dtype=fp32, out=total) add to an fp32 view inside a flat buffer,
right against float64, with the same bits in 5 repeats, in both processes, and in a CUDA graph? Each answer is printed;
a "no" makes the benchmark fail after its timings.

The timings: dW += dY^T X of bf16 dY [T, O] and X [T, I] into fp32, T 16,384, at the weight shapes [O, I] of ns-2b.
FLOPs: 2 T O I. Bytes: both factors once, the total read and written once. Ways: cuBLAS's addmm into the fp32 total;
a bf16 product and an addition; an fp32 product and an addition.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from harness import Ceilings, Reading, milliseconds

TOKENS = 16_384
SHAPES = [
    (5120, 2560),
    (2560, 5120),
    (7040, 2560),
    (2560, 7040),
    (640, 2560),
    (128, 2560),
    (80, 2560),
    (130_560, 2560),
]
"""Weights [O, I]; the last is the head's, whose factors come in chunks."""
HEAD_TOKENS = 3328
"""Tokens to a chunk at the head's shape."""
PROBED = [(2560, 5120), (80, 2560), (640, 2560)]


def _addmm(total_OI: Tensor, dy_TO: Tensor, x_TI: Tensor) -> None:
    torch.addmm(total_OI, dy_TO.t(), x_TI, out_dtype=torch.float32, out=total_OI)


def _bf16_product_and_add(total_OI: Tensor, dy_TO: Tensor, x_TI: Tensor) -> None:
    total_OI.add_(torch.mm(dy_TO.t(), x_TI))


def _fp32_product_and_add(total_OI: Tensor, dy_TO: Tensor, x_TI: Tensor) -> None:
    total_OI.add_(torch.mm(dy_TO.t(), x_TI, out_dtype=torch.float32))


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "addmm into fp32": _addmm,
    "bf16 mm + add": _bf16_product_and_add,
    "fp32 mm + add": _fp32_product_and_add,
}


def _factors(outputs: int, inputs: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(outputs * 10_000 + inputs)
    draw = lambda n: torch.randn(tokens, n, device="cuda", generator=generator).bfloat16()  # noqa: E731
    return draw(outputs), draw(inputs)


# --- the probe -----------------------------------------------------------------------------------------------


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()[:16]


def _probe_shape(outputs: int, inputs: int) -> dict[str, Any]:
    dy_TO, x_TI = _factors(outputs, inputs)
    flat = torch.zeros(256 + outputs * inputs + 256, device="cuda")
    total_OI = flat[256:-256].view(outputs, inputs)
    digests = set()
    for _ in range(5):
        flat.fill_(0.5)
        _addmm(total_OI, dy_TO, x_TI)
        digests.add(_digest(flat))
    expected = 0.5 + dy_TO.double().t() @ x_TI.double()
    error = float((total_OI.double() - expected).norm() / expected.norm())
    outside = bool((flat[:256] == 0.5).all() and (flat[-256:] == 0.5).all())
    # Twice more from here: a graph's two replays against two eager calls.
    _addmm(total_OI, dy_TO, x_TI)
    _addmm(total_OI, dy_TO, x_TI)
    eager = _digest(flat)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        _addmm(total_OI, dy_TO, x_TI)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        _addmm(total_OI, dy_TO, x_TI)
    flat.fill_(0.5)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return {
        "error": error,
        "right": error < 5e-5,
        "outside untouched": outside,
        "same bits in 5 repeats": len(digests) == 1,
        "graph gives eager's bits": _digest(flat) == eager,
        "digest": sorted(digests)[0],
    }


def _probe_child() -> None:
    print(json.dumps({f"{outputs}x{inputs}": _probe_shape(outputs, inputs) for outputs, inputs in PROBED}))


def _probe() -> list[str]:
    """Print the probe's answers; return the "no"s."""
    command = [sys.executable, str(Path(__file__).resolve())]
    runs = [subprocess.run(command, capture_output=True, text=True) for _ in range(2)]
    for run in runs:
        if run.returncode:
            print(f"probe: addmm into fp32 DOES NOT WORK\n{run.stderr[-3000:]}", flush=True)
            return ["addmm into an fp32 view"]
    first, second = (json.loads(run.stdout.splitlines()[-1]) for run in runs)
    wrong = []
    for shape, answers in first.items():
        answers["same bits in two processes"] = answers["digest"] == second[shape]["digest"]
        print(f"probe {shape}: {answers}", flush=True)
        wrong += [f"{shape}: {question}" for question, answer in answers.items() if answer is False]
    return wrong


# --- the timings ---------------------------------------------------------------------------------------------


def _work(shape: tuple[int, int], way: Callable[[Tensor, Tensor, Tensor], None]) -> Callable[[], None]:
    dy_TO, x_TI = _factors(*shape, tokens=_tokens(shape))
    total_OI = torch.zeros(shape, device="cuda")
    way(total_OI, dy_TO, x_TI)
    return lambda: way(total_OI, dy_TO, x_TI)


def _tokens(shape: tuple[int, int]) -> int:
    return HEAD_TOKENS if shape[0] > 100_000 else TOKENS


def measure(ceilings: Ceilings) -> Iterator[Reading]:
    """The probe, then every way at every shape."""
    wrong = _probe()
    for shape in SHAPES:
        tokens, (outputs, inputs) = _tokens(shape), shape
        flops = 2.0 * tokens * outputs * inputs
        moved = 2.0 * tokens * (outputs + inputs) + 8.0 * outputs * inputs
        for name, way in WAYS.items():
            try:
                ms = milliseconds(_work(shape, way))
            except Exception as error:
                wrong.append(f"{outputs}x{inputs} {name}: {error}")
                continue
            yield Reading(f"wgrad {outputs}x{inputs}, T {tokens}, {name}", ms, flops, moved)
    if wrong:
        raise RuntimeError(f"not as expected: {wrong}")


if __name__ == "__main__":
    _probe_child()
