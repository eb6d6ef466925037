"""The addresses' kernels against float64: shapes around the blocks, rows' ends, positions far out, a token before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from row_compare import assert_capturable, assert_right, assert_same, run, small_blocks
from torch import Tensor

from neuronspark.kernels.addresses import addresses
from neuronspark.kernels.addresses_triton import BACKWARD, FORWARD
from neuronspark.kernels.partial_sums_triton import SUM
from neuronspark.kernels.rotary import rotary_table

SMALL = {
    FORWARD: {"BLOCK_T": 8, "HEADS_PER_PROGRAM": 2, "STAGES": 1},
    BACKWARD: {"BLOCK_T": 8, "STAGES": 1},
    SUM: {"BLOCK_P": 4, "BLOCK_C": 16},
}
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6


@pytest.fixture(autouse=True)
def _blocks(device: torch.device) -> Iterator[None]:
    with small_blocks(device, SMALL):
        yield


def draw(
    rows: int,
    tokens: int,
    heads: int,
    widths: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    before: Tensor | None = None,
) -> tuple[Callable[..., Tensor], dict[str, Tensor], Tensor]:
    """Query beside key as a function of the inputs, the inputs, and a gradient; positions start at `first`.

    The gradient is random and partly along the output: else the gains' gradients, sums of both, would be near 0.
    """
    head_width, match_width = widths
    table = rotary_table(first + tokens, head_width, 1e6, device, torch.float64)[:, first:]

    def function(**given: Tensor) -> Tensor:
        # The kernels get the fp32 table that the model has; the float64 reference shows what its rounding costs.
        rotary = table if given["q_TD"].dtype == torch.float64 else table.float()
        return torch.stack(addresses(**given, rotary=rotary, row_tokens=tokens, eps=EPS, before_Br=before))

    dense = {"q_TD": heads * head_width, "k_TD": heads * head_width, "p_Tr": match_width}
    inputs = {name: torch.randn(rows * tokens, width, device=device).to(dtype) for name, width in dense.items()}
    for name in ("query_gain_h", "match_gain_h"):
        inputs[name] = (torch.rand(heads, device=device) + 0.5) * torch.randn(heads, device=device).sign()
    output = run("reference", function, inputs, torch.zeros(2, rows, heads, tokens, sum(widths), device=device))[
        "output"
    ]
    return function, inputs, torch.randn_like(output, dtype=torch.float32) + output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "widths"),
    [(2, 1, 1, (2, 1)), (2, 9, 3, (8, 4)), (1, 8, 2, (6, 5)), (1, 20, 1, (16, 8))],
)
def test_addresses(
    rows: int,
    tokens: int,
    heads: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> None:
    if 1 in widths:  # a norm over one channel is its sign: the gradient is rounding alone
        found = run("triton", *draw(rows, tokens, heads, widths, device, dtype))
        assert all(tensor.isfinite().all() for tensor in found.values())
        return
    assert_right(*draw(rows, tokens, heads, widths, device, dtype), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "widths"),
    [
        (3, 15, 5, (64, 32)),
        (2, 17, 9, (64, 32)),
        (5, 1, 40, (64, 32)),
        (1, 1000, 3, (48, 20)),
        (4, 4096, 40, (64, 32)),
        (1, 32768, 40, (64, 32)),
        (1, 65536, 2, (128, 64)),
    ],
)
def test_addresses_on_the_card(
    rows: int,
    tokens: int,
    heads: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> None:
    assert_right(*draw(rows, tokens, heads, widths, device, dtype), seed)


def test_positions_at_the_end_of_a_long_row(device: torch.device, seed: int) -> None:
    assert_right(*draw(1, 5, 2, (8, 4), device, first=65_531), seed)


def test_heads_and_projections_that_are_zero(device: torch.device, seed: int) -> None:
    """Eps alone is in the root: values are 0 and gradients finite, though 1 / sqrt(eps) large."""
    function, inputs, weights = draw(1, 6, 2, (8, 4), device)
    inputs["q_TD"][2, :8] = 0
    inputs["k_TD"][3, 8:] = 0
    inputs["p_Tr"][4] = 0
    inputs["match_gain_h"][0] = 0
    assert_right(function, inputs, weights, seed)


def test_the_token_before_a_row(device: torch.device, seed: int) -> None:
    """Decoding goes on from a token that is not in the rows: its p is in the first key, as if it were."""
    function, inputs, weights = draw(2, 9, 2, (8, 4), device)
    whole = run("triton", function, inputs, weights)["output"]
    last = {name: tensor.unflatten(0, (2, 9))[:, 8] for name, tensor in inputs.items() if tensor.dim() == 2}
    before = inputs["p_Tr"].unflatten(0, (2, 9))[:, 7]
    one, _, _ = draw(2, 1, 2, (8, 4), device, first=8, before=before)
    gains = {name: tensor for name, tensor in inputs.items() if tensor.dim() == 1}
    found = run("triton", one, {**last, **gains}, weights[:, :, :, 8:])["output"]
    assert torch.equal(found[:, :, :, 0], whole[:, :, :, 8]), f"NEURONSPARK_TEST_SEED={seed}"


def test_projections_that_are_a_part_of_wider_ones(device: torch.device, seed: int) -> None:
    function, inputs, weights = draw(2, 5, 2, (8, 4), device, torch.bfloat16)
    expected = run("triton", function, inputs, weights)

    def parts_of_one(**given: Tensor) -> Tensor:
        wide = torch.cat((given["q_TD"], given["k_TD"], given["p_Tr"]), 1)
        parts = dict(zip(("q_TD", "k_TD", "p_Tr"), wide.split((16, 16, 4), 1), strict=True))
        return function(**{**given, **parts})

    assert_same(expected, run("triton", parts_of_one, inputs, weights), seed)


def test_a_row_alone_and_a_second_run_give_the_same_bits(device: torch.device, seed: int) -> None:
    function, inputs, weights = draw(2, 9, 2, (8, 4), device, torch.bfloat16)
    both = run("triton", function, inputs, weights)
    assert_same(both, run("triton", function, inputs, weights), seed)
    second = {name: tensor[9:] if tensor.dim() == 2 else tensor for name, tensor in inputs.items()}
    alone = run("triton", function, second, weights[:, 1:])
    assert torch.equal(both["output"][:, 1:], alone["output"]), f"NEURONSPARK_TEST_SEED={seed}"
    for name in ("q_TD", "k_TD", "p_Tr"):
        gradient = f"gradient of {name}"
        assert torch.equal(both[gradient][9:], alone[gradient]), f"{gradient}; NEURONSPARK_TEST_SEED={seed}"


@pytest.mark.gpu
def test_capturable(device: torch.device) -> None:
    assert_capturable(*draw(2, 300, 4, (64, 32), device, torch.bfloat16))
