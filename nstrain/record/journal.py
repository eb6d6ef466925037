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
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from nstrain.base.disk import PARTIAL_SUFFIX, disk_full_is_named, fsync_dir
from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.killpoints import kill_point
from nstrain.record.local_disk import refuse_network_file_system
from nstrain.record.readings import Readings, comparable, in_printing_order, names_of, pack, refuse_unrecordable, unpack

FORMAT = 2
"""Version of the database's layout (SQLite's user_version)."""

FIRST_GENERATION = 1
"""The generation of a line that was never rolled back."""

PARENTS_GENERATION = 0
"""Of a branch: the generation of the rows that its parent trained."""

Committed = Literal["new", "equal", "different"]
"""What a commit found: no row of this update yet, an equal one, or a different one."""

Row = dict[str, float]
"""A flat row: update and generation, then the readings by name."""

BUSY_TIMEOUT_S = 10.0
"""How long a statement waits for a lock of another process (held for moments, during recovery and checkpoints)."""

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE generations (generation INTEGER PRIMARY KEY, first_update INTEGER NOT NULL);
CREATE TABLE key_sets (id INTEGER PRIMARY KEY, names TEXT NOT NULL UNIQUE);
CREATE TABLE rows (
    generation INTEGER NOT NULL, update_number INTEGER NOT NULL, key_set INTEGER NOT NULL REFERENCES key_sets (id),
    readings BLOB NOT NULL, PRIMARY KEY (generation, update_number));
CREATE TABLE replays (
    number INTEGER PRIMARY KEY AUTOINCREMENT, generation INTEGER NOT NULL, update_number INTEGER NOT NULL,
    key_set INTEGER NOT NULL REFERENCES key_sets (id), readings BLOB NOT NULL);
"""

_ROW = "generation, update_number, key_set, readings"

J = TypeVar("J", bound="JournalReader")


class JournalReader:
    """A journal to read; `Journal.open_for_reading` makes one."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection
        self._key_sets: dict[int, str] = {}
        try:
            self.metrics_version = self._read_metrics_version()
            """The version of the readings that the journal holds."""
        except BaseException:
            connection.close()
            raise

    def _read_metrics_version(self) -> int:
        (found,) = self._one("PRAGMA user_version")
        if found != FORMAT:
            raise Refusal(
                f"{self.path}: expected a journal of format {FORMAT}, found {found}; "
                "go on with the version of nstrain that wrote it"
            )
        (version,) = self._one("SELECT value FROM meta WHERE name = 'metrics_version'")
        return int(version)

    # ---- reading -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Within the block every read sees the same state, whatever a writer commits meanwhile."""
        with self._sqlite_errors_named():
            self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def rows(self, generation: int | None = None, from_update: int = 0) -> Iterator[Row]:
        """Rows in order of the updates, streamed: of the lineage, or of one generation as it was recorded."""
        if generation is not None:
            parts: list[tuple[int, int | None]] = [(generation, None)]
        else:
            parts = self._lineage()
        for part, until in parts:
            query = f"SELECT {_ROW} FROM rows WHERE generation = ? AND update_number >= ?"
            query += " AND (? IS NULL OR update_number < ?) ORDER BY update_number"
            yield from map(self._row, self._select(query, part, from_update, until, until))

    def rows_since(self, update: int) -> list[Row]:
        """The lineage's rows after an update: what a display that showed that one has yet to show."""
        return list(self.rows(from_update=update + 1))

    def last_row(self) -> Row | None:
        """The lineage's last row; None for an empty journal."""
        key = self._last_key()
        if key is None:
            return None
        return self._row(self._one(f"SELECT {_ROW} FROM rows WHERE generation = ? AND update_number = ?", *key))

    def last_update(self, generation: int | None = None) -> int | None:
        """The last update of a generation, or of the lineage; None if there is no row."""
        if generation is None:
            key = self._last_key()
            return None if key is None else key[1]
        (last,) = self._one("SELECT max(update_number) FROM rows WHERE generation = ?", generation)
        return None if last is None else int(last)

    def names(self) -> list[str]:
        """All names that the lineage's rows hold, update and generation among them, in printing order."""
        names: set[str] = set()
        for generation, until in self._lineage():
            key_sets = self._select(
                "SELECT DISTINCT key_set FROM rows WHERE generation = ? AND (? IS NULL OR update_number < ?)",
                *(generation, until, until),
            )
            for (key_set,) in list(key_sets):
                names.update(("update", "generation", *names_of(self._key_set(key_set))))
        return in_printing_order(names)

    def differences(self) -> int:
        """How many replayed updates differed from their row."""
        (count,) = self._one("SELECT count(*) FROM replays")
        return int(count)

    def replays(self) -> Iterator[Row]:
        """The replayed versions that differed from their row, in the order in which they came."""
        yield from map(self._row, self._select(f"SELECT {_ROW} FROM replays ORDER BY number"))

    def digest(self) -> str:
        """A hash (BLAKE2b-256) of all rows but for time/ and perf/: equal for two lines that did the same."""
        digest = hashlib.blake2b(digest_size=32)
        for row in self._select(f"SELECT {_ROW} FROM rows ORDER BY generation, update_number"):
            readings = comparable(unpack(self._key_set(row[2]), row[3]))
            digest.update(f"{row[0]} {row[1]} {len(readings)}\n".encode() + readings)
        return digest.hexdigest()

    def generation_at(self, update: int) -> int:
        """The generation that an update of the line as it stands belongs to, recorded or not."""
        query = "SELECT max(generation) FROM generations WHERE first_update <= ?"
        return int(self._one(query, update)[0])

    def _last_key(self) -> tuple[int, int] | None:
        """Generation and update of the lineage's last row."""
        for generation, until in reversed(self._lineage()):
            query = "SELECT max(update_number) FROM rows WHERE generation = ? AND (? IS NULL OR update_number < ?)"
            (last,) = self._one(query, generation, until, until)
            if last is not None:
                return generation, int(last)
        return None

    def _lineage(self) -> list[tuple[int, int | None]]:
        """The generations in order, each with the first update that is no longer its own (None: all are)."""
        starts = self._select("SELECT generation, first_update FROM generations ORDER BY generation")
        parts: list[tuple[int, int | None]] = []
        until: int | None = None
        for generation, first in reversed(list(starts)):
            if until is None or first < until:
                parts.append((generation, until))
                until = first
        return parts[::-1]

    def stored_rows(self, until: int) -> Iterator[tuple[int, int, bytes]]:
        """The lineage's rows up to an update as they lie in the file: update, number of the key set, readings."""
        query = "SELECT update_number, key_set, readings FROM rows WHERE generation = ? AND update_number < ?"
        for generation, end in self._lineage():
            end = until + 1 if end is None else min(end, until + 1)
            yield from self._select(f"{query} ORDER BY update_number", generation, end)

    def key_set_names(self, number: int) -> str:
        """The names of a key set, as the file has them."""
        return self._key_set(number)

    def _row(self, row: tuple[int, int, int, bytes]) -> Row:
        generation, update, key_set, readings = row
        return {"update": update, "generation": generation, **unpack(self._key_set(key_set), readings)}

    def _key_set(self, number: int) -> str:
        if number not in self._key_sets:
            (self._key_sets[number],) = self._one("SELECT names FROM key_sets WHERE id = ?", number)
        return self._key_sets[number]

    def _one(self, query: str, *arguments: Any) -> Any:
        with self._sqlite_errors_named():
            return self._db.execute(query, arguments).fetchone()

    def _select(self, query: str, *arguments: Any) -> Iterator[Any]:
        with self._sqlite_errors_named():
            for row in self._db.execute(query, arguments):  # noqa: UP028 - `yield from` would close the cursor too late
                yield row

    # ---- errors and closing ------------------------------------------------------------------------------------------

    def _sqlite_errors_named(self) -> contextlib.AbstractContextManager[None]:
        return _errors_named(self.path, writing=False)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def __enter__(self: J) -> J:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


class Journal(JournalReader):
    """A journal to write: for the one process that trains the line."""

    @classmethod
    def open(cls, path: Path, metrics_version: int) -> Journal:
        """The line's journal, made if there is none.

        Raises `Refusal` for a network file system, for a file that is no journal, and for a journal of another metrics
        version; `DiskFull` if there is no room to make one.
        """
        refuse_network_file_system(path)
        if not path.exists():
            _make(path, metrics_version, lambda db: _begin(db, FIRST_GENERATION, 0))
        with _errors_named(path, writing=True):
            connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            connection.execute("PRAGMA synchronous = FULL")
        journal = cls(path, connection)
        if journal.metrics_version != metrics_version:
            journal.close()
            raise Refusal(
                f"{path}: holds readings of metrics version {journal.metrics_version}, this nstrain records version "
                f"{metrics_version}. Go on with the version of nstrain that began the line, or make a new line."
            )
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
            log = _log_of(path)
            if log.exists() and log.stat().st_size:
                raise
            return JournalReader(path, _connect_to_read(path, uri + "&immutable=1"))

    def _sqlite_errors_named(self) -> contextlib.AbstractContextManager[None]:
        return _errors_named(self.path, writing=True)

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

            def fill(db: sqlite3.Connection) -> None:
                _begin(db, PARENTS_GENERATION, 0)
                _begin(db, FIRST_GENERATION, fork_update + 1)
                copied: dict[int, int] = {}
                for update, key_set, readings in parent.stored_rows(fork_update):
                    if key_set not in copied:
                        copied[key_set] = _key_set_number(db, parent.key_set_names(key_set))
                    row = (PARENTS_GENERATION, update, copied[key_set], readings)
                    db.execute(f"INSERT INTO rows ({_ROW}) VALUES (?, ?, ?, ?)", row)

            _make(path, parent.metrics_version, fill)

    def begin_generation(self, first_update: int) -> int:
        """Open the next generation: from `first_update` on the line is trained anew. Returns its number.

        What was recorded from there on stays in the file, but is no longer the line's. Asked again before anything of
        the new generation is recorded, it is the same one. Raises `Refusal` for an update beyond the next one.
        """
        with self._transaction():
            newest, first = self._one("SELECT generation, first_update FROM generations ORDER BY generation DESC")
            (begun,) = self._one("SELECT count(*) FROM rows WHERE generation = ?", newest)
            if first == first_update and not begun and newest > FIRST_GENERATION:
                return int(newest)
            self._refuse_gap(first_update)
            _begin(self._db, newest + 1, first_update)
            kill_point("journal:before commit")
        return int(newest) + 1

    def commit(self, update: int, readings: Readings) -> Committed:
        """Record an update of the line as it stands durably, or compare it with what was recorded of it before.

        Raises `Refusal` for a reading that is no number, and for an update that would leave a gap; `DiskFull` if there
        is no room. The journal is then as it was.
        """
        refuse_unrecordable(readings, f"{self.path}: update {update}")
        with self._transaction():
            self._refuse_gap(update)
            generation = self.generation_at(update)
            stored = self._one(
                "SELECT key_set, readings FROM rows WHERE generation = ? AND update_number = ?", generation, update
            )
            if stored is None:
                self._insert("rows", generation, update, readings)
                result: Committed = "new"
            elif comparable(unpack(self._key_set(stored[0]), stored[1])) == comparable(readings):
                result = "equal"
            else:
                self._insert("replays", generation, update, readings)
                result = "different"
            kill_point("journal:before commit")
        kill_point("journal:after commit")
        return result

    def _insert(self, table: str, generation: int, update: int, readings: Readings) -> None:
        names, values = pack(readings)
        key_set = _key_set_number(self._db, names)
        self._db.execute(f"INSERT INTO {table} ({_ROW}) VALUES (?, ?, ?, ?)", (generation, update, key_set, values))

    def _refuse_gap(self, update: int) -> None:
        last = self.last_update()
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
                raise


def _log_of(path: Path) -> Path:
    """SQLite's write-ahead log of a journal."""
    return path.with_name(path.name + "-wal")


def _connect_to_read(path: Path, uri: str) -> sqlite3.Connection:
    with _errors_named(path, writing=False):
        return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)


def _begin(db: sqlite3.Connection, generation: int, first_update: int) -> None:
    db.execute("INSERT INTO generations VALUES (?, ?)", (generation, first_update))


def _key_set_number(db: sqlite3.Connection, names: str) -> int:
    """The number of a set of names, which is added if it is new."""
    db.execute("INSERT OR IGNORE INTO key_sets (names) VALUES (?)", (names,))
    (number,) = db.execute("SELECT id FROM key_sets WHERE names = ?", (names,)).fetchone()
    return int(number)


def _make(path: Path, metrics_version: int, fill: Callable[[sqlite3.Connection], None]) -> None:
    """Make a journal under a temporary name, `fill` it, and give it its own name when it is whole."""
    log = _log_of(path)
    if log.exists():  # SQLite would play it into the new file.
        raise Refusal(f"{path}: missing, but its log {log} is there. Put the journal back, or move the log away.")
    temporary = path.with_name(path.name + PARTIAL_SUFFIX)
    for leftover in sorted(path.parent.glob(temporary.name + "*")):  # with SQLite's -journal, -wal, -shm
        leftover.unlink()
    with (
        _errors_named(temporary, writing=True),
        contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as db,
    ):
        db.executescript(_SCHEMA)
        db.execute("BEGIN")
        db.execute("INSERT INTO meta VALUES ('metrics_version', ?)", (metrics_version,))
        fill(db)
        db.execute("COMMIT")
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("PRAGMA journal_mode = WAL")
    kill_point("journal:made")
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.rename(temporary, path)
    fsync_dir(path.parent)


@contextlib.contextmanager
def _errors_named(path: Path, writing: bool) -> Iterator[None]:
    """Say what SQLite's errors mean for the journal at `path`."""
    try:
        yield
    except (sqlite3.ProgrammingError, sqlite3.IntegrityError, sqlite3.InterfaceError):
        raise  # a bug
    except sqlite3.DatabaseError as error:
        text = str(error)
        if text in ("database or disk is full", "disk I/O error"):
            if writing:
                with disk_full_is_named(path):
                    _try_to_write_beside(path)
            raise NstrainError(f"{path}: {text}; look into the system's log for the state of the disk") from error
        if text == "database is locked":
            raise NstrainError(
                f"{path}: locked by another process for more than {BUSY_TIMEOUT_S:.0f} s; end what writes it "
                "(only the line's trainer may) and run the same command again"
            ) from error
        if isinstance(error, sqlite3.OperationalError):
            raise NstrainError(f"{path}: {text}") from error
        raise Refusal(
            f"{path}: expected a journal, found something else ({text}); put the journal back from a copy"
        ) from error


def _try_to_write_beside(path: Path) -> None:
    """Raise the system's own error if no room, a quota or a size limit keeps the journal from growing.

    SQLite reports a quota and a size limit as "disk I/O error", as it does for a broken disk.
    """
    probe = path.with_name(path.name + ".probe" + PARTIAL_SUFFIX)
    end = max((file.stat().st_size for file in (path, _log_of(path)) if file.exists()), default=0)
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        block = memoryview(bytes(1 << 16))
        while block:
            written = os.pwrite(fd, block, end + (1 << 16) - len(block))
            block = block[written:]
        os.fsync(fd)
    finally:
        os.close(fd)
        probe.unlink()
