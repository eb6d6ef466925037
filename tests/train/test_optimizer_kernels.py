"""The optimizer's Triton kernels: on the card where there is one, else in Triton's interpreter.

AdamW and the moving average against the formulas in fp64 over updates with skips, a skip that leaves every byte, the
compute copy, the norms of every group and part, and the optimizer's summaries.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, same_bits
from triton_here import DEVICE

from nstrain.train import adamw as adamw_module
from nstrain.train import norms as norms_module
from nstrain.train import optimizer_summaries as summaries_module
from nstrain.train.adamw import adamw_update, advance_step, clip_by_norm
from nstrain.train.flat import TENSOR_KINDS, FlatParameters, TensorKind
from nstrain.train.model import DECAYED_GROUPS, parameter_places
from nstrain.train.norms import gradient_norms
from nstrain.train.optimizer_summaries import optimizer_summaries

DECAY = 0.1
ALL_KINDS: tuple[TensorKind, ...] = (*TENSOR_KINDS, "ema")
SETTINGS = optimizer_settings(clip_norm=5.0, eps=1e-6)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (adamw_module, norms_module, summaries_module):
        monkeypatch.setattr(module, "by_kernels", lambda device: True)


def flat_of(dtype: torch.dtype = torch.float32) -> FlatParameters:
    return FlatParameters(parameter_places(TinyModel(seed=5, dtype=dtype).to(DEVICE)), with_ema=True)


def draw(flat: FlatParameters, update: int) -> None:
    """Gradients whose norm is sometimes above the clipping norm and sometimes below; the gaps stay zero."""
    random = torch.Generator().manual_seed(update)
    for group in flat.groups:
        for cut in group.slices:
            view = cut.of(group.main_grad)
            view.copy_(torch.randn(view.shape, generator=random) * 10.0 ** (-3.0 + 2.0 * math.sin(update / 3.0)))


def apply(flat: FlatParameters, step: torch.Tensor, rate: float, move: float = 0.0) -> tuple[float, bool]:
    norms = gradient_norms(flat)
    clip = clip_by_norm(norms.total, SETTINGS.clip_norm)
    advance_step(step, clip)
    rate_, move_ = (torch.tensor(value, device=DEVICE) for value in (rate, move))
    decay = torch.tensor(DECAY, dtype=torch.float64, device=DEVICE)
    for group in flat.groups:
        adamw_update(group, SETTINGS, clip, step, rate_, decay if group.name in DECAYED_GROUPS else None, move_)
    return norms.total.item(), bool(clip.skip)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_updates_with_skips_equal_the_formula_in_fp64(dtype: torch.dtype) -> None:
    flat, step, applied, clipped = flat_of(dtype), torch.tensor(0.0, device=DEVICE), 0, 0
    state = {g.name: [g.buffer(kind).double() for kind in ALL_KINDS] for g in flat.groups}
    for update in range(1, 9):
        draw(flat, update)
        if update in (1, 2, 7):
            flat.groups[1].main_grad[3] = math.nan
        gradients = {g.name: g.main_grad.double() for g in flat.groups}
        move = {3: 0.0, 4: 1.0}.get(update, 0.3)
        norm, skipped = apply(flat, step, 0.01, move)
        assert skipped == (update in (1, 2, 7))
        assert all((g.main_grad == 0).all() for g in flat.groups)
        if skipped:
            continue
        applied += 1
        clipped += norm > SETTINGS.clip_norm
        for name, (w, m, v, e) in state.items():
            g = gradients[name] / max(1.0, norm / SETTINGS.clip_norm)
            w *= 1 - 0.01 * (DECAY if name in DECAYED_GROUPS else 0.0)
            m += (1 - SETTINGS.beta1) * (g - m)
            v += (1 - SETTINGS.beta2) * (g * g - v)
            m_hat, v_hat = m / (1 - SETTINGS.beta1**applied), v / (1 - SETTINGS.beta2**applied)
            w -= 0.01 * m_hat / (v_hat.sqrt() + SETTINGS.eps)
            e += move * (w - e)
        if update in (3, 4):
            for group in flat.groups:
                expected = group.master if update == 4 else torch.zeros_like(group.master)
                assert same_bits(group.buffer("ema"), expected), "0 leaves it alone, 1 is a copy"
    assert step.item() == applied == 5
    assert 0 < clipped < applied
    for group in flat.groups:
        for kind, expected in zip(ALL_KINDS, state[group.name], strict=True):
            found = group.buffer(kind).double()
            error = float((found - expected).norm() / expected.norm())
            assert error < 2e-6, (group.name, kind, error)
        assert torch.equal(group.compute, group.master.to(group.compute.dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skip_leaves_every_byte(bad: float) -> None:
    flat, step = flat_of(torch.bfloat16), torch.tensor(0.0, device=DEVICE)
    draw(flat, 1)
    apply(flat, step, 0.01, 1.0)
    before = {(g.name, k): g.buffer(k).clone() for g in flat.groups for k in ALL_KINDS}
    copies = {g.name: g.compute.clone() for g in flat.groups}
    draw(flat, 2)
    flat.groups[-1].main_grad[:2] = bad
    assert apply(flat, step, 0.5, 0.5)[1]
    assert step.item() == 1
    for g in flat.groups:
        assert torch.equal(g.compute.view(torch.int16), copies[g.name].view(torch.int16))
        assert same_bits(g.main_grad, torch.zeros_like(g.main_grad))
        for kind in ALL_KINDS:
            assert same_bits(g.buffer(kind), before[g.name, kind]), (g.name, kind)


def test_norms_of_groups_and_parts_and_a_nan_that_stays_in_its_own() -> None:
    model = TinyModel(seed=5).to(DEVICE)
    flat = FlatParameters(parameter_places(model))
    draw(flat, 4)
    squares = {name: float((p.main_grad.double() ** 2).sum()) for name, p in model.named_parameters()}
    norms = gradient_norms(flat)
    assert norms.total.item() == pytest.approx(math.sqrt(math.fsum(squares.values())), rel=1e-13)
    for found, owners in ((norms.groups, model.groups()), (norms.parts, model.parts())):
        assert found.keys() == owners.keys()
        for name, names in owners.items():
            assert found[name].item() == pytest.approx(math.sqrt(math.fsum(squares[n] for n in names)), rel=1e-13)
    model.get_parameter("w1").main_grad.view(-1)[-1] = math.nan
    norms = gradient_norms(flat)
    bad = {name for found in (norms.groups, norms.parts) for name, value in found.items() if value.isnan()}
    assert bad == {"matrix", "layer01"}
    assert norms.total.isnan()


@pytest.mark.slow  # the graphs' tests on a card compare bits too
def test_the_same_input_gives_the_same_bits() -> None:
    results = []
    for _ in range(2):
        flat, step = flat_of(), torch.tensor(0.0, device=DEVICE)
        for update in range(1, 4):
            draw(flat, update)
            results.append(apply(flat, step, 0.01, 0.3)[0])
        results += [g.buffer(kind).cpu().numpy().tobytes() for g in flat.groups for kind in ALL_KINDS]
        results.append(repr(optimizer_summaries(flat, SETTINGS, 3, 0.01)).encode())
    assert results[: len(results) // 2] == results[len(results) // 2 :]


@pytest.mark.parametrize("updates", [0, 4])
def test_summaries_equal_those_without_kernels(updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flat, step = flat_of(torch.bfloat16), torch.tensor(0.0, device=DEVICE)
    for update in range(1, updates + 1):
        draw(flat, update)
        apply(flat, step, 0.01)
    found = optimizer_summaries(flat, SETTINGS, updates, 3e-3)
    on_host = FlatParameters(parameter_places(TinyModel(seed=6)))
    for kind in TENSOR_KINDS:
        on_host.load(kind, flat.export(kind), "here")
    monkeypatch.setattr(summaries_module, "by_kernels", lambda device: False)
    expected = optimizer_summaries(on_host, SETTINGS, updates, 3e-3)
    for ours, theirs in ((found.groups, expected.groups), (found.parts, expected.parts)):
        assert ours.keys() == theirs.keys()
        for name, summary in ours.items():
            assert dataclasses.asdict(summary) == pytest.approx(dataclasses.asdict(theirs[name]), rel=1e-6), name


def test_every_kernel_compiles_for_every_card_and_does_not_spill(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_optimizer_kernels.py"))],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    found = [json.loads(line) for line in child.stdout.splitlines()]
    assert {line["card"] for line in found} == {"sm_90", "sm_100", "sm_103"}
    assert not [line for line in found if line["spilled"]]
