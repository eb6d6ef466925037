"""The dendritic readings against their closed forms, on hand-made decays and on hand-made models."""

from __future__ import annotations

import math

import pytest
import torch
from probe_models import EOS, build, rows_of
from torch import Tensor

from neuronspark import NeuronSpark
from neuronspark.probe_dendritic import decay_readings
from neuronspark.probe_rows import PartReadings, ProbedRows


def decays(log_decay_BLH: Tensor, tokens: Tensor | None = None, train_length: int = 10_000) -> PartReadings:
    tokens = torch.full(log_decay_BLH.shape[:2], 9) if tokens is None else tokens
    return decay_readings(log_decay_BLH, ProbedRows.of(tokens, EOS, train_length))


def test_closed_forms_against_plain_sums() -> None:
    """Uneven rows, blocks and segments; every formula written out a second time."""
    generator = torch.Generator().manual_seed(1)
    dt = torch.rand(3, 777, 5, generator=generator, dtype=torch.float64)
    a = -torch.tensor([1e-6, 1e-4, 0.01, 0.1, 3.0], dtype=torch.float64)
    tokens = rows_of(3, 777, seed=2)
    found = decays(dt * a, tokens, train_length=100)
    rest = dt[:, 1:].sum(1)
    assert torch.allclose(found["dendritic/retention"], (a * rest).exp())
    assert torch.allclose(found["dendritic/tau"], 776 / (-a * rest))
    assert torch.allclose(found["dendritic/retention32k"], (a * dt[:, 1:].mean(1) * 32768).exp())
    for k in range(8):
        assert torch.allclose(found[f"dendritic/retention_seg{k}"], (a * dt[:, 1 : 100 * (k + 1)].sum(1)).exp())
    assert torch.equal(found["dendritic/retention_seg7"], found["dendritic/retention"])
    assert "dendritic/retention_seg8" not in found
    for row in range(3):
        starts = [t for t in range(776) if tokens[row, t] == EOS]
        kept = torch.stack([(a * (dt[row, t] + dt[row, t + 1])).exp() for t in starts]).mean(0)
        assert torch.allclose(found["dendritic/boundary_retention"][row], kept)
        there = sorted({t for start in starts for t in (start, start + 1)})
        elsewhere = [t for t in range(777) if t not in there]
        ratio = dt[row, there].mean(0) / dt[row, elsewhere].mean(0)
        assert torch.allclose(found["dendritic/boundary_step_ratio"][row], ratio)


def test_the_first_token_s_own_decay_is_no_part_of_it() -> None:
    log_decay = torch.tensor([[-50.0, -0.5, -0.25]])[..., None]
    found = decays(log_decay, train_length=1)
    assert found["dendritic/retention"].item() == math.exp(-0.75)
    assert found["dendritic/tau"].item() == 2 / 0.75
    assert found["dendritic/retention_seg0"].item() == 1.0
    assert found["dendritic/retention_seg1"].item() == math.exp(-0.5)


def test_slow_leaks_stay_apart_and_flushes_do_not_hide_them() -> None:
    """fp32 log decays of heads that keep 1 - 1e-9 a token and of e-fold lengths of 256K, over 32K tokens."""
    log_decay = torch.tensor([-1e-9, -1 / 262_144, -1.0, -1e4]).expand(1, 32_768, 4).contiguous()
    found = decays(log_decay)
    tau = found["dendritic/tau"][0]
    assert torch.allclose(tau, torch.tensor([1e9, 262_144.0, 1.0, 1e-4], dtype=torch.float64), rtol=1e-6)
    retention = found["dendritic/retention"][0]
    assert 1 - retention[0].item() == pytest.approx(32_767e-9, rel=1e-3)
    assert retention[1].item() == pytest.approx(math.exp(-32_767 / 262_144), rel=1e-9)
    assert retention[2:].tolist() == [0.0, 0.0]
    assert decays(torch.zeros(1, 8, 1))["dendritic/tau"].item() == math.inf


def test_rows_without_a_boundary_have_no_reading_there() -> None:
    tokens = torch.tensor([[9, 8, 7, EOS], [9, EOS, 8, 7]])
    found = decays(torch.full((2, 4, 3), -0.5, dtype=torch.float64), tokens)
    assert found["dendritic/boundary_retention"][0].isnan().all()
    assert found["dendritic/boundary_step_ratio"][0].isnan().all()
    assert torch.allclose(found["dendritic/boundary_retention"][1], torch.tensor(math.exp(-1.0)).double())
    assert torch.allclose(found["dendritic/boundary_step_ratio"][1], torch.ones(3, dtype=torch.float64))


def hand_made(slow_A: float, slow_dt: float, dt_raw_at_eos: float) -> NeuronSpark:
    """One dendritic layer whose every head has A and dt as given, and dt_raw at an EOS and at no other token.

    Embeddings are one-hot in two directions, so the normalised input is sqrt(d) in direction 0 at an EOS; they are
    long, so that the norm's eps is nothing.
    """
    model = build(layers="D")
    width = model.config.width
    with torch.no_grad():
        model.embedding.zero_()
        model.embedding[:, 1] = 1e3
        model.embedding[EOS] = 1e3 * torch.eye(width, dtype=torch.float64)[0]
        layer = model.layer00
        layer.norm.fill_(1)
        layer.w_dt.zero_()
        layer.w_dt[:, 0] = dt_raw_at_eos / math.sqrt(width)
        layer.a_log.fill_(math.log(-slow_A))
        layer.dt_bias.fill_(math.log(math.expm1(slow_dt)))
    return model


def test_a_hand_made_model_that_leaks_evenly() -> None:
    """A = -0.7, dt = 0.01 everywhere: e-fold 1 / 0.007 tokens."""
    model = hand_made(-0.7, 0.01, 0.0)
    part = model.probe(rows_of(2, 201), EOS, 50)["layer00"]
    expected = {
        "retention": math.exp(-0.007 * 199),
        "tau": 1 / 0.007,
        "retention32k": math.exp(-0.007 * 32768),
        "retention_seg0": math.exp(-0.007 * 49),
        "retention_seg3": math.exp(-0.007 * 199),
        "boundary_retention": math.exp(-0.014),
        "boundary_step_ratio": 1.0,
    }
    for name, value in expected.items():
        found = part[f"dendritic/{name}"]
        assert torch.allclose(found, torch.full_like(found, value), rtol=1e-6), name


def test_a_hand_made_model_that_flushes_at_boundaries() -> None:
    """The design's slow head: A = -1, dt = 1/tau, and dt_raw = ln(tau) + 3.5 at an EOS leaves 0.03."""
    tau = 40_000.0
    model = hand_made(-1.0, 1 / tau, math.log(tau) + 3.5)
    tokens = torch.full((1, 41), 9)
    tokens[0, [10, 25, 39]] = EOS  # the last one ends the inputs: no boundary
    readings = model.probe(tokens, EOS, 40)
    assert readings["rows"]["dendritic/boundaries"].item() == 2
    part = readings["layer00"]
    raw = math.log(math.expm1(1 / tau)) + math.log(tau) + 3.5
    flush, usual = math.log1p(math.exp(raw)), 1 / tau
    kept = math.exp(-(flush + usual))
    assert kept == pytest.approx(0.03, abs=0.003)
    assert torch.allclose(part["dendritic/boundary_retention"], torch.tensor(kept).double(), rtol=1e-5)
    ratio = ((2 * flush + 2 * usual) / 4) / ((flush + 35 * usual) / 36)
    assert torch.allclose(part["dendritic/boundary_step_ratio"], torch.tensor(ratio).double(), rtol=1e-5)
    assert torch.allclose(part["dendritic/retention"], torch.tensor(math.exp(-3 * flush)).double(), rtol=1e-2)
