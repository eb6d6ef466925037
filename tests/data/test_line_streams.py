"""Whole lines prepared from real files: every token once, every document once, nothing held out, shares and counts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from data_helpers import (
    EOS,
    PlainText,
    documents_in,
    drawn_documents,
    is_held_out,
    make_line,
    manifest_of,
    many_rows_tree,
    prepare,
    prepare_until_exhausted,
    prose,
    prose_tree,
    quick,
    reference_permutation,
    rows_of,
    source,
    stream_of,
    table_of,
    thorough,
    write_tree,
)
from hypothesis import given
from hypothesis import strategies as st

from nstrain.base.errors import Exhausted, Refusal
from nstrain.data.line import DataLine
from nstrain.data.opening import SHARE_ONE
from nstrain.data.rows import CycleRows, row_order
from nstrain.data.sources import PinnedFile
from nstrain.data.val import collect_held_out


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A line to make: its recipe, its sizes, the seed of its text."""

    shares: tuple[int, ...]
    cycle_tokens: int
    unit_tokens: int
    segment_units: int | None
    open_files: int
    seed: int
    words: int


sizes = st.builds(
    Sizes,
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.integers(400, 2000),
    st.sampled_from([8, 16, 32]),
    st.sampled_from([None, None, 1]),
    st.integers(1, 3),
    st.integers(0, 10**6),
    st.sampled_from([3, 20, 60]),
)


def made(tmp_path: Path, tokenizer: Path, want: Sizes, cycles: int = 3) -> tuple[DataLine, int]:
    """The line, prepared as far as its text goes, and the number of cycles that is."""
    sources = []
    for i, share in enumerate(want.shares):
        strata = {"a": 30, "b/c": 18, "b/d": 5, "z": 1}
        tree = write_tree(tmp_path / f"tree{i}", many_rows_tree(want.seed + i, strata, words=want.words))
        stratum = {"by": "directory", "depth": 1 + i % 2}
        sources.append(source(f"s{i}", tree, share, held_out=0.1, stratum=stratum))
    line = make_line(
        tmp_path / "line",
        tokenizer,
        sources,
        want.cycle_tokens,
        None,
        unit_tokens=want.unit_tokens,
        segment_units=want.segment_units,
        open_files=want.open_files,
        seed=want.seed,
    )
    for cycle in range(1, cycles + 1):
        try:
            prepare(line, cycle)
        except Exhausted:
            assert not line.is_ready(cycle)
            return line, cycle - 1
    return line, cycles


def file_of(line: DataLine, name: str, stratum: int, order: int) -> tuple[PinnedFile, list[str]]:
    """A pinned file and the texts of its rows, read without the code under test."""
    pinned = line.listing(name).files[stratum][order]
    return pinned, rows_of((Path(line.source(name).path) / pinned.path).read_text())


def keyed_rows(name: str, pinned: PinnedFile, rows: list[str]) -> list[int]:
    """The trainable rows of a file in the order of its documents, which depends on the file alone."""
    key = json.dumps(["documents", pinned.path, pinned.sha256], separators=(",", ":")).encode()
    kept = [row for row, text in enumerate(rows) if text and not is_held_out(text, name, ["**/*.txt"], [], 0.1)]
    return [kept[i] for i in reference_permutation(hashlib.blake2b(key, digest_size=32).digest(), len(kept))]


def check_line(line: DataLine, cycles: int, tokenizer: Path) -> None:
    plain = PlainText(tokenizer)
    for name in line.source_names:
        documents: list[int] = []
        seen: set[tuple[str, int]] = set()
        tables = {k: table_of(line, k, name) for k in range(1, cycles + 1)}
        for k, table in tables.items():
            has_tail = manifest_of(line, k)["sources"][name]["tail_in"] is not None
            assert has_tail == (k > 1)
            for entry in table[int(has_tail) :]:
                pinned, rows = file_of(line, name, entry["stratum"], entry["file"])
                assert (pinned.path, int(entry["row"])) not in seen  # at most once
                seen.add((pinned.path, int(entry["row"])))
                assert entry["row"] == keyed_rows(name, pinned, rows)[entry["document"]]
                text = rows[entry["row"]]
                assert text
                assert not is_held_out(text, name, ["**/*.txt"], [], 0.1)
                documents += plain.document(text)
        streams = {k: stream_of(line, k, name) for k in tables}
        for k in range(2, cycles + 1):
            assert streams[k][0] == streams[k - 1][-1]
        whole = np.concatenate([streams[1][:1], *(streams[k][1:] for k in streams)]).tolist()
        assert whole == documents[: len(whole)]  # whole documents and EOS; the tail is what the last cycle cut
        tail = manifest_of(line, cycles)["after"][name]["tail"]
        assert documents[len(whole) - 1 :] == documents[len(documents) - tail["tokens"] :]
        for k, table in tables.items():
            check_manifest(line, k, name, table)


def check_manifest(line: DataLine, cycle: int, name: str, table: np.ndarray) -> None:
    """The manifest's ranges are the documents of the table, each in the segment where its first token is a target."""
    manifest, plan = manifest_of(line, cycle), line.cycle_plan(cycle)
    record = manifest["sources"][name]
    segment_tokens = record["targets"] // plan.segments
    assert record["targets"] == plan.source_tokens[plan.sources.index(name)]
    assert record["documents"] == len(table)
    ends = table["end"].astype(np.int64)
    assert ends[-1] == record["targets"] + 1
    assert np.all(np.diff(ends, prepend=0) > 0)
    starts = np.concatenate([[0], ends[:-1]])
    expected: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(plan.segments)]
    for start, entry in list(zip(starts, table, strict=True))[int(cycle > 1) :]:
        segment = expected[max(0, (start - 1) // segment_tokens)]
        segment.setdefault((int(entry["stratum"]), int(entry["file"])), []).append(int(entry["document"]))
    found = [
        {(stratum, file): list(range(first, last)) for stratum, file, first, last in ranges}
        for ranges in record["segments"]
    ]
    assert found == expected
    assert all(ranges == sorted(ranges) for ranges in record["segments"])
    # Every stratum at its share at every segment's end, to within about a document.
    strata = len(record["strata"])
    by_token = np.repeat(table["stratum"], np.diff(ends, prepend=0))
    slack = int(np.diff(ends, prepend=0).max()) * sum(Fraction(1, i) for i in range(1, strata + 1))
    for segment in range(1, plan.segments + 1):
        upto = 1 + segment * segment_tokens
        for stratum, share in enumerate(record["shares"]):
            taken = int(np.count_nonzero(by_token[:upto] == stratum))
            assert abs(taken - Fraction(share * upto, SHARE_ONE)) <= slack
    # The numbers of the files add up.
    before = manifest_of(line, cycle - 1)["after"][name]["counts"] if cycle > 1 else Counter()
    counts = manifest["after"][name]["counts"]
    assert counts["documents"] + counts["held_out"] + counts["rejected"] == counts["rows"]
    assert counts["taken_documents"] - before["taken_documents"] == len(table) - int(cycle > 1)
    opened = [
        line.listing(name).files[i][j]
        for i, stratum in enumerate(manifest["after"][name]["strata"])
        for j in range(stratum["next_file"])
    ]
    assert counts["files"] == len(opened)
    texts = [rows_of((Path(line.source(name).path) / file.path).read_text()) for file in opened]
    held_out = sum(is_held_out(t, name, ["**/*.txt"], [], 0.1) for rows in texts for t in rows if t)
    assert counts["rows"] == sum(len(rows) for rows in texts)
    assert counts["rejected"] == sum(not t for rows in texts for t in rows)
    assert counts["held_out"] == held_out


def check_rows(line: DataLine, cycles: int) -> None:
    """At every row length: the rows are windows of the streams, and each target of the cycle comes once."""
    lengths = [n for n in range(1, line.unit_tokens + 1) if line.unit_tokens % n == 0 and n > 1]
    for cycle in range(1, cycles + 1):
        for row_tokens in lengths:
            rows = CycleRows.open(line, cycle, row_tokens)
            everything = rows.read(0, rows.rows)
            assert everything.shape == (line.cycle_plan(cycle).tokens // row_tokens, row_tokens + 1)
            sources = rows.sources_of(0, rows.rows)
            for index, name in enumerate(line.source_names):
                mine = everything[sources == index]
                stream = stream_of(line, cycle, name)
                windows = np.stack([stream[i : i + row_tokens + 1] for i in range(0, len(stream) - 1, row_tokens)])
                assert sorted(mine.tolist()) == sorted(windows.tolist())
                first = windows[rows.order.locate(0, rows.rows)[1][sources == index]]
                assert np.array_equal(mine, first)
            third = rows.rows // 3
            assert np.array_equal(rows.read(third, 2 * third + 1), everything[third : 2 * third + 1])


def check_updates(line: DataLine, cycles: int) -> None:
    """Recounted from the manifests alone: updates of any size, across cycles too, are within two rows of the shares."""
    row_tokens = line.unit_tokens // 2
    counted = []
    for cycle in range(1, cycles + 1):
        order = row_order(manifest_of(line, cycle), row_tokens)
        counted.append(order.locate(0, order.rows)[0])
    sources = np.concatenate(counted)
    shares = np.array(line.cycle_plan(1).shares)
    for update_rows in (1, 2, 3, 7, 16, 33):
        for start in range(0, len(sources) - update_rows + 1, update_rows):
            rows = np.bincount(sources[start : start + update_rows], minlength=len(shares))
            assert np.all(np.abs(rows * shares.sum() - shares * update_rows) < 2 * shares.sum())


def check(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, want: Sizes) -> None:
    line, cycles = made(tmp_path_factory.mktemp("lines"), tokenizer, want)
    if cycles:
        check_line(line, cycles, tokenizer)
        check_rows(line, cycles)
        check_updates(line, cycles)


@hypothesis.settings(quick(12), phases=[hypothesis.Phase.generate])  # a line is small already, and slow to shrink
@given(want=sizes)
@pytest.mark.usefixtures("many_rows")
def test_every_token_is_trained_once(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, want: Sizes) -> None:
    check(tmp_path_factory, tokenizer, want)


@pytest.mark.slow
@thorough(150)
@given(want=sizes)
@pytest.mark.usefixtures("many_rows")
def test_every_token_is_trained_once_in_many_lines(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, want: Sizes
) -> None:
    check(tmp_path_factory, tokenizer, want)


# ------------------------------------------------------------------ recipes that change, sources that pause


@pytest.mark.usefixtures("many_rows")
def test_a_source_that_pauses_goes_on_where_it_was(tmp_path: Path, tokenizer: Path) -> None:
    from nstrain.data.extend import extend_line

    trees = [write_tree(tmp_path / n, many_rows_tree(i, {"a": 30, "b": 20})) for i, n in enumerate("xy")]
    sources = [source(n, tree, held_out=0.1) for n, tree in zip("xy", trees, strict=True)]
    line = make_line(tmp_path / "line", tokenizer, sources, 640, 1)
    prepare(line)
    extend_line(line.work, 1, recipe={"y": 1})
    line = extend_line(line.work, 1, cycle_tokens=320, recipe={"x": 3, "y": 1})
    prepare(line)
    assert [line.cycle_plan(k).first_token for k in (1, 2, 3)] == [0, 640, 1280]
    assert manifest_of(line, 2)["after"]["x"] == manifest_of(line, 1)["after"]["x"]
    assert list(manifest_of(line, 2)["sources"]) == ["y"]
    assert stream_of(line, 3, "x")[0] == stream_of(line, 1, "x")[-1]
    rows = CycleRows.open(line, 2, 32)
    assert set(rows.sources_of(0, rows.rows)) == {1}  # an index among the line's sources
    seen = [document for cycle in (1, 3) for document in documents_in(line, "x", cycle)]
    assert len(set(seen)) == len(seen)


# ------------------------------------------------------------------ held-out text


def documents_of(line: DataLine, name: str) -> dict[str, str]:
    """Text of every file of a text tree, by path."""
    root = Path(line.source(name).path)
    return {f.path: (root / f.path).read_text() for files in line.listing(name).files for f in files}


def test_what_is_held_out_is_the_same_wherever_the_line_and_its_text_are(tmp_path: Path, tokenizer: Path) -> None:
    tree = prose_tree(1, {"a": 150, "b": 100})
    decisions = []
    for place, seed in (("here", 0), ("elsewhere/deep", 99)):
        root = write_tree(tmp_path / place / "text", tree)
        line = make_line(tmp_path / place / "line", tokenizer, [source("web", root, held_out=0.1)], 800, 3, seed=seed)
        prepare(line)
        held_out = {p for p, text in documents_of(line, "web").items() if line.source("web").is_held_out(text)}
        listing = line.listing("web")
        trained = {listing.files[s][f].path for _, s, f, _ in drawn_documents(line, "web", 3)}
        assert not trained & held_out
        decisions.append((held_out, trained))
    assert decisions[0][0] == decisions[1][0]
    assert 10 <= len(decisions[0][0]) <= 45
    assert decisions[0][1] != decisions[1][1]  # another seed, another order


def test_a_larger_share_holds_out_what_a_smaller_one_does_and_another_source_others(
    tmp_path: Path, tokenizer: Path
) -> None:
    root = write_tree(tmp_path / "text", prose_tree(1, {"a": 300}))
    sources = [source("web", root, held_out=0.05), source("other", root, held_out=0.05)]
    line = make_line(tmp_path / "line", tokenizer, sources, 640, 1)
    texts = documents_of(line, "web")
    small = {p for p, text in texts.items() if line.source("web").is_held_out(text)}
    more = make_line(tmp_path / "more", tokenizer, [source("web", root, held_out=0.3)], 640, 1).source("web")
    assert small
    assert small < {p for p, text in texts.items() if more.is_held_out(text)}
    assert small != {p for p, text in texts.items() if line.source("other").is_held_out(text)}
    for path, text in texts.items():
        assert (path in small) == is_held_out(text, "web", ["**/*.txt"], [], 0.05)


def test_equal_texts_are_different_documents_but_held_out_together(tmp_path: Path, tokenizer: Path) -> None:
    texts = [prose(i, 40) for i in range(60)]
    tree = {f"{part}/{i:02d}.txt": text for part in "ab" for i, text in enumerate(texts)}
    line = make_line(
        tmp_path / "line", tokenizer, [source("web", write_tree(tmp_path / "t", tree), held_out=0.2)], 3200, None
    )
    cycle, _ = prepare_until_exhausted(line)
    listing = line.listing("web")
    trained = Counter(listing.files[s][f].path[2:] for _, s, f, _ in drawn_documents(line, "web", cycle - 1))
    assert 2 in trained.values()  # both copies, each as a document of its own
    held_out = {f"{i:02d}.txt" for i, text in enumerate(texts) if line.source("web").is_held_out(text)}
    assert held_out
    assert not held_out & trained.keys()


# ------------------------------------------------------------------ rejected rows, exhaustion


def test_rows_that_are_no_text_are_rejected_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    tree: dict[str, str | bytes] = dict(prose_tree(3, {"a": 60}))
    tree |= {
        "bad/latin1.txt": "é".encode("latin-1") * 50,
        "bad/empty.txt": b"",
        "bad/utf16.txt": "x y".encode("utf-16"),
    }
    tree |= {"a/cut.txt": "数据".encode()[:-1], "a/none.txt": b"", "a/zero.txt": b"a\x00b"}
    line = make_line(
        tmp_path / "line", tokenizer, [source("web", write_tree(tmp_path / "t", tree), held_out=0.01)], 1600, None
    )
    prepare(line, 1)
    record = manifest_of(line, 1)
    shares = dict(zip(record["sources"]["web"]["strata"], record["sources"]["web"]["shares"], strict=True))
    assert shares["bad"] == 0
    cycle, _ = prepare_until_exhausted(line)
    counts = manifest_of(line, cycle - 1)["after"]["web"]["counts"]
    opened = {
        line.listing("web").files[i][j].path
        for i, stratum in enumerate(manifest_of(line, cycle - 1)["after"]["web"]["strata"])
        for j in range(stratum["next_file"])
    }
    no_text = {"bad/latin1.txt", "bad/empty.txt", "bad/utf16.txt", "a/cut.txt", "a/none.txt"}
    assert no_text >= opened & no_text >= {"bad/latin1.txt", "bad/empty.txt", "bad/utf16.txt"}
    assert counts["rejected"] == len(opened & no_text)
    assert counts["rows"] == len(opened)


def held_out_text(name: str, share: float, held_out: bool, seed: int = 0) -> str:
    """A text of which we know whether a source of that name holds it out."""
    return next(
        t for i in range(10**6) if is_held_out(t := prose(seed + i, 30), name, ["**/*.txt"], [], share) == held_out
    )


def test_a_stratum_of_one_held_out_file_does_not_break_a_cycle(tmp_path: Path, tokenizer: Path) -> None:
    tree = prose_tree(3, {"a": 60}) | {"alone/x.txt": held_out_text("web", 0.05, True)}
    line = make_line(
        tmp_path / "line", tokenizer, [source("web", write_tree(tmp_path / "t", tree), held_out=0.05)], 960, 2
    )
    prepare(line)
    record = manifest_of(line, 2)
    assert record["sources"]["web"]["strata"] == ["a", "alone"]
    assert [share > 0 for share in record["sources"]["web"]["shares"]] == [True, False]
    assert record["after"]["web"]["counts"]["held_out"] >= 1


def refuse(act: Callable[[], Any], kind: type[Refusal], *words: str) -> None:
    with pytest.raises(kind) as caught:
        act()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_source_that_its_bytes_prove_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, tokenizer: Path
) -> None:
    small = write_tree(tmp_path / "small", {"a.txt": "x" * 500, "b.txt": "y" * 100})
    large = write_tree(tmp_path / "large", prose_tree(1, {"a": 200}))
    sources = [source("large", large), source("small", small)]
    work = tmp_path / "line"
    # 19 units of 32 tokens and one more are 609; 600 bytes and two EOS are at most 602.
    refuse(
        lambda: make_line(work, tokenizer, sources, 19 * 64, 1, segment_units=1),
        Exhausted, "source small", "take 609 tokens of it", "600", "at most 602", "smaller share",
    )  # fmt: skip
    assert not work.exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    make_line(work, tokenizer, sources, 18 * 64, 1, segment_units=1)


def test_a_source_that_runs_out_is_refused_before_its_cycle_is_ready(tmp_path: Path, tokenizer: Path) -> None:
    trees = [
        write_tree(tmp_path / n, prose_tree(i, {"a": c, "b": c})) for i, (n, c) in enumerate([("x", 60), ("y", 8)])
    ]
    sources = [source(n, tree, held_out=0.05) for n, tree in zip(["x", "y"], trees, strict=True)]
    line = make_line(tmp_path / "line", tokenizer, sources, 1280, None)
    cycle, message = prepare_until_exhausted(line)
    assert cycle > 1
    assert f"source y runs out in cycle {cycle}" in message
    assert f"end the schedule after cycle {cycle - 1}" in message
    assert not line.is_ready(cycle)
    assert not line.manifest_path(cycle).exists()
    assert not list((line.work / "cycles").glob(".*"))
    assert line.is_ready(cycle - 1)
    CycleRows.open(line, cycle - 1, 32)


def test_validation_does_not_decide_what_a_cycle_opens(tmp_path: Path, tokenizer: Path) -> None:
    tree = write_tree(tmp_path / "t", prose_tree(1, {"a": 120, "b": 60}))
    lines = [
        make_line(tmp_path / name, tokenizer, [source("web", tree, held_out=0.2)], 960, 2)
        for name in ("with", "without")
    ]
    collect_held_out(lines[0])
    for line in lines:
        prepare(line)
    assert manifest_of(lines[0], 2) == manifest_of(lines[1], 2)


def test_every_document_ends_with_eos_and_only_there(tmp_path: Path, tokenizer: Path) -> None:
    tree = {f"a/{i}.txt": f"int x{i}; // </s> <s> <param name='</s>'>" for i in range(60)}
    line = make_line(
        tmp_path / "line", tokenizer, [source("code", write_tree(tmp_path / "t", tree), held_out=0.01)], 640, 1
    )
    prepare(line)
    stream, ends = stream_of(line, 1, "code"), table_of(line, 1, "code")["end"]
    assert np.flatnonzero(stream == EOS).tolist() == (ends - 1)[: len(ends) - (stream[-1] != EOS)].tolist()
    added = set(line.encoder().vocabulary.added.values()) - {EOS}
    assert not added & set(stream.tolist())
