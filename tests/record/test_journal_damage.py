"""Damage to the journal's bytes: what is read is what was written, or it is refused by name."""

from __future__ import annotations

import io
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.killpoints import VARIABLE
from nstrain.record.export import export
from nstrain.record.journal import Journal
from nstrain.record.journal_reader import JournalReader


def readings(update: int, *, validated: bool = False, shift: float = 0.0) -> dict[str, float]:
    draw = random.Random(update)
    row: dict[str, float] = {"tokens": update * 512, "skipped": 0, "train/loss": 9.0 - update / 64 + shift}
    row.update({f"train/r{i}": draw.random() for i in range(12)})
    if validated:
        row.update({f"val_256/s{i}": draw.random() for i in range(60)}, extra=math.nan)
    return row


def fill(journal: Journal, first: int, last: int) -> None:
    for update in range(first, last + 1):
        assert journal.commit(update, readings(update, validated=update % 8 == 0)) == "new"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a journal with three generations, several pages a tree, and replays that differed."""
    path = tmp_path_factory.mktemp("sound") / "journal.db"
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 29)
        journal.begin_generation(20)
        fill(journal, 20, 50)
        for update in (33, 40):
            assert journal.commit(update, readings(update, shift=1.0)) == "different"
        journal.begin_generation(48)
        fill(journal, 48, 56)
    return path.read_bytes()


def exported(journal: JournalReader, form: Any) -> str:
    text = io.StringIO()
    export(journal, form, text)
    return text.getvalue()


READS: tuple[Callable[[JournalReader], Any], ...] = (
    lambda journal: journal.metrics_version,
    lambda journal: list(journal.rows()),
    lambda journal: list(journal.rows(from_update=40)),
    lambda journal: list(journal.rows(generation=1)),
    lambda journal: journal.last_row(),
    lambda journal: journal.last_update(),
    lambda journal: journal.last_update(2),
    lambda journal: journal.names(),
    lambda journal: journal.differences(),
    lambda journal: list(journal.replays()),
    lambda journal: journal.digest(),
    lambda journal: [journal.generation_at(update) for update in (0, 19, 20, 47, 48, 57)],
    lambda journal: list(journal.stored_rows(49)),
    lambda journal: exported(journal, "csv"),
    lambda journal: exported(journal, "jsonl"),
)


def all_read(path: Path) -> list[str]:
    """What each read gives, as text; "refused" where it refuses and names the journal."""

    def read(journal: JournalReader, what: Callable[[JournalReader], Any]) -> str:
        try:
            return repr(what(journal))
        except NstrainError as error:
            return refused(path, error)

    try:
        with Journal.open_for_reading(path) as journal:
            return [read(journal, what) for what in READS]
    except NstrainError as error:
        return [refused(path, error)] * len(READS)


def refused(path: Path, error: NstrainError) -> str:
    return "refused" if str(error).startswith(f"{path}: ") else f"does not name the journal: {error}"


def one_bit(data: bytearray, dice: random.Random) -> None:
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def one_sector(data: bytearray, dice: random.Random) -> None:
    """512 bytes come back as zeros, or as another sector's."""
    to, other = (512 * dice.randrange(len(data) // 512) for _ in range(2))
    data[to : to + 512] = dice.choice((bytes(512), bytes(data[other : other + 512])))


def damaged(data: bytes, damage: Callable[[bytearray, random.Random], None], dice: random.Random) -> bytes:
    changed = bytearray(data)
    damage(changed, dice)
    return bytes(changed)


@pytest.mark.parametrize(("damage", "times"), [(one_bit, 300), (one_sector, 100)])
def test_damage_anywhere_is_refused_by_name_or_changes_no_read(
    sound: bytes, tmp_path: Path, damage: Callable[[bytearray, random.Random], None], times: int
) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(sound)
    expected = all_read(path)
    assert "refused" not in expected
    dice = random.Random(5)
    refusals = 0
    for _ in range(times):
        path.write_bytes(damaged(sound, damage, dice))
        for found, right in zip(all_read(path), expected, strict=True):
            assert found in (right, "refused")
            refusals += found == "refused"
    assert refusals > times  # most bytes are those of rows, and several reads see each


def test_a_flipped_bit_never_lets_the_writer_record_a_falsehood(sound: bytes, tmp_path: Path) -> None:
    """A replay that is equal is never taken as different, and a row that was committed comes back."""
    path = tmp_path / "journal.db"
    dice = random.Random(6)
    outcomes: list[tuple[int, str]] = []
    for _ in range(300):
        path.write_bytes(damaged(sound, one_bit, dice))
        for leftover in path.parent.glob("journal.db-*"):
            leftover.unlink()
        try:
            with Journal.open(path, 1) as journal:
                outcomes.append((52, journal.commit(52, readings(52))))
                outcomes.append((57, journal.commit(57, readings(57))))
                assert journal.last_row() == {"update": 57, "generation": 3, **readings(57)}
        except NstrainError as error:
            outcomes.append((0, refused(path, error)))
    assert set(outcomes) == {(52, "equal"), (57, "new"), (0, "refused")}


# ---- what is told, and what mends it ---------------------------------------------------------------------------------


def change(path: Path, statement: str, *values: Any) -> None:
    with sqlite3.connect(path) as db:
        assert db.execute(statement, values).rowcount == 1
    db.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The journal of a line with checkpoints after updates 4 and 8, and one beyond `latest`."""
    for name in ("u00000004", "u00000008", "u00000012"):
        (tmp_path / "a line" / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "a line" / "checkpoints" / "latest").write_text("u00000008\n")
    path = tmp_path / "a line" / "journal.db"
    with Journal.open(path, 1) as journal:
        for update in range(15):
            journal.commit(update, {"tokens": update, "train/loss": update / 8})
    return path


@pytest.mark.parametrize(("update", "checkpoint"), [(14, 8), (9, 8), (8, 4), (5, 4), (4, None), (0, None)])
def test_the_refusal_names_the_update_and_the_checkpoint_to_go_back_to(
    path: Path, update: int, checkpoint: int | None
) -> None:
    change(path, "UPDATE rows SET readings = randomblob(16) WHERE update_number = ?", update)
    with Journal.open_for_reading(path) as journal, pytest.raises(Refusal) as raised:
        list(journal.rows())
    told = str(raised.value)
    assert f"update {update} (generation 1) is not what was written" in told
    assert "put the journal back from a copy" in told
    remedy = None if checkpoint is None else f"`nstrain rollback '{path.parent}' --to {checkpoint}`"
    assert remedy in told if remedy else "rollback" not in told


def test_what_lies_beside_the_damage_can_be_read(path: Path) -> None:
    change(path, "UPDATE rows SET readings = zeroblob(16) WHERE update_number = 5")
    with Journal.open_for_reading(path) as journal:
        assert [row["update"] for row in journal.rows(from_update=6)] == list(range(6, 15))
        assert journal.last_update() == 14
    with Journal.open(path, 1) as journal:
        assert journal.commit(15, {"tokens": 15, "train/loss": 15 / 8}) == "new"


def test_after_a_rollback_to_before_the_damage_the_line_is_whole(path: Path) -> None:
    """Also when the names were damaged: the set is made anew and the damaged one never used again."""
    change(path, "UPDATE key_sets SET names = replace(names, 'loss', 'lost')")
    with Journal.open(path, 1) as journal:
        with pytest.raises(Refusal, match="has other names than were written"):
            journal.commit(9, {"tokens": 9, "train/loss": 9 / 8})
        journal.begin_generation(0)
        for update in range(15):
            assert journal.commit(update, {"tokens": update, "train/loss": update / 8}) == "new"
        assert [row["train/loss"] for row in journal.rows()] == [update / 8 for update in range(15)]


def test_rows_that_changed_places_and_rows_that_are_gone_are_named(path: Path) -> None:
    whole = path.read_bytes()
    for statement, message in (
        ("UPDATE rows SET update_number = 99 WHERE update_number = 7", "update 7 .* has no row"),
        ("DELETE FROM rows WHERE update_number = 14", "update 14 .* has no row"),
        ("UPDATE rows SET readings = (SELECT readings FROM rows WHERE update_number = 3), checksum = (SELECT checksum "
         "FROM rows WHERE update_number = 3) WHERE update_number = 4", "update 4 .* is not what was written"),
        ("UPDATE rows SET key_set = 5 WHERE update_number = 4", "update 4 .* has no names"),
        ("UPDATE head SET contents = replace(contents, '14', '13')", "its head"),
    ):  # fmt: skip
        path.write_bytes(whole)
        change(path, statement)
        with pytest.raises(Refusal, match=message), Journal.open_for_reading(path) as journal:
            list(journal.rows())


# ---- a journal of the format before ----------------------------------------------------------------------------------

FORMAT_2 = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE generations (generation INTEGER PRIMARY KEY, first_update INTEGER NOT NULL);
CREATE TABLE key_sets (id INTEGER PRIMARY KEY, names TEXT NOT NULL UNIQUE);
CREATE TABLE rows (
    generation INTEGER NOT NULL, update_number INTEGER NOT NULL, key_set INTEGER NOT NULL REFERENCES key_sets (id),
    readings BLOB NOT NULL, PRIMARY KEY (generation, update_number));
CREATE TABLE replays (
    number INTEGER PRIMARY KEY AUTOINCREMENT, generation INTEGER NOT NULL, update_number INTEGER NOT NULL,
    key_set INTEGER NOT NULL REFERENCES key_sets (id), readings BLOB NOT NULL);
INSERT INTO meta VALUES ('metrics_version', 1);
PRAGMA user_version = 2;
PRAGMA journal_mode = WAL;
"""


def write_format_2(path: Path, journal: JournalReader) -> None:
    """What the nstrain of that format would have written of the same updates."""
    with sqlite3.connect(path) as db:
        db.executescript(FORMAT_2)
        db.execute("ATTACH ? AS new", (str(journal.path),))
        firsts = [(generation.number, generation.first_update) for generation in journal._head().generations]
        db.executemany("INSERT INTO generations VALUES (?, ?)", firsts)
        db.execute("INSERT INTO key_sets SELECT id, names FROM new.key_sets")
        columns = "generation, update_number, key_set, readings"
        for table in ("rows", "replays"):
            db.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}")
    db.close()


@pytest.fixture
def old(sound: bytes, tmp_path: Path) -> tuple[Path, list[str]]:
    """A journal of format 2, and what the same rows give in this format."""
    path = tmp_path / "journal.db"
    (tmp_path / "new.db").write_bytes(sound)
    expected = all_read(tmp_path / "new.db")
    with Journal.open_for_reading(tmp_path / "new.db") as journal:
        write_format_2(path, journal)
    return path, expected


def test_the_format_before_is_read_as_it_is_and_left_alone(old: tuple[Path, list[str]]) -> None:
    path, expected = old
    before = path.read_bytes()
    assert all_read(path) == expected
    assert path.read_bytes() == before


def test_the_format_before_gets_checksums_when_it_is_opened_to_be_written(old: tuple[Path, list[str]]) -> None:
    path, expected = old
    Journal.open(path, 1).close()
    assert all_read(path) == expected
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    dice = random.Random(9)
    upgraded = path.read_bytes()
    for _ in range(40):
        path.write_bytes(damaged(upgraded, one_bit, dice))
        assert all(found in (right, "refused") for found, right in zip(all_read(path), expected, strict=True))
    path.write_bytes(upgraded)
    with Journal.open(path, 1) as journal:
        assert journal.commit(52, readings(52)) == "equal"
        assert journal.commit(52, readings(52, shift=1.0)) == "different"
        assert journal.commit(57, readings(57)) == "new"
        assert journal.differences() == 3


def test_a_kill_in_the_midst_of_it_leaves_the_format_before(old: tuple[Path, list[str]]) -> None:
    path, expected = old
    program = (
        "import sys; from pathlib import Path; from nstrain.record.journal import Journal; "
        "Journal.open(Path(sys.argv[1]), 1)"
    )
    env = {**os.environ, VARIABLE: "journal:1"}
    killed = subprocess.run([sys.executable, "-c", program, str(path)], env=env, check=False)
    assert killed.returncode == -signal.SIGKILL
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
    db.close()
    assert all_read(path) == expected


def test_damage_to_the_format_before_ends_no_read_in_a_traceback(old: tuple[Path, list[str]]) -> None:
    path, _ = old
    whole = path.read_bytes()
    dice = random.Random(10)
    for number in range(120):
        path.write_bytes(damaged(whole, one_bit if number % 2 else one_sector, dice))
        assert not any(found.startswith("does not name the journal") for found in all_read(path))


def test_a_gap_in_the_format_before_is_found_too(old: tuple[Path, list[str]]) -> None:
    path, _ = old
    change(path, "DELETE FROM rows WHERE generation = 2 AND update_number = 30")
    with Journal.open_for_reading(path) as journal, pytest.raises(Refusal, match="update 30 .* has no row"):
        list(journal.rows())
