"""The trace's kernels against float64: row lengths around the blocks, slow and flushing decays, bits that repeat."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from row_compare import assert_capturable, assert_right, assert_same, run, small_blocks
from torch import Tensor

from neuronspark.kernels.partial_sums_triton import SUM
from neuronspark.kernels.trace_scan import trace_of_logits, trace_scan
from neuronspark.kernels.trace_scan_triton import CARRY_CONFIGURATION, CONFIGURATION

SMALL = {
    CONFIGURATION: {"CHUNK": 8, "STEP": 4, "BLOCK_K": 8},
    CARRY_CONFIGURATION: {"STEP": 2, "BLOCK_K": 8},
    SUM: {"BLOCK_P": 4, "BLOCK_C": 16},
}
DTYPES = [torch.float32, torch.bfloat16]
TERMS = {"bias_K": ("logit_BLK", 2)}


@pytest.fixture(autouse=True)
def _blocks(device: torch.device) -> Iterator[None]:
    with small_blocks(device, SMALL):
        yield


def draw(
    rows: int, tokens: int, channels: int, device: torch.device, dtype: torch.dtype = torch.float32, shift: float = 0.0
) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of `trace_of_logits`, and a gradient of its output; a logit of -12.5 is an e-fold of 256K tokens."""
    shape = (rows, tokens, channels)
    u, logit, weights = (torch.randn(shape, device=device) for _ in range(3))
    bias = torch.randn(channels, device=device) + shift
    return {"u_BLK": u.to(dtype), "logit_BLK": (2 * logit).to(dtype), "bias_K": bias}, weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "tokens", "channels"), [(1, 1, 3), (2, 5, 8), (2, 8, 5), (1, 21, 9)])
def test_trace_of_logits(
    rows: int, tokens: int, channels: int, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    assert_right(trace_of_logits, *draw(rows, tokens, channels, device, dtype), seed, TERMS)


@pytest.mark.parametrize(("rows", "tokens"), [(2, 1), (1, 19)])
def test_trace_scan(rows: int, tokens: int, device: torch.device, seed: int) -> None:
    inputs, weights = draw(rows, tokens, 7, device)
    log_decay = -torch.nn.functional.softplus(inputs["logit_BLK"] - 2)
    assert_right(trace_scan, {"u_BLK": inputs["u_BLK"], "log_decay_BLK": log_decay}, weights, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "tokens", "channels"),
    [(3, 63, 64), (2, 64, 640), (4, 65, 31), (2, 1000, 130), (4, 4096, 640), (1, 32768, 640), (1, 65536, 64)],
)
@pytest.mark.parametrize("shift", [0.0, -12.5])
def test_trace_of_logits_on_the_card(
    rows: int, tokens: int, channels: int, dtype: torch.dtype, shift: float, device: torch.device, seed: int
) -> None:
    """With the shift most channels keep their content over the whole of a long row."""
    assert_right(trace_of_logits, *draw(rows, tokens, channels, device, dtype, shift), seed, TERMS)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "tokens"), [(2, 1000), (1, 32768)])
@pytest.mark.parametrize("shift", [0.0, -12.5])
def test_trace_scan_on_the_card(rows: int, tokens: int, shift: float, device: torch.device, seed: int) -> None:
    inputs, weights = draw(rows, tokens, 96, device)
    log_decay = -torch.nn.functional.softplus(inputs["logit_BLK"] + shift)
    assert_right(trace_scan, {"u_BLK": inputs["u_BLK"], "log_decay_BLK": log_decay}, weights, seed)


def test_a_retention_of_one_minus_1e_minus_9_takes_in_what_it_should(device: torch.device, seed: int) -> None:
    """In fp32 that decay is exactly 1, and a log decay formed as log(lambda) is 0."""
    tokens, rate = 18, 1e-9
    ones = torch.ones(1, tokens, 3, device=device)
    logits = {"u_BLK": ones, "logit_BLK": ones * math.log(math.expm1(rate)), "bias_K": ones[0, 0] * 0}
    logs = {"u_BLK": ones, "log_decay_BLK": -rate * ones}
    for function, inputs in ((trace_of_logits, logits), (trace_scan, logs)):
        trace = assert_right(function, inputs, torch.randn_like(ones), seed, TERMS)["output"]
        assert abs(trace[0, -1, 0].item() / (tokens * rate) - 1) < 1e-5


@pytest.mark.parametrize("at", [0, 7, 8])
def test_a_flush_forgets_everything_before_it(at: int, device: torch.device, seed: int) -> None:
    """A logit of 1e5: the trace becomes the input, and slow decays around it keep their precision."""
    inputs, weights = draw(1, 11, 4, device, shift=-9.0)
    inputs["logit_BLK"][:, at] = 1e5
    found = assert_right(trace_of_logits, inputs, weights, seed, TERMS)
    assert torch.allclose(found["output"][:, at], inputs["u_BLK"][:, at])
    assert not found["gradient of logit_BLK"][:, at].any()
    log_decay = -torch.nn.functional.softplus(inputs["logit_BLK"] + inputs["bias_K"])
    assert_right(trace_scan, {"u_BLK": inputs["u_BLK"], "log_decay_BLK": log_decay}, weights, seed)


def test_a_row_alone_and_a_second_run_give_the_same_bits(device: torch.device, seed: int) -> None:
    inputs, weights = draw(2, 9, 5, device, torch.bfloat16)
    both = run("triton", trace_of_logits, inputs, weights)
    assert_same(both, run("triton", trace_of_logits, inputs, weights), seed)
    second = {name: tensor if name == "bias_K" else tensor[1:] for name, tensor in inputs.items()}
    alone = run("triton", trace_of_logits, second, weights[1:])
    for name in ("output", "gradient of u_BLK", "gradient of logit_BLK"):
        assert torch.equal(both[name][1:], alone[name]), f"{name}; NEURONSPARK_TEST_SEED={seed}"


def test_channels_that_are_a_part_of_wider_ones(device: torch.device, seed: int) -> None:
    """The layer's products and the gradient of its concatenation may be views of wider tensors."""
    inputs, weights = draw(2, 6, 5, device)
    expected = run("triton", trace_of_logits, inputs, weights)

    def padded(u_BLK: Tensor, logit_BLK: Tensor, bias_K: Tensor) -> Tensor:
        wide = torch.cat((u_BLK, logit_BLK, u_BLK), 2)
        trace = trace_of_logits(wide[..., :5], wide[..., 5:10], bias_K)
        return torch.cat((u_BLK, trace), 2)[..., 5:]

    found = run("triton", padded, inputs, weights)
    assert_same(expected, found, seed)


@pytest.mark.gpu
def test_capturable(device: torch.device) -> None:
    assert_capturable(trace_of_logits, *draw(2, 300, 64, device, torch.bfloat16))
