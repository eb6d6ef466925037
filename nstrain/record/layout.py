"""The journal's tables: how the head, key sets and rows lie in SQLite, each with its checksum."""

from __future__ import annotations

import sqlite3

from nstrain.record.head import Head, row_checksum, text_checksum

FORMAT = 3
"""Version of the database's layout (SQLite's user_version)."""

UNCHECKED_FORMAT = 2
"""The layout before: no checksums, no head, but tables of the metrics version and of the generations."""

_SCHEMA = """
CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 1), contents TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE key_sets (id INTEGER PRIMARY KEY, names TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE rows (
    generation INTEGER NOT NULL, update_number INTEGER NOT NULL, key_set INTEGER NOT NULL REFERENCES key_sets (id),
    readings BLOB NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (generation, update_number));
CREATE TABLE replays (
    number INTEGER PRIMARY KEY, generation INTEGER NOT NULL, update_number INTEGER NOT NULL,
    key_set INTEGER NOT NULL REFERENCES key_sets (id), readings BLOB NOT NULL, checksum INTEGER NOT NULL);
"""

ROW = "generation, update_number, key_set, readings, checksum"


def write_head(db: sqlite3.Connection, head: Head) -> None:
    """Put the head in the place of the one before."""
    contents = head.to_json()
    db.execute("INSERT OR REPLACE INTO head VALUES (1, ?, ?)", (contents, text_checksum(contents)))


def add_key_set(db: sqlite3.Connection, names: str) -> int:
    """Add a set of names; returns its number."""
    added = db.execute("INSERT INTO key_sets (names, checksum) VALUES (?, ?)", (names, text_checksum(names)))
    assert added.lastrowid is not None
    return added.lastrowid


def add_row(
    db: sqlite3.Connection,
    table: str,
    generation: int,
    update: int,
    key_set: int,
    names: str,
    readings: bytes,
    **more: int,
) -> None:
    """Add a row with its checksum; `more` are further columns."""
    checksum = row_checksum(generation, update, text_checksum(names), readings)
    values = (generation, update, key_set, readings, checksum, *more.values())
    columns = ", ".join((ROW, *more))
    db.execute(f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(values))})", values)


def make_tables(db: sqlite3.Connection) -> None:
    """Make the tables, empty, within the transaction that is open."""
    for statement in _SCHEMA.split(";"):  # not `executescript`, which would commit
        db.execute(statement)


def add_checksums(db: sqlite3.Connection, head: Head) -> None:
    """Give the tables of UNCHECKED_FORMAT, of which `head` was read, this layout; within a transaction."""
    for table in ("rows", "replays", "key_sets"):
        db.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    make_tables(db)
    db.create_function("text_checksum", 1, text_checksum)
    db.create_function("row_checksum", 4, row_checksum)
    db.execute("INSERT INTO key_sets SELECT id, names, text_checksum(names) FROM old_key_sets")
    checked = (
        "generation, update_number, key_set, readings, row_checksum(generation, update_number, "
        "(SELECT checksum FROM key_sets WHERE id = key_set), readings)"
    )
    db.execute(f"INSERT INTO rows ({ROW}) SELECT {checked} FROM old_rows")
    db.execute(f"INSERT INTO replays ({ROW}) SELECT {checked} FROM old_replays ORDER BY number")
    for table in ("old_rows", "old_replays", "old_key_sets", "meta", "generations"):
        db.execute(f"DROP TABLE {table}")
    write_head(db, head)
    db.execute(f"PRAGMA user_version = {FORMAT}")
