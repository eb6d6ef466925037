"""Whole training lines on real data, in this process: rows, checkpoints, skips, growth, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from real_line import (
    UNIT_TOKENS,
    change_run,
    journal_summary,
    last_update,
    make_data_line,
    make_run,
    prepare,
    rows_of,
    run_here,
    state_of,
    tensors_of,
)

import nstrain.line.checkpoint
from nstrain.base.disk import PARTIAL_SUFFIX, FileLock, canonical_json, sha256_bytes
from nstrain.base.errors import DiskFull, ExitCode, NstrainError, Refusal
from nstrain.data.consumers import read_consumers
from nstrain.data.extend import extend_line
from nstrain.data.line import DataLine
from nstrain.line.background import BackgroundWriter
from nstrain.line.checkpoint import Checkpoint
from nstrain.line.paths import REPLACED_SUFFIX, LinePaths
from nstrain.line.state_files import Stage, clear_stop, request_stop
from nstrain.ops.verify import verify_line
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION
from nstrain.train.feed import RowFeed
from nstrain.train.loop import Trainer
from nstrain.train.saving import Saver

CYCLES = 3
LAST_UPDATE = 39
"""2016 tokens a cycle are 63 rows: 12 updates of 5 rows and a smaller one of 3, three times."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), CYCLES)
    prepare(line.work, CYCLES)
    return line


@pytest.fixture(scope="module")
def through(data: DataLine, tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    """The line, run through without an interruption. Tests copy it before they change it."""
    paths = make_run(tmp_path_factory.mktemp("through") / "run", data)
    assert run_here(paths) == ExitCode.DONE
    return paths


@pytest.fixture
def line(data: DataLine, tmp_path: Path) -> LinePaths:
    return make_run(tmp_path / "run", data)


def copy_of(paths: LinePaths, root: Path) -> LinePaths:
    shutil.copytree(paths.root, root)
    return LinePaths(root)


def assert_equal(a: LinePaths, b: LinePaths) -> None:
    assert journal_summary(a) == journal_summary(b)
    assert journal_summary(a)[1] == 0
    assert tensors_of(a, LAST_UPDATE) == tensors_of(b, LAST_UPDATE)


def test_rows_of_a_whole_line(through: LinePaths) -> None:
    rows = rows_of(through)
    assert [row["update"] for row in rows] == list(range(LAST_UPDATE + 1))
    assert [int(row["tokens"]) for row in rows if row["smaller"]] == [2016, 4032, 6048]
    assert sum(int(row["rows"]) for row in rows) == 3 * 63
    assert all(int(row["train/rows/books"] + row["train/rows/code"]) == row["rows"] for row in rows[1:])
    assert [int(row["update"]) for row in rows if "val_32/mix" in row] == [0, 8, 13, 16, 24, 26, 32, LAST_UPDATE]
    assert not any(name.startswith("train/") for name in rows[0])
    assert rows[-1]["train/learning_rate"] == 0.0
    assert rows[-1]["val_32/mix"] < rows[0]["val_32/mix"] - 2
    assert len({frozenset(row) for row in rows}) == 5, (
        "update 0, and trained: validated or not, before and with a loss_jump"
    )


def test_checkpoints_of_a_whole_line(through: LinePaths, data: DataLine) -> None:
    states = {u: state_of(through, u) for u in through.checkpoint_updates()}
    assert {u: (s["reason"], s["kept"]) for u, s in states.items()} == {
        0: ("start", True),
        13: ("cycle_end", True),
        26: ("cycle_end", True),
        32: ("rolling", False),
        36: ("rolling", False),
        39: ("end", True),
    }
    assert all(s["tokens"] == rows_of(through)[u]["tokens"] for u, s in states.items())
    inside, between = states[32]["position"], states[26]["position"]
    assert (inside["cycle"], inside["row"]) == (3, 30)
    assert len(inside["manifest_sha256"]) == len(inside["order_digest"]) == 64
    assert (between["cycle"], between["row"], between["manifest_sha256"]) == (3, 0, None)
    assert (between["previous"]["cycle"], len(between["previous"]["order_digest"])) == (2, 64)
    consumer = next(c for c in read_consumers(data.work) if c.run == str(through.root))
    assert (consumer.cycle, consumer.row, consumer.tokens) == (4, 0, 6048)


def test_stopped_and_resumed_three_times_it_has_the_same_bits(through: LinePaths, line: LinePaths) -> None:
    for stop_after in (3, 13, 14):
        assert run_here(line, stop_after) == ExitCode.STOPPED
        assert line.checkpoint_updates()[-1] == stop_after
        assert state_of(line, stop_after)["reason"] == ("cycle_end" if stop_after == 13 else "stop")
    assert run_here(line) == ExitCode.DONE
    assert_equal(through, line)


def test_reading_ahead_changes_nothing(through: LinePaths, line: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nstrain.train.cycles.RowFeed", lambda rows: RowFeed(rows, read_ahead=False))
    assert run_here(line) == ExitCode.DONE
    assert_equal(through, line)


def test_what_happens_in_an_update_happens_in_order(line: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation, then the row, then the checkpoint, then the consumer's entry - and the start is durable first."""
    events: list[tuple[str, int]] = []
    commit, submit = Journal.commit, BackgroundWriter.submit

    def watched_commit(journal: Journal, update: int, readings: Any, may_differ: bool) -> Any:
        assert ("val_32/mix" in readings) == (update % 8 == 0 or update % 13 == 0)
        if update == 1:
            assert line.latest.read_text().strip() == "u00000000"
        events.append(("row", update))
        return commit(journal, update, readings, may_differ)

    def watched_submit(writer: BackgroundWriter, checkpoint: Checkpoint, ready: Any) -> None:
        events.append(("checkpoint", checkpoint.state["update"]))
        submit(writer, checkpoint, ready)

    def watched_consumer(work: Path, id: str, cycle: int, row: int, tokens: int, root: Path) -> None:
        newest = int(line.latest.read_text().strip()[1:])
        assert state_of(line, newest)["tokens"] == tokens, "only what is committed"
        events.append(("consumer", newest))

    monkeypatch.setattr(Journal, "commit", watched_commit)
    monkeypatch.setattr(BackgroundWriter, "submit", watched_submit)
    monkeypatch.setattr("nstrain.train.saving.write_consumer", watched_consumer)
    assert run_here(line, stop_after=17) == ExitCode.STOPPED
    saved = [0, 4, 8, 12, 13, 16, 17]
    assert [update for what, update in events if what == "row"] == list(range(18))
    assert [update for what, update in events if what == "checkpoint"] == saved
    assert [update for what, update in events if what == "consumer"] == saved
    for update in saved:
        assert events.index(("row", update)) < events.index(("checkpoint", update)) < events.index(("consumer", update))


def test_the_lock_is_held_until_the_last_write_has_ended(line: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update fails while a checkpoint is being written: another trainer must not come in between."""
    write = nstrain.line.checkpoint.write_checkpoint
    in_the_middle, locked = threading.Event(), []

    def slow_write(paths: LinePaths, checkpoint: Checkpoint) -> Path:
        if checkpoint.state["update"] == 4:
            in_the_middle.set()
            time.sleep(0.3)
            locked.append(FileLock(paths.trainer_lock).held_elsewhere())
        return write(paths, checkpoint)

    def fail(number: int) -> bool:
        if number >= 12:
            assert in_the_middle.wait(10)
            raise RuntimeError("a bad update")
        return False

    monkeypatch.setattr("nstrain.line.background.write_checkpoint", slow_write)
    with pytest.raises(RuntimeError, match="a bad update"):
        run_here(line, spoil=fail)
    assert locked == [True]
    assert line.checkpoint_updates() == [0, 4]


def test_a_finished_line_is_done_at_once(through: LinePaths, tmp_path: Path) -> None:
    paths = copy_of(through, tmp_path / "copy")
    before = sorted((str(p), p.stat().st_mtime_ns) for p in paths.checkpoints.rglob("*"))
    assert run_here(paths) == ExitCode.DONE
    assert sorted((str(p), p.stat().st_mtime_ns) for p in paths.checkpoints.rglob("*")) == before
    assert_equal(through, paths)


def test_a_damaged_newest_checkpoint_is_passed_over(
    through: LinePaths, line: LinePaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(line, stop_after=22) == ExitCode.STOPPED
    weights = line.checkpoint(22) / "weights.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    # Besides, what a kill left: a write that had begun, and a checkpoint moved aside for another of its number.
    left, earlier = line.checkpoints / f"u00000021{PARTIAL_SUFFIX}", line.checkpoint(20)
    shutil.copytree(earlier, left)
    earlier.rename(earlier.with_name(earlier.name + REPLACED_SUFFIX))
    assert run_here(line) == ExitCode.DONE
    assert "going on from u00000020" in capsys.readouterr().out
    assert not left.exists()
    assert_equal(through, line)


def test_a_longer_schedule_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made longer after the line's end, and again while it trains; then it waits for what is not prepared."""
    data = make_data_line(tmp_path / "d", 1)
    prepare(data.work, 1)
    paths = make_run(tmp_path / "run", data)
    assert run_here(paths) == ExitCode.DONE
    assert "val_32/mix" in rows_of(paths)[13]
    extend_line(data.work, cycles=1)
    prepare(data.work, 2)
    waiting = 0

    def beat(trainer: Trainer, stage: Stage, **what: Any) -> None:
        nonlocal waiting
        really_beat(trainer, stage, **what)
        if stage == "training" and trainer.state.position.update == 20:
            extend_line(data.work, cycles=1)
        waiting += stage == "waiting_data"
        if waiting in (1, 20):  # what is asked at the first wait is heeded there; 20 ends a test that failed
            request_stop(paths, 2 if waiting == 1 else None)

    really_beat = Trainer.beat
    monkeypatch.setattr(Trainer, "beat", beat)
    monkeypatch.setattr("nstrain.train.loop.DATA_POLL_S", 0.01)
    assert run_here(paths) == ExitCode.STOPPED
    assert waiting == 1, "it stops where it waits: cycle 2 is done"
    assert [int(r["update"]) for r in rows_of(paths)] == list(range(27))
    assert (state_of(paths, 13)["reason"], state_of(paths, 26)["reason"]) == ("end", "cycle_end")
    assert "val_32/mix" in rows_of(paths)[26]
    clear_stop(paths)

    def poll(saver: Saver) -> None:
        if 1 < waiting < 20:
            raise DiskFull("a checkpoint could not be written")

    monkeypatch.setattr(Saver, "poll", poll)
    with pytest.raises(DiskFull, match="could not be written"):
        run_here(paths)


def test_row_length_and_batch_change_where_run_json_says(data: DataLine, tmp_path: Path) -> None:
    ramp = [
        {"from": 0, "to": 1000, "tokens": 2 * UNIT_TOKENS},
        {"from": 1000, "to": None, "tokens": 8 * UNIT_TOKENS},
    ]
    rows = [{"from_cycle": 1, "row_tokens": 16}, {"from_cycle": 2, "row_tokens": 32}]
    paths = make_run(tmp_path / "run", data, rows=rows, tokens_per_update=ramp)
    assert run_here(paths, stop_after=15) == ExitCode.STOPPED
    assert run_here(paths) == ExitCode.DONE
    before, found = 0, rows_of(paths)
    for row in found[1:]:
        assert row["row_tokens"] == (16 if row["cycle"] == 1 else 32)
        batch = 64 if before < 1000 else 256
        assert row["tokens"] - before == (row["rows"] * row["row_tokens"] if row["smaller"] else batch)
        assert row["train/weight_decay"] == pytest.approx(0.1 * (row["tokens"] - before) / 160, rel=1e-15)
        before = row["tokens"]
    assert before == 6048
    end_of_first = next(int(r["update"]) for r in found if r["tokens"] == 2016)
    assert state_of(paths, end_of_first)["reason"] == "length_change"
    assert {name for row in found for name in row if name.endswith("/mix")} == {"val_16/mix", "val_32/mix"}


def test_skips_are_counted_over_launches_and_end_the_line(line: LinePaths) -> None:
    change_run(line, guards={"max_consecutive_skips": 2})
    # An update has three micro-batches, so these are updates 3, 6 and 7.
    with pytest.raises(NstrainError, match=r"2 updates in a row were skipped .* \(guards.max_consecutive_skips is 2\)"):
        run_here(line, spoil=lambda n: n == 8 or 15 <= n < 21)
    assert last_update(line) == 7
    assert state_of(line, 7)["optimizer"] == {"step": 4, "consecutive_skips": 2, "total_skips": 3}
    rows = rows_of(line)
    assert [int(r["update"]) for r in rows if r["skipped"]] == [3, 6, 7]
    assert math.isnan(rows[6]["train/grad_norm"])
    at_7 = tensors_of(line, 7)
    assert at_7 != tensors_of(line, 4)
    with pytest.raises(NstrainError, match="2 updates in a row"):
        run_here(line)
    assert last_update(line) == 7, "relaunched, it fails at once"
    change_run(line, guards={"max_consecutive_skips": 4})
    with pytest.raises(NstrainError, match="4 updates in a row"):
        run_here(line, spoil=lambda n: True)
    assert last_update(line) == 9, "two more, since the count of the first launch went on"
    assert tensors_of(line, 9) == at_7
    change_run(line, guards={"max_consecutive_skips": 5})
    assert run_here(line) == ExitCode.DONE
    assert [int(r["update"]) for r in rows_of(line) if r["skipped"]] == [3, 6, 7, 8, 9]
    assert [int(r["tokens"]) for r in rows_of(line)][:13] == [160 * u for u in range(13)], "skipped tokens count"
    assert state_of(line, LAST_UPDATE)["optimizer"] == {"step": 34, "consecutive_skips": 0, "total_skips": 5}


def test_a_replay_that_differs_is_kept_beside_its_row(line: LinePaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(line, stop_after=8) == ExitCode.STOPPED
    shutil.rmtree(line.checkpoint(8))
    line.latest.write_text("u00000004\n")
    # Another computation than the recorded one: update 6's gradient is spoiled in the replay.
    assert run_here(line, stop_after=8, spoil=lambda n: n == 3) == ExitCode.STOPPED
    assert "u6: differs from the row recorded before" in capsys.readouterr().out
    assert journal_summary(line)[1] == 3, "updates 6, 7 and 8"
    assert not rows_of(line)[6]["skipped"], "the row that was recorded stays"


@pytest.mark.parametrize(
    ("edit", "differs_from"),
    [
        ({"optimizer": {"clip_norm": 0.01, "weight_decay_batch": 160}, "allow_changes": ["optimizer"]}, 6),
        ({"lengths": {"32": {"micro_rows": 5}}}, 5),
        ({"validation": {"every_updates": 6, "rows_per_source": 3}}, 6),
    ],
)
def test_an_edit_after_a_kill_opens_a_generation_where_it_makes_a_difference(
    killed_at_8: LinePaths, tmp_path: Path, edit: dict[str, Any], differs_from: int
) -> None:
    """What was recorded beyond the checkpoint was trained otherwise: it is no longer what the line has done."""
    line, quiet = (copy_of(killed_at_8, tmp_path / name) for name in ("run", "quiet"))
    with Journal.open(quiet.journal, METRICS_VERSION) as journal:
        journal.begin_generation(5)
    for paths in (line, quiet):
        change_run(paths, **edit)
        assert run_here(paths, stop_after=7) == ExitCode.STOPPED
    lose_checkpoint(line, 7)  # killed once more: nothing differs now
    for paths in (line, quiet):
        assert run_here(paths, stop_after=9) == ExitCode.STOPPED
    rows = rows_of(line)
    assert [row["generation"] for row in rows] == [1 if u < differs_from else 2 for u in range(10)]
    assert [row | {"generation": 1} for row in rows] == [row | {"generation": 1} for row in rows_of(quiet)]
    assert journal_summary(line)[1] == 0, "it is no replay that differed"
    assert tensors_of(line, 9) == tensors_of(quiet, 9)
    assert state_of(line, 9)["generation"] == rows[9]["generation"]
    assert verify_line(line.root).ok


@pytest.fixture(scope="module")
def killed_at_8(data: DataLine, tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    """A line whose newest checkpoint is that of update 4. Tests copy it before they change it."""
    paths = make_run(tmp_path_factory.mktemp("killed") / "run", data)
    assert run_here(paths, stop_after=8) == ExitCode.STOPPED
    lose_checkpoint(paths, 8)
    return paths


def lose_checkpoint(paths: LinePaths, update: int) -> None:
    """Have a line stand as if it had been killed before it wrote that checkpoint."""
    shutil.rmtree(paths.checkpoint(update))
    paths.latest.write_text("u00000004\n")


def test_lost_checkpoints_are_not_taken_for_a_new_line(line: LinePaths) -> None:
    assert run_here(line, stop_after=6) == ExitCode.STOPPED
    shutil.rmtree(line.checkpoints)
    with pytest.raises(Refusal, match="Put the checkpoints back"):
        run_here(line)
    assert not line.checkpoints.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "other"}, "id was 'run' and is now 'other'"),
        ({"seed": 12}, "seed was 11 and is now 12"),
        ({"threads": 2}, "threads was 1 and is now 2"),
        ({"tokens_per_update": 320}, "tokens_per_update was 160 and is now 320"),
        ({"metrics": METRICS_VERSION + 1}, "field 'metrics' is"),
        ({"model": {"preset": "stand-in", "config": {"vocab_size": 512, "width": 24}}}, "vocab_size was 384"),
        ({"rows": [{"from_cycle": 1, "row_tokens": 16}]}, "rows.0.row_tokens was 32 and is now 16"),
        ({"validation": {"every_updates": 0, "rows_per_source": 1}}, None),
    ],
)
def test_a_changed_run_json_is_refused_before_anything_is_written(
    through: LinePaths, tmp_path: Path, change: dict[str, Any], message: str | None
) -> None:
    paths = copy_of(through, tmp_path / "copy")
    fields = json.loads(paths.run_json.read_text()) | change
    paths.run_json.write_text(json.dumps(fields))
    before = {p: p.read_bytes() for p in sorted(paths.checkpoints.rglob("*")) if p.is_file()}
    with pytest.raises(Refusal, match=message):
        run_here(paths)
    assert {p: p.read_bytes() for p in sorted(paths.checkpoints.rglob("*")) if p.is_file()} == before
    assert journal_summary(paths) == journal_summary(through)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [{"from_cycle": 1, "row_tokens": 24}], "lengths": {"24": {"micro_rows": 1}},
          "tokens_per_update": 240}, "24"),
        ({"rows": [{"from_cycle": 1, "row_tokens": 128}], "lengths": {"128": {"micro_rows": 1}},
          "tokens_per_update": 128, "model": {"preset": "s", "config": {"vocab_size": 384}}}, "reads 64 at most|unit"),
        ({"model": {"preset": "s", "config": {"vocab_size": 256}}}, "vocab_size' is 256, but the data line has 384"),
        ({"model": {"preset": "s", "config": {"vocab_size": 384, "widht": 3}}}, "field 'model.config': .*widht"),
        ({"device": "cuda"}, "field 'device' is 'cuda', but torch finds no CUDA device"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused_before_the_first_row(
    line: LinePaths, change: dict[str, Any], message: str
) -> None:
    change_run(line, **change)
    with pytest.raises(Refusal, match=message):
        run_here(line)
    assert last_update(line) is None
    assert not line.checkpoints.exists()


@pytest.mark.parametrize(("stop_after", "message"), [(6, "manifest_sha256 of cycle 1 was"), (13, "expected sha256")])
def test_a_data_line_that_is_not_what_it_was_is_refused(
    data: DataLine, tmp_path: Path, stop_after: int, message: str
) -> None:
    work = tmp_path / "data"
    shutil.copytree(data.work, work)
    paths = make_run(tmp_path / "run", dataclasses.replace(data, work=work))
    assert run_here(paths, stop_after) == ExitCode.STOPPED
    manifest = work / "manifests" / "000001.json"
    changed = json.loads(manifest.read_text())
    changed["sources"]["books"]["documents"] += 1
    text = canonical_json(changed) + b"\n"
    manifest.write_bytes(text)
    (work / "cycles" / "000001" / "READY").write_text(json.dumps({"manifest_sha256": sha256_bytes(text)}))
    with pytest.raises(Refusal, match=message):
        run_here(paths)
    assert last_update(paths) == stop_after
    assert journal_summary(paths)[1] == 0
