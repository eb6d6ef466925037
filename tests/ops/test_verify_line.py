"""`verify`: every byte of every checkpoint, and whether the line can go on; all failures at once."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nstrain.base.disk import canonical_json
from nstrain.base.errors import Refusal
from nstrain.line.checkpoint import read_latest, read_state
from nstrain.line.paths import LinePaths
from nstrain.ops.verify import Report, verify_line
from nstrain.record.journal import Journal
from nstrain.settings.run import load_run


def failures(report: Report) -> dict[str, str]:
    assert report.ok == all(item.ok for item in report.verified)
    return {item.what: item.message for item in report.verified if not item.ok}


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def work_of(paths: LinePaths) -> Path:
    return Path(load_run(paths.run_json).data.work)


def test_a_sound_line(trained: LinePaths) -> None:
    report = verify_line(trained.root)
    assert failures(report) == {}
    newest = trained.checkpoint_updates()[-1]
    assert report.goes_on_from == trained.checkpoint(newest).name
    looked_at = [item.what for item in report.verified]
    assert looked_at[:-6] == [f"checkpoints/{trained.checkpoint(u).name}" for u in trained.checkpoint_updates()]
    kinds = {item.what: item.message.partition(", ")[2] for item in report.verified[:-6]}
    assert kinds == dict(zip(kinds, ("start, kept", "rolling", "end, kept"), strict=True))
    assert looked_at[-6:] == ["latest", "leftovers", "settings", "data line", "order", "journal"]


def test_a_new_line_has_nothing_to_damage(paths: LinePaths) -> None:
    report = verify_line(paths.root)
    assert failures(report) == {}
    assert report.goes_on_from is None
    with pytest.raises(Refusal, match="not a training line"):
        verify_line(paths.root / "checkpoints")


def test_a_flipped_byte_in_any_file_of_any_checkpoint_is_named(trained: LinePaths) -> None:
    *_, before, newest = trained.checkpoint_updates()
    for update in (before, newest):
        for file in sorted(trained.checkpoint(update).iterdir()):
            whole = file.read_bytes()
            flip(file, len(whole) // 2)
            found = failures(verify_line(trained.root))
            assert file.name in found[f"checkpoints/{trained.checkpoint(update).name}"]
            assert ("latest" in found) == (update == newest)
            file.write_bytes(whole)
    assert failures(verify_line(trained.root)) == {}


def test_everything_that_is_wrong_is_in_one_report(trained: LinePaths) -> None:
    updates = trained.checkpoint_updates()
    first, newest = trained.checkpoint(updates[0]), trained.checkpoint(updates[-1])
    flip(first / "exp_avg.safetensors")
    (first / "state.json").unlink()
    (first / "notes.txt").write_text("a person's")
    flip(newest / "weights.safetensors")
    settings = json.loads(trained.run_json.read_text())
    trained.run_json.write_text(json.dumps({**settings, "seed": settings["seed"] + 1}))
    report = verify_line(trained.root)
    found = failures(report)
    assert found.keys() == {f"checkpoints/{first.name}", f"checkpoints/{newest.name}", "latest", "settings"}
    for name in ("exp_avg.safetensors: damaged", "state.json: missing", "notes.txt: not a file of this checkpoint"):
        assert name in found[f"checkpoints/{first.name}"]
    assert report.goes_on_from == trained.checkpoint(updates[-2]).name
    assert f"would go on from {report.goes_on_from}" in found["latest"]
    assert "seed was" in found["settings"]


def test_what_was_set_aside_is_verified_and_never_gone_on_from(trained: LinePaths) -> None:
    *_, before, newest = trained.checkpoint_updates()
    trained.set_aside.mkdir()
    shutil.move(trained.checkpoint(newest), trained.set_aside)
    trained.latest.write_text(f"{trained.checkpoint(before).name}\n")
    report = verify_line(trained.root)
    assert failures(report) == {}
    assert report.goes_on_from == trained.checkpoint(before).name
    flip(trained.set_aside / trained.checkpoint(newest).name / "exp_avg_sq.safetensors")
    assert failures(verify_line(trained.root)).keys() == {f"set-aside/{trained.checkpoint(newest).name}"}


def test_latest(trained: LinePaths) -> None:
    newest = trained.checkpoint_updates()[-1]
    trained.latest.unlink()
    assert "names no checkpoint" in failures(verify_line(trained.root))["latest"]
    trained.latest.write_text(f"u{newest + 1:08d}\n")
    assert f"u{newest + 1:08d} is not sound" in failures(verify_line(trained.root))["latest"]
    older = trained.checkpoint(trained.checkpoint_updates()[-2]).name
    trained.latest.write_text(f"{older}\n")
    assert verify_line(trained.root).goes_on_from == older
    shutil.rmtree(trained.checkpoints)
    trained.checkpoints.mkdir()
    trained.latest.write_text(f"u{newest:08d}\n")
    assert "nothing: the line cannot go on" in failures(verify_line(trained.root))["latest"]


def test_leftovers_are_told_and_do_no_harm(trained: LinePaths) -> None:
    (trained.checkpoints / "u00000099.partial").mkdir()
    report = verify_line(trained.root)
    assert failures(report) == {}
    assert "u00000099.partial" in next(item.message for item in report.verified if item.what == "leftovers")


def test_a_checkpoint_that_the_line_removes_meanwhile_is_no_finding(
    trained: LinePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    rolling = next(u for u in trained.checkpoint_updates() if not read_state(trained.checkpoint(u))["kept"])

    def remove_first(path: Path) -> None:
        if path == trained.checkpoint(rolling):
            shutil.rmtree(path)
            raise FileNotFoundError(path)

    monkeypatch.setattr("nstrain.ops.verify.verify_checkpoint", remove_first)
    assert failures(verify_line(trained.root)) == {}


def test_what_a_running_line_commits_and_removes_meanwhile_is_no_finding(trained: LinePaths, tmp_path: Path) -> None:
    *_, rolling, newest = trained.checkpoint_updates()
    names = before, between, last = [trained.checkpoint(u).name for u in (rolling, newest - 1, newest)]
    later = shutil.move(trained.checkpoints / last, tmp_path / "later")
    trained.latest.write_text(f"{before}\n")

    def commit_between() -> None:
        (trained.checkpoints / between).mkdir()
        trained.latest.write_text(f"{between}\n")

    def commit_last() -> None:
        shutil.rmtree(trained.checkpoints / between)
        shutil.move(later, trained.checkpoints / last)
        trained.latest.write_text(f"{last}\n")

    the_line_goes_on: dict[str, Callable[[], None]] = {
        f"checkpoints/{before}": commit_between,
        f"checkpoints/{between}": commit_last,
        "settings": lambda: shutil.rmtree(trained.checkpoints / last),  # a still later one is there
    }
    report = verify_line(trained.root, lambda what: the_line_goes_on.get(what, lambda: None)())
    assert failures(report) == {}
    assert report.goes_on_from == last
    assert {f"checkpoints/{name}" for name in names} <= {item.what for item in report.verified}


def test_a_data_line_that_is_not_the_one_that_was_trained(trained: LinePaths) -> None:
    manifest = work_of(trained) / "manifests" / "000001.json"
    value = json.loads(manifest.read_text())
    value["sources"]["prose"]["documents"] += 1
    manifest.write_bytes(canonical_json(value) + b"\n")
    assert "000001.json: expected sha256" in failures(verify_line(trained.root))["order"]
    manifest.unlink()
    assert "no such manifest" in failures(verify_line(trained.root))["order"]
    shutil.rmtree(work_of(trained))
    assert {"data line", "order"} <= failures(verify_line(trained.root)).keys()


def test_another_order_of_the_same_rows(trained: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nstrain.data.order.RowOrder.digest", lambda self: "another")
    assert "the rows of cycle 1 came in an order" in failures(verify_line(trained.root))["order"]


def edit_journal(statement: str) -> Callable[[LinePaths], None]:
    def edit(paths: LinePaths) -> None:
        with sqlite3.connect(paths.journal) as db:
            assert db.execute(statement).rowcount > 0
        db.close()

    return edit


def rolled_back_alone(paths: LinePaths) -> None:
    with Journal.open(paths.journal, load_run(paths.run_json).metrics) as journal:
        journal.begin_generation(8)


def rolled_back_and_trained_again(paths: LinePaths) -> None:
    """The record of after a rollback, exactly up to a checkpoint of before it."""
    with Journal.open(paths.journal, load_run(paths.run_json).metrics) as journal:
        rows = list(journal.rows(from_update=4))
        journal.begin_generation(4)
        for row in rows:
            journal.commit(int(row["update"]), {name: row[name] for name in row.keys() - {"update", "generation"}})


def of_another_version(paths: LinePaths) -> None:
    paths.journal.unlink()
    Journal.open(paths.journal, 99).close()


def damage_journal(paths: LinePaths) -> None:
    edit_journal("UPDATE rows SET key_set = key_set")(paths)
    data = paths.journal.read_bytes()
    size = int.from_bytes(data[16:18], "big")
    paths.journal.write_bytes(data[:size] + b"\x7f" * 64 + data[size + 64 :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda paths: paths.journal.unlink(), "missing; put the line's own journal back"),
        (edit_journal("DELETE FROM rows WHERE update_number = 3"), "update 3 (generation 1) has no row"),
        (edit_journal("DELETE FROM rows WHERE update_number > 3"), "update 4 (generation 1) has no row"),
        (edit_journal("UPDATE rows SET readings = zeroblob(length(readings)) WHERE update_number = 6"), "--to 4`"),
        (edit_journal("UPDATE key_sets SET names = replace(names, 'train/loss', 'train/lost')"), "other names"),
        (edit_journal("UPDATE head SET contents = replace(contents, '8', '7')"), "its head"),
        (rolled_back_alone, "ends at update 7, before the checkpoint"),
        (rolled_back_and_trained_again, "is of generation 1, "),
        (of_another_version, "metrics version 99"),
        (damage_journal, "put the journal back from a copy"),
        (lambda paths: paths.journal.write_bytes(b"not a database, though as long as one" * 300), "expected a journal"),
    ],
)
def test_a_damaged_journal(trained: LinePaths, damage: Callable[[LinePaths], None], message: str) -> None:
    damage(trained)
    found = failures(verify_line(trained.root))
    assert found.keys() == {"journal"}
    assert message in found["journal"]


def test_the_command(trained: LinePaths) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "nstrain.cli.main", "verify", str(trained.root), *arguments]
        return subprocess.run(program, capture_output=True, text=True, check=False)

    ran = command("--json")
    assert ran.returncode == 0, ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout)
    assert report == json.loads(json.dumps(dataclasses.asdict(verify_line(trained.root))))
    latest = read_latest(trained)
    assert latest is not None
    flip(trained.checkpoint(latest) / "state.json")
    ran = command()
    assert ran.returncode == 1
    assert f"FAILED  checkpoints/{trained.checkpoint(latest).name}" in ran.stdout
