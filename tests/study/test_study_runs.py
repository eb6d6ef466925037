"""The table, the plan, and the command that fills the one from the other."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.study import plan, probes
from benchmarks.study.arms import ARMS, BASELINES, MECHANISMS, SHAPES, TOGETHER
from benchmarks.study.run import Session, study
from benchmarks.study.table import Table, best, job_of, plain
from benchmarks.study.training import RECIPES, Job
from nstrain.base.errors import Refusal

JOB = Job("default", "50M", 3e-3)


def filled(table: Table, job: Job, val: float | None) -> None:
    table.append(job, {"val": val, "seconds": 1.0})


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "results.jsonl", "data", "abc")


# --- the table -----------------------------------------------------------------------------------------------------


def test_rows_come_back_by_job_data_and_commit(tmp_path: Path) -> None:
    path = tmp_path / "t" / "results.jsonl"
    filled(Table(path, "data", "abc"), JOB, 2.5)
    again = Table(path, "data", "abc")
    row = again.find(JOB)
    assert row is not None
    assert (row["val"], row["commit"], job_of(row)) == (2.5, "abc", JOB)
    assert again.find(dataclasses.replace(JOB, seed=1)) is None
    assert Table(path, "data", "def").find(JOB) is None
    assert Table(path, "data", "def", any_commit=True).find(JOB) is not None
    assert Table(path, "other", "abc", any_commit=True).find(JOB) is None


def test_a_row_that_was_cut_off_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = Table(path, "data", "abc")
    filled(first, JOB, 2.5)
    whole = path.read_bytes()
    other = dataclasses.replace(JOB, seed=1)
    filled(first, other, 2.6)
    path.write_bytes(path.read_bytes()[:-10])
    again = Table(path, "data", "abc")
    assert len(again.rows) == 1
    filled(again, other, 2.7)
    assert path.read_bytes().startswith(whole)
    assert [json.loads(line)["val"] for line in path.read_text().splitlines()] == [2.5, 2.7]


def test_a_strange_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"arm": "default"}\n')
    with pytest.raises(Refusal, match="line 1"):
        Table(path, "data", "abc")


def test_numbers_as_json_has_them() -> None:
    assert plain({"a": [1.23456789, float("nan"), (float("inf"),)], "b": 3, "c": "x"}) == {
        "a": [1.23457, None, [None]],
        "b": 3,
        "c": "x",
    }


def test_the_best_rate_is_that_of_the_least_mean(table: Table) -> None:
    assert best([]) == []
    for rate, losses in {1e-3: (2.5, 2.7), 2e-3: (None, 2.0), 3e-3: (2.4, 2.6), 4e-3: (2.9,)}.items():
        for seed, val in enumerate(losses):
            filled(table, dataclasses.replace(JOB, seed=seed, rate=rate), val)
    filled(table, dataclasses.replace(JOB, seed=1, rate=3e-3), 2.65)  # the newest of a seed counts
    found = best(table.rows)
    assert [(row["rate"], row["seed"], row["val"]) for row in found] == [(3e-3, 0, 2.4), (3e-3, 1, 2.65)]
    assert best(table.of(rate=2e-3)) == []


# --- the plan ------------------------------------------------------------------------------------------------------


def run_all(table: Table, parts: list[str], loss: dict[tuple[str, float], float]) -> list[Job]:
    """Do what is wanted, one job after the other; losses by arm and rate, 3 elsewhere."""
    done: list[Job] = []
    while missing := [job for job in plan.wanted(parts, table) if table.find(job) is None]:
        filled(table, missing[0], loss.get((missing[0].arm, missing[0].rate), 3.0))
        done.append(missing[0])
    return done


def test_part_1_searches_each_rate_and_then_asks_for_seeds(table: Table) -> None:
    losses = {
        ("default", 3e-3): 2.0,
        ("llama", 1.5e-3): 2.4,
        ("llama", 6e-4): 2.3,
        ("llama-conv", 3e-3): 2.3,
        ("llama-conv", 6e-3): 2.2,
    }
    done = run_all(table, ["1"], losses)
    assert done[:4] == [Job(arm.name, "50M", 3e-3) for arm in (ARMS["default"], *BASELINES)]
    assert {job.rate for job in done if job.arm == "default" and job.seed == 0} == {1.5e-3, 3e-3, 6e-3}
    assert {job.rate for job in done if job.arm == "llama" and job.seed == 0} == {6e-4, 1.5e-3, 3e-3}
    assert {job.rate for job in done if job.arm == "llama-conv" and job.seed == 0} == {1.5e-3, 3e-3, 6e-3, 1.2e-2}
    assert [job for job in done if job.arm == "llama" and job.seed] == [Job("llama", "50M", 6e-4, 1)]
    assert [job for job in done if job.arm == "llama-conv" and job.seed] == [Job("llama-conv", "50M", 6e-3, 1)]
    assert [job.seed for job in done if job.arm == "default" and job.seed] == [1, 2]
    assert len(done) == len(set(done))


def test_mechanisms_and_shapes_are_at_the_defaults_best_rate(table: Table) -> None:
    done = run_all(
        table,
        ["1", "2", "3"],
        {("default", 1.5e-3): 2.0, ("no-spikes", 3e-3): 1.9, ("ffn-2", 1.5e-3): 1.7, ("match-64", 1.5e-3): 1.8},
    )
    for arm in (*MECHANISMS[1:], *SHAPES):
        assert [job.rate for job in done if job.arm == arm.name and job.seed == 0] == [1.5e-3]
    assert {job.rate for job in done if job.arm == "no-spikes"} == {1.5e-3, 3e-3, 6e-3}
    again = [job for job in done if job.seed and job.arm not in ("default", *(arm.name for arm in BASELINES))]
    of_shapes = [job for job in again if job.arm not in ("no-spikes", "everywhere")]
    assert [job for job in again if job not in of_shapes] == [
        Job(name, "50M", rate, seed) for seed in (1, 2) for name, rate in (("no-spikes", 3e-3), ("everywhere", 1.5e-3))
    ]
    repeated = ["ffn-2", "match-64", *(arm.name for arm in SHAPES if arm.name not in ("ffn-2", "match-64"))][:4]
    together = [Job(arm.name, "50M", 1.5e-3, seed) for seed in (0, 1, 2) for arm in TOGETHER]
    assert of_shapes == [Job(name, "50M", 1.5e-3, seed) for seed in (1, 2) for name in repeated] + together[2:]
    assert done[-len(together) :] == together


def test_the_final_pair_is_the_default_and_the_best_baseline(table: Table) -> None:
    run_all(table, ["1"], {("mamba-attention", 3e-3): 2.0})
    jobs = plan.final_pair(table)
    assert [(job.arm, job.seed) for job in jobs] == [
        ("default", 0), ("mamba-attention", 0), ("default", 1), ("mamba-attention", 1)
    ]  # fmt: skip
    assert {job.rate for job in jobs if job.arm == "mamba-attention"} == {2e-3}
    assert RECIPES[jobs[0].recipe].long_rows


# --- the command ---------------------------------------------------------------------------------------------------


def session(table: Table, data: Path, jobs: list[Job], budget_s: float = 60.0) -> Session:
    return Session(table, data, lambda _: jobs, ["cpu", "cpu"], time.monotonic() + budget_s)


@pytest.mark.slow  # a study, run by hand
def test_runs_fill_the_table_and_are_not_run_again(
    tmp_path: Path, data_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    jobs = [
        Job("default", "toy", 1e-2, 0, "toy"),
        Job("no such arm", "toy", 1e-2, 0, "toy"),
        Job("llama", "toy", 1e-2, 0, "toy"),
    ]
    study(session(Table(path, "data", "abc"), data_directory, jobs))
    said = capsys.readouterr().out
    assert "KeyError" in said
    assert "0 runs are still missing, 1 failed" in said
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(row["arm"] for row in rows) == ["default", "llama"]
    wanted = {"parameters", "tokens", "val", "val_by_source", "val_by_position", "val_by_document_position", "curve"}
    wanted |= {"tasks", "long_rows", "gradient", "tokens_per_s", "seconds", "card", "versions", "commit", "data"}
    assert all(wanted <= set(row) for row in rows)
    assert "dendritic/firing" in next(row for row in rows if row["arm"] == "default")["health"]

    class NoWorker:
        def __init__(self, *_: Any) -> None:
            raise AssertionError("nothing was missing")

    again = session(Table(path, "data", "abc"), data_directory, [jobs[0], jobs[2]])
    again.devices = []
    study(again)
    assert len(path.read_text().splitlines()) == 2


def test_a_run_that_does_not_fit_is_not_begun(table: Table, data_directory: Path) -> None:
    job = Job("default", "toy", 1e-2, 0, "toy")
    table.append(dataclasses.replace(job, seed=1), {"val": 2.0, "seconds": 100.0})
    assert not session(table, data_directory, [job], budget_s=105).fits(job)
    assert session(table, data_directory, [job], budget_s=115).fits(job)


# --- what a model is asked -----------------------------------------------------------------------------------------


def test_induction_asks_for_what_the_row_has_shown() -> None:
    probe = probes.induction(16, 64, 3, 128)
    inputs, targets = probe.tokens[:, :-1], probe.tokens[:, 1:]
    assert probe.asked.sum() == 3 * 15
    for row, place in zip(*np.nonzero(probe.asked), strict=True):
        assert targets[row, place] == targets[row, place - 16]
        assert inputs[row, place] == inputs[row, place - 16]
    assert not probe.asked[:, :17].any()


def test_recall_asks_for_each_value_once() -> None:
    probe = probes.recall(8, 64, 3, 128)
    assert probe.asked.sum() == 3 * 8
    for row in range(3):
        shown = probe.tokens[row, 1:17].reshape(8, 2)
        bound = dict(map(tuple, shown.tolist()))
        assert len(bound) == 8
        places = np.nonzero(probe.asked[row])[0]
        asked = [(probe.tokens[row, place], probe.tokens[row, place + 1]) for place in places]
        assert sorted(key for key, _ in asked) == sorted(bound)
        assert all(bound[key] == value for key, value in asked)


def test_a_target_is_right_above_one_half() -> None:
    probe = probes.induction(16, 64, 2, 128)
    losses = np.full((2, 64), 5.0, np.float32)
    places = np.nonzero(probe.asked)
    losses[places[0][:15], places[1][:15]] = 0.69
    assert probe.score(losses)["right"] == 0.5
    assert probe.score(losses)["loss"] == pytest.approx((5 + 0.69) / 2)
