"""The journal's rules: one row an update, nothing replaced, no gaps, readers see snapshots."""

from __future__ import annotations

import math
import os
import sqlite3
import struct
from pathlib import Path

import numpy as np
import pytest

from nstrain.base.errors import NstrainError, Refusal
from nstrain.record import journal as journal_module
from nstrain.record.journal import Journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def row(update: int, **more: float) -> dict[str, float]:
    return {"tokens": update * 512, "train/loss": 9.0 - update / 64, "time/wall": 1e9 + update, **more}


def fill(journal: Journal, first: int, last: int, generation: int = 0, **more: float) -> None:
    for update in range(first, last + 1):
        assert journal.commit(generation, update, row(update, **more)) == "new"


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_come_back_flat_in_order_with_their_kinds(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        assert journal.last_row() is None
        assert journal.last_update(0) is None
        assert list(journal.rows()) == []
        assert journal.names() == []
        journal.commit(0, 0, {"tokens": 0, "val_256/mix": 9.5})
        journal.commit(0, 1, {"tokens": 512, "skipped": 0, "train/loss": 2.0})
    with Journal.open_for_reading(path) as journal:
        rows = list(journal.rows())
        assert rows == [
            {"update": 0, "generation": 0, "tokens": 0, "val_256/mix": 9.5},
            {"update": 1, "generation": 0, "tokens": 512, "skipped": 0, "train/loss": 2.0},
        ]
        assert [type(value) for value in rows[1].values()] == [int, int, int, int, float]
        assert list(rows[1])[:2] == ["update", "generation"]
        assert journal.last_row() == rows[1]
        assert journal.last_update(0) == 1
        assert journal.last_update() == 1
        assert journal.last_update(1) is None
        assert journal.names() == ["update", "tokens", "generation", "skipped", "train/loss", "val_256/mix"]
        assert journal.metrics_version == 1


def test_rows_from_an_update_on(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 9)
        assert [r["update"] for r in journal.rows(from_update=7)] == [7, 8, 9]
        assert [r["update"] for r in journal.rows_since(7)] == [8, 9]
        assert journal.rows_since(9) == []


def test_a_library_s_numbers_are_recorded_as_python_s(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        journal.commit(0, 0, {"tokens": np.int64(5), "train/loss": np.float32(0.1)})  # type: ignore[dict-item]
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
            assert journal.commit(0, update, replayed) == "equal"
        assert list(journal.rows()) == before
        assert journal.digest() == digest
        assert journal.differences() == 0
        assert journal.commit(0, 6, row(6)) == "new"


def test_nan_equals_nan_whatever_its_payload(path: Path) -> None:
    payload = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]
    with Journal.open(path, 1) as journal:
        journal.commit(0, 0, {"tokens": 0, "train/grad_norm": math.nan})
        assert journal.commit(0, 0, {"tokens": 0, "train/grad_norm": payload}) == "equal"
        assert journal.commit(0, 0, {"tokens": 0, "train/grad_norm": -math.nan}) == "equal"


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
        journal.commit(0, 0, recorded)
        assert journal.commit(0, 0, replayed) == "different"
        assert journal.commit(0, 0, recorded) == "equal"
        assert journal.commit(0, 0, replayed) == "different"
        key = {"update": 0, "generation": 0}
    with Journal.open_for_reading(path) as reader:
        assert reader.differences() == 2
        assert str(list(reader.rows())) == str([{**key, **recorded}])
        assert str(list(reader.replays())) == str([{**key, **replayed}] * 2)


# ---- gaps, generations, refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [1, 7, -1])
def test_a_journal_begins_at_update_0(path: Path, update: int) -> None:
    with Journal.open(path, 1) as journal, pytest.raises(Refusal, match="must be one of 0 to 0"):
        journal.commit(0, update, row(update))


@pytest.mark.parametrize("update", [6, 7, 100, -1])
def test_a_gap_is_refused_and_nothing_written(path: Path, update: int) -> None:
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 4)
        before = journal.digest()
        with pytest.raises(Refusal, match=rf"0 to 5, found {update}: rows were lost"):
            journal.commit(0, update, row(update))
        assert journal.digest() == before
        assert journal.commit(0, 5, row(5)) == "new"


def test_a_rollback_opens_a_generation_and_the_lineage_follows_it(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 9)
        with pytest.raises(Refusal, match="must be one of 0 to 10"):
            journal.commit(1, 11, row(11))
        fill(journal, 5, 7, generation=1, extra=1.0)
        with pytest.raises(Refusal, match="generation 1 has begun"):
            journal.commit(0, 10, row(10))
        with pytest.raises(Refusal, match="must be one of 5 to 8"):
            journal.commit(1, 4, row(4))
        # Updates 8 and 9 of the abandoned generation are kept, but are not the line's.
        assert [(r["generation"], r["update"]) for r in journal.rows()] == [
            *((0, u) for u in range(5)),
            *((1, u) for u in range(5, 8)),
        ]
        assert [r["update"] for r in journal.rows(generation=0)] == list(range(10))
        assert [r["update"] for r in journal.rows(generation=1, from_update=6)] == [6, 7]
        assert journal.last_update() == 7
        assert journal.last_update(0) == 9
        with pytest.raises(
            Refusal, match="must be one of 0 to 8"
        ):  # what the abandoned generation reached is no matter
            journal.commit(2, 9, row(9))
        # Rolled back further: generation 1 is not the line's any more, but for nothing.
        fill(journal, 2, 3, generation=2)
        assert [(r["generation"], r["update"]) for r in journal.rows()] == [(0, 0), (0, 1), (2, 2), (2, 3)]
        assert "extra" not in journal.names()
        assert journal.rows_since(1) == list(journal.rows(generation=2))
        assert journal.commit(2, 3, row(3)) == "equal"


def test_a_replay_in_an_abandoned_generation_is_still_compared(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 3)
        fill(journal, 2, 2, generation=1)
        assert journal.commit(0, 3, row(3)) == "equal"


def test_what_is_no_number_is_refused_and_nothing_written(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        with pytest.raises(Refusal, match="train/loss"):
            journal.commit(0, 0, {"tokens": 1, "train/loss": "nan"})  # type: ignore[dict-item]
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
        with pytest.raises(Refusal, match="format 1, found 9"):
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


def test_a_second_writer_waits_and_then_says_who_may_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "BUSY_TIMEOUT_S", 0.1)
    with Journal.open(path, 1) as journal, Journal.open(path, 1) as second:
        fill(journal, 0, 0)
        with journal._transaction(), pytest.raises(NstrainError, match="locked by another process"):
            second.commit(0, 1, row(1))
        assert second.commit(0, 1, row(1)) == "new"


# ---- readers and digests ---------------------------------------------------------------------------------------------


def test_a_reader_sees_one_state_while_a_writer_commits(path: Path) -> None:
    with Journal.open(path, 1) as journal:
        fill(journal, 0, 9)
        with Journal.open_for_reading(path) as reader:
            with reader.snapshot():
                rows = reader.rows()
                seen = [next(rows)["update"]]
                fill(journal, 10, 19, new_name=1.0)
                journal.commit(0, 3, row(3, other=1.0))
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


def test_a_reader_cannot_write(path: Path) -> None:
    Journal.open(path, 1).close()
    with Journal.open_for_reading(path) as reader:
        assert not hasattr(reader, "commit")
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader._db.execute("DELETE FROM rows")


def test_the_digest_sees_every_reading_but_the_clock_s(tmp_path: Path) -> None:
    def digest(name: str, *rows: tuple[int, int, dict[str, float]]) -> str:
        with Journal.open(tmp_path / name, 1) as journal:
            for generation, update, readings in rows:
                journal.commit(generation, update, readings)
            return journal.digest()

    base = digest("base", (0, 0, {"a": 1.0, "b": 2}), (0, 1, {"a": math.nan, "time/wall": 1.0}))
    assert digest("same", (0, 0, {"b": 2, "a": 1.0}), (0, 1, {"a": -math.nan, "perf/x": 4.0})) == base
    others = [
        digest("value", (0, 0, {"a": 1.5, "b": 2}), (0, 1, {"a": math.nan})),
        digest("kind", (0, 0, {"a": 1.0, "b": 2.0}), (0, 1, {"a": math.nan})),
        digest("name", (0, 0, {"a": 1.0, "c": 2}), (0, 1, {"a": math.nan})),
        digest("short", (0, 0, {"a": 1.0, "b": 2})),
        digest("generation", (0, 0, {"a": 1.0, "b": 2}), (1, 1, {"a": math.nan})),
    ]
    assert len({base, *others}) == 6
