"""AdamW: equal to torch's over 1000 updates with skips, stable bit for bit, and a skip that touches no byte."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, same_bits

from nstrain.settings.run import OptimizerSettings
from nstrain.train.adamw import adamw_update, advance_step, clip_by_norm
from nstrain.train.flat import FlatParameters
from nstrain.train.model import DECAYED_GROUPS, parameter_places
from nstrain.train.norms import gradient_norms

DECAY = 0.1


def rate_of(update: int) -> float:
    """A warm-up, a plateau and a decay to 0."""
    return 3e-3 * min(1.0, update / 50, max(0.0, (990 - update) / 390))


def draw_gradients(parameters: dict[str, torch.Tensor], update: int) -> None:
    """Gradients of wandering size: some updates are clipped, some are not."""
    random = torch.Generator().manual_seed(update)
    size = 10.0 ** (-3.0 + 2.0 * math.sin(update / 17.0))
    for name in sorted(parameters):
        parameters[name].copy_(torch.randn(parameters[name].shape, generator=random) * size)


def is_skipped(update: int) -> bool:
    return update in (1, 2) or update % 97 == 0


class FlatRun:
    """Our optimizer on the tiny model, driven with given gradients."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self.model = TinyModel(seed=5)
        self.flat = FlatParameters(parameter_places(self.model), with_ema=True)
        self.settings = settings
        self.step = torch.tensor(0.0)
        self.grads = {name: p.main_grad for name, p in self.model.named_parameters()}

    def apply(self, rate: float, move: float = 0.0) -> float:
        norms = gradient_norms(self.flat)
        clip = clip_by_norm(norms.total, self.settings.clip_norm)
        advance_step(self.step, clip)
        for group in self.flat.groups:
            decay = torch.tensor(DECAY, dtype=torch.float64) if group.name in DECAYED_GROUPS else None
            adamw_update(group, self.settings, clip, self.step, torch.tensor(rate), decay, torch.tensor(move))
        return norms.total.item()


def run_flat(updates: int) -> FlatRun:
    run = FlatRun(optimizer_settings(clip_norm=0.2))
    for update in range(1, updates + 1):
        draw_gradients(run.grads, update)
        if is_skipped(update):
            run.grads["w1"].view(-1)[3] = math.nan
        run.apply(rate_of(update), 0.1)
    return run


def test_equals_torch_over_1000_updates_with_skips() -> None:
    reference = TinyModel(seed=5)
    decays = {
        name: name in {n for g in DECAYED_GROUPS for n in reference.groups()[g]}
        for name, _ in reference.named_parameters()
    }
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in reference.named_parameters() if decays[n] == kind], "weight_decay": DECAY * kind}
            for kind in (True, False)
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )
    run = FlatRun(optimizer_settings(clip_norm=0.2))
    averages: dict[str, torch.Tensor] = {}
    clipped = skipped = 0
    for update in range(1, 1001):
        rate = rate_of(update)
        draw_gradients(run.grads, update)
        for name, p in reference.named_parameters():
            p.grad = run.grads[name].clone()
        if is_skipped(update):
            run.grads["w1"].view(-1)[3] = math.nan
            skipped += 1
        else:
            for group in optimizer.param_groups:
                group["lr"] = rate
            clipped += bool(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.2) > 0.2)
            optimizer.step()
        move = 0.0 if update < 100 else 1.0 if update == 100 else 0.004
        run.apply(rate, move)
        if move and not is_skipped(update):
            for name, p in reference.named_parameters():
                average, weights = averages.get(name, torch.zeros(())), p.detach().double()
                averages[name] = average + move * (weights - average)
    assert skipped == 12
    assert 100 < clipped < 900
    assert run.step.item() == 1000 - skipped
    for (name, p), (_, q) in zip(run.model.named_parameters(), reference.named_parameters(), strict=True):
        # Weights move by about 1; each of 1000 updates rounds them at 2^-24 of their size, and torch's own clipping
        # divides by norm + 1e-6.
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert (p - TinyModel(seed=5).get_parameter(name)).abs().max() > 0.05
    for group in run.flat.groups:
        for cut in group.slices:
            found = cut.of(group.buffer("ema")).double()
            torch.testing.assert_close(
                found, averages[cut.name], rtol=0, atol=2e-6, msg=lambda m, n=cut.name: f"{n}: {m}"
            )
            assert (found - run.model.get_parameter(cut.name)).abs().max() > 1e-4


def test_one_update_equals_the_formula_in_fp64() -> None:
    run = FlatRun(optimizer_settings(clip_norm=0.5, beta1=0.8, beta2=0.9, eps=1e-3))
    weights = {n: p.detach().double() for n, p in run.model.named_parameters()}
    draw_gradients(run.grads, 12)
    grads = {n: g.double() for n, g in run.grads.items()}
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
    assert norm > 0.5
    run.apply(0.01)
    for name, p in run.model.named_parameters():
        g = grads[name] * (0.5 / norm)
        decay = DECAY if name[0] in "wme" else 0.0
        expected = weights[name] * (1 - 0.01 * decay) - 0.01 * g / (g.abs() + 1e-3)
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=1e-7)


def test_two_runs_are_equal_bit_for_bit() -> None:
    a, b = run_flat(200), run_flat(200)
    for x, y in zip(a.flat.groups, b.flat.groups, strict=True):
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            assert same_bits(x.buffer(kind), y.buffer(kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38])
@pytest.mark.parametrize("group", ["matrix", "embedding", "memory", "neuron", "norm"])
def test_a_skip_leaves_every_byte(bad: float, group: str) -> None:
    run = run_flat(5)
    before = {
        (g.name, kind): g.buffer(kind).clone()  # type: ignore[arg-type]
        for g in run.flat.groups
        for kind in ("weights", "exp_avg", "exp_avg_sq", "ema")
    }
    step = run.step.item()
    draw_gradients(run.grads, 6)
    run.grads[run.model.groups()[group][0]].view(-1)[:2] = bad
    run.apply(0.5, 0.5)
    assert run.step.item() == step
    for g in run.flat.groups:
        for kind in ("weights", "exp_avg", "exp_avg_sq", "ema"):
            assert same_bits(g.buffer(kind), before[g.name, kind]), (g.name, kind)  # type: ignore[arg-type]


def test_a_gradient_of_exactly_the_clipping_norm_is_not_scaled() -> None:
    clip = clip_by_norm(torch.tensor(2.0, dtype=torch.float64), 2.0)
    assert (clip.divisor.item(), clip.skip.item()) == (1.0, 0.0)
    clip = clip_by_norm(torch.tensor(4.0, dtype=torch.float64), 2.0)
    assert (clip.divisor.item(), clip.skip.item()) == (2.0, 0.0)


def test_a_zero_gradient_only_decays() -> None:
    run = FlatRun(optimizer_settings(clip_norm=1.0))
    before = run.model.w0.detach().clone(), run.model.norm.detach().clone()
    run.apply(0.5)
    torch.testing.assert_close(run.model.w0.detach(), before[0] * (1 - 0.5 * DECAY), rtol=1e-6, atol=0)
    assert same_bits(run.model.norm.detach(), before[1])
