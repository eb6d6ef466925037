"""Changed files, damaged uploads and bad rows are told apart; the errors name the file, the place and the remedy."""

from __future__ import annotations

import errno
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import prose
from reader_files import (
    FORMATS,
    compressed,
    json_lines,
    pin,
    reader_of,
    source_of,
    texts,
    write_texts,
)

from nstrain.data.readers import BadUpload, ChangedFile, estimate, read_pinned, scan_columns, verify_pinned
from nstrain.data.readers import errors as errors_module
from nstrain.data.sources import PinnedFile

DOCUMENTS = [prose(seed, 20) for seed in range(400)]
REMEDY = "make a new line without it"


def read_all(root: Path, file: PinnedFile) -> list[str | None]:
    source = source_of(root, "parquet" if file.path.endswith(".parquet") else "jsonl")
    return [row.text for row in read_pinned(source, file, ".")]


# ------------------------------------------------------------------ truncated


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_file_is_a_bad_upload_wherever_it_is_cut(tmp_path: Path, name: str) -> None:
    path = write_texts(tmp_path / name, DOCUMENTS, **({"row_group_size": 100} if name.endswith("parquet") else {}))
    whole = path.read_bytes()
    draw = random.Random(3)
    cuts = {
        1,
        2,
        3,
        4,
        8,
        30,
        *(len(whole) - n for n in (1, 2, 3, 4, 7, 8, 9, 20)),
        *draw.sample(range(1, len(whole)), 60),
    }
    for cut in sorted(cuts):
        if name == "rows.jsonl" and (whole[cut - 1 : cut] == b"\n" or whole[cut : cut + 1] == b"\n"):
            continue  # a whole file of fewer rows: only its hash tells
        path.write_bytes(whole[:cut])
        with pytest.raises(BadUpload, match=rf"web: .*{name}: (line|after line|its beginning|its footer)") as error:
            read_all(tmp_path, pin(tmp_path, path))
        assert REMEDY in str(error.value)


@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_file_is_no_file_of_its_format(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    if name == "rows.jsonl":
        assert texts(path) == []
        return
    for read in (lambda: texts(path), lambda: scan_columns(reader_of(name), path)):
        with pytest.raises(BadUpload, match=f"{name}: its (beginning|footer): "):
            read()


def test_a_stream_cut_within_a_line_before_it_was_compressed_is_a_bad_upload(tmp_path: Path) -> None:
    data = json_lines([{"content": "a"}, {"content": "b c d"}])
    for name in FORMATS[:3]:
        for lost in range(2, 18):
            (tmp_path / name).write_bytes(compressed(name, data[:-lost]))
            with pytest.raises(BadUpload, match="line 2: the file ends within it"):
                texts(tmp_path / name)
        (tmp_path / name).write_bytes(compressed(name, data[:-1]))
        assert texts(tmp_path / name) == ["a", "b c d"]


# ------------------------------------------------------------------ corrupt


@pytest.mark.parametrize("name", FORMATS)
def test_any_flipped_bit_changes_the_file_and_nothing_of_it_is_read(tmp_path: Path, name: str) -> None:
    path = write_texts(tmp_path / name, DOCUMENTS[:50])
    file, whole, draw = pin(tmp_path, path), path.read_bytes(), random.Random(4)
    for _ in range(40):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        rows = read_pinned(source_of(tmp_path, "jsonl"), file, ".")
        with pytest.raises(ChangedFile, match=f"{name} has changed: pinned .* bytes, found .*; restore the file"):
            next(rows)
    path.write_bytes(whole)
    assert read_all(tmp_path, file) == DOCUMENTS[:50]


def test_page_checksums_find_every_flipped_bit_of_the_data(tmp_path: Path) -> None:
    """Pinned with the damage in it: the hash cannot help, the checksum in the file does."""
    path = write_texts(
        tmp_path / "rows.parquet", DOCUMENTS, write_page_checksum=True, row_group_size=100, compression="zstd"
    )
    whole, draw = path.read_bytes(), random.Random(5)
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    found = 0
    for _ in range(60):
        data = bytearray(whole)
        data[draw.randrange(4, len(data) - footer)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        try:
            assert read_all(tmp_path, pin(tmp_path, path)) == DOCUMENTS
        except BadUpload as error:
            assert "rows.parquet: row group " in str(error) and REMEDY in str(error)  # noqa: PT017, PT018
            found += 1
    assert found > 30  # the rest lies in the other column, or where nothing is read


def test_a_zeroed_row_group_is_named_and_those_before_it_were_read(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "rows.parquet", DOCUMENTS, row_group_size=100)
    column = pq.read_metadata(path).row_group(2).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    rows = read_pinned(source_of(tmp_path, "parquet"), pin(tmp_path, path), ".")
    assert [next(rows).text for _ in range(200)] == DOCUMENTS[:200]
    with pytest.raises(BadUpload, match=r"rows.parquet: row group 2 of 4: .*; make a new line without it"):
        next(rows)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet"])
def test_something_else_under_the_name_is_a_bad_upload(tmp_path: Path, name: str) -> None:
    for data in (
        b"version https://git-lfs.github.com/spec/v1\n",
        b"<html>not found</html>",
        os.urandom(100),
        bytes(100),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadUpload, match=name):
            read_all(tmp_path, pin(tmp_path, tmp_path / name))
        with pytest.raises(BadUpload, match=name):
            estimate(reader_of(name), tmp_path / name, len, 100)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst"])
def test_what_follows_a_compressed_stream_is_not_ignored(tmp_path: Path, name: str) -> None:
    path = write_texts(tmp_path / name, DOCUMENTS)
    path.write_bytes(path.read_bytes() + b"and more")
    with pytest.raises(BadUpload, match=f"{name}: after line "):
        texts(path)


# ------------------------------------------------------------------ what is no fault of the content


def test_an_error_of_the_operating_system_stays_one() -> None:
    for error, expected in (
        (OSError(errno.EIO, "Input/output error"), OSError),
        (OSError(errno.ESTALE, "Stale file handle"), OSError),
        (pa.ArrowMemoryError("malloc"), pa.ArrowMemoryError),
        (OSError("ZSTD decompress failed"), BadUpload),
        (pa.ArrowInvalid("Parquet magic bytes not found"), BadUpload),
    ):
        with pytest.raises(expected) as found, errors_module.damage_is_named("f", "line 1"):
            raise error
        assert isinstance(found.value, BadUpload) == (expected is BadUpload)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_is_gone_is_a_changed_one(tmp_path: Path, name: str) -> None:
    path = write_texts(tmp_path / name, DOCUMENTS[:3])
    file = pin(tmp_path, path)
    path.unlink()
    with pytest.raises(ChangedFile, match=f"{name} cannot be read .No such file or directory.; restore the file"):
        read_all(tmp_path, file)
    path.mkdir()
    with pytest.raises(ChangedFile, match="cannot be read .Is a directory."):
        verify_pinned(path, file, "web")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("what", ["appended", "replaced"])
def test_a_file_written_to_while_it_is_read_is_a_changed_one(tmp_path: Path, name: str, what: str) -> None:
    path = write_texts(tmp_path / name, DOCUMENTS[:5])
    rows = read_pinned(source_of(tmp_path, "parquet" if "parquet" in name else "jsonl"), pin(tmp_path, path), ".")
    next(rows)
    if what == "replaced":
        os.replace(write_texts(tmp_path / "other" / name, DOCUMENTS[:5]), path)
    else:
        os.utime(path, ns=(0, 0))
    with pytest.raises(ChangedFile, match="was written to while it was read; restore the file"):
        list(rows)


def test_errors_cross_processes_as_they_are(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "rows.parquet", DOCUMENTS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadUpload) as error:
        texts(path)
    error.value.found_in("web", "rows.parquet")
    again: Any = pickle.loads(pickle.dumps(error.value))
    assert (type(again), str(again)) == (BadUpload, str(error.value))
    assert (again.source, again.path, again.may_pass) == ("web", "rows.parquet", False)
