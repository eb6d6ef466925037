"""The table of runs: JSON lines, one a run, only ever appended to, each complete or not there.

A run is identified by its job, the data's digest and the commit of the code. A line that was cut off by a crash is the
last one; it is dropped when the table is read, and written over by the next row.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.training import Job
from nstrain.base.errors import Refusal

Row = dict[str, Any]
JOB_FIELDS = tuple(field.name for field in dataclasses.fields(Job))


def job_of(row: Row) -> Job:
    """The job that a row is the result of."""
    return Job(**{name: row[name] for name in JOB_FIELDS})


class Table:
    """The rows of one file about one data set and one commit, or about all of them."""

    def __init__(self, path: Path, data: str, commit: str, any_commit: bool = False) -> None:
        """Reads the file if it is there; new rows will be of `commit`.

        Raises `Refusal` for a line that is no row, unless it is the cut-off last.
        """
        self._path, self._data, self._commit = path, data, commit
        self.rows: list[Row] = []
        self._good_bytes = 0
        if path.exists():
            for row, end in _rows(path):
                self._good_bytes = end
                if row["data"] == data and (any_commit or row["commit"] == commit):
                    self.rows.append(row)

    def find(self, job: Job) -> Row | None:
        """The newest row of a job."""
        return next((row for row in reversed(self.rows) if job_of(row) == job), None)

    def of(self, **fields: Any) -> list[Row]:
        """Rows with these values, oldest first."""
        return [row for row in self.rows if all(row[name] == value for name, value in fields.items())]

    def append(self, job: Job, found: Row) -> Row:
        """Add a run's row, on disk before this returns."""
        row: Row = plain({**dataclasses.asdict(job), "data": self._data, "commit": self._commit, **found})
        line = (json.dumps(row) + "\n").encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            if file.tell() > self._good_bytes:
                file.truncate(self._good_bytes)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._good_bytes += len(line)
        self.rows.append(row)
        return row


def _rows(path: Path) -> Iterator[tuple[Row, int]]:
    """(row, the byte after it) of every whole line."""
    end = 0
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
            job_of(row)
        except (ValueError, KeyError, TypeError) as error:
            raise Refusal(f"{path}, line {number} is no row of the study ({error!r}); take it out") from None
        end += len(line) + 1
        yield row, end


def plain(value: Any) -> Any:
    """A value as JSON has it: floats of six digits, and null for what is no number."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def by_rate(rows: Iterable[Row]) -> dict[float, list[Row]]:
    """One arm's rows of each rate: the newest of each seed, by seed."""
    found: dict[float, dict[int, Row]] = {}
    for row in rows:
        found.setdefault(row["rate"], {})[row["seed"]] = row
    return {rate: [seeds[seed] for seed in sorted(seeds)] for rate, seeds in found.items()}


def mean_loss(rows: Sequence[Row]) -> float:
    """The mean validation loss over the seeds of a rate; infinite if that of one is no number."""
    losses = [row["val"] for row in rows]
    return math.inf if None in losses else sum(losses) / len(losses)


def best(rows: Iterable[Row]) -> list[Row]:
    """One arm's rows, by seed, at the rate of the least mean loss over its seeds; none if it diverged at every rate."""
    found = min(by_rate(rows).values(), key=mean_loss, default=[])
    return found if found and math.isfinite(mean_loss(found)) else []
