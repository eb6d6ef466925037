"""The journal as text for other programs: one flat object, or line of a table, an update.

JSON Lines that strict parsers read: NaN and the infinities, for which JSON has no numbers, are the strings "NaN",
"Infinity" and "-Infinity". Floats have a point or an exponent, ints have neither, and floats are written in the
shortest form that reads back to the same bits; so nothing but a NaN's payload is lost.
"""

from __future__ import annotations

import csv
import json
import math
from typing import IO, Literal

from nstrain.record.journal_reader import JournalReader
from nstrain.record.readings import in_printing_order

Format = Literal["jsonl", "csv"]
"""What `export` writes."""


def _not_finite(value: float) -> str | None:
    """How a number that JSON does not know is written; None for the others."""
    if math.isfinite(value):
        return None
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def export(journal: JournalReader, form: Format, file: IO[str]) -> int:
    """Write the lineage's rows in order of the updates; returns how many.

    Columns: update, tokens, generation, cycle, row_tokens, rows, skipped, smaller, then the others in alphabetical
    order. In csv a reading that a row does not have is an empty field, in jsonl it is left out. Memory does not grow
    with the journal, and rows that are committed meanwhile are not part of it.
    """
    with journal.snapshot():
        return _export_csv(journal, file) if form == "csv" else _export_jsonl(journal, file)


def _export_jsonl(journal: JournalReader, file: IO[str]) -> int:
    count = 0
    for row in journal.rows():
        values = {name: _not_finite(row[name]) or row[name] for name in in_printing_order(row)}
        file.write(json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) + "\n")
        count += 1
    return count


def _export_csv(journal: JournalReader, file: IO[str]) -> int:
    names = journal.names()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(names)
    count = 0
    for row in journal.rows():
        table.writerow("" if name not in row else _not_finite(row[name]) or repr(row[name]) for name in names)
        count += 1
    return count
