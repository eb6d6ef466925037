"""Rows of every format: what is a row, what is rejected, columns and strata, the sample from a file's beginning."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import quick
from hypothesis import given
from hypothesis import strategies as st
from reader_files import FORMATS, compressed, json_lines, reader_of, rows, texts, write_records, write_texts

from nstrain.base.errors import Refusal
from nstrain.data.readers import (
    NO_STRATUM,
    MissingColumn,
    ReaderSettings,
    Row,
    estimate,
    jsonl,
    parquet,
    read_rows,
    refuse_missing_columns,
    scan_columns,
)
from nstrain.data.readers import rows as rows_module

TEXTS = [
    "one",
    "zwei\nlines",
    "三",
    "",
    " ",
    "nul \x00 in",
    "cr\r\nlf\r\n",
    "\ufeffmark",
    "tab\t\x0b",
    "\u2028",
    "x" * 3000,
]
EXPECTED = [text or None for text in TEXTS]


# ------------------------------------------------------------------ all formats alike


@pytest.mark.parametrize("name", FORMATS)
def test_texts_come_back_as_they_are_and_empty_ones_are_rejected(tmp_path: Path, name: str) -> None:
    assert texts(write_texts(tmp_path / name, TEXTS)) == EXPECTED


@pytest.mark.parametrize("name", FORMATS)
@quick(15)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=40),
    st.integers(1, 50), st.integers(1, 60), st.integers(1, 20),
)  # fmt: skip
def test_blocks_batches_and_row_groups_do_not_matter(
    tmp_path_factory: pytest.TempPathFactory, name: str, documents: list[str], block: int, batch: int, group: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / name
    write_texts(path, documents, **({"row_group_size": group} if name.endswith("parquet") else {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "BLOCK_BYTES", block)
        patch.setattr(parquet, "BATCH_BYTES", batch)
        patch.setattr(parquet, "MAX_BATCH_ROWS", batch)
        assert texts(path) == [text or None for text in documents]


RECORDS: list[dict[str, Any]] = [
    {"content": "a", "meta": {"text": "m1", "lang": "en"}, "files": [{"content": "f1", "lang": "c"}]},
    {"content": None, "meta": None, "files": None},
    {"content": "b", "meta": {"text": None, "lang": None}, "files": []},
    {"content": "c", "meta": {"text": "m4", "lang": ""},
     "files": [{"content": "f2", "lang": "py"}, {"content": None, "lang": "c"}, {"content": "", "lang": None}, None]},
    {"content": "d", "meta": {"text": "", "lang": "de"}, "files": [{"content": "f3", "lang": "c"}]},
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_nested_columns(tmp_path: Path, name: str) -> None:
    path = write_records(tmp_path / name, RECORDS)
    assert texts(path, "content") == ["a", None, "b", "c", "d"]
    assert texts(path, "meta.text") == ["m1", None, None, "m4", None]
    # A missing list is a rejected row, an empty one none at all; elements are rows, numbered over all lists.
    assert texts(path, "files[].content") == ["f1", None, "f2", None, None, None, "f3"]


@pytest.mark.parametrize("name", FORMATS)
def test_lists_of_strings(tmp_path: Path, name: str) -> None:
    path = write_records(tmp_path / name, [{"t": ["a", None, "b"]}, {"t": None}, {"t": []}, {"t": ["", "c"]}])
    assert texts(path, "t[]") == ["a", None, "b", None, None, "c"]


@pytest.mark.parametrize("name", FORMATS)
def test_strata_by_column(tmp_path: Path, name: str) -> None:
    path = write_records(tmp_path / name, RECORDS)
    by_row = [Row("a", "en"), Row(None, NO_STRATUM), Row("b", NO_STRATUM), Row("c", NO_STRATUM), Row("d", "de")]
    assert rows(path, "content", "meta.lang") == by_row
    by_element = [
        Row("f1", "c"), Row(None, NO_STRATUM), Row("f2", "py"), Row(None, "c"), Row(None, NO_STRATUM),
        Row(None, NO_STRATUM), Row("f3", "c"),
    ]  # fmt: skip
    assert rows(path, "files[].content", "files[].lang") == by_element
    row_of_elements = ["en", NO_STRATUM, *[NO_STRATUM] * 4, "de"]
    assert [row.stratum for row in rows(path, "files[].content", "meta.lang")] == row_of_elements
    for only in ("c", "py", NO_STRATUM, "not there"):
        found = rows(path, "files[].content", "files[].lang", only)
        assert found == [row if row.stratum == only else Row(None, row.stratum) for row in by_element]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("values", "strata"),
    [([3, None, -7], ["3", NO_STRATUM, "-7"]), ([True, False, None], ["true", "false", NO_STRATUM]),
     ([0.5, None, 2.0], ["0.5", NO_STRATUM, "2.0"])],
)  # fmt: skip
def test_strata_that_are_no_strings_are_named_as_they_are_written(
    tmp_path: Path, name: str, values: list[Any], strata: list[str]
) -> None:
    path = write_records(tmp_path / name, [{"content": "x", "s": value} for value in values])
    assert [row.stratum for row in rows(path, "content", "s")] == strata


# ------------------------------------------------------------------ json lines


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"content": "ok"}', "ok"),
        (b' {"content" : "ok"} \r', "ok"),
        (b'{"content": "a", "content": "b"}', "b"),
        (b'{"content": "ok", "score": NaN, "n": 1e999, "m": -Infinity}', "ok"),
        (b'{"content": "ok", "n": ' + b"9" * 10_000 + b"}", "ok"),
        (b'{"content": "\\ud83e\\udde0 \\u00e9"}', "\U0001f9e0 é"),
        (b'{"content": "\\u0000"}', "\x00"),
        (b'{"content": "\\ud800"}', None),
        (b'{"content": "\\udde0\\ud83e"}', None),
        (b'{"content": "\xff"}', None),
        (b'{"content": "\xed\xa0\x80"}', None),
        (b'{"content": "raw\ttab"}', None),
        (b'{"content": 5}', None),
        (b'{"content": NaN}', None),
        (b'{"content": null}', None),
        (b'{"content": ["a"]}', None),
        (b'{"content": {"content": "a"}}', None),
        (b'{"content": ""}', None),
        (b'{"other": "a"}', None),
        (b'"content"', None),
        (b'["content"]', None),
        (b"null", None),
        (b"", None),
        (b"  ", None),
        (b"{", None),
        (b'{"content": "a"} trailing', None),
        (b"{'content': 'a'}", None),
        (b'{"content": "ok", "d": ' + b"[" * 99 + b"]" * 99 + b"}", "ok"),
        (b'{"content": "ok", "d": ' + b"[" * 100 + b"]" * 100 + b"}", None),
        (b'{"content": "ok", "d": ' + b'{"e":' * 5000 + b"1" + b"}" * 5000 + b"}", None),
        (b'{"content": "' + b"[{" * 500 + b'"}', "[{" * 500),
        (b'{"content": "ok", "d": [' + b"[]," * 500 + b"[]]}", "ok"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_the_rule_for_json_lines(tmp_path: Path, name: str, line: bytes, text: str | None) -> None:
    """Between two good lines, so that a bad one is seen to spoil nothing."""
    before, after = json_lines([{"content": "before"}]), json_lines([{"content": "after"}])
    (tmp_path / name).write_bytes(compressed(name, before + line + b"\n" + after, frame_bytes=37))
    assert texts(tmp_path / name) == ["before", text, "after"]


def test_the_rule_does_not_depend_on_the_depth_of_the_callers_stack(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b'{"content": "x", "d": ' + b"[" * n + b"]" * n + b"}\n" for n in (99, 100, 600, 900)))

    def deep(levels: int) -> list[str | None]:
        return deep(levels - 1) if levels else texts(path)

    assert texts(path) == deep(400) == ["x", None, None, None]


def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    line = json_lines([{"content": "a"}])
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\xef\xbb\xbf" + line)
    assert texts(tmp_path / "rows.jsonl") == ["a", None]


def test_a_last_line_needs_no_newline_if_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for data, expected in (
        (b'{"content": "a"}', ["a"]),
        (b"", []),
        (b"\n", [None]),
        (b'{"content": 3}\n ', [None] * 2),
        (b'{"content": "\xff"}', [None]),
        (b'{"content": "a", "d": ' + b"[" * 5000 + b"]" * 5000 + b"}", [None]),
    ):
        path.write_bytes(data)
        assert texts(path) == expected


def test_a_line_too_long_to_hold_is_one_rejected_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_DOCUMENT_BYTES", 100)
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 16)
    lines = [{"content": "y" * n} for n in (3, 84, 85, 86, 500, 4)]
    for name in FORMATS[:3]:
        (tmp_path / name).write_bytes(compressed(name, json_lines(lines)))
        assert [text and len(text) for text in texts(tmp_path / name)] == [3, 84, 85, None, None, 4]
    (tmp_path / "rows.jsonl").write_bytes(json_lines(lines)[:-5] + b"x" * 200)  # and without a newline
    assert texts(tmp_path / "rows.jsonl")[-1] is None


# ------------------------------------------------------------------ parquet


def strings_of(values: list[bytes]) -> pa.Array:
    """A string array of any bytes: Arrow does not look."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


def test_invalid_utf8_in_a_string_column_is_one_rejected_row(tmp_path: Path) -> None:
    values = [b"a", b"\xff\xfe", "é".encode(), b"\xed\xa0\x80", b"ok"]
    expected = ["a", None, "é", None, "ok"]
    table = pa.table(
        {
            "content": strings_of(values),
            "raw": pa.array(values, pa.binary()),
            "meta": pa.StructArray.from_arrays([strings_of(values)], ["text"]),
            "l": pa.ListArray.from_arrays([0, 2, 2, 5, 5, 5], strings_of(values)),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    for column in ("content", "raw", "meta.text", "l[]"):
        assert texts(tmp_path / "rows.parquet", column) == expected
    assert [row.stratum for row in rows(tmp_path / "rows.parquet", "raw", "content")] == [
        s or NO_STRATUM for s in expected
    ]


@pytest.mark.parametrize(
    "type", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_type_that_holds_text(tmp_path: Path, type: pa.DataType) -> None:
    values = [b"a", None, b"", b"a"] if "binary" in str(type) else ["a", None, "", "a"]
    column = pa.array(values, type) if not pa.types.is_dictionary(type) else pa.array(values).dictionary_encode()
    pq.write_table(pa.table({"content": column, "lang": column}), tmp_path / "rows.parquet")
    expected = [Row("a", "a"), Row(None, NO_STRATUM), Row(None, NO_STRATUM), Row("a", "a")]
    assert rows(tmp_path / "rows.parquet", "content", "lang") == expected
    assert rows(tmp_path / "rows.parquet", "content", "lang", "a") == expected


def test_a_column_of_nulls_and_a_file_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": pa.nulls(3)}), tmp_path / "rows.parquet")
    assert texts(tmp_path / "rows.parquet") == [None] * 3
    pq.write_table(pa.table({"content": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    assert texts(tmp_path / "rows.parquet") == []


def test_a_text_too_long_to_hold_is_one_rejected_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_DOCUMENT_BYTES", 10)
    monkeypatch.setattr(rows_module, "MAX_DOCUMENT_BYTES", 10)
    assert texts(write_texts(tmp_path / "rows.parquet", ["a" * 10, "b" * 11, "é" * 6, "c"])) == [
        "a" * 10,
        None,
        None,
        "c",
    ]
    for size, expected in ((10, "a" * 10), (11, None)):
        (tmp_path / "f.txt").write_text("a" * size)
        assert list(read_rows(ReaderSettings("text"), tmp_path / "f.txt", "f")) == [Row(expected, None)]


# ------------------------------------------------------------------ columns that are not there


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "column", ["text", "meta", "meta.nothing", "files[]", "files.content", "content[]", "files[].x"]
)
def test_a_column_that_is_not_there_is_refused_with_what_is_there(tmp_path: Path, name: str, column: str) -> None:
    path = write_records(tmp_path / name, RECORDS)
    with pytest.raises(
        MissingColumn, match=r"web: has no column '.*'; it has content \(.*files\[\]\.content \("
    ) as error:
        refuse_missing_columns(reader_of(name, column), path, "web")
    assert f"'{column}'" in str(error.value)
    with pytest.raises(MissingColumn, match="has no column 'l'"):
        refuse_missing_columns(reader_of(name, "content", "l"), path, "web")
    refuse_missing_columns(reader_of(name, "files[].content", "files[].lang"), path, "web")
    if name.endswith(".parquet"):
        with pytest.raises(MissingColumn, match="has no column"):
            texts(path, column)


def test_columns_are_listed_with_their_types(tmp_path: Path) -> None:
    names = {"content", "meta.text", "meta.lang", "files[].content", "files[].lang"}
    with pytest.raises(MissingColumn, match="column 'n' holds number; expected strings"):
        refuse_missing_columns(reader_of("jsonl", "n"), write_texts(tmp_path / "rows.jsonl", ["a"]), "web")
    for name in FORMATS:
        there = scan_columns(reader_of(name), write_records(tmp_path / name, RECORDS))
        assert names <= set(there)
        assert "string" in there["content"]
    assert scan_columns(ReaderSettings("text"), tmp_path / "any") == {}
    (tmp_path / "empty.jsonl").write_bytes(b"\nnot json\n")
    refuse_missing_columns(reader_of("jsonl"), tmp_path / "empty.jsonl", "web")


def test_a_parquet_column_that_is_no_text_is_refused(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"content": [1, 2], "when": pa.array([1, 2], pa.timestamp("s"))}), tmp_path / "rows.parquet"
    )
    with pytest.raises(MissingColumn, match="column 'content' has type int64; expected strings"):
        texts(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"content": ["a"], "when": pa.array([1], pa.timestamp("s"))}), tmp_path / "rows.parquet")
    with pytest.raises(MissingColumn, match="column 'when' has type .* expected strings, numbers or booleans"):
        rows(tmp_path / "rows.parquet", "content", "when")


@pytest.mark.parametrize(
    ("fields", "match"),
    [(("text", "content"), "have no columns"), (("text", None, "lang"), "have no columns"),
     (("jsonl",), "name the one"), (("jsonl", "a", "b[].c"), "lies in a list"),
     (("jsonl", "a[].b", "c[].d"), "not in the same")],
)  # fmt: skip
def test_readers_that_make_no_sense_are_refused(fields: tuple[Any, ...], match: str) -> None:
    with pytest.raises(Refusal, match=match):
        ReaderSettings(*fields)


@pytest.mark.parametrize("column", ["", ".a", "a.", "a..b", "[]", "a[]b", "a[].", "a[].b[].c", "a[][]"])
def test_columns_that_are_no_paths_are_refused(column: str) -> None:
    with pytest.raises(Refusal, match="is no path"):
        ReaderSettings("jsonl", column)


# ------------------------------------------------------------------ samples


def count(texts: list[str]) -> int:
    return sum(len(text) + 1 for text in texts)


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_of_a_whole_file_counts_every_document(tmp_path: Path, name: str) -> None:
    path = write_texts(tmp_path / name, TEXTS)
    found = estimate(reader_of(name), path, count, 1 << 20)
    assert found.tokens == count([text for text in TEXTS if text])
    assert found.file_bytes == path.stat().st_size


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_stands_for_its_part_of_the_file(tmp_path: Path, name: str) -> None:
    draw = random.Random(1)
    documents = ["".join(draw.choice("abcdefgh ") for _ in range(1000)) for n in range(2000)]
    path = write_texts(tmp_path / name, documents)
    found = estimate(reader_of(name), path, count, 200_000)
    assert found.tokens == 200 * 1001
    assert found.file_bytes == pytest.approx(path.stat().st_size / 10, rel=0.1)


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_of_one_stratum_counts_only_its_documents(tmp_path: Path, name: str) -> None:
    path = write_records(tmp_path / name, RECORDS)
    found = estimate(reader_of(name, "files[].content", "files[].lang"), path, count, 1 << 20, only="c")
    assert (found.tokens, found.file_bytes) == (6, path.stat().st_size)


@pytest.mark.parametrize(
    ("data", "max_bytes", "tokens", "file_bytes"),
    [("é" * 10, 100, 11, 20), ("é" * 10, 7, 4, 7), ("abc", 3, 4, 3), ("", 5, 0, 0), (b"\xff" * 9, 5, 0, 9)],
)
def test_a_sample_of_a_text_is_its_beginning(
    tmp_path: Path, data: str | bytes, max_bytes: int, tokens: int, file_bytes: int
) -> None:
    (tmp_path / "f.txt").write_bytes(data if isinstance(data, bytes) else data.encode())
    found = estimate(ReaderSettings("text"), tmp_path / "f.txt", count, max_bytes)
    assert (found.tokens, found.file_bytes) == (tokens, file_bytes)


def test_json_records_are_what_the_helpers_say() -> None:
    assert [json.loads(line) for line in json_lines(RECORDS).splitlines()] == RECORDS
