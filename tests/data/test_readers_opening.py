"""Opening a file: the entry is what the whole file in memory would give, however it is read, and memory is bounded."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from data_helpers import EOS, PlainText, prose, quick
from hypothesis import given
from hypothesis import strategies as st
from reader_files import FORMATS, pin, request, source_of, write_records, write_texts

from nstrain.base.errors import DiskFull
from nstrain.data import encode, entries
from nstrain.data.encode import Encoder, load_encoder
from nstrain.data.entries import DOCUMENT, FileRequest, FileTokens, load_entry, open_file
from nstrain.data.opened import OpenedFiles
from nstrain.data.order import derive_key, keyed_permutation
from nstrain.data.pieces import pieces
from nstrain.data.readers import NO_STRATUM
from nstrain.data.readers import jsonl as jsonl_module
from nstrain.data.readers import parquet as parquet_module
from nstrain.data.sources import Listing


@pytest.fixture(scope="module")
def encoder(tokenizer: Path) -> Encoder:
    return load_encoder(tokenizer, EOS)


def reader_name(name: str) -> str:
    return "parquet" if name.endswith(".parquet") else "jsonl"


def opened(asked: FileRequest, encoder: Encoder) -> FileTokens:
    open_file(asked, encoder)
    found = load_entry(asked.entry, asked.file, verify=True)
    assert found is not None
    return found


def reference(
    asked: FileRequest, rows: list[tuple[int, str | None]], encode_text: Callable[[str], list[int]]
) -> tuple[int, int, int, npt.NDArray[Any], npt.NDArray[Any]]:
    """The entry from all its numbered rows at once: invariants 3 and 5 written down a second time."""
    kept = [(n, text) for n, text in rows if text and not asked.source.is_held_out(text)]
    held_out = sum(1 for _, text in rows if text and asked.source.is_held_out(text))
    parts: list[Any] = ["documents", asked.file.path, asked.file.sha256]
    by_column = asked.source.rows.stratum_column is not None
    order = keyed_permutation(derive_key(*parts, *([asked.stratum] if by_column else [])), len(kept))
    documents = [encode_text(text) for text in (kept[i][1] for i in order) if text]
    table = np.zeros(len(kept), entries.DOCUMENT)
    table["end"] = np.cumsum([len(ids) for ids in documents], dtype=np.uint64)
    table["row"] = [kept[i][0] for i in order]
    tokens = np.array([i for ids in documents for i in ids], "<u2")
    return len(rows), held_out, len(rows) - held_out - len(kept), table, tokens


def same(found: FileTokens, expected: tuple[int, int, int, npt.NDArray[Any], npt.NDArray[Any]]) -> bool:
    rows, held_out, rejected, table, tokens = expected
    counts = (found.rows, found.held_out, found.rejected) == (rows, held_out, rejected)
    return counts and found.table.tobytes() == table.tobytes() and found.tokens.tobytes() == tokens.tobytes()


# ------------------------------------------------------------------ the entry


@pytest.mark.parametrize("name", FORMATS)
@quick(12)
@given(
    seeds=st.lists(st.integers(0, 60), max_size=40),
    sizes=st.tuples(*[st.sampled_from([1, 7, 100, 5000])] * 4),
    held_out=st.sampled_from([0.01, 0.3]),
)
def test_entries_equal_the_in_memory_reference_for_any_batch_size(
    tmp_path_factory: pytest.TempPathFactory, encoder: Encoder, tokenizer: Path, name: str, seeds: list[int],
    sizes: tuple[int, int, int, int], held_out: float,
) -> None:  # fmt: skip
    root = tmp_path_factory.mktemp("open")
    texts = [prose(seed, seed) for seed in seeds]  # the one of 0 words is empty: rejected
    path = write_texts(root / "a" / name, texts or ["only"])
    asked = request(source_of(root, reader_name(name), held_out=held_out), path, root / "open" / "entry")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "BATCH_BYTES", sizes[0])
        patch.setattr(encode, "PIECE_CHARACTERS", sizes[1])
        patch.setattr(entries, "SPILL_BYTES", sizes[2])
        patch.setattr(jsonl_module, "BLOCK_BYTES", sizes[3])
        patch.setattr(parquet_module, "BATCH_BYTES", sizes[3])
        found = opened(asked, encoder)
    assert same(found, reference(asked, list(enumerate(texts or ["only"])), PlainText(tokenizer).document))
    assert [p.name for p in (root / "open").iterdir()] == ["entry"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("column", ["lang", "files[].lang"])
def test_a_stratum_of_a_column_has_its_own_rows_in_its_own_order(
    tmp_path: Path, encoder: Encoder, tokenizer: Path, name: str, column: str
) -> None:
    draw = random.Random(6)
    names = ["en", "de", None, ""]
    records = [
        {
            "lang": draw.choice(names),
            "files": [{"content": prose(draw.randrange(99), draw.randrange(9)), "lang": draw.choice(names)}] * n,
        }
        for n in (draw.randrange(4) for _ in range(60))
    ]
    path = write_records(tmp_path / name, records)
    documents = [
        ((r if column == "lang" else f)["lang"] or NO_STRATUM, f["content"]) for r in records for f in r["files"]
    ]
    source = source_of(
        tmp_path, reader_name(name), text_column="files[].content", stratum={"by": "column", "column": column}
    )
    seen = 0
    for stratum in ("en", "de", NO_STRATUM, "fr"):
        asked = request(source, path, tmp_path / "open" / stratum, stratum)
        rows = [(n, text) for n, (of, text) in enumerate(documents) if of == stratum]
        found = opened(asked, encoder)
        assert same(found, reference(asked, rows, PlainText(tokenizer).document))
        seen += found.rows
    assert seen == len(documents)


@pytest.mark.parametrize("name", FORMATS)
def test_bad_rows_are_counted_and_keep_their_numbers(tmp_path: Path, encoder: Encoder, name: str) -> None:
    texts = ["", prose(1, 9), "", "", prose(2, 9), prose(3, 9), ""]
    path = write_texts(tmp_path / name, texts)
    found = opened(request(source_of(tmp_path, reader_name(name), held_out=1e-9), path, tmp_path / "e"), encoder)
    assert (found.rows, found.rejected, found.held_out) == (7, 4, 0)
    assert sorted(found.table["row"].tolist()) == [1, 4, 5]


def test_markers_and_control_tokens_in_rows(tmp_path: Path, encoder: Encoder) -> None:
    path = write_texts(tmp_path / "r.jsonl", ["<|im_start|>hi</s><|im_end|>"])
    found = opened(
        request(source_of(tmp_path, "jsonl", markers=("<|im_start|>",), held_out=1e-9), path, tmp_path / "e"), encoder
    )
    ids = found.document(0).tolist()
    added = set(encoder.vocabulary.added.values())
    assert [i for i in ids if i in added] == [encoder.vocabulary.added["<|im_start|>"], EOS]
    assert ids[-1] == EOS


def test_a_file_without_documents_has_an_empty_entry(tmp_path: Path, encoder: Encoder) -> None:
    (tmp_path / "r.jsonl").write_bytes(b"")
    found = opened(request(source_of(tmp_path, "jsonl"), tmp_path / "r.jsonl", tmp_path / "e"), encoder)
    assert (found.rows, found.documents, len(found.tokens), found.longest_from(0)) == (0, 0, 0, 0)


def test_every_damaged_bit_of_an_entry_is_seen(tmp_path: Path, encoder: Encoder) -> None:
    """Of the header's length, of the header, of the table of documents and of the tokens."""
    path = write_texts(tmp_path / "r.jsonl", [prose(n, 3) for n in range(9)])
    asked = request(source_of(tmp_path, "jsonl"), path, tmp_path / "e")
    open_file(asked, encoder)
    whole = asked.entry.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    assert 200 < header < len(whole) - 9 * DOCUMENT.itemsize - 9 * 2
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        asked.entry.write_bytes(damaged)
        assert load_entry(asked.entry, asked.file, verify=True) is None, f"byte {bit // 8}, bit {bit % 8}"
    asked.entry.write_bytes(whole)
    assert load_entry(asked.entry, asked.file, verify=True) is not None
    for added in (b"\0", whole[-2:]):
        asked.entry.write_bytes(whole + added)
        assert load_entry(asked.entry, asked.file, verify=True) is None


def test_an_entry_cut_anywhere_is_seen(tmp_path: Path, encoder: Encoder) -> None:
    path = write_texts(tmp_path / "r.jsonl", [prose(n, 3) for n in range(9)])
    asked = request(source_of(tmp_path, "jsonl"), path, tmp_path / "e")
    open_file(asked, encoder)
    whole = asked.entry.read_bytes()
    for cut in range(len(whole)):
        asked.entry.write_bytes(whole[:cut])
        assert load_entry(asked.entry, asked.file, verify=True) is None, cut


# ------------------------------------------------------------------ what may go wrong on the way


@pytest.mark.parametrize("where", ["spill", "entry"])
def test_a_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = write_texts(tmp_path / "r.jsonl", [prose(n, 30) for n in range(50)])
    asked = request(source_of(tmp_path, "jsonl"), path, tmp_path / "open" / "e")

    class Full:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    if where == "spill":
        monkeypatch.setattr(entries.tempfile, "SpooledTemporaryFile", Full)
    else:
        monkeypatch.setattr(entries, "_permuted", lambda *_: Full())
    with pytest.raises(DiskFull, match=r"open/e: cannot be written .No space left on device."):
        open_file(asked, encoder)
    assert list((tmp_path / "open").iterdir()) == []


def test_a_tick_may_stop_the_opening_in_the_middle(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "TICK_TOKENS", 100)
    path = write_texts(tmp_path / "r.jsonl", [prose(n, 30) for n in range(50)])
    asked = request(source_of(tmp_path, "jsonl"), path, tmp_path / "open" / "e")
    ticks: list[int] = []

    def tick(tokens: int) -> None:
        ticks.append(tokens)
        if len(ticks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_file(asked, encoder, tick)
    assert list((tmp_path / "open").iterdir()) == []
    open_file(asked, encoder, tick)
    entry = load_entry(asked.entry, asked.file, verify=True)
    assert entry is not None
    assert sum(ticks[3:]) == len(entry.tokens)


def test_opened_files_read_the_strata_of_their_listing(tmp_path: Path, encoder: Encoder) -> None:
    records = [{"content": prose(n, 9), "lang": "en" if n % 3 else "de"} for n in range(30)]
    path = write_records(tmp_path / "files" / "r.parquet", records)
    source = source_of(tmp_path / "files", "parquet", stratum={"by": "column", "column": "lang"}, held_out=1e-9)
    files = tuple((pin(tmp_path / "files", path, stratum=i),) for i in range(2))
    asked: list[None] = []
    cache = OpenedFiles(tmp_path / "open", source, Listing(("de", "en"), files), encoder, lambda: asked.append(None))
    cache.prefetch([(0, 0), (1, 0)])  # there is no pool
    assert (cache.stratum_name(1), asked) == ("en", [])
    assert [cache.get(stratum, 0).documents for stratum in (0, 1)] == [10, 20]
    assert len(asked) == 2 * 2, "as each begins and as it ends"
    assert cache.get(1, 0) is cache.get(1, 0)
    cache.forget({(1, 0)})
    assert len(list((tmp_path / "open").iterdir())) == 1
    assert cache.get(1, 0).documents == 20
    assert len(asked) == 2 * 2
    assert cache.get(0, 0).documents == 10
    assert len(asked) == 3 * 2


# ------------------------------------------------------------------ long texts in pieces


@quick(200)
@given(
    st.lists(st.sampled_from(["\n", " ", "a", "\r\n", "數", "\t", "b. ", "\u2028", "\x1c"]), max_size=40),
    st.integers(1, 9),
)
def test_pieces_are_the_text_cut_after_newlines_before_no_space(parts: list[str], characters: int) -> None:
    text = "".join(parts)
    found = list(pieces(text, characters))
    assert "".join(found) == text
    for left, right in itertools.pairwise(found):
        assert len(left) >= characters
        assert left[-1] == "\n"
        assert not right[0].isspace()


@quick(150)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
        | st.sampled_from(["\n", "\n\n", " \n", "\r\n", "  "]),
        max_size=40,
    ),
    st.integers(1, 20),
)
def test_pieces_have_the_ids_of_the_whole(encoder: Encoder, tokenizer: Path, parts: list[str], characters: int) -> None:
    assert encoder.cuts_long_texts
    text = "".join(parts) or "x"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "PIECE_CHARACTERS", characters)
        ids = encoder.encode([text], {})[0].tolist()
    assert [*ids, EOS] == PlainText(tokenizer).document(text)


@pytest.mark.parametrize("megabytes", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_a_long_document_is_encoded_in_pieces(
    encoder: Encoder, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, megabytes: int
) -> None:
    period = "".join(prose(seed, 12) + "\n" * (1 + seed % 3) for seed in range(2000))
    text = period * (megabytes * 1_000_000 // len(period.encode()) + 1)
    longest = 0
    plain = Encoder._encode_plain

    def watch(self: Encoder, texts: list[str]) -> list[npt.NDArray[Any]]:
        nonlocal longest
        longest = max(longest, sum(len(text.encode()) for text in texts))
        return plain(self, texts)

    monkeypatch.setattr(Encoder, "_encode_plain", watch)
    ids = encoder.encode([text], {})[0]
    assert longest <= encode.BATCH_BYTES
    expected = np.array(PlainText(tokenizer).document(period)[:-1], "<u2")
    assert ids.tobytes() == np.tile(expected, len(text) // len(period)).tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "NFKC"}},
    ],
)
def test_a_tokenizer_that_does_not_split_there_encodes_long_texts_whole(
    tokenizer: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A space in front, GPT-2's pattern (it keeps the spaces before a word), none at all, normalizers that look on."""
    definition = json.dumps({**json.loads(tokenizer.read_bytes()), **change})
    encoder = Encoder(definition.encode(), EOS, "t")
    assert not encoder.cuts_long_texts
    text = "a\n\nb\n´c\n  d\n" * 5
    whole = encoder.encode([text], {})[0].tolist()
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 4)
    assert encoder.encode([text], {})[0].tolist() == whole


def test_a_normalizer_that_composes_characters_does_no_harm(tokenizer: Path) -> None:
    definition = json.dumps({**json.loads(tokenizer.read_bytes()), "normalizer": {"type": "NFC"}})
    assert Encoder(definition.encode(), EOS, "t").cuts_long_texts


def test_an_encoder_crosses_processes_without_losing_its_switch(encoder: Encoder) -> None:
    again = pickle.loads(pickle.dumps(encoder))
    text = "a<think>b</s>"
    assert again.encode([text], {})[0].tolist() == encoder.encode([text], {})[0].tolist()
    assert again.canary_sha256 == encoder.canary_sha256


def test_arrow_gives_its_memory_back(tmp_path: Path, encoder: Encoder) -> None:
    path = write_texts(tmp_path / "r.parquet", [prose(n, 100) for n in range(500)])
    before = pa.total_allocated_bytes()
    open_file(request(source_of(tmp_path, "parquet"), path, tmp_path / "e"), encoder)
    assert pa.total_allocated_bytes() <= before
    assert os.path.getsize(tmp_path / "e") > 0
