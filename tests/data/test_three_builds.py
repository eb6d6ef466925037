"""The same cycles built in many ways - in one process, by two workers, killed again and again - are the same bytes."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_helpers import make_line, prepared, prose, prose_tree, source, write_tree
from preparer_children import Kill, Preparers
from reader_files import write_records

from nstrain.data.consumers import write_consumer
from nstrain.data.cycles import cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.data.preparer import run_preparer
from nstrain.data.verify import verify_line

CYCLES = 3
KILLED = -9


def sources(base: Path) -> list[dict[str, object]]:
    """A text tree with strata by directory, nested parquet by column, compressed JSON lines by file."""
    draw = random.Random(5)
    tree = write_tree(base / "tree", prose_tree(1, {"a": 14, "b": 9, "c": 3}, words=90))
    for number in range(5):
        rows = [
            {
                "files": [
                    {"content": prose(draw.randrange(10**6), draw.randint(1, 120)), "language": kind} for kind in kinds
                ]
            }
            for kinds in ("xy", "y", "", "xyx", "z") * draw.randint(1, 2)
        ]
        write_records(base / "nested" / f"{number}.parquet", rows, row_group_size=3)
        lines = [{"text": prose(draw.randrange(10**6), draw.randint(0, 150))} for _ in range(draw.randint(4, 14))]
        write_records(base / "lines" / f"{number}.jsonl.gz", lines)
    nested = {"include": ["*.parquet"], "reader": "parquet", "text_column": "files[].content"}
    lined = {"include": ["*.jsonl.gz"], "reader": "jsonl", "text_column": "text", "stratum": {"by": "file"}}
    by_language = {"by": "column", "column": "files[].language"}
    return [
        source("tree", tree, 3, held_out=0.1),
        source("nested", base / "nested", 2, held_out=0.1, stratum=by_language, **nested),
        source("lines", base / "lines", 2, held_out=0.1, **lined),
    ]


@dataclasses.dataclass(frozen=True)
class Original:
    """A line before anything is prepared, and what preparing it straight in this process gives."""

    work: Path
    expected: dict[str, bytes]

    def copy(self, work: Path) -> DataLine:
        """A line to build, as it was at first."""
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self.work, work)
        return DataLine.open(work)


@pytest.fixture(scope="module")
def original(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Original:
    base = tmp_path_factory.mktemp("original")
    line = make_line(base / "line", tokenizer, sources(base), 1500, CYCLES, segment_units=1)
    shutil.copytree(line.work, base / "straight")
    straight = DataLine.open(base / "straight")
    run_preparer(straight.work, until_cycle=CYCLES, workers=0)
    assert cycles_on_disk(straight) == [1, 2, 3]
    assert [found for found in verify_line(straight) if not found.ok] == []
    return Original(line.work, prepared(straight))


@pytest.fixture(scope="module")
def preparers() -> Iterator[Preparers]:
    with Preparers() as preparers:
        yield preparers


class RandomMoment:
    """Says kill a random, short time after a random number of changes that can be seen in a line's directory."""

    def __init__(self, work: Path, draw: random.Random) -> None:
        self._work, self._seen = work, self._look(work)
        self._changes, self._wait_s = draw.randint(1, 30), draw.uniform(0, 0.01)

    @staticmethod
    def _look(work: Path) -> list[str]:
        return sorted(os.path.join(d, name) for d, _, names in os.walk(work) for name in names)

    def __call__(self) -> bool:
        now = self._look(self._work)
        self._changes -= now != self._seen
        self._seen = now
        if self._changes <= 0:
            time.sleep(self._wait_s)
        return self._changes <= 0


@pytest.mark.slow  # the pool's kills are in every run
def test_two_workers_and_one_that_is_killed_ten_times(original: Original, preparers: Preparers, tmp_path: Path) -> None:
    line = original.copy(tmp_path / "two")
    assert preparers.run(line.work, CYCLES, workers=2)[0] == 0
    assert prepared(line) == original.expected
    draw = random.Random(7)
    line = original.copy(tmp_path / "killed")
    kills, ready = 0, set()
    while kills < 10:
        status, _ = preparers.run(line.work, CYCLES, workers=1, kill_when=RandomMoment(line.work, draw))
        kills += status == KILLED
        ready.add(len(cycles_on_disk(line)))
        if status == 0 and kills < 10:
            assert prepared(line) == original.expected
            line = original.copy(line.work)
    assert len(ready) > 1, "the kills came in one cycle only"
    assert preparers.run(line.work, CYCLES, workers=1)[0] == 0
    assert prepared(line) == original.expected


def test_killed_at_every_kill_point_of_a_cycle(original: Original, preparers: Preparers, tmp_path: Path) -> None:
    for number in itertools.count(1):
        line = original.copy(tmp_path / "line")
        status, _ = preparers.run(line.work, CYCLES, kill=Kill(point=f"cycle:{number}"))
        if status == 0:
            break
        assert status == KILLED
        assert preparers.run(line.work, CYCLES)[0] == 0
        assert prepared(line) == original.expected
    assert number == CYCLES * (3 + 2) + 1  # three sources, the manifest, the rename
    assert prepared(line) == original.expected


def test_killed_while_a_consumed_cycle_is_deleted(original: Original, preparers: Preparers, tmp_path: Path) -> None:
    line = original.copy(tmp_path / "line")
    assert preparers.run(line.work, CYCLES)[0] == 0
    write_consumer(line.work, "a", CYCLES, 0, 0, Path("/run/a"))
    for on_disk in ([2, 3], [3]):
        assert preparers.run(line.work, CYCLES, kill=Kill(point="cycle:1"))[0] == KILLED
        assert cycles_on_disk(line) == on_disk
    assert preparers.run(line.work, CYCLES, kill=Kill(point="cycle:1"))[0] == 0
    left = {name: data for name, data in original.expected.items() if name.startswith(("manifests", "cycles/000003"))}
    assert prepared(line) == left
    write_consumer(line.work, "a", 1, 0, 0, Path("/run/a"))  # rolled back: what was deleted is made again
    assert preparers.run(line.work, CYCLES)[0] == 0
    assert prepared(line) == original.expected


MOMENTS = ("before", "after", "torn")


def test_killed_at_some_fsyncs_and_renames_one_after_the_other(
    original: Original, preparers: Preparers, tmp_path: Path
) -> None:
    line = original.copy(tmp_path / "counted")
    status, calls = preparers.run(line.work, CYCLES)
    assert (status, prepared(line)) == (0, original.expected)
    assert calls > 50
    draw = random.Random(3)
    line = original.copy(tmp_path / "line")
    for moment in MOMENTS * 5:
        status, _ = preparers.run(line.work, CYCLES, kill=Kill(call=draw.randint(1, calls // 4), moment=moment))
        if status != KILLED:
            assert (status, prepared(line)) == (0, original.expected)
            line = original.copy(line.work)
    assert preparers.run(line.work, CYCLES)[0] == 0
    assert prepared(line) == original.expected


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_every_fsync_and_rename(
    original: Original, preparers: Preparers, tmp_path: Path, moment: str
) -> None:
    for call in itertools.count(1):
        line = original.copy(tmp_path / "line")
        status, calls = preparers.run(line.work, CYCLES, kill=Kill(call=call, moment=moment))
        if status == 0:
            assert call > calls > 50
            break
        assert status == KILLED
        assert preparers.run(line.work, CYCLES)[0] == 0
        assert prepared(line) == original.expected, f"killed {moment} call {call}"


def test_without_open_files_kept_between_cycles(original: Original, tmp_path: Path) -> None:
    """open/ is a cache: lost whole, in part, or damaged, it changes nothing."""
    draw = random.Random(9)
    whole, damaged = original.copy(tmp_path / "whole"), original.copy(tmp_path / "damaged")
    for cycle in range(1, CYCLES + 1):
        run_preparer(whole.work, until_cycle=cycle, workers=0)
        shutil.rmtree(whole.work / "open")
        run_preparer(damaged.work, until_cycle=cycle, workers=0)
        entries = sorted(damaged.work.glob("open/*/*.tokens"))
        assert len(entries) > 5
        for entry in entries:
            match draw.randrange(3):
                case 0:
                    entry.unlink()
                case 1:
                    entry.write_bytes(entry.read_bytes()[:-3])
                case 2:
                    data = entry.read_bytes()
                    entry.write_bytes(data[: len(data) // 2] + bytes(byte ^ 1 for byte in data[len(data) // 2 :]))
    assert prepared(whole) == original.expected
    assert prepared(damaged) == original.expected
