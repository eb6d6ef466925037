"""Real trials: the model and the engine of a line in processes of their own, measured, out of memory, or orphaned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nstrain.base.errors import ExitCode, Refusal
from nstrain.base.logs import ROTATE_BYTES, old_log
from nstrain.base.process import identify
from nstrain.line.paths import LinePaths
from nstrain.settings.run import load_run, save_run
from nstrain.tune import child
from nstrain.tune.child import TRIAL_COMMAND, TrialFailed, run_trial

ROOT = Path(__file__).parents[2]
GIB = 1 << 30

LIMITED = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_AS, ({6 * GIB}, {6 * GIB}))
runpy.run_module("nstrain.tune.trial", run_name="__main__")
"""


def job(paths: LinePaths, **fields: Any) -> dict[str, Any]:
    return {"settings": json.loads(paths.run_json.read_text()), "vocabulary": 384, "kernels": {}, **fields}


def test_a_line_is_tuned_by_the_command(paths: LinePaths) -> None:
    settings = load_run(paths.run_json)
    save_run(paths.run_json, settings.model_copy(update={"tokens_per_update": 64}))
    command = [sys.executable, "-m", "nstrain.cli.main", "tune", str(paths.root), "--seconds", "0.1", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert ran.returncode == int(ExitCode.DONE), ran.stderr
    result = json.loads(ran.stdout)
    trials = {(t["shape"]["recompute"], t["shape"]["micro_rows"]): t for t in result["trials"]}
    assert set(trials) == {("none", 1), ("dendritic", 1), ("all", 1)}, "an update of one row has one size"
    assert ran.stderr.count("tokens/s") == len(trials), "each trial is told when it ends"
    for trial in trials.values():
        measured = trial["measured"]
        assert trial["outcome"] == "measured"
        assert measured["updates"] >= 3
        assert 0 < measured["finish_s"] < 60
        assert 0 < measured["micro_batch_s"] < 60
        assert 0 < measured["transient_bytes"] < measured["room_bytes"]
        assert measured["persistent_bytes"] >= 16 * 1_000_000
    choice = result["chosen"]["64"]
    assert choice["tokens_per_s"] == max(trial["tokens_per_s"] for trial in trials.values())
    written = load_run(paths.run_json)
    assert (written.lengths["64"].micro_rows, written.lengths["64"].recompute) == (
        choice["micro_rows"],
        choice["recompute"],
    )
    kernels = json.loads((paths.tune / "kernels.json").read_text())
    assert kernels["kernels"] == {}, "there are none on a CPU"
    assert kernels["basis"] == json.loads((paths.tune / "trials.json").read_text())["basis"]


def test_want_of_memory_is_told(paths: LinePaths, tmp_path: Path) -> None:
    shape = {"row_tokens": 64, "micro_rows": 500_000, "recompute": "none"}
    limited = (sys.executable, "-c", LIMITED)
    with pytest.raises(TrialFailed, match="allocate") as failed:
        run_trial(job(paths, shape=shape, micro_batches=1, seconds=0.1), tmp_path / "log", 60, command=limited)
    assert failed.value.out_of_memory


def test_settings_that_cannot_be_trained_are_refused(paths: LinePaths, tmp_path: Path) -> None:
    asked = job(paths)
    asked["settings"]["model"]["config"]["rope_max_seq_len"] = 32
    with pytest.raises(Refusal, match="rope_max_seq_len"):
        run_trial(asked, tmp_path / "log", 60)


def test_an_interrupt_ends_the_trial_as_well(paths: LinePaths) -> None:
    before = paths.run_json.read_bytes()
    command = [sys.executable, "-m", "nstrain.cli.main", "tune", str(paths.root)]
    tuner = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{tuner.pid}/task/{tuner.pid}/children")
    deadline = time.monotonic() + 120
    while not (pids := children.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    tuner.send_signal(signal.SIGINT)
    _, said = tuner.communicate(timeout=30)
    assert tuner.returncode == int(ExitCode.STOPPED), said
    assert "the same command goes on from there" in said
    while (
        identify(int(pids[0])) is not None
    ):  # interrupted while it was just being started, it leaves as an orphan does
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert paths.run_json.read_bytes() == before


def test_one_that_reports_and_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may hang as a process leaves it: what was measured is known, and the tuner goes on."""
    monkeypatch.setattr(child, "LEAVE_S", 0.1)
    says = "os.write(int(sys.argv[-3]), b'{\"machine\": 1}\\n'); print(os.getpid(), flush=True); time.sleep(60)"
    began, log = time.monotonic(), tmp_path / "trials.log"
    answer = run_trial({}, log, 60, command=(sys.executable, "-S", "-c", f"import os, sys, time; {says}"))
    assert answer == {"machine": 1}
    assert time.monotonic() - began < 30, "it waited until the limit"
    assert identify(int(log.read_text())) is None


def test_an_orphan_leaves(tmp_path: Path) -> None:
    """A trial whose tuner is killed must not go on occupying the device."""
    parent_read, parent_write = os.pipe()
    report_read, report_write = os.pipe()
    trial = subprocess.Popen(
        [*TRIAL_COMMAND, "--report-fd", str(report_write), "--parent-fd", str(parent_read)],
        stdin=subprocess.PIPE,  # it waits for its job, which does not come
        pass_fds=[parent_read, report_write],
        cwd=ROOT,
    )
    try:
        time.sleep(0.3)
        assert trial.poll() is None
        os.close(parent_write)
        assert trial.wait(20) == int(ExitCode.STOPPED)
    finally:
        trial.kill()
        trial.wait()
        assert trial.stdin is not None
        trial.stdin.close()
        for fd in (parent_read, report_read, report_write):
            os.close(fd)


def test_the_log_of_trials_is_put_aside_when_it_is_large(paths: LinePaths, tmp_path: Path) -> None:
    log = tmp_path / "trials.log"
    with log.open("wb") as file:
        file.truncate(ROTATE_BYTES + 1)
    with pytest.raises(TrialFailed, match="exit code 1, while starting: broken"):
        run_trial(job(paths), log, 60, command=(sys.executable, "-c", "raise SystemExit('broken')"))
    assert log.read_text() == "broken\n"
    hints = "CUDA kernel errors might be reported later\\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions\\n"
    died = f"print('one line'); raise RuntimeError('CUDA error: unspecified launch failure\\n{hints}')"
    with pytest.raises(TrialFailed, match="starting: RuntimeError: CUDA error: unspecified launch failure$"):
        run_trial(job(paths), log, 60, command=(sys.executable, "-c", died))
    assert old_log(log).stat().st_size == ROTATE_BYTES + 1
