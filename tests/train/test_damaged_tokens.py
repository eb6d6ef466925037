"""A token file that was damaged after it was prepared: nothing that was trained on it is kept, and the remedy that is
told brings the line to the bits that it would have had."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_line import (
    journal_summary,
    last_update,
    make_data_line,
    make_run,
    prepare,
    run_here,
    state_of,
    tensors_of,
    wait_until,
)

from nstrain.base.errors import ExitCode, NeedsOperator
from nstrain.data.consumers import read_consumers
from nstrain.data.line import DataLine
from nstrain.data.token_check import TokenCheck
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_heartbeat
from nstrain.train.cycles import CycleAhead, OpenCycle

CYCLES = 2
CYCLE_UPDATES = 13
LAST_UPDATE = CYCLES * CYCLE_UPDATES


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), CYCLES)
    prepare(line.work, CYCLES)
    return line


@pytest.fixture(scope="module")
def through(prepared: DataLine, tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    """The line on files without a damage."""
    paths = make_run(tmp_path_factory.mktemp("through") / "run", prepared)
    assert run_here(paths) == ExitCode.DONE
    return paths


@pytest.fixture
def data(prepared: DataLine, tmp_path: Path) -> DataLine:
    work = shutil.copytree(prepared.work, tmp_path / "data")
    for entry in (work / "consumers").iterdir():
        entry.unlink()
    return DataLine.open(work)


@pytest.fixture
def line(data: DataLine, tmp_path: Path) -> LinePaths:
    return make_run(tmp_path / "run", data)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nstrain.train.loop.HASHING_BEAT_S", 0.1)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hashing takes until the event is set, and gets on meanwhile."""
    go_on = threading.Event()
    hashed = TokenCheck._sha256

    def slow_hash(check: TokenCheck, file: object) -> str:
        while not (go_on.wait(0.01) or check._closing.is_set()):
            check.bytes_read += 1
        return hashed(check, file)  # type: ignore[arg-type]

    monkeypatch.setattr(TokenCheck, "_sha256", slow_hash)
    yield go_on
    go_on.set()


def damage(data: DataLine, cycle: int) -> None:
    """Other tokens in the first half of a cycle's text, in place; the sizes stay."""
    path = data.cycle_directory(cycle) / "books.bin"
    tokens = bytearray(path.read_bytes())
    tokens[: len(tokens) // 2] = bytes(len(tokens) // 2)
    path.write_bytes(tokens)


def remedy(message: str) -> None:
    """Do what a message says, as it is typed; the preparer of `nstrain run` follows."""
    subprocess.run(next(part for part in message.split("`") if part.startswith("rm ")), shell=True, check=True)


def assert_undisturbed(line: LinePaths, through: LinePaths) -> None:
    assert journal_summary(line) == journal_summary(through)
    assert journal_summary(line)[1] == 0, "no row of the damaged tokens was ever recorded"
    assert tensors_of(line, LAST_UPDATE) == tensors_of(through, LAST_UPDATE)
    mine, theirs = state_of(line, LAST_UPDATE), state_of(through, LAST_UPDATE)
    assert [mine[name] for name in ("position", "tokens", "generation", "optimizer")] == [
        theirs[name] for name in ("position", "tokens", "generation", "optimizer")
    ]


@pytest.mark.parametrize("cycle", [1, 2])
def test_it_is_trained_meanwhile_but_nothing_of_it_is_committed(
    data: DataLine,
    line: LinePaths,
    through: LinePaths,
    slow: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    cycle: int,
) -> None:
    """A launch, with the files hashed while updates go on up to the first checkpoint that is due."""
    if cycle == 2:
        slow.set()
        assert run_here(line, CYCLE_UPDATES) == ExitCode.STOPPED
        slow.clear()
    begins, saves_at = {1: (0, 4), 2: (13, 16)}[cycle]
    damage(data, cycle)
    seen: list[tuple[int | None, int]] = []

    def let_go() -> None:
        beats: set[float] = set()

        def waits() -> bool:
            beat = read_heartbeat(line)
            if beat is not None and beat.stage == "saving" and beat.update == saves_at:
                beats.add(beat.time)
            return len(beats) >= 3

        try:
            wait_until(waits, what="a save that waits, and beats")
            seen.append((last_update(line), line.checkpoint_updates()[-1]))
        finally:
            slow.set()

    releases = threading.Thread(target=let_go)
    releases.start()
    with pytest.raises(NeedsOperator, match=rf"cycles/00000{cycle}/books.bin: expected sha256 \w+, by the") as caught:
        run_here(line)
    releases.join()
    assert seen == [(begins, begins)], "three or four updates further, neither a row nor a checkpoint of them"
    assert (last_update(line), line.checkpoint_updates()[-1]) == (begins, begins)
    (consumer,) = read_consumers(data.work)
    assert (consumer.cycle, consumer.row) == (cycle, 0)
    assert caught.value.exit_code == ExitCode.NEEDS_OPERATOR

    remedy(str(caught.value))
    prepare(data.work, CYCLES)
    assert run_here(line) == ExitCode.DONE
    assert_undisturbed(line, through)


def test_the_next_cycle_is_found_damaged_before_it_is_its_turn(
    data: DataLine,
    line: LinePaths,
    through: LinePaths,
    slow: threading.Event,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line goes on to the end of the present cycle, having told, and trains nothing of the damaged one."""
    damage(data, 2)
    take = CycleAhead.take

    def take_and_hash_slowly(ahead: CycleAhead, data: DataLine, cycle: int, row_tokens: int) -> OpenCycle:
        if cycle == 2:  # hashed again, and for longer than an update takes
            slow.clear()
            threading.Timer(0.5, slow.set).start()
        return take(ahead, data, cycle, row_tokens)

    slow.set()
    monkeypatch.setattr(CycleAhead, "take", take_and_hash_slowly)
    with pytest.raises(NeedsOperator, match=r"cycles/000002/books.bin: expected sha256") as caught:
        run_here(line)
    printed = capsys.readouterr().out
    assert "ALARM cycle 2, which is next, is damaged: " in printed
    assert printed.index("ALARM cycle 2") < printed.index("u13  ")
    assert printed.count("ALARM cycle 2") == 1
    beat = read_heartbeat(line)
    assert beat is not None
    assert beat.update == CYCLE_UPDATES
    assert (last_update(line), line.checkpoint_updates()[-1]) == (CYCLE_UPDATES, CYCLE_UPDATES)
    remedy(str(caught.value))
    prepare(data.work, CYCLES)
    assert run_here(line) == ExitCode.DONE
    assert_undisturbed(line, through)


def test_what_is_mended_before_it_is_its_turn_does_not_stop_the_line(
    prepared: DataLine, data: DataLine, line: LinePaths, through: LinePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(data, 2)
    look, told = CycleAhead.look, []

    def look_and_mend(ahead: CycleAhead, *arguments: Any) -> str | None:
        problem = look(ahead, *arguments)
        if problem is not None:
            told.append(problem)
            remedy(problem)
            shutil.copytree(prepared.cycle_directory(2), data.cycle_directory(2))  # as its preparer does
        return problem

    monkeypatch.setattr(CycleAhead, "look", look_and_mend)
    assert run_here(line) == ExitCode.DONE
    assert len(told) == 1
    assert_undisturbed(line, through)


def test_a_resume_within_a_cycle_waits_only_where_it_saves(
    line: LinePaths, through: LinePaths, slow: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    slow.set()
    assert run_here(line, 6) == ExitCode.STOPPED
    slow.clear()
    threading.Timer(1.5, slow.set).start()
    assert run_here(line) == ExitCode.DONE
    assert re.search(r"waited \d+\.\d s for the hashes of cycle 1's token files", capsys.readouterr().out)
    assert_undisturbed(line, through)


def test_asked_to_stop_it_saves_nothing_of_a_damaged_cycle(
    data: DataLine, line: LinePaths, slow: threading.Event
) -> None:
    damage(data, 1)
    threading.Timer(0.5, slow.set).start()
    with pytest.raises(NeedsOperator, match=r"books.bin: expected sha256"):
        run_here(line, 2)
    assert (last_update(line), line.checkpoint_updates()) == (0, [0])


def test_a_trainer_that_dies_meanwhile_is_only_further_behind(
    line: LinePaths, through: LinePaths, slow: threading.Event
) -> None:
    """Rows that are held back go with it; they are trained again, to the same bits."""

    def dies(number: int) -> bool:
        if number >= 9:
            raise RuntimeError("the card is gone")
        return False

    with pytest.raises(RuntimeError, match="the card is gone"):
        run_here(line, spoil=dies)
    assert (last_update(line), line.checkpoint_updates()) == (0, [0])
    slow.set()
    assert run_here(line) == ExitCode.DONE
    assert_undisturbed(line, through)
