"""The quantal neuron's values and gradients, on a table worked out by hand, and against its definition."""

from __future__ import annotations

import math

import ns_reference as reference
import pytest
import torch

from neuronspark import ModelConfig
from neuronspark.kernels.quantal import release
from neuronspark.neuron import excitatory, signed

# theta = 0.5, D = 4, w = 1. Columns: u / theta, quanta, gradient passes, d output / d theta.
EXCITATORY = [
    (-1.5, 0, 0, 0.0),
    (-1.0, 0, 0, 0.0),  # the window is open: its edge is outside
    (-0.75, 0, 1, 0.75),
    (0.0, 0, 1, 0.0),
    (0.5, 0, 1, -0.5),  # ties go to the even neighbour
    (0.75, 1, 1, 0.25),
    (1.5, 2, 1, 0.5),
    (2.5, 2, 1, -0.5),
    (3.5, 4, 1, 0.5),
    (4.5, 4, 1, -0.5),
    (4.75, 4, 1, -0.75),
    (5.0, 4, 0, 4.0),
    (9.0, 4, 0, 4.0),
]
SIGNED = [
    (-9.0, -4, 0, -4.0),
    (-5.0, -4, 0, -4.0),
    (-4.75, -4, 1, 0.75),
    (-2.5, -2, 1, 0.5),
    (-1.5, -2, 1, -0.5),
    (-0.5, 0, 1, 0.5),
    (-0.25, 0, 1, 0.25),
    (0.5, 0, 1, -0.5),
    (1.25, 1, 1, -0.25),
    (4.5, 4, 1, -0.5),
    (5.0, 4, 0, 4.0),
]


@pytest.mark.parametrize(("lowest", "table"), [(0, EXCITATORY), (-4, SIGNED)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_table(lowest: int, table: list[tuple[float, int, int, float]], dtype: torch.dtype) -> None:
    theta = 0.5
    for ratio, quanta, passes, dtheta in table:
        u = torch.tensor([[ratio * theta]], dtype=dtype, requires_grad=True)
        log_theta = torch.tensor([math.log(theta)], dtype=dtype, requires_grad=True)
        assert log_theta.exp().item() == theta, "the table's edges need the exact threshold"
        out = release(u, log_theta, lowest, 4, 1.0)
        du, dlog_theta = torch.autograd.grad(out.sum(), [u, log_theta])
        assert out.item() == quanta * theta, ratio
        assert du.item() == passes, ratio
        assert dlog_theta.item() / theta == pytest.approx(dtheta, abs=1e-6), ratio


@pytest.mark.parametrize("lowest", [0, -4])
def test_against_the_definition(lowest: int) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(200, 3, generator=generator, dtype=torch.float64) * 4
    weights = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    results = []
    for function in (release, reference.release):
        u, log_theta = start.clone().requires_grad_(), torch.tensor([-0.5, 0.1, 0.4]).double().requires_grad_()
        out = function(u, log_theta, lowest, 4, 1.0)
        results.append((out, *torch.autograd.grad((out * weights).sum(), [u, log_theta])))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_output_is_exactly_whole_quanta() -> None:
    u = torch.randn(1000, 1, generator=torch.Generator().manual_seed(1)) * 3
    log_theta = torch.tensor([math.log(0.6)])
    quanta = {(n * log_theta.exp()).item() for n in range(-4, 5)}
    assert set(release(u, log_theta, -4, 4, 1.0).flatten().tolist()) <= quanta


def test_firing_of_unit_input() -> None:
    """The contract's figure: a signed neuron of threshold 0.6 fires 0.76 of the time at unit variance."""
    config = ModelConfig(vocab_size=128, width=64, layers="D", rope_max_seq_len=8, ffn_width=64)
    u = torch.randn(200_000, 1, generator=torch.Generator().manual_seed(2))
    log_theta = torch.tensor([math.log(0.6)])
    assert (signed(u, log_theta, config) != 0).double().mean().item() == pytest.approx(0.764, abs=0.01)
    assert (excitatory(u, log_theta, config) != 0).double().mean().item() == pytest.approx(0.382, abs=0.01)
