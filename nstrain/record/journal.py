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
the two are counted; nothing is ever replaced. Readings of another metrics version are refused: names, conditions or
formulas differ, so one record cannot hold both.

Rows and key sets have checksums, and the head, in one record with a checksum of its own, says which rows there are
(head.py). All reading goes through them: what is read is what was written, or damage is refused by name (damage.py).
A journal of format 2, which had neither, is read as it is, and gets them when it is next opened to be written.

The file is made under a temporary name and renamed, so a journal that exists has its tables.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar
from urllib.parse import quote

from nstrain.base.disk import PARTIAL_SUFFIX, fsync_dir
from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.killpoints import kill_point
from nstrain.record.damage import (
    BUSY_TIMEOUT_S,
    FROM_A_COPY,
    NotSqlite,
    RowDamage,
    damaged,
    log_of,
    sqlite_errors_named,
    unreadable_named,
)
from nstrain.record.head import Generation, Head, Span, row_checksum, text_checksum
from nstrain.record.layout import (
    FORMAT,
    ROW,
    UNCHECKED_FORMAT,
    add_checksums,
    add_key_set,
    add_row,
    make_tables,
    write_head,
)
from nstrain.record.local_disk import refuse_network_file_system
from nstrain.record.readings import Readings, comparable, in_printing_order, names_of, pack, refuse_unrecordable, unpack

FIRST_GENERATION = 1
"""The generation of a line that was never rolled back."""

PARENTS_GENERATION = 0
"""Of a branch: the generation of the rows that its parent trained."""

Committed = Literal["new", "equal", "different"]
"""What a commit found: no row of this update yet, an equal one, or a different one."""

Row = dict[str, float]
"""A flat row: update and generation, then the readings by name."""


class _Stored(NamedTuple):
    """A row as it lies in the file, found to be what was written."""

    generation: int
    update: int
    names: str
    """Of its key set."""
    readings: bytes


J = TypeVar("J", bound="JournalReader")


class JournalReader:
    """A journal to read; `Journal.open_for_reading` makes one."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection
        self._key_sets: dict[int, tuple[str, int]] = {}
        try:
            (self._format,) = self._one("PRAGMA user_version")
            if self._format not in (UNCHECKED_FORMAT, FORMAT):
                raise Refusal(
                    f"{self.path}: expected a journal of format {FORMAT} or {UNCHECKED_FORMAT}, found {self._format}; "
                    f"go on with the version of nstrain that wrote it, or {FROM_A_COPY} if the file is damaged"
                )
            self.metrics_version = self._head().metrics_version
            """The version of the readings that the journal holds."""
        except BaseException:
            connection.close()
            raise

    def _head(self) -> Head:
        """Which rows the journal holds."""
        if self._format == UNCHECKED_FORMAT:
            return self._head_of_tables()
        found = self._one("SELECT contents, checksum FROM head WHERE id = 1")
        if found is None or not isinstance(found[0], str) or text_checksum(found[0]) != found[1]:
            raise damaged(self.path, "its head is not what was written")
        return Head.from_json(found[0])

    def _head_of_tables(self) -> Head:
        """The head of a journal that has none."""
        version = self._one("SELECT value FROM meta WHERE name = 'metrics_version'")
        (differences,) = self._one("SELECT count(*) FROM replays")
        found = self._select(
            "SELECT generation, first_update, (SELECT max(update_number) FROM rows "
            "WHERE rows.generation = generations.generation) FROM generations ORDER BY generation"
        )
        try:
            generations = tuple(
                Generation(int(number), int(first), _int_or_none(last)) for number, first, last in found
            )
            if not generations or generations[0].first_update != 0:
                raise ValueError("no generation of update 0")
            return Head(int(version[0]), generations, differences)
        except (TypeError, ValueError):
            raise damaged(self.path, "its tables of generations and versions cannot be read") from None

    # ---- reading -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Within the block every read sees the same state, whatever a writer commits meanwhile."""
        with self._sqlite_errors_named():
            self._db.execute("BEGIN")
        try:
            yield
        finally:
            with self._sqlite_errors_named():
                if self._db.in_transaction:  # an error may have ended it
                    self._db.execute("ROLLBACK")

    def rows(self, generation: int | None = None, from_update: int = 0) -> Iterator[Row]:
        """Rows in order of the updates, streamed: of the lineage, or of one generation as it was recorded."""
        head = self._head()
        spans = head.lineage() if generation is None else [s for s in head.recorded() if s.generation == generation]
        for span in spans:
            yield from map(self._row, self._stored(span, from_update, mendable=generation is None))

    def rows_since(self, update: int) -> list[Row]:
        """The lineage's rows after an update: what a display that showed that one has yet to show."""
        return list(self.rows(from_update=update + 1))

    def last_row(self) -> Row | None:
        """The lineage's last row; None for an empty journal."""
        lineage = self._head().lineage()
        if not lineage:
            return None
        (last,) = self._stored(lineage[-1], lineage[-1].last_update, mendable=True)
        return self._row(last)

    def last_update(self, generation: int | None = None) -> int | None:
        """The last update of a generation, or of the lineage; None if there is no row."""
        head = self._head()
        if generation is None:
            return head.last_update
        return next((span.last_update for span in head.recorded() if span.generation == generation), None)

    def names(self) -> list[str]:
        """All names that the lineage's rows hold, update and generation among them, in printing order."""
        key_sets: set[str] = set()
        for span in self._head().lineage():
            key_sets.update(row.names for row in self._stored(span, mendable=True))
        names = {name for key_set in key_sets for name in ("update", "generation", *names_of(key_set))}
        return in_printing_order(names)

    def differences(self) -> int:
        """How many replayed updates differed from their row."""
        return self._head().differences

    def replays(self) -> Iterator[Row]:
        """The replayed versions that differed from their row, in the order in which they came."""
        expected = self._head().differences
        query = f"SELECT number, {self._columns} FROM replays ORDER BY number LIMIT ?"
        count = 0
        for count, (number, *values) in enumerate(self._select(query, expected), start=1):
            try:
                if self._format == FORMAT and number != count:
                    raise RowDamage("is missing")
                row = self._checked(values)
            except RowDamage as damage:
                raise damaged(self.path, f"replayed version {count} {damage}") from None
            yield self._row(row)
        if count < expected:
            raise damaged(self.path, f"replayed version {count + 1} is missing")

    def digest(self) -> str:
        """A hash (BLAKE2b-256) of all rows but for time/ and perf/: equal for two lines that did the same."""
        digest = hashlib.blake2b(digest_size=32)
        for span in self._head().recorded():
            for row in self._stored(span):
                readings = comparable(self._unpacked(row))
                digest.update(f"{row.generation} {row.update} {len(readings)}\n".encode() + readings)
        return digest.hexdigest()

    def generation_at(self, update: int) -> int:
        """The generation that an update of the line as it stands belongs to, recorded or not."""
        return self._head().generation_at(update).number

    def stored_rows(self, until: int) -> Iterator[tuple[int, str, bytes]]:
        """The lineage's rows up to an update as they lie in the file: update, names of the key set, readings."""
        for span in self._head().lineage():
            for row in self._stored(span, until=until, mendable=True):
                yield row.update, row.names, row.readings

    @property
    def _columns(self) -> str:
        return ROW if self._format == FORMAT else ROW.replace("checksum", "NULL")

    def _stored(
        self, span: Span, first: int = 0, until: int | None = None, mendable: bool = False
    ) -> Iterator[_Stored]:
        """A span's rows from an update on, up to another; each must be there. `mendable`: a rollback mends these."""
        expected = max(first, span.first_update)
        last = span.last_update if until is None else min(until, span.last_update)
        if expected > last:
            return
        query = f"SELECT {self._columns} FROM rows WHERE generation = ? AND update_number BETWEEN ? AND ?"
        try:
            for values in self._select(f"{query} ORDER BY update_number", span.generation, expected, last):
                if values[:2] != (span.generation, expected):
                    break
                yield self._checked(values)
                expected += 1
            if expected <= last:
                raise RowDamage("has no row")
        except (RowDamage, NotSqlite) as damage:
            what = f"cannot be read ({damage.reason})" if isinstance(damage, NotSqlite) else str(damage)
            self._refuse_row(span.generation, expected, what, mendable)

    def _refuse_row(self, generation: int, update: int, what: str, mendable: bool) -> NoReturn:
        raise damaged(self.path, f"update {update} (generation {generation}) {what}", update if mendable else None)

    def _checked(self, values: Any) -> _Stored:
        """A row of the file. Raises `RowDamage` if it is not what was written."""
        generation, update, key_set, readings, checksum = values
        names, names_checksum = self._key_set(key_set)
        if not isinstance(readings, bytes):
            raise RowDamage("has readings of another kind")
        if self._format == FORMAT and checksum != row_checksum(generation, update, names_checksum, readings):
            raise RowDamage("is not what was written (its checksum differs)")
        return _Stored(generation, update, names, readings)

    def _key_set(self, number: Any) -> tuple[str, int]:
        """The names of a key set and their checksum. Raises `RowDamage` if they are not what was written."""
        if number not in self._key_sets:
            checksum = "checksum" if self._format == FORMAT else "NULL"
            found = self._one(f"SELECT names, {checksum} FROM key_sets WHERE id = ?", number)
            if found is None or not isinstance(found[0], str):
                raise RowDamage(f"has no names (key set {number!r})")
            computed = text_checksum(found[0])
            if self._format == FORMAT and computed != found[1]:
                raise RowDamage(f"has other names than were written (key set {number})")
            with unreadable_named():
                names_of(found[0])
            self._key_sets[number] = found[0], computed
        return self._key_sets[number]

    def _unpacked(self, row: _Stored) -> dict[str, float]:
        try:
            with unreadable_named():
                return unpack(row.names, row.readings)
        except RowDamage as damage:
            self._refuse_row(row.generation, row.update, str(damage), mendable=True)

    def _row(self, row: _Stored) -> Row:
        return {"update": row.update, "generation": row.generation, **self._unpacked(row)}

    def _one(self, query: str, *arguments: Any) -> Any:
        with self._sqlite_errors_named():
            return self._db.execute(query, arguments).fetchone()

    def _select(self, query: str, *arguments: Any) -> Iterator[Any]:
        with self._sqlite_errors_named():
            for row in self._db.execute(query, arguments):  # noqa: UP028 - `yield from` would close the cursor too late
                yield row

    # ---- errors and closing ------------------------------------------------------------------------------------------

    def _sqlite_errors_named(self) -> contextlib.AbstractContextManager[None]:
        return sqlite_errors_named(self.path, writing=False)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def __enter__(self: J) -> J:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


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
        uri = f"file:{quote(os.path.abspath(path))}?mode=ro"
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

    def commit(self, update: int, readings: Readings) -> Committed:
        """Record an update of the line as it stands durably, or compare it with what was recorded of it before.

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


def _int_or_none(value: Any) -> int | None:
    return None if value is None else int(value)


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
