"""The journal as JSON Lines and as a table."""

from __future__ import annotations

import csv
import io
import json
import math
import struct
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nstrain.record.export import export
from nstrain.record.journal import Journal
from nstrain.record.readings import KEY_NAMES

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

names = st.one_of(
    st.sampled_from(["tokens", "cycle", "skipped", "train/loss", "val_256/mix", "time/wall"]),
    st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=9).filter(
        lambda n: n not in KEY_NAMES
    ),
)
rows = st.lists(
    st.dictionaries(names, st.one_of(st.integers(-(2**53), 2**53), st.floats(width=64)), max_size=8), max_size=6
)


def strict(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


def read_jsonl(text: str) -> list[dict[str, Any]]:
    loaded = [json.loads(line, parse_constant=strict) for line in text.splitlines()]
    return [{k: NOT_FINITE[v] if isinstance(v, str) else v for k, v in row.items()} for row in loaded]


def read_csv(text: str) -> list[dict[str, Any]]:
    def number(field: str) -> float:
        if field in NOT_FINITE:
            return NOT_FINITE[field]
        return float(field) if set(".e") & set(field) else int(field)

    return [{k: number(v) for k, v in row.items() if v != ""} for row in csv.DictReader(io.StringIO(text, newline=""))]


def bits(row: dict[str, Any]) -> dict[str, tuple[type, bytes | None]]:
    return {k: (type(v), None if math.isnan(v) else struct.pack("<d", v)) for k, v in row.items()}


def exported(journal: Any, form: Literal["jsonl", "csv"]) -> str:
    file = io.StringIO()
    count = export(journal, form, file)
    assert count == sum(1 for _ in journal.rows())
    return file.getvalue()


@given(rows)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
def test_every_number_reads_back_to_its_bits(tmp_path: Path, recorded: list[dict[str, float]]) -> None:
    path = tmp_path / "journal.db"
    path.unlink(missing_ok=True)
    with Journal.open(path, 1) as journal:
        for update, readings in enumerate(recorded):
            journal.commit(update, readings)
        expected = [bits({"update": u, "generation": 1, **readings}) for u, readings in enumerate(recorded)]
        assert [bits(row) for row in read_jsonl(exported(journal, "jsonl"))] == expected
        assert [bits(row) for row in read_csv(exported(journal, "csv"))] == expected


@pytest.fixture
def journal(tmp_path: Path) -> Any:
    with Journal.open(tmp_path / "journal.db", 1) as journal:
        journal.commit(0, {"tokens": 0, "val_256/mix": 9.25, "val_256/b": 9.0, "time/wall": 1.5})
        journal.commit(1, {"tokens": 512, "skipped": 1, "train/loss": math.nan, "train/grad_norm": math.inf})
        journal.commit(2, {"tokens": 1024, "skipped": 0, "train/loss": -0.0, "train/grad_norm": -math.inf})
        yield journal


def test_jsonl_is_this(journal: Journal) -> None:
    assert exported(journal, "jsonl").splitlines() == [
        '{"update": 0, "tokens": 0, "generation": 1, "time/wall": 1.5, "val_256/b": 9.0, "val_256/mix": 9.25}',
        '{"update": 1, "tokens": 512, "generation": 1, "skipped": 1, "train/grad_norm": "Infinity", '
        '"train/loss": "NaN"}',
        '{"update": 2, "tokens": 1024, "generation": 1, "skipped": 0, "train/grad_norm": "-Infinity", '
        '"train/loss": -0.0}',
    ]


def test_csv_is_this(journal: Journal) -> None:
    assert exported(journal, "csv").splitlines() == [
        "update,tokens,generation,skipped,time/wall,train/grad_norm,train/loss,val_256/b,val_256/mix",
        "0,0,1,,1.5,,,9.0,9.25",
        "1,512,1,1,,Infinity,NaN,,",
        "2,1024,1,0,,-Infinity,-0.0,,",
    ]


def test_after_a_rollback_only_the_line_as_it_stands_is_exported(journal: Journal) -> None:
    journal.begin_generation(1)
    journal.commit(1, {"tokens": 512, "train/loss": 8.0})
    assert [(r["generation"], r["update"]) for r in read_jsonl(exported(journal, "jsonl"))] == [(1, 0), (2, 1)]
    header = exported(journal, "csv").splitlines()[0]
    assert "grad_norm" not in header


def test_rows_committed_during_an_export_are_not_part_of_it(journal: Journal) -> None:
    class CommitsMeanwhile(io.StringIO):
        def write(self, text: str) -> int:
            last = journal.last_update()
            assert last is not None
            journal.commit(last + 1, {"tokens": 0, f"new{last}": 1.0})
            return super().write(text)

    for form in ("jsonl", "csv"):
        before = journal.last_update()
        with Journal.open_for_reading(journal.path) as reader:
            file = CommitsMeanwhile()
            assert export(reader, form, file) == (before or 0) + 1
        assert "new" + str(before) not in file.getvalue()


def test_an_empty_journal(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "empty.db", 1) as journal:
        assert exported(journal, "jsonl") == ""
        assert exported(journal, "csv").strip() == ""
