"""The journal: one row an update, the truth about what a line did.

An SQLite database in write-ahead-log mode with `synchronous=FULL`: a row whose `commit` has returned survives `kill -9`
and a power cut. One writer (the trainer, which holds the line's lock), any number of readers, who see a consistent
snapshot and hold nobody up.

Rows are keyed by (generation, update). A line begins in generation 1; a rollback opens the next one, and says at which
update it begins: one that the line had reached. The *lineage* is the line as it stands: of each generation the rows
before the first update of any later one. It has no gap, so an update's generation follows from its number. The journal
of a branch begins with its parent's lineage up to the fork, as generation 0.

An update that is trained again after a restart is compared with its row (readings.py says what equal means). Equal:
nothing is written. Different: the row stays, the other version goes to the table `replays` under a running number, and
the two are counted; nothing is ever replaced. But if run.json was edited before the restart, the updates from the first
that differs on are trained otherwise on purpose: they open a generation. Readings of another metrics version are
refused: names, conditions or formulas differ, so one record cannot hold both.

Rows and key sets have checksums, and a head says which rows there are; journal_reader.py reads, and refuses damage by
name. A journal of format 2, which had neither, is read as it is, and gets them when it is next opened to be written.

The file is made under a temporary name and renamed, so a journal that exists has its tables.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from nstrain.base.disk import PARTIAL_SUFFIX, fsync_dir
from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.killpoints import kill_point
from nstrain.record.damage import BUSY_TIMEOUT_S, RowDamage, log_of, sqlite_errors_named
from nstrain.record.head import Generation, Head, Span
from nstrain.record.journal_reader import FIRST_GENERATION, PARENTS_GENERATION, JournalReader
from nstrain.record.layout import (
    FORMAT,
    UNCHECKED_FORMAT,
    add_checksums,
    add_key_set,
    add_row,
    make_tables,
    write_head,
)
from nstrain.record.local_disk import refuse_network_file_system
from nstrain.record.readings import Readings, comparable, pack, refuse_unrecordable

Committed = Literal["new", "equal", "different", "anew"]
"""What a commit found: no row of this update yet, an equal one, a different one, or one that it is meant to differ
from, so that it opened the next generation."""


class Journal(JournalReader):
    """A journal to write: for the one process that trains the line."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        super().__init__(path, connection)
        self._numbers: dict[str, int] = {}
        """The numbers of the key sets, by their names; filled at the first row."""

    @classmethod
    def open(cls, path: Path, metrics_version: int) -> Journal:
        """The line's journal, made if there is none.

        Raises `Refusal` for a network file system, for a file that is no journal, and for a journal of another metrics
        version; `DiskFull` if there is no room to make one.
        """
        refuse_network_file_system(path)
        if not path.exists():
            _make(path, lambda db: Head(metrics_version, (Generation(FIRST_GENERATION, 0, None),)))
        with sqlite_errors_named(path, writing=True):
            connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            connection.execute("PRAGMA synchronous = FULL")
        journal = cls(path, connection)
        if journal.metrics_version != metrics_version:
            journal.close()
            raise Refusal(
                f"{path}: holds readings of metrics version {journal.metrics_version}, this nstrain records version "
                f"{metrics_version}. Go on with the version of nstrain that began the line, or make a new line."
            )
        if journal._format == UNCHECKED_FORMAT:
            journal._add_checksums()
        return journal

    @staticmethod
    def open_for_reading(path: Path) -> JournalReader:
        """A journal to read, while a writer may be at work. Raises `Refusal` if there is no journal at `path`."""
        if not path.exists():
            raise Refusal(f"{path}: no such journal; it is made when the line is first run")
        uri = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode=ro"
        try:
            return JournalReader(path, _connect_to_read(path, uri))
        except Refusal:
            raise
        except NstrainError:
            # SQLite could not make its files beside the journal: the disk is full, or the directory is not ours to
            # write. Without a log the file itself is whole, and can be read as one that does not change.
            log = log_of(path)
            if log.exists() and log.stat().st_size:
                raise
            return JournalReader(path, _connect_to_read(path, uri + "&immutable=1"))

    def _sqlite_errors_named(self) -> contextlib.AbstractContextManager[None]:
        return sqlite_errors_named(self.path, writing=True)

    @staticmethod
    def make_branch(path: Path, parent: JournalReader, fork_update: int) -> None:
        """Make the journal of a branch: its parent's rows up to the fork as generation 0, then generation 1.

        Raises `Refusal` if the parent's journal does not reach the fork, or there is a journal already; `DiskFull` if
        there is no room. The journal appears whole or not at all.
        """
        refuse_network_file_system(path)
        if path.exists():
            raise Refusal(f"{path}: exists already")
        with parent.snapshot():
            last = parent.last_update()
            if last is None or last < fork_update:
                raise Refusal(f"{parent.path}: its last update is {last}, the fork is after update {fork_update}")

            def fill(db: sqlite3.Connection) -> Head:
                copied: dict[str, int] = {}
                for update, names, readings in parent.stored_rows(fork_update):
                    if names not in copied:
                        copied[names] = add_key_set(db, names)
                    add_row(db, "rows", PARENTS_GENERATION, update, copied[names], names, readings)
                own = Generation(FIRST_GENERATION, fork_update + 1, None)
                return Head(parent.metrics_version, (Generation(PARENTS_GENERATION, 0, fork_update), own))

            _make(path, fill)

    def begin_generation(self, first_update: int) -> int:
        """Open the next generation: from `first_update` on the line is trained anew. Returns its number.

        What was recorded from there on stays in the file, but is no longer the line's. Asked again before anything of
        the new generation is recorded, it is the same one. Raises `Refusal` for an update beyond the next one.
        """
        with self._transaction():
            head = self._head()
            newest = head.generations[-1]
            begun = newest.last_update is not None
            if newest.first_update == first_update and not begun and newest.number > FIRST_GENERATION:
                return newest.number
            self._refuse_gap(head, first_update)
            write_head(self._db, head.with_generation(newest.number + 1, first_update))
            kill_point("journal:before commit")
        return newest.number + 1

    def commit(self, update: int, readings: Readings, may_differ: bool = False) -> Committed:
        """Record an update of the line as it stands durably, or compare it with what was recorded of it before.

        `may_differ`: the line was changed on purpose since that was recorded. A row that differs then opens the next
        generation; what was recorded from there on stays in the file, but is no longer the line's.

        Raises `Refusal` for a reading that is no number, and for an update that would leave a gap; `DiskFull` if there
        is no room. The journal is then as it was.
        """
        refuse_unrecordable(readings, f"{self.path}: update {update}")
        with self._transaction():
            head = self._head()
            self._refuse_gap(head, update)
            generation = head.generation_at(update)
            names, values = pack(readings)
            if generation.last_update is None or generation.last_update < update:
                self._insert("rows", generation.number, update, names, values)
                write_head(self._db, head.with_row(generation.number, update))
                result: Committed = "new"
            else:
                (stored,) = self._stored(Span(generation.number, update, update), mendable=True)
                if comparable(self._unpacked(stored)) == comparable(readings):
                    result = "equal"
                elif may_differ:
                    number = head.generations[-1].number + 1
                    self._insert("rows", number, update, names, values)
                    write_head(self._db, head.with_generation(number, update).with_row(number, update))
                    result = "anew"
                else:
                    self._insert("replays", generation.number, update, names, values, number=head.differences + 1)
                    write_head(self._db, head.with_difference())
                    result = "different"
            kill_point("journal:before commit")
        kill_point("journal:after commit")
        return result

    def _insert(self, table: str, generation: int, update: int, names: str, readings: bytes, **more: int) -> None:
        if not self._numbers:
            for (number,) in list(self._select("SELECT id FROM key_sets ORDER BY id")):
                with contextlib.suppress(RowDamage):  # a set that is damaged is never used again
                    self._numbers[self._key_set(number)[0]] = number
        if names not in self._numbers:
            self._numbers[names] = add_key_set(self._db, names)
        add_row(self._db, table, generation, update, self._numbers[names], names, readings, **more)

    def _add_checksums(self) -> None:
        """Bring a journal of the format before up to this one; its rows are taken as they are."""
        with self._transaction():
            add_checksums(self._db, self._head())
            kill_point("journal:before commit")
        self._format = FORMAT
        self._key_sets.clear()

    def _refuse_gap(self, head: Head, update: int) -> None:
        last = head.last_update
        following = 0 if last is None else last + 1
        if not 0 <= update <= following:
            raise Refusal(
                f"{self.path}: the next update must be one of 0 to {following}, found {update}: rows were lost, or the "
                "checkpoint is not this line's. Put the journal back from a copy, or go on from a checkpoint of an "
                f"update up to {last or 0}."
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._sqlite_errors_named():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                self._key_sets.clear()
                self._numbers.clear()
                raise


def _connect_to_read(path: Path, uri: str) -> sqlite3.Connection:
    with sqlite_errors_named(path, writing=False):
        return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)


def _make(path: Path, fill: Callable[[sqlite3.Connection], Head]) -> None:
    """Make a journal under a temporary name, `fill` it, and give it its own name when it is whole."""
    log = log_of(path)
    if log.exists():  # SQLite would play it into the new file.
        raise Refusal(f"{path}: missing, but its log {log} is there. Put the journal back, or move the log away.")
    temporary = path.with_name(path.name + PARTIAL_SUFFIX)
    for leftover in sorted(path.parent.glob(temporary.name + "*")):  # with SQLite's -journal, -wal, -shm
        leftover.unlink()
    with (
        sqlite_errors_named(temporary, writing=True),
        contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as db,
    ):
        db.execute("BEGIN")
        make_tables(db)
        write_head(db, fill(db))
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode = WAL")
    kill_point("journal:made")
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.rename(temporary, path)
    fsync_dir(path.parent)
