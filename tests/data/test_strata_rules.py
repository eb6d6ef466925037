"""Strata by file and by the value of a column, from the recipe to the tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import (
    PlainText,
    make_line,
    manifest_of,
    prepare,
    prepare_until_exhausted,
    prose_tree,
    source,
    stream_of,
    table_of,
    write_tree,
)
from mixed_line import HELD_OUT, mixed_line
from reader_files import write_records

from nstrain.base.errors import Refusal
from nstrain.data.init import load_recipe
from nstrain.data.line import DataLine
from nstrain.data.opening import SHARE_ONE
from nstrain.data.val import collect_held_out


class FileRow(NamedTuple):
    """A row as another reader sees it."""

    text: str | None
    stratum: str


def rows_of_file(line: DataLine, name: str, path: str) -> list[FileRow]:
    """All rows of a source's file, by other means than the code's readers."""
    import gzip

    file = Path(line.source(name).path or "") / path
    if name == "tree":
        return [FileRow(file.read_text(), path)]
    if name == "rows":
        records = [json.loads(data) for data in gzip.decompress(file.read_bytes()).splitlines()]
        kinds = [record["meta"]["kind"] for record in records]
        return [
            FileRow(record["text"], "(none)" if kind in (None, "") else str(kind))
            for record, kind in zip(records, kinds, strict=True)
        ]
    lists = pq.read_table(file)["files"].to_pylist()
    return [FileRow(item["content"], item["language"]) for items in lists for item in items]


def documents(line: DataLine, name: str, cycles: int) -> Iterator[tuple[str, str, int]]:
    """(stratum, path, row) of every document that a source draws in cycles 1 ... cycles."""
    listing = line.listing(name)
    for cycle in range(1, cycles + 1):
        for entry in table_of(line, cycle, name)[int(cycle > 1) :]:
            path = listing.files[entry["stratum"]][entry["file"]].path
            yield listing.strata[entry["stratum"]], path, int(entry["row"])


@pytest.fixture(scope="module")
def used_up(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[DataLine, int]:
    """The mixed line, prepared until a source runs out, and its number of cycles."""
    line = mixed_line(tmp_path_factory.mktemp("mixed"), tokenizer)
    cycle, message = prepare_until_exhausted(line)
    assert "runs out in cycle" in message
    assert cycle > 4
    return line, cycle - 1


@pytest.mark.parametrize("name", ["rows", "nested", "tree"])
def test_rows_go_to_their_stratum_and_each_once(used_up: tuple[DataLine, int], name: str, tokenizer: Path) -> None:
    line, cycles = used_up
    plain, tokens = PlainText(tokenizer), []
    seen: set[tuple[str, int]] = set()
    for stratum, path, row in documents(line, name, cycles):
        assert (path, row) not in seen  # over all strata of the file
        seen.add((path, row))
        found = rows_of_file(line, name, path)[row]
        assert found.text
        assert found.stratum == stratum
        assert not line.source(name).is_held_out(found.text)
        tokens += plain.document(found.text)
    streams = [stream_of(line, cycle, name) for cycle in range(1, cycles + 1)]
    whole = np.concatenate([streams[0][:1], *(stream[1:] for stream in streams)]).tolist()
    assert whole == tokens[: len(whole)]


@pytest.mark.parametrize("name", ["rows", "nested", "tree"])
def test_the_rows_of_a_file_are_counted_once_over_its_strata(used_up: tuple[DataLine, int], name: str) -> None:
    line, cycles = used_up
    state, listing = manifest_of(line, cycles)["after"][name], line.listing(name)
    expected: Counter[str] = Counter()
    for index, stratum in enumerate(state["strata"]):
        for file in listing.files[index][: stratum["next_file"]]:
            for row in rows_of_file(line, name, file.path):
                if row.stratum == listing.strata[index]:
                    kind = "rejected" if not row.text else "documents"
                    kind = "held_out" if row.text and line.source(name).is_held_out(row.text) else kind
                    expected.update([kind, "rows"])
    counts = state["counts"]
    assert {key: counts[key] for key in ("rows", "documents", "held_out", "rejected")} == {
        key: expected[key] for key in ("rows", "documents", "held_out", "rejected")
    }
    assert expected["held_out"]
    assert bool(expected["rejected"]) == (name == "rows")


def test_a_file_counts_for_each_of_its_strata_by_its_texts(used_up: tuple[DataLine, int]) -> None:
    line, _ = used_up
    assert line.listing("rows").strata == ("(none)", "7", "code", "mail", "prose")
    assert line.listing("nested").strata == ("x", "y", "z")
    assert [len(files) for files in line.listing("tree").files] == [1] * 80
    assert line.listing("tree").strata == tuple(files[0].path for files in line.listing("tree").files)
    for name in ("rows", "nested"):
        expected: Counter[tuple[str, str]] = Counter()
        for path in {file.path for files in line.listing(name).files for file in files}:
            for row in rows_of_file(line, name, path):
                expected[path, row.stratum] += len((row.text or "").encode())
        listing = line.listing(name)
        assert expected == Counter(
            {(f.path, listing.strata[f.stratum]): f.text_bytes for fs in listing.files for f in fs}
        )


def test_a_stratum_of_a_column_has_its_share_in_every_cycle(used_up: tuple[DataLine, int]) -> None:
    line, cycles = used_up
    for cycle in range(1, cycles + 1):
        for name, record in manifest_of(line, cycle)["sources"].items():
            table = table_of(line, cycle, name)
            lengths = np.diff(table["end"].astype(np.int64), prepend=0)
            for stratum, share in enumerate(record["shares"]):
                taken = int(lengths[table["stratum"] == stratum].sum())
                assert abs(taken - share * int(lengths.sum()) / SHARE_ONE) <= 3 * int(lengths.max())


def test_held_out_rows_of_columns_are_gathered_by_stratum(tmp_path: Path, tokenizer: Path) -> None:
    line = mixed_line(tmp_path, tokenizer, unit_tokens=8, cycle_tokens=640)
    index = collect_held_out(line, 4000)
    plain = PlainText(tokenizer)
    for name in ("rows", "nested"):
        stream = np.fromfile(line.work / "val" / f"{name}.bin", line.token_dtype).tolist()
        paths = sorted({file.path for files in line.listing(name).files for file in files})
        by_stratum: dict[str, list[str]] = {}
        for path in paths:
            for row in rows_of_file(line, name, path):
                if row.text and line.source(name).is_held_out(row.text):
                    by_stratum.setdefault(row.stratum, []).append(row.text)
        for group in index["sources"][name]["groups"]:
            texts = [text for stratum in group["strata"] for text in by_stratum.get(stratum, ())]
            part = stream[group["start"] : group["start"] + group["tokens"]]
            assert Counter(part) == Counter(token for text in texts for token in plain.document(text))


def test_a_file_of_rows_without_the_column_is_the_stratum_none(tmp_path: Path, tokenizer: Path) -> None:
    texts = list(prose_tree(3, {"a": 60}).values())
    write_records(tmp_path / "text" / "0.jsonl", [{"text": t, "kind": "x"} for t in texts[:30]])
    write_records(tmp_path / "text" / "1.jsonl", [{"text": t} for t in texts[30:]])
    (tmp_path / "text" / "2.jsonl").write_bytes(b"")
    fields = {
        "include": ["*.jsonl"],
        "reader": "jsonl",
        "text_column": "text",
        "stratum": {"by": "column", "column": "kind"},
    }
    line = make_line(tmp_path / "line", tokenizer, [source("web", tmp_path / "text", **fields)], 640, 1)
    listing = line.listing("web")
    assert listing.strata == ("(none)", "x")
    assert sorted(f.path for f in listing.files[0]) == ["1.jsonl", "2.jsonl"]
    assert [f.path for f in listing.files[1]] == ["0.jsonl"]
    prepare(line)
    assert all(share > 0 for share in manifest_of(line, 1)["sources"]["web"]["shares"])


# ------------------------------------------------------------------ refused at init


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no text column": (
        {"text_column": "content"},
        r"source web: .*has no column 'content'; it has .*text \(string\).*Correct the column",
    ),
    "no stratum column": (
        {"stratum": {"by": "column", "column": "lang"}},
        r"has no column 'lang'; it has .*meta\.kind",
    ),
    "no nested field": (
        {"stratum": {"by": "column", "column": "meta.lang"}},
        r"has no column 'meta\.lang'; it has .*meta\.kind",
    ),
    "a text that is a number": ({"text_column": "n"}, r"column 'n' .*expected"),
    "no path": ({"text_column": "a..b"}, r"column 'a\.\.b' is no path"),
}


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("what", WRONG)
def test_columns_that_are_not_there_are_refused_naming_what_is(
    tmp_path: Path, tokenizer: Path, ending: str, what: str
) -> None:
    fields, match = WRONG[what]
    write_records(tmp_path / "text" / f"0.{ending}", [{"text": "x" * 999, "n": 1, "meta": {"kind": "a"}}] * 9)
    reader = {"include": ["**/*"], "reader": ending.split(".")[0], "text_column": "text", **fields}
    with pytest.raises(Refusal, match=match):
        make_line(tmp_path / "line", tokenizer, [source("web", tmp_path / "text", **reader)], 640, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["line.recipe.json", "text"]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"reader": "text", "text_column": "x"}, "text_column is for the readers jsonl and parquet, found reader text"),
        ({"reader": "jsonl"}, "reader jsonl needs a text_column"),
        ({"reader": "parquet"}, "reader parquet needs a text_column"),
        ({"stratum": {"by": "column", "column": "x"}}, "strata by column need the reader jsonl or parquet"),
        ({"reader": "csv", "text_column": "x"}, r"'sources.0.reader'"),
        ({"stratum": {"by": "column"}}, r"column"),
        ({"stratum": {"by": "file", "depth": 1}}, r"depth"),
    ],
)
def test_readers_and_strata_that_do_not_fit_are_refused(tmp_path: Path, fields: dict[str, Any], match: str) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"format": 1, "sources": [source("web", tmp_path, **fields)]}))
    with pytest.raises(Refusal, match=match):
        load_recipe(path)


def test_a_later_file_without_the_columns_stops_the_line_by_name(tmp_path: Path, tokenizer: Path) -> None:
    """By column every file is read at init; else the file is met when it is opened."""
    rows = [{"text": text, "kind": "x"} for text in prose_tree(3, {"a": 30}).values()]
    write_records(tmp_path / "text" / "0.parquet", rows)
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "text" / "1.parquet")
    fields = {"include": ["*"], "reader": "parquet", "text_column": "text", "held_out": HELD_OUT}
    by_column = {**fields, "stratum": {"by": "column", "column": "kind"}}
    for wanted in (fields, by_column):
        with pytest.raises(Refusal, match=r"1\.parquet.*has no column '.*'; it has .*body"):
            make_line(tmp_path / "line", tokenizer, [source("web", tmp_path / "text", **wanted)], 64, 1)
    write_tree(tmp_path / "text", {"1.parquet": "PAR1 no more"})
    with pytest.raises(Refusal, match=r"1\.parquet"):
        make_line(tmp_path / "line", tokenizer, [source("web", tmp_path / "text", **fields)], 64, 1)
