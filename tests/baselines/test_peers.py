"""The peer outside of the trainer: it computes what the baseline computes, and is timed over whole updates."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from contract_models import BASELINES, rows_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import peers


def test_the_plain_llama_is_the_baseline() -> None:
    baseline, rows = BASELINES["llama"].build(), rows_of(2, 50)
    plain = peers.PlainLlama(baseline.config, 50)
    ours, theirs = list(baseline.parameters()), list(plain.parameters())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        other.data.copy_(mine)
    h_BLw = plain(rows[:, :-1])
    losses_T = torch.nn.functional.cross_entropy(
        (h_BLw @ plain.embedding.t()).flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
    )
    torch.testing.assert_close(losses_T.view(2, 50), baseline.token_losses(rows), rtol=1e-4, atol=1e-5)


def test_a_peer_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--preset", "llama-tiny", "--seq-len", "32", "--rows", "1", "--accum", "2"]
    peers.main([*size, "--updates", "2", "--device", "cpu", "--no-compile", "--json"])
    reading = json.loads(capsys.readouterr().out)
    assert reading["parameters"] == peers.load_preset("llama-tiny").parameter_count()
    assert reading["tokens_per_s"] == pytest.approx(64 / reading["update_s"])
    assert reading["six_n_tflop_s"] == pytest.approx(6 * reading["parameters"] * 64 / reading["update_s"] / 1e12)
    assert reading["losses"][0] == pytest.approx(math.log(8192), abs=0.3)


def test_other_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--preset", "mamba2-tiny"])
    assert "the peers are Llamas" in capsys.readouterr().err
