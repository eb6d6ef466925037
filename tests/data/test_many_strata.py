"""A source of 110 strata, of each of which a cycle takes less than one file: no more is opened than must be open."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from data_helpers import PlainText, make_line, manifest_of, prepared, prose, prose_tree, source, table_of, write_tree
from reader_files import write_texts
from strata_bounds import lags_of

from nstrain.data import opened, opener_pool
from nstrain.data.encode import Encoder
from nstrain.data.entries import FileRequest, open_file
from nstrain.data.line import DataLine
from nstrain.data.opener_pool import OpenerPool
from nstrain.data.opening import SHARE_ONE, _Opener
from nstrain.data.preparer import run_preparer
from nstrain.data.state import OpenFile, StratumState

STRATA = 110
OPEN_FILES = 2
CYCLES = 6
CYCLE_TOKENS = 11_000
MANY: dict[str, Any] = {"include": ["**/*.zst"], "reader": "jsonl", "text_column": "content", "held_out": 0.05}


@dataclasses.dataclass(frozen=True)
class Many:
    """The line before anything is prepared."""

    line: DataLine
    longest: int
    """Tokens of its longest document."""

    def copy(self, base: Path) -> DataLine:
        """The same elsewhere."""
        shutil.copytree(self.line.work, base / "line")
        return DataLine.open(base / "line")


@pytest.fixture(scope="module")
def many(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Many:
    """Three or four files a stratum, of 7 to 14 rows of very different lengths."""
    base = tmp_path_factory.mktemp("many")
    draw, plain, longest = random.Random(4), PlainText(tokenizer), 0
    for stratum in range(STRATA):
        for number in range(draw.randint(3, 4)):
            texts = [prose(draw.randrange(10**6), draw.randint(4, 50)) for _ in range(draw.randint(7, 14))]
            write_texts(base / "many" / f"language{stratum:03d}" / f"{number}.jsonl.zst", texts)
            longest = max(longest, *(len(plain.document(text)) for text in texts))
    recipe = [source("many", base / "many", **MANY)]
    return Many(make_line(base / "line", tokenizer, recipe, CYCLE_TOKENS, CYCLES, open_files=OPEN_FILES), longest)


@dataclasses.dataclass(frozen=True)
class Built:
    """The line, prepared; and the (stratum, order) of every file that was read for each cycle."""

    line: DataLine
    read: list[list[tuple[int, int]]]


@pytest.fixture(scope="module")
def built(many: Many, tmp_path_factory: pytest.TempPathFactory) -> Built:
    line = many.copy(tmp_path_factory.mktemp("built"))
    read: list[list[tuple[int, int]]] = []

    def counted(request: FileRequest, encoder: Encoder, tick: Callable[[int], None] = lambda n: None) -> None:
        read[-1].append((request.file.stratum, request.file.order))
        open_file(request, encoder, tick)

    with pytest.MonkeyPatch.context() as patch:
        for module in (opened, opener_pool):
            patch.setattr(module, "open_file", counted)
        for cycle in range(1, CYCLES + 1):
            read.append([])
            run_preparer(line.work, until_cycle=cycle, workers=0)
    return Built(line, read)


def open_in(line: DataLine, cycle: int) -> list[tuple[OpenFile, ...]]:
    """The open files of each stratum as a cycle's drawing begins."""
    strata = manifest_of(line, cycle)["sources"]["many"]["opened"]
    return [StratumState.from_json(stratum).open for stratum in strata]


def needs_in(line: DataLine, cycle: int) -> list[int]:
    """What the cycle takes of each stratum."""
    shares = manifest_of(line, cycle)["sources"]["many"]["shares"]
    return [-(-share * (CYCLE_TOKENS + 1) // SHARE_ONE) for share in shares]


def test_the_first_cycle_reads_what_must_be_open_and_the_second_nothing(built: Built) -> None:
    smallest = [min(file.tokens for file in files) for files in open_in(built.line, 1)]
    assert sum(need < size for need, size in zip(needs_in(built.line, 1), smallest, strict=True)) > 0.9 * STRATA
    assert sorted(built.read[0]) == [(stratum, order) for stratum in range(STRATA) for order in range(OPEN_FILES)]
    assert built.read[1] == []
    every = [file for read in built.read for file in read]
    assert len(set(every)) == len(every), "a file was read twice"


def test_a_file_is_read_only_when_those_open_cannot_give_the_cycle(built: Built, many: Many) -> None:
    """Without the newest a stratum would have fewer open than open_files, or less than its need and one document."""
    later = 0
    for cycle in range(2, CYCLES + 1):
        for stratum, (files, need) in enumerate(
            zip(open_in(built.line, cycle), needs_in(built.line, cycle), strict=True)
        ):
            new = [order for read_stratum, order in built.read[cycle - 1] if read_stratum == stratum]
            without_newest = [file for file in files if file.order != max(new, default=-1)]
            if new:
                assert len(without_newest) < OPEN_FILES or sum(f.left for f in without_newest) < need + many.longest
            later += len(new)
    assert later > 20, "the later cycles are to need further files"


def test_the_open_files_of_a_stratum_are_used_in_proportion(built: Built, many: Many) -> None:
    """Two files that were opened together: in a cycle the same part of each is taken, to within a document."""
    both = 0
    for first, second in open_in(built.line, 2):
        taken, whole = first.tokens - first.left + second.tokens - second.left, first.tokens + second.tokens
        assert abs(first.tokens - first.left - Fraction(first.tokens * taken, whole)) <= many.longest
        both += min(first.cursor, second.cursor) > 0
    assert both > 0.8 * STRATA, "a cycle takes several documents of most strata"


def test_every_stratum_is_within_a_document_of_its_share(built: Built) -> None:
    """Here, where strata are alike, at every place."""
    for cycle in range(1, CYCLES + 1):
        part, table = manifest_of(built.line, cycle)["sources"]["many"], table_of(built.line, cycle, "many")
        assert len(set(table["stratum"].tolist())) == STRATA
        assert max(lags_of(part, table)) < 1


def test_what_workers_read_ahead_stays_until_it_is_opened(
    many: Many, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With worker processes too every file is read once, also where the guess at what will be opened is too high."""
    line = many.copy(tmp_path)
    asked: list[tuple[int, int]] = []
    real_open, real_likely = OpenerPool.open_as_they_come, _Opener._likely

    def counted(self: OpenerPool, arrivals: Iterable[Sequence[FileRequest]], *told: Any) -> None:
        come = [list(requests) for requests in arrivals]
        asked.extend((request.file.stratum, request.file.order) for requests in come for request in requests)
        real_open(self, come, *told)

    monkeypatch.setattr(OpenerPool, "open_as_they_come", counted)
    monkeypatch.setattr(_Opener, "_likely", lambda self, i, need, rate: real_likely(self, i, 2 * need, rate))
    run_preparer(line.work, until_cycle=CYCLES, workers=2)
    assert len(asked) > sum(len(read) for read in built.read), "it guessed too high"
    assert len(set(asked)) == len(asked), "a file was read twice"
    assert prepared(line) == prepared(built.line)


def test_the_files_of_a_stratum_that_needs_many_are_asked_for_at_once(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first open_files, and the others when those are read: workers and downloads would wait meanwhile."""
    write_tree(tmp_path / "text", prose_tree(3, {"one": 40}, words=200))
    line = make_line(tmp_path / "line", tokenizer, [source("web", tmp_path / "text")], 6400, 1)
    asked: list[int] = []
    real = OpenerPool.open_as_they_come

    def counted(self: OpenerPool, arrivals: Iterable[Sequence[FileRequest]], *told: Any) -> None:
        come = [list(requests) for requests in arrivals]
        asked.append(sum(map(len, come)))
        real(self, come, *told)

    monkeypatch.setattr(OpenerPool, "open_as_they_come", counted)
    run_preparer(line.work, until_cycle=1, workers=0)
    assert sum(asked) > 3 * OPEN_FILES
    assert asked[0] > sum(asked) / 2
