"""Reading the journal (journal.py tells what it is): every row that is read is the one that was written.

Rows and key sets have checksums, and the head, in one record with a checksum of its own, says which rows there are
(head.py). All reading goes through them: what is read is what was written, or damage is refused by name (damage.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar

from nstrain.base.errors import Refusal
from nstrain.record.damage import FROM_A_COPY, NotSqlite, RowDamage, damaged, sqlite_errors_named, unreadable_named
from nstrain.record.head import Generation, Head, Span, row_checksum, text_checksum
from nstrain.record.layout import FORMAT, ROW, UNCHECKED_FORMAT
from nstrain.record.readings import comparable, in_printing_order, names_of, unpack

FIRST_GENERATION = 1
"""The generation of a line that was never rolled back."""

PARENTS_GENERATION = 0
"""Of a branch: the generation of the rows that its parent trained."""

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


def _int_or_none(value: Any) -> int | None:
    return None if value is None else int(value)
