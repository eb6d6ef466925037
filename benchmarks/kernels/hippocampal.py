"""The hippocampal layer's operators beside its pool read: addresses, comparator, trace; at ns-2b's widths in bf16.

Shapes: 4 rows of 4096 tokens and 1 of 32,768; 40 heads of 64, match width 32, 640 trace channels. Bytes are the fewest:
each input read once, each output written once, bf16 but for the comparator's logits (fp32). Forward, backward, and both
in one go, each replayed from a CUDA graph, as the trainer runs them. Peer in the same run: the PyTorch reference of the
same operator, eager, forward and backward.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Ceilings, Reading, milliseconds
from torch import Tensor

HEADS, HEAD_WIDTH, MATCH_WIDTH, CHANNELS = 40, 64, 32, 640
WIDTH = HEADS * HEAD_WIDTH
SHAPES = ((4, 4096), (1, 32768))
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class _Case:
    """One operator at one shape."""

    function: Callable[..., Any]
    inputs: list[Tensor]
    forward_bytes: float
    backward_bytes: float

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs."""
        out = self.function(*self.inputs)
        return out if isinstance(out, tuple) else (out,)

    def backward_of(self, out: tuple[Tensor, ...], gradients: list[Tensor], keep: bool = False) -> None:
        """Every input's gradient."""
        torch.autograd.grad(out, self.inputs, gradients, retain_graph=keep)


def _bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16().requires_grad_()


def _fp32(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").requires_grad_()


def _addresses(rows: int, tokens: int) -> _Case:
    from neuronspark.kernels.addresses import addresses
    from neuronspark.kernels.rotary import rotary_table

    rotary = rotary_table(tokens, HEAD_WIDTH, 1e6, torch.device("cuda"), torch.float32)
    inputs = [_bf16(rows * tokens, WIDTH), _bf16(rows * tokens, WIDTH), _bf16(rows * tokens, MATCH_WIDTH)]
    inputs += [_fp32(HEADS), _fp32(HEADS)]
    read = 2.0 * rows * tokens * (2 * WIDTH + MATCH_WIDTH)
    written = 4.0 * rows * tokens * HEADS * (HEAD_WIDTH + MATCH_WIDTH)
    table = 4.0 * tokens * HEAD_WIDTH

    def function(*given: Tensor) -> tuple[Tensor, Tensor]:
        return addresses(*given, rotary=rotary, row_tokens=tokens, eps=EPS)

    return _Case(function, inputs, read + written + table, 2 * read + written + table)


def _comparator(rows: int, tokens: int) -> _Case:
    from neuronspark.kernels.arbitration import arbitrate

    control = torch.randn(rows, tokens, 4, HEADS, device="cuda")
    logits = [control[:, :, index].transpose(1, 2).requires_grad_() for index in (2, 3)]
    inputs = [_bf16(rows, HEADS, tokens, HEAD_WIDTH), _bf16(rows, HEADS, tokens, HEAD_WIDTH), *logits]
    inputs += [_fp32(HEADS) for _ in range(3)]
    dense, small = 2.0 * rows * tokens * WIDTH, 4.0 * rows * tokens * HEADS
    return _Case(arbitrate, inputs, 3 * dense + 2 * small, 5 * dense + 4 * small)


def _trace(rows: int, tokens: int) -> _Case:
    from neuronspark.kernels.trace_scan import trace_of_logits

    inputs = [_bf16(rows, tokens, CHANNELS), _bf16(rows, tokens, CHANNELS), _fp32(CHANNELS)]
    dense = 2.0 * rows * tokens * CHANNELS
    return _Case(trace_of_logits, inputs, 3 * dense, 5 * dense)


OPERATORS: dict[str, Callable[[int, int], _Case]] = {
    "addresses": _addresses,
    "comparator": _comparator,
    "trace": _trace,
}


def _captured(work: Callable[[], Any]) -> Callable[[], None]:
    """The work as the replay of a CUDA graph; it must have run once on the current stream."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        work()
    return graph.replay


def _times(case: _Case) -> tuple[float, float, float]:
    """Milliseconds of forward, backward, and both."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
        out = case.forward()
        gradients = [torch.randn_like(tensor) for tensor in out]
        case.backward_of(out, gradients, keep=True)
        works = (
            _captured(case.forward),
            _captured(lambda: case.backward_of(out, gradients, keep=True)),
            _captured(lambda: case.backward_of(case.forward(), gradients)),
        )
    torch.cuda.synchronize()
    forward, backward, both = (milliseconds(work) for work in works)
    return forward, backward, both


def _reference_ms(case: _Case) -> float:
    """Milliseconds of the PyTorch reference, forward and backward, eager."""
    os.environ["NEURONSPARK_KERNELS"] = "reference"
    try:
        gradients = [torch.randn_like(tensor) for tensor in case.forward()]
        return milliseconds(lambda: case.backward_of(case.forward(), gradients))
    finally:
        del os.environ["NEURONSPARK_KERNELS"]


def measure(ceilings: Ceilings) -> Iterator[Reading]:
    """Everything of the docstring; one operator's failure does not stop the others."""
    wrong = []
    for name, make in OPERATORS.items():
        for rows, tokens in SHAPES:
            what = f"{name} {rows} x {tokens}"
            try:
                case = make(rows, tokens)
                forward, backward, both = _times(case)
                reference = _reference_ms(case)
            except Exception as error:
                wrong.append(f"{what}: {type(error).__name__}: {error}")
                continue
            finally:
                torch.cuda.empty_cache()
            together = case.forward_bytes + case.backward_bytes
            yield Reading(f"{what} forward", forward, bytes=case.forward_bytes)
            yield Reading(f"{what} backward", backward, bytes=case.backward_bytes)
            yield Reading(f"{what} forward + backward", both, bytes=together)
            yield Reading(f"{what} forward + backward, PyTorch reference", reference, bytes=together)
    if wrong:
        raise RuntimeError(f"failed: {wrong}")


def search() -> Iterator[tuple[str, Any, float]]:
    """Each kernel's candidates, timed by the passes that they are part of, at both shapes."""
    from neuronspark.kernels import addresses_triton, arbitration_triton, launch, trace_scan_triton

    saved = launch.table()
    modules = {"addresses": addresses_triton, "comparator": arbitration_triton, "trace": trace_scan_triton}
    try:
        for operator, module in modules.items():
            for rows, tokens in SHAPES:
                case = OPERATORS[operator](rows, tokens)
                for name, candidates in module.CANDIDATES.items():
                    for chosen in candidates:
                        launch.use({**saved, name: {launch.ANY: vars(chosen)}})
                        forward, backward, _ = _times(case)
                        label = f"{name} {rows}x{tokens}"
                        if not name.endswith("backward"):
                            yield f"{label} fwd", chosen, forward
                        if not name.endswith("forward"):
                            yield f"{label} bwd", chosen, backward
    finally:
        launch.use(saved)
