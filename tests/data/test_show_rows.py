"""`data show` against the rows that are trained and the files they come from."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from data_helpers import PlainText, make_line, many_rows_tree, prepare, rows_of, source, table_of, write_tree

from nstrain.base.errors import Refusal
from nstrain.data.line import DataLine
from nstrain.data.rebuild import rebuild_in_line
from nstrain.data.rows import CycleRows
from nstrain.data.show import FIRST_TOKENS, show_rows
from nstrain.data.verify import verify_line


@pytest.fixture
def line(tokenizer: Path, tmp_path: Path, many_rows: None) -> DataLine:
    sources = []
    for i, name in enumerate(("web", "code")):
        tree = write_tree(tmp_path / name, many_rows_tree(i, {"a": 30, "b": 20}, words=8))
        sources.append(source(name, tree, 2 - i, held_out=0.1))
    line = make_line(tmp_path / "line", tokenizer, sources, 960, 2)
    prepare(line)
    return line


@pytest.mark.parametrize("row_tokens", [8, 32])
@pytest.mark.parametrize("cycle", [1, 2])
def test_it_shows_the_rows_that_are_trained(line: DataLine, tokenizer: Path, cycle: int, row_tokens: int) -> None:
    rows = CycleRows.open(line, cycle, row_tokens)
    shown = list(show_rows(line, cycle, 0, rows.rows, row_tokens, with_text=True))
    assert [row["row"] for row in shown] == list(range(rows.rows))
    tokens, sources = rows.read(0, rows.rows), rows.sources_of(0, rows.rows)
    encoder, plain = line.encoder(), PlainText(tokenizer)
    targets_of: dict[tuple[str, str, int], int] = {}
    for place, row in enumerate(shown):
        assert row["source"] == line.source_names[sources[place]]
        assert row["tokens"] == tokens[place][:FIRST_TOKENS].tolist()
        assert row["text"] == encoder.decode(tokens[place])
        assert row["window"] == rows.order.locate(place, place + 1)[1][0]
        assert all(document["tokens"] > 0 for document in row["documents"])
        assert sum(document["tokens"] for document in row["documents"]) == row_tokens
        assert row["stratum"] == row["documents"][0]["stratum"]
        assert sum(row["strata"].values()) == row_tokens
        for stratum, count in row["strata"].items():
            assert count == sum(d["tokens"] for d in row["documents"] if d["stratum"] == stratum)
        targets, start = tokens[place][1:].tolist(), 0
        for document in row["documents"]:
            text = rows_of((Path(line.source(row["source"]).path) / document["path"]).read_text())[document["row"]]
            assert document["path"].startswith(document["stratum"] + "/")
            part = targets[start : start + document["tokens"]]
            whole = plain.document(text)
            assert any(whole[i : i + len(part)] == part for i in range(len(whole)))
            start += document["tokens"]
            key = (row["source"], document["path"], document["row"])
            targets_of[key] = targets_of.get(key, 0) + document["tokens"]
    # All rows together show every target of the cycle: each document's tokens in the stream.
    for name in line.source_names:
        table, listing = table_of(line, cycle, name), line.listing(name)
        lengths = np.diff(table["end"].astype(np.int64), prepend=1)  # the first token is only an input
        for entry, length in zip(table, lengths, strict=True):
            key = (name, listing.files[entry["stratum"]][entry["file"]].path, int(entry["row"]))
            assert targets_of.get(key, 0) == length


def test_a_part_of_the_rows_and_no_text_unless_asked(line: DataLine) -> None:
    everything = list(show_rows(line, 1, 0, 30, 32, with_text=False))
    assert list(show_rows(line, 1, 7, 11, 32, with_text=False)) == everything[7:11]
    assert "text" not in everything[0]
    assert list(show_rows(line, 1, 4, 4, 32, with_text=False)) == []


def test_of_a_deleted_cycle_the_manifest_still_tells_source_and_window(line: DataLine) -> None:
    before = list(show_rows(line, 1, 0, 30, 32, with_text=False))
    shutil.rmtree(line.cycle_directory(1))
    after = list(show_rows(line, 1, 0, 30, 32, with_text=True))
    assert after == [{**{k: row[k] for k in ("row", "source", "window")}, "tokens": None} for row in before]


def test_rows_and_cycles_that_are_not_there_are_refused(line: DataLine) -> None:
    for first, last in ((0, 31), (31, 32), (5, 4)):
        with pytest.raises(Refusal, match=r"cycle 1 has rows 0 ... 29"):
            list(show_rows(line, 1, first, last, 32, with_text=False))
    with pytest.raises(Refusal, match="it has not been prepared yet"):
        list(show_rows(line, 3, 0, 1, 32, with_text=False))
    with pytest.raises(Refusal, match="do not divide"):
        list(show_rows(line, 1, 0, 1, 24, with_text=False))


@pytest.mark.parametrize("how", ["lost", "cut", "flipped"])
def test_a_damaged_table_of_documents_is_named_with_the_remedy(line: DataLine, how: str) -> None:
    path = line.cycle_directory(1) / "code.idx"
    data = path.read_bytes()
    path.unlink() if how == "lost" else path.write_bytes(data[:-8] if how == "cut" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(Refusal, match=rf"code.idx: expected sha256 .*`rm -r {line.cycle_directory(1)}`"):
        list(show_rows(line, 1, 0, 1, 32, with_text=True))


def test_a_cycle_that_lost_its_ready_is_not_one_that_was_deleted(line: DataLine) -> None:
    directory = line.cycle_directory(2)
    whole = (directory / "web.bin").read_bytes()
    (directory / "READY").unlink()
    (directory / "web.bin").write_bytes(b"half")
    with pytest.raises(Refusal, match=r"READY: missing, though .*`rm -r "):
        list(show_rows(line, 2, 0, 1, 32, with_text=False))
    (failed,) = [found for found in verify_line(line) if not found.ok]
    assert (failed.what, "READY: missing" in failed.message) == ("cycle 2", True)
    rebuild_in_line(line, 2, workers=0)
    assert (directory / "web.bin").read_bytes() == whole
    assert all(found.ok for found in verify_line(line))
