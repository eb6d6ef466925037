"""Runs one after the other on a card, in one process: captured graphs, memory given back, the same numbers again."""

from __future__ import annotations

import pytest

from benchmarks.study import training
from benchmarks.study.arms import ARMS
from benchmarks.study.data import StudyData
from benchmarks.study.training import Job

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "arm", ["default", "no-spikes", "everywhere", "no-arbitration", "llama-conv", "mamba-attention"]
)
def test_runs_follow_each_other(arm: str, data: StudyData) -> None:
    job = Job(arm, "toy", 1e-2, 0, "toy")
    for letter in sorted(set(ARMS[arm].configure(training.SIZES["toy"]).layers)):
        training.warm_up(job, letter, data, "cuda")
    first, second = (training.run(job, data, "cuda") for _ in range(2))
    assert first[1]
    assert second[1]
    timed = {"seconds", "tokens_per_s"}
    assert {n: v for n, v in first[0].items() if n not in timed} == {
        n: v for n, v in second[0].items() if n not in timed
    }
