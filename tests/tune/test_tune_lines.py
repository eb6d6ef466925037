"""`nstrain tune` on made-up devices: what it tries, chooses, writes and refuses, with trials as real processes."""

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
from fake_card import UUID, FakeCard
from made_up_device import MIB, MadeUpDevice

from nstrain.base.disk import FileLock
from nstrain.base.errors import GpuTaken, NstrainError, Refusal
from nstrain.gpu import borrowed
from nstrain.gpu import lease as lease_module
from nstrain.gpu.lease import gpu_lease
from nstrain.line.paths import LinePaths
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION, RunSettings, load_run, save_run
from nstrain.tune.records import Trial
from nstrain.tune.tuner import Tuned, TuneOptions, tune


def tuned(paths: LinePaths, device: MadeUpDevice, **options: Any) -> Tuned:
    return tune(paths.root, TuneOptions(**options), command=device.command)


def change(paths: LinePaths, **fields: Any) -> None:
    """Edit fields of run.json."""
    values = json.loads(paths.run_json.read_text()) | fields
    save_run(paths.run_json, RunSettings.model_validate_json(json.dumps(values)))


def stored(paths: LinePaths) -> dict[str, Any]:
    return dict(json.loads((paths.tune / "trials.json").read_text()))


def outcomes(trials: list[Trial]) -> dict[str, str]:
    return {f"{trial.shape.recompute}/{trial.shape.micro_rows}": trial.outcome for trial in trials}


def test_grows_and_takes_the_fastest(paths: LinePaths, device: MadeUpDevice) -> None:
    before = json.loads(paths.run_json.read_text())
    result = tuned(paths, device)
    assert device.ran == [f"{shape} x 64" for shape in ("none/1", "none/2", "none/4", "none/8", "dendritic/8", "all/8")]
    after = json.loads(paths.run_json.read_text())
    assert after["lengths"] == {"64": {"micro_rows": 8, "recompute": "none"}}
    assert after | {"lengths": before["lengths"]} == before
    # Eight updates of eight rows a cycle, three cycles: 0.010 + 8 * 0.010 for the rows, 0.001 for the end.
    assert result.chosen[64].tokens_per_s == pytest.approx(8 * 64 / 0.091)
    assert result.written
    assert stored(paths)["chosen"]["64"]["micro_rows"] == 8
    kernels = json.loads((paths.tune / "kernels.json").read_text())["kernels"]
    assert sorted(kernels) == ["kernel of all", "kernel of dendritic", "kernel of none"]


def test_trials_share_compiled_kernels_with_the_trainer(
    paths: LinePaths, device: MadeUpDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    tuned(paths, device)
    assert device.kernel_caches == {str(tmp_path / ".triton" / "cache")}, "where Triton itself looks"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    tuned(paths, device, again=True)
    assert "/elsewhere" in device.kernel_caches


def test_recomputes_for_room(paths: LinePaths, device: MadeUpDevice) -> None:
    """4 rows fill the device without recomputing; a launch costs so much that 8 recomputed rows are faster."""
    device.change(room=11 * MIB, launch_s=0.1)
    result = tuned(paths, device)
    assert device.ran[:3] == ["none/1 x 64", "none/2 x 64", "none/4 x 64"]
    assert "none/8 x 64" not in device.ran
    pruned = next(trial for trial in result.trials if trial.outcome == "pruned")
    assert (pruned.shape.recompute, pruned.shape.micro_rows) == ("none", 8)
    assert pruned.estimated_bytes == 18 * MIB
    assert "18.0 MiB of 11.0 MiB" in (pruned.reason or "")
    assert device.ran[3:] == ["dendritic/4 x 64", "dendritic/8 x 64", "all/8 x 64"]
    assert load_run(paths.run_json).lengths["64"].recompute == "dendritic"


def test_a_first_trial_out_of_memory_moves_on_to_recomputing(paths: LinePaths, device: MadeUpDevice) -> None:
    device.change(room=3 * MIB)
    result = tuned(paths, device)
    assert outcomes(result.trials)["none/1"] == "failed"
    assert device.ran == ["none/1 x 64", "dendritic/1 x 64", "all/1 x 64"]
    assert load_run(paths.run_json).lengths["64"].recompute == "all"


def test_the_margin_stays_free(paths: LinePaths, device: MadeUpDevice) -> None:
    device.change(room=18 * MIB + MIB // 8)  # 8 rows take 18 MiB: they fit, but for the margin of 2 %
    result = tuned(paths, device)
    eight = [trial for trial in result.trials if trial.shape.micro_rows == 8 and trial.shape.recompute == "none"]
    assert [trial.outcome for trial in eight] == ["pruned"]
    assert (result.chosen[64].micro_rows, result.chosen[64].recompute) != (8, "none")


def test_a_trial_that_hangs_is_ended_and_told(paths: LinePaths, device: MadeUpDevice) -> None:
    device.change(faults={"none/2": "hangs"})
    result = tuned(paths, device, limit_s=1.5)
    (hung,) = (trial for trial in result.trials if trial.outcome == "failed")
    assert hung.reason == "not done after 2s, while timing"
    (pid,) = device.pids()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert result.chosen[64].micro_rows == 8, "the shapes beyond it are tried all the same"


@pytest.mark.parametrize(
    ("fault", "reason", "of_memory"),
    [
        ("is killed", "was killed by SIGKILL", True),
        ("crashes", "ended with exit code 1, while timing: ValueError: an illegal address", False),
        ("loses numbers", "loss nan: not finite", False),
    ],
)
def test_a_trial_that_dies(paths: LinePaths, device: MadeUpDevice, fault: str, reason: str, of_memory: bool) -> None:
    device.change(faults={"none/4": fault})
    result = tuned(paths, device)
    (dead,) = (trial for trial in result.trials if trial.outcome == "failed")
    assert dead.reason is not None
    assert dead.reason.startswith(reason)
    assert dead.out_of_memory == of_memory
    # What the kernel killed took too much memory: nothing larger is tried. After a crash one more is.
    assert ("none/8 x 64" in device.ran) != of_memory


def test_two_in_a_row_that_bring_nothing_end_the_growth(paths: LinePaths, device: MadeUpDevice) -> None:
    device.change(launch_s=0.0, faults={"none/2": "loses numbers"})  # without a launch's cost all sizes are as fast
    tuned(paths, device)
    assert [shape for shape in device.ran if shape.startswith("none")] == ["none/1 x 64", "none/2 x 64", "none/4 x 64"]


def test_nothing_fits(paths: LinePaths, device: MadeUpDevice) -> None:
    device.change(room=MIB)
    before = paths.run_json.read_bytes()
    with pytest.raises(NstrainError, match=r"no shape of rows of 64 tokens .*\n.*recompute none: tried to allocate"):
        tuned(paths, device)
    assert paths.run_json.read_bytes() == before
    assert len(stored(paths)["trials"]) == 3


def test_a_model_larger_than_the_device_is_refused_untried(paths: LinePaths, device: MadeUpDevice) -> None:
    device.change(memory=15_000_000, free=15_000_000)
    with pytest.raises(Refusal, match=r"1,000,000 parameters take 15\.3 MiB"):
        tuned(paths, device)
    assert device.ran == []


def test_a_device_in_use_is_told(paths: LinePaths, device: MadeUpDevice) -> None:
    device.change(free=60 << 30)
    (notice,) = tuned(paths, device).notices
    assert notice.startswith("4.0 GiB of the GPU's 64.0 GiB were in use")


def test_each_length_of_the_schedule(paths: LinePaths, device: MadeUpDevice) -> None:
    rows = [{"from_cycle": 1, "row_tokens": 32}, {"from_cycle": 3, "row_tokens": 128}]
    lengths = {str(length): {"micro_rows": 1} for length in (32, 64, 128)}
    change(paths, rows=rows, lengths=lengths)
    result = tuned(paths, device)
    assert {length: choice.micro_rows for length, choice in result.chosen.items()} == {32: 16, 128: 4}
    written = load_run(paths.run_json).lengths
    assert {length: shape.micro_rows for length, shape in written.items()} == {"32": 16, "64": 1, "128": 4}
    first = next(trial for trial in result.trials if trial.shape.row_tokens == 128)
    assert first.estimated_bytes == 2 * MIB + 128 * MIB // 32, "as the 4 x 32 tokens that were tried"


def test_finished_trials_are_used_again(paths: LinePaths, device: MadeUpDevice) -> None:
    device.change(faults={"none/4": "loses numbers"})
    tuned(paths, device)
    before = len(device.ran)
    device.change(faults={})
    result = tuned(paths, device)
    assert device.ran[before:] == ["none/4 x 64"], "what failed is tried again, what was measured is not"
    assert [trial.reused for trial in result.trials].count(False) == 1
    assert not result.notices
    tuned(paths, device, again=True)
    assert len(device.ran) == before + 1 + 6


@pytest.mark.parametrize("what", ["threads", "code"])
def test_trials_of_another_basis_are_not_used(paths: LinePaths, device: MadeUpDevice, what: str) -> None:
    tuned(paths, device)
    before = len(device.ran)
    if what == "threads":
        change(paths, threads=2)
    else:
        device.change(code="0ther")
    result = tuned(paths, device)
    assert len(device.ran) == 2 * before
    expected = {"threads": "settings.threads was 1, is 2", "code": "machine.code was 'c0de', is '0ther'"}
    assert result.notices == [f"earlier trials are not used: {expected[what]}"]


def test_a_foreign_trials_file_is_refused(paths: LinePaths, device: MadeUpDevice) -> None:
    paths.tune.mkdir()
    (paths.tune / "trials.json").write_text('{"format": 2}')
    with pytest.raises(Refusal, match="trials.json: is not what"):
        tuned(paths, device)


@pytest.mark.parametrize("by", ["checkpoint", "latest", "journal"])
def test_a_line_that_has_trained_is_left_alone(paths: LinePaths, device: MadeUpDevice, by: str) -> None:
    if by == "checkpoint":
        paths.checkpoint(4).mkdir()
    elif by == "latest":
        paths.latest.write_text("u00000004")
    else:
        with Journal.open(paths.journal, METRICS_VERSION) as journal:
            for update in range(5):
                journal.commit(update, {"train/loss": 1.0})
    before = paths.run_json.read_bytes()
    with pytest.raises(Refusal, match=r"update 4: .*--measure-only .*allow_changes"):
        tuned(paths, device)
    assert device.ran == []
    result = tuned(paths, device, measure_only=True)
    assert result.chosen[64].micro_rows == 8
    assert not result.written
    assert paths.run_json.read_bytes() == before


def test_a_branch_may_be_tuned_until_it_trains(paths: LinePaths, device: MadeUpDevice) -> None:
    value = json.loads(paths.run_json.read_text())
    value["branch"] = {"from": "/trunk", "line": "t", "at_cycle": 1, "update": 4, "tokens": 512}
    paths.run_json.write_text(json.dumps(value))
    paths.checkpoint(4).mkdir()
    assert tuned(paths, device).written
    paths.checkpoint(5).mkdir()
    with pytest.raises(Refusal, match="has trained up to update 5"):
        tuned(paths, device)


def test_a_line_with_its_start_checkpoint_alone_may_be_tuned(paths: LinePaths, device: MadeUpDevice) -> None:
    paths.checkpoint(0).mkdir()
    paths.latest.write_text("u00000000")
    assert tuned(paths, device).written


def test_a_run_json_edited_meanwhile_is_not_overwritten(paths: LinePaths, device: MadeUpDevice) -> None:
    def edit(trial: Trial) -> None:
        change(paths, seed=77)

    with pytest.raises(Refusal, match="was edited while"):
        tune(paths.root, on_trial=edit, command=device.command)
    assert load_run(paths.run_json).seed == 77
    assert load_run(paths.run_json).lengths["64"].micro_rows == 3
    assert tuned(paths, device).chosen[64].micro_rows == 8
    assert len(device.ran) == 6, "the seed changes no trial"


@pytest.mark.parametrize("lock", ["supervisor_lock", "trainer_lock"])
def test_a_line_in_use_is_not_tuned(paths: LinePaths, device: MadeUpDevice, lock: str) -> None:
    with (
        FileLock(getattr(paths, lock)).acquire("the test"),
        pytest.raises(NstrainError, match=f"held by process {os.getpid()}"),
    ):
        tuned(paths, device)
    assert device.ran == []


def on_a_gpu(paths: LinePaths, device: MadeUpDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """The line on a made-up GPU that nobody uses, as host.json's reader tells."""
    card, host = FakeCard(tmp_path / "card"), tmp_path / "host.json"
    host.write_text(json.dumps({"gpu_reader": card.source.reader}))
    monkeypatch.setattr(lease_module, "LEASE_ROOTS", (tmp_path,))
    monkeypatch.setattr(borrowed, "LEASE_WAIT_S", 0.0)
    monkeypatch.setenv("NSTRAIN_HOST", str(host))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    change(paths, device="cuda")
    device.change(uuid=UUID)
    return card


def test_the_gpu_is_leased(
    paths: LinePaths, device: MadeUpDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(paths, device, tmp_path, monkeypatch)
    lease = gpu_lease(UUID)
    held: list[bool] = []
    tune(paths.root, on_trial=lambda _: held.append(lease.held_elsewhere()), command=device.command)
    assert held
    assert all(held)
    assert not lease.held_elsewhere()
    ran = len(device.ran)
    with (
        lease.acquire("the test"),
        pytest.raises(GpuTaken, match=f"the GPU {UUID} is held by process {os.getpid()}"),
    ):
        tuned(paths, device, again=True)
    assert len(device.ran) == ran


def test_nothing_touches_a_gpu_that_somebody_uses(
    paths: LinePaths, device: MadeUpDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = on_a_gpu(paths, device, tmp_path, monkeypatch)
    card.put(os.getppid())
    device.change(machine="crashes")
    with pytest.raises(GpuTaken, match=rf"process {os.getppid()} .* on {UUID}: wait until it has"):
        tuned(paths, device)
    card.put()
    device.change(machine=None, uuid="GPU-2")
    with pytest.raises(Refusal, match=f"torch uses GPU GPU-2, but .* the lease of {UUID} was taken"):
        tuned(paths, device)
    assert device.ran == []


def test_trials_of_a_line_that_has_trained_run_with_its_kernels(paths: LinePaths, device: MadeUpDevice) -> None:
    tuned(paths, device)
    assert device.jobs[-1]["kernels"] == {}
    checkpoint = paths.checkpoint(8)
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"kernels": {"scan/64": {"any": {}}}}))
    paths.latest.write_text(checkpoint.name + "\n")
    result = tuned(paths, device, measure_only=True)
    assert device.jobs[-1]["kernels"] == {"scan/64": {"any": {}}}
    assert not any(trial.reused for trial in result.trials), "they ran with others"


DRIVER = """
import json, sys
from pathlib import Path
from nstrain.tune.tuner import tune
tune(Path(sys.argv[1]), command=json.loads(sys.argv[2]))
assert "torch" not in sys.modules, "the tuner itself has no use for torch"
"""


def driver(paths: LinePaths, device: MadeUpDevice, **environment: str) -> subprocess.Popen[bytes]:
    """A tuner as a process."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(paths.root), json.dumps(device.command)],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("instant", [3, 7])
def test_killed_at_any_instant_and_run_again(paths: LinePaths, device: MadeUpDevice, instant: int) -> None:
    """Instants 1 to 6 are after a trial was recorded, 7 after run.json was written."""
    before = paths.run_json.read_bytes()
    killed = driver(paths, device, NSTRAIN_KILL_POINT=f"tune:{instant}")
    assert killed.wait(30) == -signal.SIGKILL
    assert (paths.run_json.read_bytes() == before) == (instant < 7)
    assert len(stored(paths)["trials"]) == min(instant, 6)
    assert driver(paths, device).wait(30) == 0
    assert len(device.ran) == 6, "no trial is run twice"
    assert load_run(paths.run_json).lengths["64"].micro_rows == 8


def test_killed_while_a_trial_runs(paths: LinePaths, device: MadeUpDevice) -> None:
    before = paths.run_json.read_bytes()
    device.change(faults={"none/4": "hangs"})
    process = driver(paths, device)
    deadline = time.monotonic() + 120
    while not (pids := device.pids()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait(30)
    os.kill(pids[0], signal.SIGKILL)  # it would leave by itself, were it not made up: see test_tune_trials.py
    assert paths.run_json.read_bytes() == before
    device.change(faults={})
    assert driver(paths, device).wait(30) == 0
    assert device.ran.count("none/4 x 64") == 2
    assert len(device.ran) == 7
