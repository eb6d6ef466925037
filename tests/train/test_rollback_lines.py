"""Lines that go on from an earlier checkpoint: the same bits, a generation of their own, deleted data made again."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path

import pytest
from real_line import (
    change_run,
    journal_summary,
    make_data_line,
    make_run,
    prepare,
    rows_of,
    run_here,
    state_of,
    tensors_of,
)

from nstrain.base.disk import FileLock
from nstrain.base.errors import ExitCode, Refusal
from nstrain.base.process import this_process
from nstrain.data.consumers import read_consumers
from nstrain.data.cycles import cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import Outcome, SupervisorState, write_supervisor
from nstrain.ops.branch import make_branch
from nstrain.ops.branch_plan import parse_plan
from nstrain.ops.check import check_line, refuse_failed
from nstrain.ops.rollback import roll_back
from nstrain.ops.status import status
from nstrain.ops.verify import verify_line
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION

CYCLES = 2
LAST_UPDATE = 26
"""13 updates a cycle, of which the last is smaller; checkpoints at 0, 13, 20, 24 and 26."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a line that is done, with its data line, whose cycles are deleted."""
    root = tmp_path_factory.mktemp("done")
    data = make_data_line(root, CYCLES)
    prepare(data.work, CYCLES)
    assert run_here(make_run(root / "run", data)) == ExitCode.DONE
    prepare(data.work, CYCLES)
    assert cycles_on_disk(data) == []
    return root


@pytest.fixture
def line(done: Path) -> LinePaths:
    """That line and its data line, which the test may change: put back after it."""
    kept = done.with_name(done.name + " kept")
    if not kept.exists():
        shutil.copytree(done, kept)
    shutil.rmtree(done)
    shutil.copytree(kept, done)
    return LinePaths(done / "run")


def data_of(line: LinePaths) -> DataLine:
    return DataLine.open(line.root.parent / "data")


def generations(line: LinePaths) -> list[int]:
    return [int(row["generation"]) for row in rows_of(line)]


def without_generation(line: LinePaths) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "generation"} for row in rows_of(line)]


def test_it_goes_on_to_the_same_bits_with_deleted_cycles_made_again(line: LinePaths) -> None:
    """From the middle of cycle 2, then from the end of cycle 1 and from the very start: all three were deleted."""
    rows, tensors = without_generation(line), tensors_of(line, LAST_UPDATE)
    for generation, update, cycle, row in ((2, 20, 2, 35), (3, 13, 2, 0), (4, 0, 1, 0)):
        result = roll_back(line.root, update)
        assert (result.update, result.generation) == (update, generation)
        assert result.to_prepare == tuple(range(cycle, CYCLES + 1))
        assert line.checkpoint_updates()[-1] == update
        (consumer,) = read_consumers(data_of(line).work)
        assert (consumer.cycle, consumer.row, consumer.tokens) == (cycle, row, state_of(line, update)["tokens"])
        prepare(data_of(line).work, CYCLES)
        assert run_here(line) == ExitCode.DONE
        assert without_generation(line) == rows
        assert generations(line)[update:] == [1, *[generation] * (LAST_UPDATE - update)]
        assert tensors_of(line, LAST_UPDATE) == tensors
        assert journal_summary(line)[1] == 0, "an update of a new generation is no replay"
        assert state_of(line, LAST_UPDATE)["generation"] == generation
        prepare(data_of(line).work, CYCLES)
        assert cycles_on_disk(data_of(line)) == []


def test_later_checkpoints_are_set_aside_until_the_line_is_as_far_again(line: LinePaths) -> None:
    """It ends where it had ended before, and never gets beyond that: its disk use is bounded all the same."""
    result = roll_back(line.root, 13)
    assert result.set_aside == ("u00000020", "u00000024", "u00000026")
    assert sorted(path.name for path in line.set_aside.iterdir()) == list(result.set_aside)
    assert line.checkpoint_updates() == [0, 13]
    aside = rf"{line.set_aside}/u00000020 was set aside by a rollback and is not taken back"
    with pytest.raises(Refusal, match=rf"no checkpoint after update 20; it has: 0, 13\. That in {aside}"):
        roll_back(line.root, 20)
    with Journal.open(line.journal, METRICS_VERSION) as journal:
        assert journal.last_update() == 13, "the record is the line's as it stands"
    prepare(data_of(line).work, CYCLES)
    assert run_here(line, stop_after=24) == ExitCode.STOPPED
    assert len(list(line.set_aside.iterdir())) == 3
    assert run_here(line) == ExitCode.DONE
    assert not line.set_aside.exists()
    assert line.checkpoint_updates()[-1] == LAST_UPDATE


def test_what_was_set_aside_goes_at_the_end_of_a_line_that_takes_fewer_updates(line: LinePaths) -> None:
    roll_back(line.root, 13)
    change_run(line, allow_changes=["tokens_per_update"], tokens_per_update=512)
    prepare(data_of(line).work, CYCLES)
    assert run_here(line) == ExitCode.DONE
    assert line.checkpoint_updates()[-1] == 17 < LAST_UPDATE
    assert not line.set_aside.exists()


def test_it_goes_at_the_next_start_if_the_line_was_killed_before_that(line: LinePaths) -> None:
    roll_back(line.root, 13)
    prepare(data_of(line).work, CYCLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nstrain.train.saving.remove_set_aside", lambda *_: [])
        assert run_here(line) == ExitCode.DONE
    assert len(list(line.set_aside.iterdir())) == 3
    assert run_here(line) == ExitCode.DONE
    assert not line.set_aside.exists()


def test_what_is_trained_otherwise_is_another_generation_and_no_difference(line: LinePaths) -> None:
    before = rows_of(line)
    shutil.copytree(line.checkpoints, copied := line.root / "copied")
    roll_back(line.root, 20)
    change_run(line, allow_changes=["learning_rate"], learning_rate=[{"from": 0, "shape": "constant", "start": 0.02}])
    prepare(data_of(line).work, CYCLES)
    assert run_here(line) == ExitCode.DONE
    after = rows_of(line)
    assert after[:21] == before[:21]
    assert after[21]["train/learning_rate"] == 0.02
    assert after[21]["train/loss"] == before[21]["train/loss"], "of the weights at update 20"
    assert after[22]["train/loss"] != before[22]["train/loss"]
    assert journal_summary(line)[1] == 0
    changes = state_of(line, LAST_UPDATE)["changes"]
    assert [(change["field"], change["update"]) for change in changes["applied"]] == [("learning_rate", 20)]

    # A copy of before the rollback, put back: its later checkpoints have other weights than the record tells of.
    shutil.rmtree(line.checkpoints)
    copied.rename(line.checkpoints)
    abandoned = (
        lambda: run_here(line),
        lambda: refuse_failed(check_line(line.root, quick=True)),
        lambda: roll_back(line.root, 26),
        lambda: make_branch(line.root.with_name("b"), line.root, 2, parse_plan("decay:2048"), "", line.root / "d"),
    )
    for act in abandoned:
        with pytest.raises(
            Refusal, match="u00000026: is of generation 1, .* has update 26 in generation 2: .* --to 20"
        ):
            act()
    (problem,) = (look for look in verify_line(line.root).verified if not look.ok)
    assert "u00000026: is of generation 1" in str(problem)
    roll_back(line.root, 13)
    assert state_of(line, 13)["changes"]["applied"] == [], "a change that was rolled back has not happened"


def test_asked_again_it_is_the_same_rollback(line: LinePaths) -> None:
    first = roll_back(line.root, 13)
    again = roll_back(line.root, 13)
    assert (again.generation, again.set_aside) == (first.generation, ())


def test_it_is_seen_until_the_next_launch_however_the_line_had_ended(line: LinePaths) -> None:
    gone = dataclasses.replace(this_process(), start_ticks=this_process().start_ticks - 1)
    ended = SupervisorState(gone, time.time(), 3, reason="stopped by process 7")
    line.heartbeat.unlink()  # it is of this very process, which lives
    outcomes: tuple[Outcome | None, ...] = ("done", "stopped", "failed", None)
    for outcome in outcomes:
        write_supervisor(line, dataclasses.replace(ended, outcome=outcome, trainer_pid=8))
        roll_back(line.root, 13)
        look = status(line.root)
        assert (look.state, look.update, look.reason) == ("stopped", 13, "rolled back to update 13, not run since")
    write_supervisor(line, dataclasses.replace(ended, outcome="failed", reason="no memory"))
    assert status(line.root).reason == "no memory", "a launch that recorded nothing counts"


def test_killed_before_its_last_step_it_replays_and_can_be_asked_for_again(
    line: LinePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Journal, first_update: int) -> int:
        raise KeyboardInterrupt

    rows = rows_of(line)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "begin_generation", fail)
        with pytest.raises(KeyboardInterrupt):
            roll_back(line.root, 20)
    prepare(data_of(line).work, CYCLES)
    assert run_here(line, stop_after=23) == ExitCode.STOPPED
    assert rows_of(line) == rows, "replayed and equal: nothing was lost, nothing recorded twice"
    assert roll_back(line.root, 20).generation == 2
    assert run_here(line) == ExitCode.DONE
    assert generations(line) == [*[1] * 21, *[2] * 6]


def test_refusals_change_nothing(line: LinePaths) -> None:
    def tree() -> list[tuple[str, int]]:
        return sorted(
            (str(p), p.stat().st_mtime_ns) for p in line.root.rglob("*") if p.is_file() and "lock" not in p.name
        )

    before = tree()
    with pytest.raises(Refusal, match=r"no checkpoint after update 14; it has: 0, 13, 20, 24, 26$"):
        roll_back(line.root, 14)
    with pytest.raises(Refusal, match="is not a training line"):
        roll_back(line.root.parent, 13)
    for lock in (line.supervisor_lock, line.trainer_lock):
        with FileLock(lock).acquire("the line"), pytest.raises(Refusal, match="cannot be rolled back"):
            roll_back(line.root, 13)
    weights = line.checkpoint(13) / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(Refusal, match=r"u00000013/weights.safetensors: damaged"):
        roll_back(line.root, 13)
    data[-1] ^= 1
    weights.write_bytes(data)
    assert [name for name, _ in tree()] == [name for name, _ in before]
    assert [item for item in tree() if "u00000013" not in item[0]] == [i for i in before if "u00000013" not in i[0]]
