"""Held-out rows: whose text they are, how they are cut and weighted, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import (
    EOS,
    PlainText,
    contents,
    drawn_documents,
    is_held_out,
    make_line,
    many_rows_tree,
    prepare,
    prose_tree,
    quick,
    rows_of,
    source,
    write_tree,
)
from hypothesis import example, given
from hypothesis import strategies as st

from nstrain.base.disk import canonical_json
from nstrain.base.errors import Refusal
from nstrain.data.init import init_line, load_recipe
from nstrain.data.line import DataLine
from nstrain.data.val import ValidationRows, _apportion, collect_held_out, load_index

STRATA = {"large": 200, "middle": 60, "small": 4, "tiny": 2, "one": 1}


def small_line(work: Path, tokenizer: Path, **fields: Any) -> DataLine:
    root = work.with_name(work.name + ".text")
    write_tree(root, prose_tree(5, STRATA, words=30))
    return make_line(work, tokenizer, [source("web", root, held_out=0.2, **fields)], 640, 1)


@pytest.fixture(scope="module")
def line(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """A line of one source with its held-out rows gathered."""
    line = small_line(tmp_path_factory.mktemp("val") / "line", tokenizer)
    collect_held_out(line)
    return line


@pytest.mark.parametrize("row_tokens", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("rows_per_source", [1, 3, 7, 40, 10_000])
def test_rows_are_cut_from_one_stratum_and_weighted_by_its_bytes(
    line: DataLine, row_tokens: int, rows_per_source: int
) -> None:
    rows = ValidationRows.open(line, row_tokens, rows_per_source).rows
    entry = load_index(line)["sources"]["web"]
    groups = {"+".join(g["strata"]): g for g in entry["groups"]}
    stream = np.fromfile(line.work / "val" / "web.bin", line.token_dtype).astype(np.int64)
    available = sum((g["tokens"] - 1) // row_tokens for g in groups.values())
    assert len(rows) == min(max(rows_per_source, len(groups)), available)
    assert abs(sum(row.weight for row in rows) - 1) < 1e-12
    for name, group in groups.items():
        mine = [row for row in rows if row.stratum == name]
        assert mine
        whole = sum(g["weight_bytes"] for g in groups.values())
        assert sum(row.weight for row in mine) == pytest.approx(group["weight_bytes"] / whole, rel=1e-12)
        assert len({row.weight for row in mine}) == 1
        tokens = stream[group["start"] : group["start"] + group["tokens"]]
        assert len(mine) * row_tokens < len(tokens)
        for i, row in enumerate(mine):  # consecutive windows: every token a target once
            assert row.source == "web"
            assert np.array_equal(row.tokens, tokens[i * row_tokens : (i + 1) * row_tokens + 1])


def test_strata_that_cannot_fill_a_row_are_pooled_and_named(line: DataLine) -> None:
    entry = load_index(line)["sources"]["web"]
    pooled = [g for g in entry["groups"] if g["pooled"]]
    assert len(pooled) == 1
    assert {"tiny", "one"} <= set(pooled[0]["strata"])
    assert ["large"] in [g["strata"] for g in entry["groups"]]
    assert sorted(s for g in entry["groups"] for s in g["strata"]) == sorted(STRATA)
    sizes = dict(zip(line.listing("web").strata, line.listing("web").bytes_by_stratum, strict=True))
    start = 0
    for group in entry["groups"]:
        assert group["tokens"] >= line.unit_tokens + 1
        assert group["start"] == start
        assert group["weight_bytes"] == sum(sizes[s] for s in group["strata"])
        start += group["tokens"]
    assert start == entry["tokens"]
    named = {row.stratum for row in ValidationRows.open(line, 32, 1).rows}
    assert named == {"+".join(g["strata"]) for g in entry["groups"]}


def test_the_documents_of_pooled_strata_are_mixed_by_their_weights(tmp_path: Path, tokenizer: Path) -> None:
    """Rows are cut from a group's beginning: of strata one after another they would be of the first alone."""
    tree = prose_tree(5, {"a": 60, "b": 40, "c": 20, "d": 20, "e": 20}, words=30)
    web = source("web", write_tree(tmp_path / "text", tree), held_out=0.2)
    line = make_line(tmp_path / "line", tokenizer, [web], 1024, 1, unit_tokens=1024)
    collect_held_out(line)
    (group,) = load_index(line)["sources"]["web"]["groups"]
    assert group["pooled"]
    stream = np.fromfile(line.work / "val" / "web.bin", line.token_dtype)
    plain, listing = PlainText(tokenizer), line.listing("web")
    of_text = {
        tuple(plain.document((tmp_path / "text" / file.path).read_text())): stratum
        for stratum, files in enumerate(listing.files)
        for file in files
    }
    drawn: list[tuple[int, int]] = []
    for end in np.flatnonzero(stream == EOS) + 1:
        start = sum(tokens for _, tokens in drawn)
        drawn.append((of_text[tuple(stream[start:end].tolist())], int(end) - start))
    heaviest_first = sorted(range(5), key=lambda i: (-listing.bytes_by_stratum[i], i))
    assert [stratum for stratum, _ in drawn[:5]] == heaviest_first
    left = [sum(1 for stratum, _ in drawn if stratum == i) for i in range(5)]
    taken = [0] * 5
    for stratum, tokens in drawn:
        shares = [taken[i] / listing.bytes_by_stratum[i] for i in range(5) if left[i]]
        assert taken[stratum] / listing.bytes_by_stratum[stratum] == min(shares)
        taken[stratum] += tokens
        left[stratum] -= 1


def texts_of(line: DataLine, name: str) -> dict[str, str]:
    root = Path(line.source(name).path)
    return {f.path: (root / f.path).read_text() for files in line.listing(name).files for f in files}


def test_the_rows_are_whole_held_out_documents_of_their_stratum_each_once(line: DataLine, tokenizer: Path) -> None:
    plain = PlainText(tokenizer)
    stream = np.fromfile(line.work / "val" / "web.bin", line.token_dtype).tolist()
    texts = texts_of(line, "web")
    used: set[str] = set()
    for group in load_index(line)["sources"]["web"]["groups"]:
        rest = stream[group["start"] : group["start"] + group["tokens"]]
        paths = [
            f.path for s in group["strata"] for f in line.listing("web").files[line.listing("web").strata.index(s)]
        ]
        for path in paths:
            document = plain.document(texts[path])
            if is_held_out(texts[path], "web", ["**/*.txt"], [], 0.2) and rest[: len(document)] == document:
                rest = rest[len(document) :]
                used.add(path)
        assert rest == []
    assert len(used) == load_index(line)["sources"]["web"]["documents"]


def test_nothing_that_is_trained_is_validated_on(tmp_path: Path, tokenizer: Path) -> None:
    line = small_line(tmp_path / "line", tokenizer)
    collect_held_out(line)
    prepare(line)
    listing, texts = line.listing("web"), texts_of(line, "web")
    trained = {texts[listing.files[s][f].path] for _, s, f, _ in drawn_documents(line, "web", 1)}
    validated = {text for text in texts.values() if is_held_out(text, "web", ["**/*.txt"], [], 0.2)}
    assert trained
    assert not trained & validated
    rows = ValidationRows.open(line, 32, 10_000).rows
    decode = line.encoder().decode
    pieces = [p for row in rows for p in decode(row.tokens).split("</s>")[1:-1]]  # documents inside a row
    assert all(any(piece in text for text in validated) for piece in pieces)


@pytest.mark.usefixtures("many_rows")
def test_files_of_many_documents_give_their_held_out_rows_only(tmp_path: Path, tokenizer: Path) -> None:
    tree = many_rows_tree(2, {"a": 40, "b": 25})
    line = make_line(
        tmp_path / "line", tokenizer, [source("web", write_tree(tmp_path / "t", tree), held_out=0.3)], 640, 1
    )
    index = collect_held_out(line)
    texts = [row for text in tree.values() for row in rows_of(text) if row]
    held_out = [text for text in texts if is_held_out(text, "web", ["**/*.txt"], [], 0.3)]
    decoded = line.encoder().decode(np.fromfile(line.work / "val" / "web.bin", line.token_dtype)).split("</s>")
    assert decoded.pop() == ""
    assert len(decoded) == index["sources"]["web"]["documents"] <= len(held_out)
    assert set(decoded) <= set(held_out)


def test_gathering_again_elsewhere_gives_the_same_bytes(tmp_path: Path, tokenizer: Path, line: DataLine) -> None:
    other = small_line(tmp_path / "line", tokenizer)
    collect_held_out(other)
    assert contents(other.work / "val") == contents(line.work / "val")


def test_more_is_gathered_when_asked_and_no_more_than_there_is(tmp_path: Path, tokenizer: Path) -> None:
    counts = []
    for i, target in enumerate((1, 400, 2000, 10**9)):
        line = small_line(tmp_path / f"line{i}", tokenizer)
        counts.append(collect_held_out(line, target)["sources"]["web"]["tokens"])
    assert counts == sorted(counts)
    assert counts[0] < counts[1] < counts[2] < counts[3]
    plain = PlainText(tokenizer)
    held_out = [t for t in texts_of(line, "web").values() if is_held_out(t, "web", ["**/*.txt"], [], 0.2)]
    assert counts[3] == sum(len(plain.document(t)) for t in held_out)


def test_control_tokens_are_reported_by_the_librarys_default_and_ours(tmp_path: Path, tokenizer: Path) -> None:
    tree = {f"a/{i}.txt": f"#include <functional> {i} <think> /think <|im_start|> {'x ' * 30}" for i in range(200)}
    root = write_tree(tmp_path / "t", tree)
    sources = [
        source("code", root, held_out=0.3),
        source("chat", root, held_out=0.3, markers=["<|im_start|>"]),
    ]
    line = make_line(tmp_path / "line", tokenizer, sources, 640, 1)
    index = collect_held_out(line)["sources"]
    for name in ("code", "chat"):
        reported = index[name]["control_tokens_per_million"]
        assert reported["library_default"] > 10_000
        assert reported["plain_text"] == 0
    marker = line.encoder().vocabulary.added["<|im_start|>"]
    for name, has in (("code", False), ("chat", True)):
        tokens = np.fromfile(line.work / "val" / f"{name}.bin", line.token_dtype)
        assert (marker in tokens) == has
        if has:
            assert np.count_nonzero(tokens == marker) == index[name]["documents"]


def test_rows_are_fixed_for_life(line: DataLine) -> None:
    before = contents(line.work / "val")
    with pytest.raises(Refusal, match="exists already"):
        collect_held_out(line)
    assert contents(line.work / "val") == before


def test_too_little_held_out_text_is_refused_and_nothing_left(tmp_path: Path, tokenizer: Path) -> None:
    root = write_tree(tmp_path / "t", prose_tree(1, {"a": 40}, words=30))
    line = make_line(tmp_path / "line", tokenizer, [source("web", root, held_out=0.0001)], 640, 1)
    before = contents(line.work)
    with pytest.raises(
        Refusal, match=r"source web: its held-out documents have 0 tokens.* row takes 33.*hold out more"
    ):
        collect_held_out(line)
    assert contents(line.work) == before


def test_rows_need_data_val_and_an_undamaged_file(tmp_path: Path, tokenizer: Path, line: DataLine) -> None:
    other = small_line(tmp_path / "line", tokenizer)
    with pytest.raises(Refusal, match="run `nstrain data val"):
        ValidationRows.open(other, 32, 4)
    shutil.copytree(line.work / "val", other.work / "val")
    ValidationRows.open(other, 32, 4)
    with pytest.raises(Refusal, match="rows of 24 tokens do not divide"):
        ValidationRows.open(other, 24, 4)
    data = bytearray((other.work / "val" / "web.bin").read_bytes())
    data[5] ^= 1
    (other.work / "val" / "web.bin").write_bytes(data)
    with pytest.raises(Refusal, match=r"web.bin: damaged: expected"):
        ValidationRows.open(other, 32, 4)
    (other.work / "val" / "web.bin").unlink()
    with pytest.raises(Refusal, match=r"web.bin: damaged: expected"):
        ValidationRows.open(other, 32, 4)


def test_an_edited_index_is_refused(tmp_path: Path, tokenizer: Path, line: DataLine) -> None:
    """Whatever was edited: a weight, where a group begins, the hash itself, or only how it is written."""
    other = small_line(tmp_path / "line", tokenizer)
    path, sound = other.work / "val" / "index.json", (line.work / "val" / "index.json").read_bytes()
    shutil.copytree(line.work / "val", other.work / "val")
    index = json.loads(sound)
    assert index == load_index(other)
    edits: list[Any] = [
        {**index, "unit_tokens": 16},
        {**index, "sha256": "0" * 64},
        {name: value for name, value in index.items() if name != "sha256"},
        [index],
    ]
    for field, value in (("weight_bytes", 1), ("start", 1), ("tokens", 40)):
        edits.append(json.loads(sound))
        edits[-1]["sources"]["web"]["groups"][0][field] = value
    for edited in [*map(canonical_json, edits), json.dumps(index, indent=2).encode(), sound + b"\n"]:
        path.write_bytes(edited)
        with pytest.raises(Refusal, match=r"val/index.json: (its content does not have|not the held-out index)"):
            ValidationRows.open(other, 32, 4)
    path.write_bytes(sound)
    ValidationRows.open(other, 32, 4)


def test_held_out_text_of_another_line_is_refused(tmp_path: Path, tokenizer: Path, line: DataLine) -> None:
    root = Path(line.source("web").path)
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"format": 1, "sources": [source("web", root, held_out=0.1)]}))
    other = init_line(tmp_path / "line", load_recipe(recipe), tokenizer, 1, 640, 1, unit_tokens=32)
    shutil.copytree(line.work / "val", other.work / "val")
    with pytest.raises(Refusal, match="not the held-out index of this line"):
        ValidationRows.open(other, 32, 4)


@quick(200)
@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 9)), min_size=1, max_size=8),
)
@example(4, [(5, 9), (5, 9), (5, 9)])
def test_rows_are_shared_out_by_weight_with_one_each_at_least(rows: int, groups: list[tuple[int, int]]) -> None:
    weights, available = [w for w, _ in groups], [a for _, a in groups]
    counts = _apportion(rows, weights, available)
    assert all(1 <= n <= a for n, a in zip(counts, available, strict=True))
    assert sum(counts) == min(max(rows, len(groups)), sum(available))
    for i, n in enumerate(counts):  # no row would serve another group better
        for j, m in enumerate(counts):
            if m > 1 and n < available[i]:
                assert weights[i] / n <= weights[j] / (m - 1) + 1e-9
            if i < j and weights[i] == weights[j] and n < available[i]:
                assert n >= m, "of equals the first"
