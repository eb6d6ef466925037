"""Twenty cycles over ten real sources: every token and every document accounted for by what the test itself knows.

The rows of every file, what is held out, and every document's ids are worked out here without the readers, the encoder
or the drawing under test. The schedule has three pieces, and a branch forks in its middle. How far a stratum may be
from its share is said in `strata_bounds`; to be more than a document behind is rare: at most 1 % of all places.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
from data_helpers import EOS, contents, prepared, stream_of, table_of
from real_corpora import RealRow, RealSource, real_sources
from strata_bounds import lags_of

from nstrain.data.branch import branch_line
from nstrain.data.extend import extend_line
from nstrain.data.init import init_line, parse_recipe
from nstrain.data.line import DataLine
from nstrain.data.manifest import load_manifest
from nstrain.data.opening import SHARE_ONE
from nstrain.data.plan import plan_line
from nstrain.data.preparer import run_preparer
from nstrain.data.sources import PinnedFile
from nstrain.data.state import SourceState
from nstrain.data.val import collect_held_out
from nstrain.data.verify import verify_line

PIECES = (8, 7, 5)
"""Cycles of the schedule's pieces."""
FORK_AFTER = 10
USED = Fraction(9, 10)
"""Of the source that is used most, what the twenty cycles take."""

Document = tuple[str, int]
"""A document is a file's path and a row."""


class Truth:
    """What is in a source: its trainable documents with their ids, without any code of the data line."""

    def __init__(self, source: RealSource, library: tokenizers.Tokenizer) -> None:
        self.source = source
        self.ids: dict[Document, npt.NDArray[np.uint16]] = {}
        self.held_out: set[Document] = set()
        trainable: list[tuple[Document, str]] = []
        for path, rows in source.files.items():
            for number, row in enumerate(rows):
                if row.text is not None and source.is_held_out(row.text):
                    self.held_out.add((path, number))
                elif row.text is not None:
                    trainable.append(((path, number), row.text))
        for first in range(0, len(trainable), 50):
            part = trainable[first : first + 50]
            encodings = library.encode_batch_fast([text for _, text in part], add_special_tokens=False)
            for (document, _), encoding in zip(part, encodings, strict=True):
                self.ids[document] = np.array([*encoding.ids, EOS], np.uint16)
        self.tokens = sum(len(ids) for ids in self.ids.values())

    def rows(self, path: str, stratum: str) -> list[tuple[int, RealRow]]:
        """A file's rows that are of a stratum, with their numbers in the file."""
        return [(n, row) for n, row in enumerate(self.source.files[path]) if row.stratum == stratum]

    def documents(self, path: str, stratum: str) -> list[Document]:
        """A file's trainable documents of a stratum."""
        return [(path, n) for n, _ in self.rows(path, stratum) if (path, n) in self.ids]


@dataclasses.dataclass(frozen=True)
class Built:
    """The trunk and its branch, prepared; and what is true of their sources."""

    trunk: DataLine
    branch: DataLine
    truths: dict[str, Truth]

    @property
    def trunk_cycles(self) -> list[tuple[DataLine, int]]:
        """The trunk's cycles in order."""
        return [(self.trunk, cycle) for cycle in range(1, sum(PIECES) + 1)]

    @property
    def branch_cycles(self) -> list[tuple[DataLine, int]]:
        """The cycles of a line that goes from the trunk into the branch."""
        return self.trunk_cycles[:FORK_AFTER] + [(self.branch, cycle) for cycle in (1, 2, 3)]


def build(work: Path, tokenizer: Path, budget: int, held_out: float, unit_tokens: int, workers: int) -> Built:
    """Twenty cycles that use up most of the sources; a branch after the tenth."""
    sources = real_sources(work / "sources", budget, held_out)
    library = tokenizers.Tokenizer.from_str(json.dumps({**json.loads(tokenizer.read_bytes()), "added_tokens": []}))
    truths = {source.name: Truth(source, library) for source in sources}
    largest = max(truth.tokens for truth in truths.values())
    shares = {name: max(1, 8 * truth.tokens // largest) for name, truth in truths.items()}
    other = {name: share + (1 if share < 4 else -1) for name, share in shares.items() if name != "metadata"}
    recipes = (shares, other, shares)
    sizes = (1, 1, 2)
    uses = {
        name: sum(
            cycles * size * Fraction(recipe.get(name, 0), sum(recipe.values()))
            for cycles, size, recipe in zip(PIECES, sizes, recipes, strict=True)
        )
        for name in truths
    }
    cycle_tokens = int(USED * min(truths[name].tokens / use for name, use in uses.items()))
    recipe = {"format": 1, "sources": [{**s.entry, "share": shares[s.name]} for s in sources]}
    options: dict[str, Any] = {"unit_tokens": unit_tokens, "segment_units": 1, "seed": 11}
    trunk = init_line(
        work / "trunk", parse_recipe(recipe, work, "recipe"), tokenizer, EOS, cycle_tokens, PIECES[0], **options
    )
    trunk = extend_line(trunk.work, PIECES[1], recipe=other)
    trunk = extend_line(trunk.work, PIECES[2], cycle_tokens=2 * cycle_tokens, recipe=shares)
    plan = plan_line(trunk)
    assert plan is not None
    assert not [source for source in plan.sources if source.short], "expected to suffice, and it will"
    collect_held_out(trunk, 4 * unit_tokens)
    run_preparer(trunk.work, until_cycle=FORK_AFTER + 2, workers=workers)
    branch = branch_line(
        work / "branch", trunk.work, FORK_AFTER, cycle_tokens, 3, dict.fromkeys(other, 2), 2 * unit_tokens, 1
    )
    before = contents(trunk.work)
    run_preparer(branch.work, until_cycle=3, workers=workers)
    assert contents(trunk.work) == before, "a branch leaves its trunk alone"
    of_branch = prepared(branch)
    run_preparer(trunk.work, until_cycle=sum(PIECES), workers=workers)
    assert prepared(branch) == of_branch, "and the trunk its branch"
    return Built(trunk, branch, truths)


@functools.lru_cache(maxsize=64)
def _manifest(path: Path) -> dict[str, Any]:
    return load_manifest(path)


def manifest_of(line: DataLine, cycle: int) -> dict[str, Any]:
    """A cycle's manifest, kept: each is looked at many times."""
    return _manifest(line.manifest_path(cycle))


def drawn_in(line: DataLine, cycle: int, name: str) -> list[tuple[int, Document]]:
    """What a source draws in a cycle, in order: stratum and document. The tail was drawn before."""
    has_tail = manifest_of(line, cycle)["sources"][name]["tail_in"] is not None
    listing = line.listing(name)
    return [
        (int(entry["stratum"]), (listing.file(entry["stratum"], entry["file"]).path, int(entry["row"])))
        for entry in table_of(line, cycle, name)[int(has_tail) :]
    ]


def with_source(cycles: Sequence[tuple[DataLine, int]], name: str) -> list[tuple[DataLine, int]]:
    """The cycles whose recipe has a source."""
    return [(line, cycle) for line, cycle in cycles if name in line.cycle_plan(cycle).sources]


def check_stream(cycles: Sequence[tuple[DataLine, int]], truth: Truth) -> None:
    """No document twice, none that is held out, and the streams are the documents, end to end without a gap."""
    name = truth.source.name
    drawn = [document for line, cycle in cycles for _, document in drawn_in(line, cycle, name)]
    assert len(set(drawn)) == len(drawn), "a document twice"
    assert not set(drawn) & truth.held_out
    expected = np.concatenate([truth.ids[document] for document in drawn])
    stream = np.concatenate([stream_of(line, cycle, name)[:-1] for line, cycle in cycles])
    assert np.array_equal(stream, expected[: len(stream)])
    last_line, last_cycle = cycles[-1]
    assert stream_of(last_line, last_cycle, name)[-1] == expected[len(stream)]
    tail = SourceState.from_json(manifest_of(last_line, last_cycle)["after"][name]).tail
    assert tail is not None
    assert tail.tokens == len(expected) - len(stream)


def files_of(line: DataLine, name: str) -> Iterator[tuple[int, str, PinnedFile]]:
    """Every (stratum, stratum's name, file) of a source."""
    listing = line.listing(name)
    for index, stratum in enumerate(listing.strata):
        for file in listing.files[index]:
            yield index, stratum, file


def check_ends(cycles: Sequence[tuple[DataLine, int]], truth: Truth) -> dict[str, int]:
    """Every file is used up, open, without documents, or unopened, and all sums agree; how many of each."""
    name = truth.source.name
    line, cycle = cycles[-1]
    state = SourceState.from_json(manifest_of(line, cycle)["after"][name])
    drawn = {document for line, cycle in cycles for _, document in drawn_in(line, cycle, name)}
    ends = {"used": 0, "open": 0, "without documents": 0, "unopened": 0}
    rows = held_out = documents = opened_tokens = left_tokens = 0
    for index, stratum, file in files_of(line, name):
        inside = truth.documents(file.path, stratum)
        taken = [document for document in inside if document in drawn]
        if file.order >= state.strata[index].next_file:
            ends["unopened"] += 1
            assert not taken
            continue
        of_stratum = truth.rows(file.path, stratum)
        rows += len(of_stratum)
        held_out += sum((file.path, number) in truth.held_out for number, _ in of_stratum)
        documents += len(inside)
        opened_tokens += sum(len(truth.ids[document]) for document in inside)
        still_open = [open_file for open_file in state.strata[index].open if open_file.order == file.order]
        if still_open:
            ends["open"] += 1
            left = sum(len(truth.ids[document]) for document in inside if document not in drawn)
            assert (still_open[0].documents, still_open[0].cursor) == (len(inside), len(taken))
            assert (still_open[0].path, still_open[0].left) == (file.path, left)
            assert len(taken) < len(inside)
            left_tokens += left
        elif inside:
            ends["used"] += 1
            assert taken == inside
        else:
            ends["without documents"] += 1
    counts = state.counts
    assert counts.files == ends["used"] + ends["open"] + ends["without documents"]
    assert (counts.rows, counts.held_out, counts.documents) == (rows, held_out, documents)
    assert counts.rows == counts.documents + counts.held_out + counts.rejected
    assert counts.taken_documents == len(drawn)
    assert counts.taken_tokens == sum(len(truth.ids[document]) for document in drawn)
    assert counts.taken_tokens + left_tokens == opened_tokens == sum(s.opened_tokens for s in state.strata)
    return ends


def check_shares(cycles: Sequence[tuple[DataLine, int]], truth: Truth) -> None:
    """A stratum's share in every cycle is what it has left over what the source has left as the cycle begins."""
    name = truth.source.name
    drawn: set[Document] = set()
    for line, cycle in cycles:
        source = manifest_of(line, cycle)["sources"][name]
        listing, left = line.listing(name), []
        rates = line.calibration().rates(line.source(name), listing)
        for index, (stratum, opened, rate) in enumerate(zip(listing.strata, source["opened"], rates, strict=True)):
            known = listing.files[index][: opened["next_file"]]
            in_opened = [document for file in known for document in truth.documents(file.path, stratum)]
            tokens = sum(len(truth.ids[document]) for document in in_opened)
            unread = sum(file.text_bytes for file in listing.files[index][opened["next_file"] :])
            seen = rate.bytes + sum(file.text_bytes for file in known)
            assert seen or not unread, "every stratum was sampled or opened"
            expected = unread * (rate.tokens + tokens) / seen if unread else Fraction(0)
            left.append(expected + sum(len(truth.ids[document]) for document in in_opened if document not in drawn))
        if (tail := source["tail_in"]) is not None:
            left[tail["stratum"]] += tail["tokens"]
        for share, tokens_left in zip(source["shares"], left, strict=True):
            assert abs(share - SHARE_ONE * tokens_left / sum(left)) < 1
        assert sum(source["shares"]) == SHARE_ONE
        drawn |= {document for _, document in drawn_in(line, cycle, name)}


def check(built: Built) -> None:
    """All of it, for the trunk and for the way into the branch."""
    for way in (built.trunk_cycles, built.branch_cycles):
        ends: dict[str, int] = {}
        lags: list[float] = []
        for truth in built.truths.values():
            cycles = with_source(way, truth.source.name)
            check_stream(cycles, truth)
            check_shares(cycles, truth)
            for line, cycle in cycles:
                name = truth.source.name
                lags += lags_of(manifest_of(line, cycle)["sources"][name], table_of(line, cycle, name))
            for end, count in check_ends(cycles, truth).items():
                ends[end] = ends.get(end, 0) + count
        assert sum(lag > 1 for lag in lags) <= len(lags) / 100
        assert all(ends.values()), f"files of every kind are in the corpus: {ends}"
    for line in (built.trunk, built.branch):
        assert [found for found in verify_line(line) if not found.ok] == []


def check_schedule(built: Built) -> None:
    """Three pieces of different recipes and sizes; positions go on from piece to piece and into the branch."""
    trunk, branch = built.trunk, built.branch
    pieces = [(len(p.recipe), p.cycle_tokens) for p in trunk.settings.schedule]
    assert len(set(pieces)) == 3
    positions = [trunk.cycle_plan(cycle).first_token for cycle in range(1, sum(PIECES) + 1)]
    assert positions == list(np.cumsum([0] + [trunk.cycle_plan(cycle).tokens for cycle in range(1, sum(PIECES))]))
    assert branch.cycle_plan(1).first_token == trunk.cycle_plan(FORK_AFTER + 1).first_token
    for name in trunk.cycle_plan(1).sources:
        left_out = [c for c in range(1, sum(PIECES) + 1) if name not in trunk.cycle_plan(c).sources]
        assert left_out == (list(range(PIECES[0] + 1, PIECES[0] + PIECES[1] + 1)) if name == "metadata" else [])
    tails = {name: state["tail"] for name, state in manifest_of(trunk, FORK_AFTER)["after"].items()}
    firsts = {name: source["tail_in"] for name, source in manifest_of(branch, 1)["sources"].items()}
    assert firsts == {name: tails[name] for name in firsts}


@pytest.mark.slow  # the demo trains on this machine's text as well
def test_a_sample_of_the_machine(tokenizer: Path, tmp_path: Path) -> None:
    built = build(tmp_path, tokenizer, budget=80_000, held_out=0.15, unit_tokens=32, workers=0)
    assert len(built.truths) >= 10
    check_schedule(built)
    check(built)


@pytest.mark.slow
def test_a_large_part_of_the_machine(tokenizer: Path, tmp_path: Path) -> None:
    """Up to 5 MB a source, thousands of files, opened by two worker processes."""
    built = build(tmp_path, tokenizer, budget=5_000_000, held_out=0.05, unit_tokens=1024, workers=2)
    check_schedule(built)
    check(built)
