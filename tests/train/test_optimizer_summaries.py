"""The optimizer's summaries against fp64 formulas, and the update that AdamW then really makes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, random_rows

from nstrain.settings.run import LengthSettings
from nstrain.train import optimizer_summaries as module
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.norms import NODE

SETTINGS = optimizer_settings(eps=1e-6)


def trained(updates: int, vocab_size: int = 64) -> EagerEngine:
    engine = EagerEngine(TinyModel(seed=2, vocab_size=vocab_size), SETTINGS)
    engine.set_length(LengthSettings(micro_rows=4))
    for seed in range(updates):
        train_update(engine, random_rows(4, seed=seed), 4, 1e-2, 0.1)
    return engine


def formula(engine: EagerEngine, names: list[str], rate: float) -> dict[str, float]:
    """The summary of some parameters, from exports by name."""
    t = engine.counts.step
    w, m, v = (
        np.concatenate([engine.flat.export(kind)[n].astype(np.float64).ravel() for n in names])  # type: ignore[arg-type]
        for kind in ("weights", "exp_avg", "exp_avg_sq")
    )
    v_hat = v / (1 - SETTINGS.beta2**t)
    step = rate * m / (1 - SETTINGS.beta1**t) / (np.sqrt(v_hat) + SETTINGS.eps)
    return {
        "param_norm": float(np.linalg.norm(w)),
        "m_norm": float(np.linalg.norm(m)),
        "grad_rms": math.sqrt(v_hat.mean()),
        "update_norm": float(np.linalg.norm(step)),
        "update_ratio": float(np.linalg.norm(step) / np.linalg.norm(w)),
    }


def test_summaries_equal_their_formulas_by_group_and_part() -> None:
    engine = trained(5)
    found = engine.optimizer_summaries(3e-3)
    for by_name, owners in ((found.groups, engine.model.groups()), (found.parts, engine.model.parts())):
        assert list(by_name.keys()) == [name for name in by_name if name in owners]
        assert by_name.keys() == owners.keys()
        for name, summary in by_name.items():
            assert dataclasses.asdict(summary) == pytest.approx(formula(engine, owners[name], 3e-3), rel=1e-12), name


def test_update_norm_is_the_step_that_a_repeated_gradient_then_makes() -> None:
    """With beta1 = beta2 = 0 the moments are the last gradient's: AdamW repeats the step it was asked about."""
    engine = EagerEngine(TinyModel(seed=2), optimizer_settings(beta1=0.0, beta2=0.0, clip_norm=1e9))
    engine.set_length(LengthSettings(micro_rows=4))
    train_update(engine, random_rows(4), 4, 0.0, 0.0)  # at rate 0: the gradient stays the same
    expected = engine.optimizer_summaries(1e-3).groups
    before = {group.name: group.master.clone() for group in engine.flat.groups}
    train_update(engine, random_rows(4), 4, 1e-3, 0.0)
    for group in engine.flat.groups:
        moved = (group.master - before[group.name]).double().norm().item()
        assert moved == pytest.approx(expected[group.name].update_norm, rel=1e-4)


def test_before_the_first_update_only_weights_have_a_size() -> None:
    engine = trained(0)
    summary = engine.optimizer_summaries(1e-3).groups["matrix"]
    assert summary.param_norm == pytest.approx(engine.flat.groups[0].master.norm().item())
    assert (summary.m_norm, summary.grad_rms, summary.update_norm, summary.update_ratio) == (0.0, 0.0, 0.0, 0.0)


def test_weights_that_are_all_zero_have_no_ratio() -> None:
    engine = trained(1)
    engine.model.norm.data.zero_()
    found = engine.optimizer_summaries(1e-3).parts["norm"]
    assert (found.param_norm, found.update_ratio) == (0.0, 0.0)
    assert found.update_norm > 0


def test_sums_depend_neither_on_threads_nor_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained(1, vocab_size=6000)
    seen = set()
    for threads, chunk in ((1, 64), (2, 64), (3, 7), (1, 1000)):
        torch.set_num_threads(threads)
        monkeypatch.setattr(module, "CHUNK", chunk * NODE)
        seen.add(repr(engine.optimizer_summaries(1e-3)))
    torch.set_num_threads(1)
    assert len(seen) == 1
