"""A line whose journal is damaged, as an operator meets it: every command says what, and the remedy is one to type."""

from __future__ import annotations

import json
import random
import re
import shlex
import sqlite3

import pytest
from typer.testing import CliRunner, Result

from nstrain.base.errors import NstrainError
from nstrain.cli.main import app
from nstrain.line.paths import LinePaths
from nstrain.ops.verify import verify_line
from nstrain.record.journal import Journal
from nstrain.supervise.supervisor import Supervisor

COMMANDS = (
    ("journal", "--format", "jsonl"),
    ("journal", "--format", "csv"),
    ("plot",),
    ("status",),
    ("status", "--json"),
    ("verify",),
    ("check",),
)


def command(*words: str) -> Result:
    """A command, within this process; `main` makes a message of an NstrainError, a traceback of any other."""
    return CliRunner().invoke(app, list(words))


def damage_row(paths: LinePaths, update: int) -> None:
    with sqlite3.connect(paths.journal) as db:
        query = "SELECT readings FROM rows WHERE update_number = ?"
        readings = bytearray(db.execute(query, (update,)).fetchone()[0])
        readings[11] ^= 4
        db.execute("UPDATE rows SET readings = ? WHERE update_number = ?", (bytes(readings), update))
    db.close()


def rows_of(paths: LinePaths) -> list[dict[str, float]]:
    """What the line computed, without the clock and the generation."""
    with Journal.open_for_reading(paths.journal) as journal:
        return [
            {name: value for name, value in row.items() if not name.startswith(("time/", "perf/", "generation"))}
            for row in journal.rows()
        ]


def test_the_remedy_typed_as_it_is_told_gives_the_same_record_again(trained: LinePaths) -> None:
    before = rows_of(trained)
    damage_row(trained, 6)
    (said,) = [item.message for item in verify_line(trained.root).verified if not item.ok]
    assert "update 6 (generation 1) is not what was written" in said
    remedy = re.search(r"train from update 4 on again: `(nstrain rollback [^`]*)`", said)
    assert remedy, said
    rolled_back = command(*shlex.split(remedy[1])[1:])
    assert rolled_back.exit_code == 0, rolled_back.output
    assert Supervisor(trained.root, lambda text: None).run().outcome == "done"
    assert rows_of(trained) == before
    assert verify_line(trained.root).ok


def test_without_a_checkpoint_before_the_damage_only_a_copy_is_offered(trained: LinePaths) -> None:
    damage_row(trained, 0)
    (said,) = [item.message for item in verify_line(trained.root).verified if not item.ok]
    assert "update 0" in said
    assert "no checkpoint is left from before it" in said
    assert "rollback" not in said


def test_a_damaged_record_is_an_alarm_and_the_line_is_still_told(trained: LinePaths) -> None:
    sound = json.loads(command("status", str(trained.root), "--json").stdout)
    damage_row(trained, 8)
    found = json.loads(command("status", str(trained.root), "--json").stdout)
    assert [found[name] for name in ("state", "update", "tokens", "cycle")] == [
        sound[name] for name in ("state", "update", "tokens", "cycle")
    ]
    (alarm,) = found["alarms"]
    assert "update 8 (generation 1) is not what was written" in alarm


def test_check_reads_the_rows_that_a_start_would(trained: LinePaths) -> None:
    damage_row(trained, 6)
    checked = command("check", str(trained.root))
    assert checked.exit_code != 0
    assert "update 6 (generation 1) is not what was written" in " ".join(checked.output.split())


@pytest.mark.parametrize("seed", range(6))
def test_no_command_ends_in_a_traceback(trained: LinePaths, seed: int) -> None:
    dice = random.Random(seed)
    data = bytearray(trained.journal.read_bytes())
    for _ in range(8):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    trained.journal.write_bytes(data)
    for name, *options in COMMANDS:
        ran = command(name, str(trained.root), *options)
        assert ran.exception is None or isinstance(ran.exception, (SystemExit, NstrainError)), (name, ran.exception)
        assert "Traceback" not in ran.output
    assert "FAILED  journal" in command("verify", str(trained.root)).output
