"""The dendritic scan's kernels against float64: row lengths around the chunks and segments, slow, flushing and mixed
decays, widths that are no tile's, bits that repeat. On a card every candidate for a pinned configuration as well.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_compare import relative_error
from row_compare import FP32_LIMIT, assert_capturable, assert_right, assert_same, run
from torch import Tensor

from neuronspark.kernels import dendritic_scan_triton_backward, dendritic_scan_triton_forward, launch
from neuronspark.kernels.dendritic_scan import dendritic_scan
from neuronspark.kernels.dendritic_scan_triton import _Scan, dendritic_scan_triton

DTYPES = [torch.float32, torch.bfloat16]
NAMES = ("v", "log_decay", "factor", "b", "c", "skip")


def draw(
    shape: tuple[int, int, int, int, int, int], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of `dendritic_scan` for (rows, tokens, heads, compartments, states, groups), and a gradient of y.

    Heads differ in their decays, from e-folds of a token to some of 20,000 tokens; one token in 50 flushes a head.
    """
    rows, tokens, heads, compartments, states, groups = shape

    def normal(*sizes: int) -> Tensor:
        return torch.randn(rows, tokens, *sizes, device=device)

    log_decay = -torch.exp(normal(heads) - torch.linspace(0, 10, heads, device=device))
    log_decay = log_decay.masked_fill(torch.rand(rows, tokens, heads, device=device) < 0.02, -100.0)
    inputs = {
        "v": normal(heads, compartments).to(dtype),
        "log_decay": log_decay,
        "factor": torch.rand(rows, tokens, heads, device=device) - 0.1,
        "b": normal(groups, states).to(dtype),
        "c": (normal(groups, states) * states**-0.5).to(dtype),
        "skip": torch.randn(heads, device=device),
    }
    # Leaning towards v: the gradient of a head's skip is one sum of dy v, which would at times cancel to nothing.
    return inputs, normal(heads, compartments) + inputs["v"].float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 2, 16, 16, 1),
        (1, 65, 6, 24, 40, 2),
        (1, 70, 2, 64, 64, 1),
        (1, 16, 2, 96, 16, 2),
        (1, 70, 2, 5, 3, 1),
    ],
)
def test_scan(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, device: torch.device, seed: int) -> None:
    # A few tokens' roundings do not average out: one more rounding in a sum's largest term is seen.
    assert_right(dendritic_scan, *draw(shape, device, dtype), seed, roundings=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("states", [3, 16, 24, 32, 40, 64, 128])
@pytest.mark.parametrize("compartments", [5, 16, 24, 32, 48, 64, 72, 128])
def test_a_state_tile_is_never_narrower_than_a_card_computes_rightly(
    compartments: int, states: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reaches the kernels: 16-bit products of a narrower one are wrong on Hopper (`test_widths_on_card`)."""
    seen = []

    def scan(v: Tensor, *others: Tensor) -> Tensor:
        seen.append((v.shape[3], others[2].shape[3]))
        return v

    monkeypatch.setattr(_Scan, "apply", scan)
    inputs, _ = draw((1, 2, 2, compartments, states, 1), torch.device("cpu"), dtype)
    assert torch.equal(dendritic_scan_triton(**inputs), inputs["v"])
    ((p, n),) = seen
    tile = dendritic_scan_triton_forward.tile
    largest = dendritic_scan_triton_forward.largest_compartments(dtype)
    assert p <= largest
    assert dtype == torch.float32 or tile(p) >= min(tile(n), largest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token(dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Nothing decays before the first token, so the decay's gradient is 0 and not only near it."""
    inputs, weights = draw((3, 1, 4, 16, 16, 2), device, dtype)
    found = run("triton", dendritic_scan, inputs, weights)
    assert not found.pop("gradient of log_decay").any()

    def scan_of_one(**changing: Tensor) -> Tensor:
        return dendritic_scan(log_decay=inputs["log_decay"].to(changing["factor"].dtype), **changing)

    assert_right(scan_of_one, {name: inputs[name] for name in NAMES if name != "log_decay"}, weights, seed)


def test_segments(device: torch.device, seed: int) -> None:
    """A row long enough to be walked over in several segments, and one that the segments do not divide."""
    chunk = dendritic_scan_triton_forward.chunk_tokens(torch.float32)
    tokens = 27 * chunk + 3
    sizes = dendritic_scan_triton_forward.Sizes(1, tokens, 1, 16, 16, 1, torch.float32)
    assert sizes.segments == 3
    assert sizes.segments * sizes.segment_chunks > sizes.chunks
    inputs, weights = draw((1, tokens, 1, 16, 16, 1), device)
    inputs["log_decay"] = inputs["log_decay"].clamp(min=-1) * 0.01
    assert_right(dendritic_scan, inputs, weights, seed)


def test_parts_of_groups(device: torch.device, seed: int) -> None:
    """Groups whose heads are several blocks, the last one smaller, add up to the same db and dc."""
    sizes = dendritic_scan_triton_forward.Sizes(1, 20, 22, 16, 16, 2, torch.float32)
    assert 11 % dendritic_scan_triton_backward.gradient_head_block(sizes)
    assert_right(dendritic_scan, *draw((1, 20, 22, 16, 16, 2), device), seed)


def test_layouts(device: torch.device, seed: int) -> None:
    """Inputs as the layer gives them (b a part of a wider tensor) and others that lie askew, not contiguous."""
    inputs, weights = draw((2, 19, 2, 16, 16, 1), device)
    plain = run("triton", dendritic_scan, inputs, weights)
    wide = {name: torch.cat((inputs[name], inputs[name]), -1) for name in ("v", "b", "c")}
    parts = {name: tensor.unflatten(-1, (2, 16))[..., 0, :] for name, tensor in wide.items()}
    askew = {name: inputs[name].mT.contiguous().mT for name in ("v", "log_decay", "factor", "c")}
    transposed = weights.transpose(1, 2).contiguous().transpose(1, 2)
    found = [_gradients({**inputs, **laid}, weights) for laid in (parts, askew)]
    for other in (*found, run("triton", dendritic_scan, inputs, transposed)):
        for name, expected in plain.items():
            # A card's compiler orders a sum by how its terms lie, so that only layout for layout bits are the same. A
            # flush of 100 in the decays' running sum is rounded then at other tokens: as far off as from float64.
            error = relative_error(other[name], expected)
            assert error < FP32_LIMIT, f"{name}: relative error {error:.2e}, seed {seed}"


def _gradients(inputs: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Like `run` for the kernels, on tensors that lie as given (`run` makes them contiguous)."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    output = dendritic_scan_triton(**leaves)
    gradients = torch.autograd.grad(output, list(leaves.values()), weights)
    return {"output": output.detach()} | {
        f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)
    }


@pytest.mark.parametrize("log_decay", [0.0, -1e-9, -4e-6, -1e-3, -30.0, -60.0, -61.0, -1e5])
def test_extreme_decays(log_decay: float, device: torch.device, seed: int) -> None:
    """From no decay at all to one that leaves nothing; below -60 its gradient is 0."""
    inputs, weights = draw((1, 50, 1, 16, 16, 1), device)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], log_decay)
    found = assert_close(inputs, weights, seed)
    if log_decay < -60:
        assert not found["gradient of log_decay"].any()


def test_flush_beside_slow_decays(device: torch.device, seed: int) -> None:
    """A flush of any size leaves a chunk's sums fine enough to tell the decays after it."""
    inputs, weights = draw((1, 40, 2, 16, 16, 1), device)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -0.05)
    inputs["log_decay"][:, ::20] = -1e7
    found = run("triton", dendritic_scan, inputs, weights)
    exact = run("reference", dendritic_scan, {name: x.double() for name, x in inputs.items()}, weights.double())
    for name, expected in exact.items():
        error = relative_error(found[name], expected)
        assert error < 5 * FP32_LIMIT, f"{name}: {error:.1e} off; NEURONSPARK_TEST_SEED={seed}"  # -60 resolves 4e-6


@pytest.mark.parametrize("factor", [0.0, 1e-9, 1e5])
def test_extreme_factors(factor: float, device: torch.device, seed: int) -> None:
    """No input, hardly any, and a very large one."""
    inputs, weights = draw((1, 40, 2, 16, 16, 1), device)
    inputs["factor"] = torch.full_like(inputs["factor"], factor)
    assert_close(inputs, weights, seed)


def assert_close(inputs: dict[str, Tensor], weights: Tensor, seed: int) -> dict[str, Tensor]:
    """As `assert_right`, for results that may be 0 throughout: off by 3e-5 of the values, or of 1e-7 if they are less.

    A decay to the power of a token is 9e-27 at the lowest that counts, so what passes it vanishes beside the rest.
    """
    found = run("triton", dendritic_scan, inputs, weights)
    exact = run("reference", dendritic_scan, {name: x.double() for name, x in inputs.items()}, weights.double())
    for name, expected in exact.items():
        allowed = 3 * FP32_LIMIT * max(float(expected.norm()), 1e-7)
        off = float((found[name].double() - expected).norm())
        assert off <= allowed, f"{name}: {off:.2e} off, allowed {allowed:.2e}; NEURONSPARK_TEST_SEED={seed}"
    return found


def test_refusals(device: torch.device) -> None:
    inputs, _ = draw((1, 2, 1, 16, 136, 1), device)
    with pytest.raises(ValueError, match="136 states"):
        dendritic_scan_triton(**inputs)
    with pytest.raises(ValueError, match="one type for all"):
        dendritic_scan_triton(**{**inputs, "b": inputs["b"].half()})


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits(dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Twice the same bits, with and without states saved for a backward pass."""
    inputs, weights = draw((1, 70, 3, 16, 16, 1), device, dtype)
    first = run("triton", dendritic_scan, inputs, weights)
    assert_same(first, run("triton", dendritic_scan, inputs, weights), seed)
    assert torch.equal(first["output"], dendritic_scan_triton(**inputs))


# --- on a card -----------------------------------------------------------------------------------------------

CARD_SHAPES = [
    (4, 4096, 80, 64, 64, 1),
    (64, 256, 80, 64, 64, 1),
    (1, 8191, 80, 64, 64, 2),
    (2, 1000, 64, 64, 64, 1),
    (3, 65, 5, 64, 128, 1),
    (2, 777, 6, 96, 48, 3),
    (300, 1, 80, 64, 64, 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CARD_SHAPES)
def test_on_card(shape: tuple[int, int, int, int, int, int], device: torch.device, seed: int) -> None:
    inputs, weights = draw(shape, device, torch.bfloat16)
    if shape[1] == 1:  # the decay's gradient is exactly 0, and float64's only nearly
        inputs = {
            name: tensor.repeat_interleave(2, 1) if tensor.dim() > 1 else tensor for name, tensor in inputs.items()
        }
        weights = weights.repeat_interleave(2, 1)
    assert_right(dendritic_scan, inputs, weights, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("states", [16, 40, 64, 128])
@pytest.mark.parametrize("compartments", [16, 24, 32, 48, 64, 96])
def test_widths_on_card(compartments: int, states: int, device: torch.device, seed: int) -> None:
    """Three chunks, the last one short, so that states count. 24 x 40 was right in the interpreter and wrong here."""
    inputs, weights = draw((1, 131, 6, compartments, states, 2), device, torch.bfloat16)
    assert_right(dendritic_scan, inputs, weights, seed, roundings=3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 1000, 8, 64, 64, 1), (3, 65, 5, 40, 24, 1), (1, 5000, 2, 64, 64, 1)])
def test_fp32_on_card(shape: tuple[int, int, int, int, int, int], device: torch.device, seed: int) -> None:
    assert_right(dendritic_scan, *draw(shape, device), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_slow_decays_on_card(dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """65,536 tokens: e-folds of 256K tokens, a retention of 1 - 1e-9, no decay, and a fast head beside them."""
    inputs, weights = draw((1, 65536, 4, 64, 64, 1), device, dtype)
    inputs["log_decay"] = torch.tensor([-4e-6, -1e-9, 0.0, -0.1], device=device).expand(1, 65536, 4).contiguous()
    inputs["factor"] = inputs["factor"].abs() * 0.01
    assert_right(dendritic_scan, inputs, weights, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 1024, 80, 64, 64, 1), (1, 4097, 80, 64, 64, 1)])
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        (name, choice)
        for module in (dendritic_scan_triton_forward, dendritic_scan_triton_backward)
        for name, choices in module.CANDIDATES.items()
        for choice in range(len(choices))
    ],
)
def test_candidates_on_card(
    name: str, choice: int, shape: tuple[int, int, int, int, int, int], device: torch.device, seed: int
) -> None:
    """What a compiler makes of each candidate is right, so that a faster one may be pinned; and repeats its bits."""
    candidates = {**dendritic_scan_triton_forward.CANDIDATES, **dendritic_scan_triton_backward.CANDIDATES}
    inputs, weights = draw(shape, device, torch.bfloat16)
    launch.use({name: {launch.ANY: dataclasses.asdict(candidates[name][choice])}})
    try:
        found = assert_right(dendritic_scan, inputs, weights, seed)
        for _ in range(3):
            assert_same(found, run("triton", dendritic_scan, inputs, weights), seed)
    finally:
        launch.use({})


@pytest.mark.gpu
def test_accuracy_is_no_worse_than_the_reference_on_card(device: torch.device, seed: int) -> None:
    """The decay's gradient is a sum over flows that do not cancel: better than the reference's in bf16."""
    inputs, weights = draw((2, 2048, 16, 64, 64, 1), device, torch.bfloat16)
    exact = run(
        "reference", dendritic_scan, {name: x.double() for name, x in inputs.items()}, weights.bfloat16().double()
    )
    errors = {
        kernels: relative_error(
            run(kernels, dendritic_scan, inputs, weights)["gradient of log_decay"], exact["gradient of log_decay"]
        )
        for kernels in ("triton", "reference")
    }
    assert errors["triton"] < errors["reference"], f"{errors}; NEURONSPARK_TEST_SEED={seed}"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_captured(tokens: int, device: torch.device, seed: int) -> None:
    assert_capturable(dendritic_scan, *draw((2, tokens, 80, 64, 64, 1), device, torch.bfloat16))
