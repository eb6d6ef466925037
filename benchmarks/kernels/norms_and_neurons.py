"""RMSNorm, the quantal neuron and what is fused from them, at ns-2b's widths, 16,384 tokens, bf16.

Bytes are counted as each input read once and each output written once; parameters, their gradients and the inverse rms
are left out (under 2 % together). With E = 2 bytes an element: rms_norm, norm_release and release 2 E forward and 5 E
forward and backward; gated_release and the products 3 E and 8 E. Peers in the same run: each operator's PyTorch
reference, torch's own rms_norm, and a copy of a tensor of this size (2 E). All are timed as replays of a CUDA graph, as
a trainer runs them: launched one by one, the smaller ones would wait for Python.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from harness import Ceilings, Reading, forward_backward, milliseconds
from torch import Tensor

from neuronspark.kernels import launch, release_triton, row_norm_triton
from neuronspark.kernels.gated_release import gated_release
from neuronspark.kernels.norm_release import norm_release
from neuronspark.kernels.quantal import release
from neuronspark.kernels.release_product import release_product, release_times
from neuronspark.kernels.rmsnorm import rms_norm

TOKENS = 16_384
WIDTH, INNER, HEAD, FEED_FORWARD = 2560, 5120, 64, 7040
EPS, MARGIN = 1e-6, 1.0
EXCITATORY, SIGNED = (0, 4), (-4, 4)


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator at a shape, ready to run."""

    name: str
    function: Callable[..., Tensor]
    inputs: list[Tensor]
    elements: int
    """Of its output."""
    forward_passes: int
    """Tensors of that size that a forward must read and write."""
    both_passes: int
    """The same of a forward and a backward."""
    launches: tuple[str, str]
    """Names of the pinned configurations of its forward and its backward."""


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _gain(*shape: int) -> Tensor:
    return (torch.rand(shape, device="cuda") + 0.5).requires_grad_()


def _log_theta(channels: int) -> Tensor:
    return (torch.rand(channels, device="cuda") - 1).requires_grad_()


def _cases() -> Iterator[Case]:
    """One case at a time, so that only its tensors are on the card."""

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return rms_norm(x, gain, EPS)

    def neuron(levels: tuple[int, int]) -> Callable[..., Tensor]:
        return lambda u, log_theta: release(u, log_theta, *levels, MARGIN)

    size = TOKENS * WIDTH
    rows = ("rms_norm_forward/row", "rms_norm_backward/row")
    yield Case(f"rms_norm {WIDTH}", norm, [_draw(TOKENS, WIDTH), _gain(WIDTH)], size, 2, 5, rows)
    groups = ("rms_norm_forward/heads", "rms_norm_backward/heads")
    grouped = [_draw(TOKENS, 2, 1, HEAD), _gain(2, 1, HEAD)]
    yield Case(f"rms_norm B and C 2x{HEAD}", norm, grouped, TOKENS * 2 * HEAD, 2, 5, groups)

    fused_rows = ("norm_release_forward/row", "norm_release_backward/row")
    yield Case(
        f"norm_release {WIDTH}",
        lambda x, gain, log_theta: norm_release(x, gain, EPS, log_theta, SIGNED, MARGIN),
        [_draw(TOKENS, WIDTH), _gain(WIDTH), _log_theta(WIDTH)],
        size,
        2,
        5,
        fused_rows,
    )
    heads = INNER // HEAD
    yield Case(
        f"gated_release {heads}x{HEAD}",
        lambda y, z, gain, log_theta: gated_release(y, z, gain, EPS, log_theta, SIGNED, MARGIN),
        [_draw(TOKENS, heads, HEAD), _draw(TOKENS, heads, HEAD), _gain(heads, HEAD), _log_theta(INNER)],
        TOKENS * INNER,
        3,
        8,
        ("gated_release_forward/heads", "gated_release_backward/heads"),
    )
    alone = (release_triton.RELEASE_FORWARD, release_triton.RELEASE_BACKWARD)
    for kind, levels in (("excitatory", EXCITATORY), ("signed", SIGNED)):
        inputs = [_draw(TOKENS, FEED_FORWARD), _log_theta(FEED_FORWARD)]
        yield Case(f"release {kind} {FEED_FORWARD}", neuron(levels), inputs, TOKENS * FEED_FORWARD, 2, 5, alone)
    products = (release_triton.PRODUCT_FORWARD, release_triton.PRODUCT_BACKWARD)
    yield Case(
        f"release_product {FEED_FORWARD}",
        lambda a, ta, b, tb: release_product(a, ta, EXCITATORY, b, tb, SIGNED, MARGIN),
        [_draw(TOKENS, FEED_FORWARD), _log_theta(FEED_FORWARD), _draw(TOKENS, FEED_FORWARD), _log_theta(FEED_FORWARD)],
        TOKENS * FEED_FORWARD,
        3,
        8,
        products,
    )
    yield Case(
        f"release_times {WIDTH}",
        lambda a, ta, b: release_times(a, ta, EXCITATORY, b, MARGIN),
        [_draw(TOKENS, WIDTH), _log_theta(WIDTH), _draw(TOKENS, WIDTH)],
        size,
        3,
        8,
        products,
    )


@contextmanager
def _references() -> Iterator[None]:
    os.environ["NEURONSPARK_KERNELS"] = "reference"
    try:
        yield
    finally:
        del os.environ["NEURONSPARK_KERNELS"]


def _replay_ms(work: Callable[[], Any]) -> float:
    """Time of a call's kernels as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return milliseconds(graph.replay)


def _copy(x: Tensor) -> Reading:
    source, target = x.detach(), torch.empty_like(x)
    return Reading(f"copy {tuple(x.shape)}", _replay_ms(lambda: target.copy_(source)), bytes=2 * 2 * x.numel())


def _readings(case: Case, whose: str = "") -> Iterator[Reading]:
    passes = 2 * case.elements  # bytes of one bf16 tensor
    name = f"{case.name}{whose}"
    with torch.no_grad():
        forward_ms = _replay_ms(lambda: case.function(*case.inputs))
    yield Reading(f"{name}, forward", forward_ms, bytes=case.forward_passes * passes)
    both_ms = _replay_ms(forward_backward(case.function, case.inputs))
    yield Reading(f"{name}, forward + backward", both_ms, bytes=case.both_passes * passes)


def measure(ceilings: Ceilings) -> Iterator[Reading]:
    """Every operator, and its reference in the same run."""
    for case in _cases():
        yield from _readings(case)
        with _references():
            yield from _readings(case, " (reference)")
        if case.name == f"rms_norm {WIDTH}":
            x, gain = case.inputs
            gain_16 = gain.detach().to(x.dtype).requires_grad_()
            theirs = dataclasses.replace(
                case,
                function=lambda x, gain: torch.nn.functional.rms_norm(x, (WIDTH,), gain, EPS),
                inputs=[x, gain_16],
            )
            yield from _readings(theirs, " (torch)")
            yield _copy(x)


def search() -> Iterator[tuple[str, launch.Launch, float]]:
    """Each candidate: a forward's time, or a forward's and backward's where the backward's configuration varies."""
    candidates = {**release_triton.CANDIDATES, **row_norm_triton.CANDIDATES}
    card = launch.card_of(torch.device("cuda"))
    for case in _cases():
        runs = (lambda case=case: case.function(*case.inputs), forward_backward(case.function, case.inputs))
        for name, run in zip(case.launches, runs, strict=True):
            for candidate in candidates.get(name, ()):
                launch.use({name: {card: dataclasses.asdict(candidate)}})
                try:
                    yield f"{case.name} {name}", candidate, _replay_ms(run)
                finally:
                    launch.use({})
