"""The baselines' Triton kernels against float64: on the card where there is one, else in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from baselines.operators import convolved_silu, rotate, silu_product
from torch import Tensor
from triton_here import DEVICE

from neuronspark.kernels import launch
from neuronspark.kernels.launch import CARDS
from neuronspark.kernels.rotary import rotary_table

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8 + 1e-5}
DTYPES = list(ROUNDING)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few programs, so that each walks over several blocks; what torch.empty gives is NaN."""
    monkeypatch.setenv("NEURONSPARK_KERNELS", "triton")
    table = {name: launches["any"] for name, launches in launch.table().items() if "baseline_conv" in name}
    few = {name: {"any": {**one, "blocks": {**one["blocks"], "PROGRAMS": 4}}} for name, one in table.items()}
    launch.use(few)
    empty_like, empty = torch.empty_like, torch.empty
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    yield
    launch.use({})


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def assert_near_float64(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Output and every gradient, against the reference in float64 on the same numbers, relative to each's largest."""
    shown = function(*inputs)
    weights = draw(*shown.shape, dtype=shown.dtype)

    def results(leaves: list[Tensor]) -> list[Tensor]:
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, weights.to(output.dtype))]

    found = results([x.detach().requires_grad_() for x in inputs])
    expected = results([x.detach().double().requires_grad_() for x in inputs])  # float64 never runs a kernel
    for mine, other in zip(found, expected, strict=True):
        error = (mine.double() - other).abs().max() / other.abs().max().clamp(min=1e-3)
        assert error <= 2 * ROUNDING[mine.dtype]
    again = results([x.detach().requires_grad_() for x in inputs])
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 300), (3, 2049)])
def test_silu_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_near_float64(silu_product, [draw(*shape, dtype=dtype) * 3, draw(shape[0] + 1, shape[1], dtype=dtype)[1:]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 5, 3, 6), (2, 3, 9, 128)])
def test_turn(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table = rotary_table(11, shape[-1], 100.0, DEVICE, torch.float32)
    assert_near_float64(lambda x: rotate(x, table), [draw(*shape, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "taps"), [((1, 1, 1), 4), ((3, 13, 130), 4), ((2, 3, 5), 4), ((1, 9, 4), 2)])
def test_convolution(shape: tuple[int, ...], taps: int, dtype: torch.dtype) -> None:
    x_BLC, weight_Ck = draw(*shape, dtype=dtype), draw(shape[-1], taps, dtype=dtype)
    assert_near_float64(convolved_silu, [x_BLC, weight_Ck, draw(shape[-1])])


def test_inputs_that_lie_otherwise_give_the_same() -> None:
    x_BLhd, table = draw(2, 3, 5, 8).transpose(1, 2), rotary_table(5, 8, 100.0, DEVICE, torch.float32)
    assert torch.equal(rotate(x_BLhd, table), rotate(x_BLhd.contiguous(), table))
    gate, x = draw(6, 10)[:, ::2], draw(6, 5)
    assert torch.equal(silu_product(gate, x), silu_product(gate.contiguous(), x))
    wide = draw(2, 7, 12)[..., :6]
    assert torch.equal(
        convolved_silu(wide, draw(6, 4), draw(6)), convolved_silu(wide.contiguous(), draw(6, 4), draw(6))
    )


COMPILE = """
import json, sys
from baselines.operators_triton import compile_cases
from neuronspark.kernels.launch import compile_case
for card in sys.argv[1:]:
    for case in compile_cases():
        print(json.dumps({"case": case.name, "card": card, **vars(compile_case(case, card))}))
"""


@pytest.mark.slow  # the baselines' kernels change seldom
def test_every_kernel_compiles_for_every_card_and_does_not_spill(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, *CARDS]
    child = subprocess.run(command, env=environment | path, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    found = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(found) == 5 * len(CARDS)
    assert not [case for case in found if case["spilled_bytes"]]
