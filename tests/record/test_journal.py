"""The journal's rules: one row an update, nothing replaced, no gaps, readers see snapshots."""

from __future__ import annotations

import math
import os
import sqlite3
import struct
from pathlib import Path

import numpy as np
import pytest

from nstrain.base.errors import DiskFull, NstrainError, Refusal
from nstrain.record import journal as journal_module
from nstrain.record.journal import Journal
from nstrain.record.journal_reader import JournalReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def row(update: int, **more: float) -> dict[str, float]:
    return {"tokens": update * 512, "train/loss": 9.0 - update / 64, "time/wall": 1e9 + update, **more}


def fill(journal: Journal, first: int, last: int, **more: float) -> None:
    for update in range(first, last + 1):
        assert journal.commit(update, row(update, **more)) == "new"


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directory", [b"plain", b"a b%20?#", "Größe".encode(), "Größe".encode("latin-1")])
def test_rows_come_back_flat_in_order_with_their_kinds(tmp_path: Path, directory: bytes) -> None:
    path = tmp_path / os.fsdecode(directory) / "journal.db"  # the last is what a locale of another encoding makes of it
    path.parent.mkdir()
    with Journal.open(path, 1) as journal:
        assert journal.last_row() is None
        assert journal.last_update() is None
        assert list(journal.rows()) == []
        assert journal.names() == []
        journal.commit(0, {"tokens": 0, "val_256/mix": 9.5})
        journal.commit(1, {"tokens": 512, "skipped": 0, "train/loss": 2.0})
    with Journal.open(path, 1) as journal:  # FULL and a log: what a commit has returned from survives a power cut
        assert [journal._one(f"PRAGMA {name}") for name in ("synchronous", "journal_mode")] == [(2,), ("wal",)]
    with Journal.open_for_reading(path) as journal:
        rows = list(journal.rows())
        assert rows == [
            {"update": 0, "generation": 1, "tokens": 0, "val_256/mix": 9.5},
            {"update": 1, "generation": 1, "tokens": 512, "skipped": 0, "train/loss": 2.0},
        ]
        assert [type(value) for value in rows[1].values()] == [int, int, int, int, float]
        assert list(rows[1])[:2] == ["update", "generation"]
        assert journal.last_row() == rows[1]
        assert journal.last_update() == 1
        assert journal.last_update() == 1
        assert journal.last_update(2) is None
        assert journal.names() == ["update", "tokens", "generation", "skipped", "train/loss", "val_256/mix"]
        assert journal.metrics_version == 1


def test_rows_from_an_update_on(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 9)
        assert [r["update"] for r in journal.rows(from_update=7)] == [7, 8, 9]
        assert [r["update"] for r in journal.rows(from_update=8)] == [8, 9]
        assert list(journal.rows(from_update=10)) == []


def test_a_library_s_numbers_are_recorded_as_python_s(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        journal.commit(0, {"tokens": np.int64(5), "train/loss": np.float32(0.1)})  # type: ignore[dict-item]
        (only,) = journal.rows()
        assert only["tokens"] == 5
        assert type(only["tokens"]) is int
        assert only["train/loss"] == float(np.float32(0.1))


def test_key_sets_are_stored_once(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 50)
        fill(journal, 51, 52, skipped=1)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM key_sets").fetchone() == (2,)
    db.close()


# ---- replays ---------------------------------------------------------------------------------------------------------


def test_an_equal_replay_writes_nothing(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 5)
        before, digest = list(journal.rows()), journal.digest()
        for update in range(3, 6):
            replayed = {**row(update), "time/wall": 7.0, "perf/tokens_per_s": 5.0}
            assert journal.commit(update, replayed) == "equal"
        assert list(journal.rows()) == before
        assert journal.digest() == digest
        assert journal.differences() == 0
        assert journal.commit(6, row(6)) == "new"


def test_nan_equals_nan_whatever_its_payload(path: Path) -> None:
    payload = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]
    with Journal.open(path, 1) as journal:
        journal.commit(0, {"tokens": 0, "train/grad_norm": math.nan})
        assert journal.commit(0, {"tokens": 0, "train/grad_norm": payload}) == "equal"
        assert journal.commit(0, {"tokens": 0, "train/grad_norm": -math.nan}) == "equal"


@pytest.mark.parametrize(
    ("recorded", "replayed"),
    [
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": 1.0}, {"a": math.nextafter(1.0, 2.0)}),
        ({"a": 1.0}, {"a": math.nan}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1.0}, {"a": 1.0, "b": 0.0}),
        ({"a": 1.0, "b": 0.0}, {"a": 1.0}),
    ],
)
def test_a_different_replay_is_kept_beside_the_row_and_counted(
    path: Path, recorded: dict[str, float], replayed: dict[str, float]
) -> None:
    with Journal.open(path, 1) as journal:
        journal.commit(0, recorded)
        assert journal.commit(0, replayed) == "different"
        assert journal.commit(0, recorded) == "equal"
        assert journal.commit(0, replayed) == "different"
        key = {"update": 0, "generation": 1}
    with Journal.open_for_reading(path) as reader:
        assert reader.differences() == 2
        assert str(list(reader.rows())) == str([{**key, **recorded}])
        assert str(list(reader.replays())) == str([{**key, **replayed}] * 2)
    for number in (2, 1):
        with sqlite3.connect(path) as db:
            db.execute("DELETE FROM replays WHERE number = ?", (number,))
        db.close()
        with Journal.open_for_reading(path) as reader, pytest.raises(Refusal, match=f"version {number} is missing"):
            list(reader.replays())


def test_names_of_a_row_that_was_not_committed_are_not_taken_for_recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(point: str) -> None:
        raise DiskFull("no room")

    with Journal.open(path, 1) as journal:
        journal.commit(0, {"a": 0.0})
        with monkeypatch.context() as at_the_commit:
            at_the_commit.setattr(journal_module, "kill_point", full)
            with pytest.raises(DiskFull):
                journal.commit(1, {"b": 1.0})
        journal.commit(1, {"c": 1.0})
        journal.commit(2, {"b": 2.0})
        assert [set(found) - {"update", "generation"} for found in journal.rows()] == [{"a"}, {"c"}, {"b"}]


# ---- gaps, generations, refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [1, 7, -1])
def test_a_journal_begins_at_update_0(path: Path, update: int) -> None:
    with Journal.open(path, 1) as journal, pytest.raises(Refusal, match="must be one of 0 to 0"):
        journal.commit(update, row(update))


@pytest.mark.parametrize("update", [6, 7, 100, -1])
def test_a_gap_is_refused_and_nothing_written(path: Path, update: int) -> None:
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 4)
        before = journal.digest()
        with pytest.raises(Refusal, match=rf"0 to 5, found {update}: rows were lost"):
            journal.commit(update, row(update))
        assert journal.digest() == before
        assert journal.commit(5, row(5)) == "new"


def keys(journal: JournalReader) -> list[tuple[int, int]]:
    """Generation and update of the line's rows."""
    return [(int(r["generation"]), int(r["update"])) for r in journal.rows()]


def test_a_rollback_opens_a_generation_and_the_lineage_follows_it(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 9)
        with pytest.raises(Refusal, match="must be one of 0 to 10, found 11"):
            journal.begin_generation(11)
        assert journal.begin_generation(5) == 2
        # Before anything of it is recorded, the line ends where the new generation begins.
        assert (journal.last_update(), journal.last_update(1)) == (4, 9)
        assert keys(journal) == [(1, u) for u in range(5)]
        assert journal.begin_generation(5) == 2, "asked again, it is the same one"
        with pytest.raises(Refusal, match="must be one of 0 to 5, found 6"):
            journal.commit(6, row(6))
        fill(journal, 5, 7, extra=1.0)
        # Updates 8 and 9 of the abandoned generation are kept, but are not the line's.
        assert keys(journal) == [*((1, u) for u in range(5)), *((2, u) for u in range(5, 8))]
        assert [r["update"] for r in journal.rows(generation=1)] == list(range(10))
        assert [r["update"] for r in journal.rows(generation=2, from_update=6)] == [6, 7]
        with pytest.raises(Refusal, match="0 to 8"):  # what the abandoned generation reached is no matter
            journal.commit(9, row(9))
        # Rolled back further: generation 2 is not the line's any more, but for nothing.
        assert journal.begin_generation(2) == 3
        assert journal.begin_generation(2) == 3
        fill(journal, 2, 3)
        assert keys(journal) == [(1, 0), (1, 1), (3, 2), (3, 3)]
        assert "extra" not in journal.names()
        assert list(journal.rows(from_update=2)) == list(journal.rows(generation=3))
        assert journal.begin_generation(2) == 4, "with rows of its own, the next is another one"
        assert keys(journal) == [(1, 0), (1, 1)]
        last = journal.last_row()
        assert last is not None
        assert (last["generation"], last["update"], journal.last_update()) == (1, 1, 1)


def test_each_update_is_of_the_generation_that_the_line_has_there(path: Path) -> None:
    """Also when a line goes on from a checkpoint before the one that it was rolled back to."""
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 6)
        journal.begin_generation(4)
        assert [journal.generation_at(u) for u in (0, 3, 4, 5)] == [1, 1, 2, 2]
        assert journal.commit(3, row(3)) == "equal"
        assert journal.commit(4, row(4, other=1.0)) == "new"
        assert journal.commit(4, row(4)) == "different", "compared with the row of the same generation"
        assert journal.commit(2, row(2), may_differ=True) == "equal"
        assert journal.commit(3, row(3, other=1.0), may_differ=True) == "anew"
        assert keys(journal) == [(1, 0), (1, 1), (1, 2), (3, 3)], "what was recorded otherwise is the line's no more"
        assert (journal.commit(4, row(4), may_differ=True), journal.differences()) == ("new", 1)


def test_a_branch_begins_with_its_parents_lineage_as_generation_0(path: Path, tmp_path: Path) -> None:
    branch = tmp_path / "branch" / "journal.db"
    branch.parent.mkdir()
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 9)
        journal.begin_generation(5)
        fill(journal, 5, 8, extra=1.0)
        before = journal.digest()
        with pytest.raises(Refusal, match="its last update is 8, the fork is after update 9"):
            Journal.make_branch(branch, journal, 9)
        assert list(branch.parent.iterdir()) == []
        Journal.make_branch(branch, journal, 6)
        expected = [{**r, "generation": 0} for r in journal.rows() if r["update"] <= 6]
        assert journal.digest() == before
    with Journal.open(branch, 1) as journal:
        assert list(journal.rows()) == expected
        assert (journal.last_update(), journal.generation_at(6), journal.generation_at(7)) == (6, 0, 1)
        with pytest.raises(Refusal, match="0 to 7, found 8"):
            journal.commit(8, row(8))
        fill(journal, 7, 8)
        assert journal.begin_generation(7) == 2
        assert keys(journal) == [(0, u) for u in range(7)]
    with Journal.open_for_reading(path) as parent, pytest.raises(Refusal, match="exists already"):
        Journal.make_branch(branch, parent, 3)
    second = tmp_path / "second.db"
    with Journal.open_for_reading(branch) as parent:
        Journal.make_branch(second, parent, 6)
    with Journal.open_for_reading(second) as journal:
        assert list(journal.rows()) == expected, "a branch of a branch has both before it"


def test_what_is_no_number_is_refused_and_nothing_written(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        with pytest.raises(Refusal, match="train/loss"):
            journal.commit(0, {"tokens": 1, "train/loss": "nan"})  # type: ignore[dict-item]
        assert journal.last_row() is None


def test_another_metrics_version_is_refused_with_the_remedy(path: Path) -> None:
    Journal.open(path, 1).close()
    with pytest.raises(Refusal, match=r"metrics version 1, this nstrain records version 2.*make a new line"):
        Journal.open(path, 2)
    with Journal.open_for_reading(path) as reader:  # readers take what is there
        assert reader.metrics_version == 1


def test_another_format_is_refused(path: Path) -> None:
    Journal.open(path, 1).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    for opened in (lambda: Journal.open(path, 1), lambda: Journal.open_for_reading(path)):
        with pytest.raises(Refusal, match="format 3 or 2, found 9"):
            opened()


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * 5000])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for opened in (lambda: Journal.open(path, 1), lambda: Journal.open_for_reading(path)):
        with pytest.raises(Refusal, match=r"journal\.db: expected a journal"):
            opened()
    assert path.read_bytes() == content


def test_no_journal_to_read_is_a_refusal(path: Path) -> None:
    with pytest.raises(Refusal, match="no such journal"):
        Journal.open_for_reading(path)


def test_a_log_without_its_journal_is_never_played_into_a_new_one(path: Path) -> None:
    path.with_name("journal.db-wal").write_bytes(b"rows that were")
    with pytest.raises(Refusal, match=r"journal\.db-wal"):
        Journal.open(path, 1)
    assert not path.exists()


def test_a_network_file_system_is_refused_before_anything_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstrain.record.local_disk import refuse_network_file_system

    monkeypatch.setattr(
        journal_module, "refuse_network_file_system", lambda p: refuse_network_file_system(p, "s:/ / nfs4 rw 0 0")
    )
    with pytest.raises(Refusal, match="nfs4"):
        Journal.open(path, 1)
    assert os.listdir(path.parent) == []


def test_garbage_of_a_killed_creation_is_written_over(path: Path) -> None:
    for ending in ("", "-journal", "-wal", "-shm"):
        path.with_name("journal.db.partial" + ending).write_bytes(b"half")
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 2)
    assert os.listdir(path.parent) == ["journal.db"]


def test_a_new_journal_is_on_the_disk_before_it_has_its_name_and_its_name_then(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), events.append(os.readlink(f"/proc/self/fd/{fd}"))))
    monkeypatch.setattr(os, "rename", lambda old, new: (rename(old, new), events.append("named")))
    Journal.open(path, 1).close()
    assert events == [f"{path}.partial", "named", str(path.parent)]


def test_a_second_writer_waits_and_then_says_who_may_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "BUSY_TIMEOUT_S", 0.1)
    with Journal.open(path, 1) as journal, Journal.open(path, 1) as second:
        fill(journal, 0, 0)
        with journal._transaction(), pytest.raises(NstrainError, match="locked by another process"):
            second.commit(1, row(1))
        assert second.commit(1, row(1)) == "new"


# ---- readers and digests ---------------------------------------------------------------------------------------------


def test_a_reader_sees_one_state_while_a_writer_commits(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 9)
        with Journal.open_for_reading(path) as reader:
            with reader.snapshot():
                rows = reader.rows()
                seen = [next(rows)["update"]]
                fill(journal, 10, 19, new_name=1.0)
                journal.commit(3, row(3, other=1.0))
                seen += [r["update"] for r in rows]
                assert seen == list(range(10))
                assert reader.last_update() == 9
                assert "new_name" not in reader.names()
                assert reader.differences() == 0
            assert reader.last_update() == 19
            assert reader.differences() == 1
            assert "new_name" in reader.names()


def test_an_unfinished_iteration_does_not_hold_up_the_writer(path: Path) -> None:
    with Journal.open(path, 1) as journal, Journal.open_for_reading(path) as reader:
        fill(journal, 0, 3)
        rows = reader.rows()
        next(rows)
        own = journal.rows()
        next(own)
        journal._db.execute("PRAGMA wal_autocheckpoint = 4")  # SQLite then copies its log back often
        fill(journal, 4, 60)
        assert [r["update"] for r in rows] == [1, 2, 3]
        assert journal.last_update() == 60


def test_a_log_that_cannot_be_read_is_not_left_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a log the file alone is the whole record, and is read where SQLite cannot make its files beside it."""
    connect = journal_module._connect_to_read

    def alone(path: Path, uri: str) -> sqlite3.Connection:
        if "immutable" not in uri:
            raise NstrainError("unable to open database file")
        return connect(path, uri)

    monkeypatch.setattr(journal_module, "_connect_to_read", alone)
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 3)
        with pytest.raises(NstrainError, match="unable to open"):
            Journal.open_for_reading(path)
    with Journal.open_for_reading(path) as reader:
        assert reader.last_update() == 3


def test_a_reader_cannot_write(path: Path) -> None:
    Journal.open(path, 1).close()
    with Journal.open_for_reading(path) as reader:
        assert not hasattr(reader, "commit")
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader._db.execute("DELETE FROM rows")


def test_the_digest_sees_every_reading_but_the_clock_s(tmp_path: Path) -> None:
    def digest(name: str, *rows: tuple[int, dict[str, float]], rolled_back_to: int | None = None) -> str:
        with Journal.open(tmp_path / name, 1) as journal:
            for update, readings in rows:
                if update == rolled_back_to:
                    journal.begin_generation(update)
                journal.commit(update, readings)
            return journal.digest()

    base = digest("base", (0, {"a": 1.0, "b": 2}), (1, {"a": math.nan, "time/wall": 1.0}))
    assert digest("same", (0, {"b": 2, "a": 1.0}), (1, {"a": -math.nan, "perf/x": 4.0})) == base
    others = [
        digest("value", (0, {"a": 1.5, "b": 2}), (1, {"a": math.nan})),
        digest("kind", (0, {"a": 1.0, "b": 2.0}), (1, {"a": math.nan})),
        digest("name", (0, {"a": 1.0, "c": 2}), (1, {"a": math.nan})),
        digest("short", (0, {"a": 1.0, "b": 2})),
        digest("generation", (0, {"a": 1.0, "b": 2}), (1, {"a": math.nan}), rolled_back_to=1),
    ]
    assert len({base, *others}) == 6
