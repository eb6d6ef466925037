"""The comparator's kernels against float64: shapes around the blocks, vectors of no length, logits that saturate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from row_compare import assert_capturable, assert_right, assert_same, run, small_blocks
from torch import Tensor

from neuronspark.kernels.arbitration import arbitrate
from neuronspark.kernels.arbitration_triton import BACKWARD, FORWARD
from neuronspark.kernels.partial_sums_triton import SUM

SMALL = {
    FORWARD: {"BLOCK_T": 4, "TILES": 2, "STAGES": 1},
    BACKWARD: {"BLOCK_T": 4, "TILES": 3, "STAGES": 1},
    SUM: {"BLOCK_P": 4, "BLOCK_C": 16},
}
DTYPES = [torch.float32, torch.bfloat16]
TERMS = {
    "copy_bias_h": ("copy_BhL", 1),
    "novelty_weight_h": ("copy_BhL", 1),  # each times a novelty of at most 1
    "read_gain_bias_h": ("gain_BhL", 1),
}


@pytest.fixture(autouse=True)
def _blocks(device: torch.device) -> Iterator[None]:
    with small_blocks(device, SMALL):
        yield


def draw(
    rows: int, heads: int, tokens: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of `arbitrate`, with r and v alike to various degrees, and a gradient of its output."""
    shape = (rows, heads, tokens, width)
    r, v = torch.randn(shape, device=device), torch.randn(shape, device=device)
    likeness = torch.randn(shape[:3], device=device)[..., None]
    logits = {name: torch.randn(shape[:3], device=device) for name in ("copy_BhL", "gain_BhL")}
    names = ("copy_bias_h", "novelty_weight_h", "read_gain_bias_h")
    parameters = {name: torch.randn(heads, device=device) for name in names}
    inputs = {"r_BhLd": r.to(dtype), "v_BhLd": (v + likeness * r).to(dtype), **logits, **parameters}
    return inputs, torch.randn(rows * tokens, heads * width, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 1, 8), (1, 2, 13, 6), (2, 1, 25, 16)])
def test_arbitrate(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, seed: int) -> None:
    if shape[-1] == 1:  # cosine +-1: its gradient is rounding alone
        inputs, weights = draw(*shape, device, dtype)
        found = run("triton", arbitrate, inputs, weights)
        assert all(tensor.isfinite().all() for tensor in found.values())
        return
    assert_right(arbitrate, *draw(*shape, device, dtype), seed, TERMS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(3, 2, 63, 64), (2, 5, 64, 64), (1, 4, 1000, 40), (4, 40, 4096, 64), (1, 40, 32768, 64), (1, 2, 65536, 128)],
)
def test_arbitrate_on_the_card(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    assert_right(arbitrate, *draw(*shape, device, dtype), seed, TERMS)


@pytest.mark.parametrize("zero", ["r_BhLd", "v_BhLd"])
def test_a_vector_of_no_length_has_cosine_zero_and_a_finite_gradient(
    zero: str, device: torch.device, seed: int
) -> None:
    inputs, weights = draw(1, 2, 6, 8, device)
    inputs[zero][:, :, 2] = 0
    inputs[zero][:, :, 4] *= 1e-9
    assert_right(arbitrate, inputs, weights, seed, TERMS)


def test_logits_that_saturate(device: torch.device, seed: int) -> None:
    """copy_pi of 0 and 1 and gains from 0 to 1e4: nothing overflows, and what is not read gets no gradient."""
    inputs, weights = draw(1, 2, 8, 8, device)
    for name in ("copy_BhL", "gain_BhL"):
        inputs[name] = torch.tensor([-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4, 1.0], device=device).expand(1, 2, 8)
    inputs["copy_BhL"] = inputs["copy_BhL"].flip(2).contiguous()
    found = assert_right(arbitrate, inputs, weights, seed, TERMS)
    assert not found["gradient of r_BhLd"][:, :, 7].any()
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_layouts_of_the_layer_give_the_same_bits_as_contiguous_ones(device: torch.device, seed: int) -> None:
    """Logits lie beside those of other heads and controls; a value may lie as its projection left it."""
    inputs, weights = draw(2, 3, 9, 8, device, torch.bfloat16)
    expected = run("triton", arbitrate, inputs, weights)

    def laid_out(**given: Tensor) -> Tensor:
        for name in ("v_BhLd", "copy_BhL", "gain_BhL"):
            given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
        return arbitrate(**given)

    assert_same(expected, run("triton", laid_out, inputs, weights), seed)


def test_a_row_alone_and_a_second_run_give_the_same_bits(device: torch.device, seed: int) -> None:
    inputs, weights = draw(2, 2, 7, 8, device, torch.bfloat16)
    both = run("triton", arbitrate, inputs, weights)
    assert_same(both, run("triton", arbitrate, inputs, weights), seed)
    second = {name: tensor if tensor.dim() == 1 else tensor[1:] for name, tensor in inputs.items()}
    alone = run("triton", arbitrate, second, weights[7:])
    assert torch.equal(both["output"][7:], alone["output"]), f"NEURONSPARK_TEST_SEED={seed}"
    for name in ("r_BhLd", "v_BhLd", "copy_BhL", "gain_BhL"):
        gradient = f"gradient of {name}"
        assert torch.equal(both[gradient][1:], alone[gradient]), f"{gradient}; NEURONSPARK_TEST_SEED={seed}"


@pytest.mark.gpu
def test_capturable(device: torch.device) -> None:
    assert_capturable(arbitrate, *draw(2, 4, 300, 64, device, torch.bfloat16))
