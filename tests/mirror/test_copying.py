"""The mirror's loop, one trouble at a time."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_tracker import FakeClock, FakeRemote, FakeRun, FakeService, Killed
from mirror_lines import TRACKER, Line, copier, fast_directory
from run_json import changed, settings

from nstrain.base.errors import DiskFull, Refusal
from nstrain.mirror import state as state_module
from nstrain.mirror.clock import MirrorPace
from nstrain.mirror.comparing import compared, differing
from nstrain.mirror.contract import ServiceAway
from nstrain.mirror.state import MirrorState, read_state
from nstrain.settings.run import save_run


class World:
    """A line, its service, and mirrors that run for a time."""

    def __init__(self, root: Path) -> None:
        self.line = Line(root / "trunk")
        self.clock = FakeClock(self._over)
        self.service = FakeService(self.clock)
        self.told: list[str] = []
        self.end_at = 0.0
        self.steps: Iterator[Callable[[], object]] = iter(())
        self.pace = MirrorPace(poll_s=10.0)
        self.client_files = False

    def _over(self) -> bool:
        next(self.steps, lambda: None)()
        return self.clock.time >= self.end_at

    def mirror(self, seconds: float, *steps: Callable[[], object]) -> None:
        """A mirror for so long; at each of its first waits one of the steps happens."""
        self.end_at, self.steps = self.clock.time + seconds, iter(steps)
        self.clock.waits.clear()
        one = copier(self.line, self.service, self.clock, self.pace, self.told.append, self.client_files)
        one.run()
        one.end()

    @property
    def state(self) -> MirrorState:
        found = read_state(self.line.paths)
        assert found is not None
        return found

    @property
    def run(self) -> FakeRun:
        return self.service.runs[self.state.run_id]

    def assert_copied(self) -> None:
        rows = self.line.rows()
        assert self.run.rows.keys() == rows.keys()
        assert [update for update, row in rows.items() if differing(row, self.run.rows[update])] == []
        assert self.service.wrongs == []


@pytest.fixture
def world() -> Iterator[World]:
    with fast_directory() as directory:
        yield World(directory)


def test_what_is_recorded_is_sent_compared_and_told(world: World) -> None:
    world.line.train(5)
    world.mirror(1500, *[lambda: world.line.train(1)] * 3)
    world.assert_copied()
    state = world.state
    assert (state.pushed_through, state.verified_through, state.differences) == (7, 7, 0)
    assert (state.url, state.known, state.pid) == (f"https://tracker/{state.run_id}", True, None)
    assert (state.failing_since, state.error, state.superseded) == (None, None, ())
    assert world.run.config["nstrain"] == {
        "line": "a1", "run": str(world.line.paths.root), "generation": 1, "parent": None
    }  # fmt: skip
    assert world.run.config["tracker"] == TRACKER
    assert world.told == [f"run {state.run_id} begins, of generation 1: {state.url}"]
    assert world.service.calls.count("open") == 1  # a session lasts

    world.mirror(0)  # and the next mirror sends nothing again
    assert world.run.sent == list(range(8))


def test_there_is_no_run_before_there_is_a_journal(world: World) -> None:
    world.mirror(600)
    assert world.service.calls == []
    assert read_state(world.line.paths) is None
    world.mirror(600, lambda: world.line.train(2))
    world.assert_copied()


@pytest.mark.parametrize("instant", range(8))
def test_a_start_that_is_cut_off_finds_its_run_again(world: World, instant: int) -> None:
    world.line.train(3)
    world.service.kill_in = instant
    with pytest.raises(Killed):
        world.mirror(100)
    world.service.kill_in = None
    begun = world.state.run_id  # told before the service heard of it
    world.mirror(100)
    assert list(world.service.runs) == [begun]
    world.assert_copied()


def test_a_service_that_is_away_is_tried_again_with_growing_waits(world: World) -> None:
    world.line.train(3)
    began = world.clock.time
    world.service.away_until = began + 5 * 3600
    world.mirror(6 * 3600)
    world.assert_copied()
    tries = [name for name in world.service.calls if name == "open"]
    assert 30 <= len(tries) <= 60  # 5 s doubling to 10 minutes: some 10, and then 6 to 8 an hour
    first, long, again = world.told[0], world.told[1], world.told[-1]
    assert first == "https://tracker: open: no answer; it is tried again, training does not wait for it"
    assert "nothing has arrived for 2h" in long
    assert "the copy goes on, through update 2, after 5h" in again
    assert len(world.told) == 4  # with that of the run's beginning
    assert world.state.failing_since is None


def test_while_it_is_away_the_file_says_since_when_and_lives(world: World) -> None:
    world.line.train(3)
    began = world.clock.time
    world.service.away_until = began + 1e9
    beats: list[float] = []
    world.mirror(3600, *[lambda: beats.append(world.clock.time - world.state.updated_at)] * 400)
    assert len(beats) > 300
    assert max(beats) <= 20
    assert (world.state.failing_since, world.state.error) == (began, "https://tracker: open: no answer")
    world.mirror(3600)
    assert world.state.failing_since == began  # across mirrors


def test_an_opened_run_is_not_yet_a_success(world: World) -> None:
    """A service that lets runs be opened and takes no row fails all the time: the waits grow, and since is since."""
    world.line.train(3)
    began = world.clock.time
    world.service.away_for = {"send"}
    world.mirror(4 * 3600)
    assert world.service.calls.count("open") < 45
    assert world.state.failing_since == began
    world.service.away_for = set()
    world.mirror(600)
    assert world.state.failing_since is None
    world.assert_copied()


def test_a_refusal_is_tried_again_every_ten_minutes(world: World) -> None:
    world.line.train(3)
    world.service.refuses_until = world.clock.time + 7200
    world.mirror(7200)
    assert 12 <= world.service.calls.count("open") <= 17
    assert world.state.error == "https://tracker: the key is not valid"
    assert not world.state.known
    world.mirror(600)
    world.assert_copied()


def test_a_run_that_was_deleted_there_is_refused_with_a_remedy(world: World) -> None:
    world.line.train(3)
    world.mirror(100)
    deleted = world.state.run_id
    del world.service.runs[deleted]
    world.mirror(100)
    assert f"there is no run {deleted}; if run {deleted} was deleted there, `rm " in (world.state.error or "")
    assert world.service.runs == {}
    world.line.paths.wandb_run.unlink()
    world.mirror(100)
    world.assert_copied()


def test_rows_that_are_shown_late_are_waited_for(world: World) -> None:
    world.line.train(3)
    world.service.lag_s = 170.0
    world.mirror(2000, *[lambda: world.line.train(1)] * 40)
    assert world.service.calls.count("open") == 1
    assert len(world.service.runs) == 1
    world.assert_copied()


def test_the_newest_rows_that_were_lost_are_sent_again(world: World) -> None:
    world.line.train(3)
    world.mirror(900, lambda: setattr(world.service, "drops", 4), lambda: world.line.train(4))
    assert "updates 3 to 6 were sent, but after 180 s the service does not show them; it is tried" in world.told[1]
    assert world.state.failing_since is None
    assert len(world.service.runs) == 1
    assert world.run.sent == [*range(7), *range(3, 7)]
    world.assert_copied()


def test_rows_that_were_found_and_lost_are_compared_again(world: World) -> None:
    world.line.train(8)
    world.mirror(100)
    assert world.state.verified_through == 7
    world.service.lose_newest(world.state.run_id, 3)
    world.service.drops = 1  # of those that are sent again the first gets lost
    world.mirror(900)
    assert world.state.superseded[0].why == "a hole at update 5"
    world.assert_copied()


def test_a_hole_begins_a_new_run_and_a_second_one_waits_an_hour(world: World) -> None:
    world.line.train(3)
    drop = (lambda: setattr(world.service, "drops", 1), lambda: world.line.train(2))
    world.mirror(1200, *drop)
    (old,) = world.state.superseded
    assert (old.why, old.marked, old.generation) == ("a hole at update 3", True, 1)
    assert world.service.runs[old.run_id].superseded == (world.state.run_id, "a hole at update 3")
    assert sorted(world.service.runs[old.run_id].rows) == [0, 1, 2, 4]  # it stays as it is
    world.assert_copied()

    second = world.state.run_id
    world.mirror(1500, *drop)
    assert world.state.run_id == second
    assert "no sooner than 1h00m after this one" in (world.state.error or "")
    world.mirror(3600)
    assert [run.why for run in world.state.superseded] == ["a hole at update 3", "a hole at update 5"]
    world.assert_copied()


def test_a_row_that_the_service_counts_and_never_shows_is_a_hole_in_the_end(world: World) -> None:
    world.line.train(3)
    world.mirror(100)
    run_id = world.state.run_id
    world.line.train(1)
    world.service.drops = 1
    world.mirror(10)
    world.run.top = 3  # the last row is not there, and is counted
    world.mirror(1700)
    assert world.state.run_id == run_id
    world.mirror(2200)
    assert world.state.superseded[0].why == "a hole at update 3"
    world.assert_copied()


def test_rows_that_differ_are_counted_once_and_never_rewritten(world: World) -> None:
    world.line.train(20)
    world.service.lag_s = 100.0  # all are altered before they are first read back
    change = [lambda: [world.service.alter(world.state.run_id, update, skipped=7) for update in range(1, 15)]]
    world.mirror(900, *change)
    world.mirror(900)
    assert world.state.differences == 14
    told = [text for text in world.told if "differ" in text]
    assert len(told) == 11  # ten, and that there are more
    assert told[0] == "update 1 differs on the service: skipped; the journal's row is right"
    assert world.run.sent == list(range(20))


def test_a_journal_that_is_older_than_the_copy_is_waited_for_and_compared(world: World) -> None:
    world.line.train(4)
    old = world.line.paths.journal.read_bytes()
    world.line.train(4)
    world.mirror(100)
    assert world.run.sent == list(range(8))

    world.line.paths.journal.write_bytes(old)
    grow = [lambda: world.line.train(1), lambda: world.line.train(1, version=1), *[lambda: world.line.train(1)] * 4]
    world.mirror(700, lambda: None, *grow)
    assert world.run.sent == list(range(10))  # nothing a second time
    assert world.state.verified_through == 9
    assert world.state.differences == 1
    assert "update 5 differs on the service: train/loss; the journal's row is right" in world.told


def test_a_rollback_begins_a_new_run_filled_from_the_journal(world: World) -> None:
    world.line.train(6)
    world.mirror(700, lambda: world.line.roll_back(2), lambda: world.line.train(2, version=1))
    (old,) = world.state.superseded
    assert old.why == "generation 2 of the line takes the place of 1"
    assert world.service.runs[old.run_id].superseded == (world.state.run_id, old.why)
    assert sorted(world.service.runs[old.run_id].rows) == list(range(6))
    assert (world.run.generation, sorted(world.run.rows)) == (2, [0, 1, 2, 3, 4])
    world.assert_copied()


def test_two_rollbacks_while_it_is_away_name_a_run_that_is_there(world: World) -> None:
    world.line.train(6)
    world.mirror(100)
    first = world.state.run_id
    world.service.away_until = world.clock.time + 3000
    roll_back = [lambda: world.line.roll_back(2), *[lambda: None] * 90, lambda: world.line.roll_back(1)]
    world.mirror(8000, *roll_back)
    assert [run.generation for run in world.state.superseded] == [1, 2]
    assert set(world.service.runs) == {first, world.state.run_id}
    assert world.service.runs[first].superseded == (world.state.run_id, "generation 2 of the line takes the place of 1")
    world.assert_copied()


def test_a_mark_that_is_refused_is_told_once_and_copying_goes_on(world: World) -> None:
    world.line.train(6)
    world.mirror(100)
    world.line.roll_back(2)
    world.line.train(1)
    world.service.away_for = {"supersede"}
    world.mirror(1500)
    world.assert_copied()
    assert [run.marked for run in world.state.superseded] == [False]
    assert world.state.failing_since is None
    world.service.away_for = set()
    world.mirror(100)
    assert [run.marked for run in world.state.superseded] == [True]


def test_another_project_gets_a_run_of_its_own(world: World) -> None:
    world.line.train(3)
    world.mirror(100)
    first = world.state.run_id
    save_run(world.line.paths.run_json, settings(changed("tracker", to={**TRACKER, "project": "other"})))
    world.mirror(100)
    assert (world.state.project, world.state.superseded) == ("other", ())
    assert world.state.run_id != first
    assert world.service.runs[first].superseded is None
    world.assert_copied()


def test_no_room_for_the_file_keeps_a_run_from_beginning(world: World) -> None:
    world.line.train(3)
    full = itertools.count()
    write = state_module.write_state

    def no_room(*arguments: Any) -> None:
        if next(full) < 5:
            raise DiskFull("no room")
        write(*arguments)

    with mock.patch.object(state_module, "write_state", no_room):
        world.mirror(3600)
    world.assert_copied()
    assert world.told[0].startswith("no room; it is tried again")


def test_what_is_there_at_the_end_is_sent_and_what_is_not_found_is_told(world: World) -> None:
    world.line.train(3)
    world.mirror(100)
    world.line.train(2)
    world.mirror(0)
    world.assert_copied()
    world.line.train(2)
    world.service.lag_s = 1000.0
    began = world.clock.time
    world.mirror(0)
    assert world.clock.time - began <= 60
    assert world.told[-1].startswith("updates 5 to 6 have not been found on the service yet; the next mirror, or `")
    assert (world.state.pushed_through, world.state.verified_through) == (6, 4)


def test_the_end_comes_in_time_however_slowly_the_service_gives_rows_back(world: World) -> None:
    world.line.train(200)
    world.mirror(10)
    assert world.state.verified_through == 199
    world.line.train(300)
    read = FakeRemote.read

    def slowly(remote: FakeRemote, first: int, last: int) -> Iterator[Any]:
        for row in read(remote, first, last):
            world.clock.time += 1.0
            yield row

    began = world.clock.time
    with mock.patch.object(FakeRemote, "read", slowly):
        world.mirror(0)
    assert world.clock.time - began <= 60
    assert 220 < (world.state.verified_through or 0) < 260
    assert "have not been found on the service yet" in world.told[-1]


def test_a_damaged_journal_ends_it_with_the_journals_words(world: World) -> None:
    world.line.train(3)
    world.mirror(100)
    journal = world.line.paths.journal
    one = copier(world.line, world.service, world.clock, world.pace)
    world.end_at = world.clock.time + 1e9
    world.steps = iter([lambda: journal.write_bytes(b"x" * 8192)])
    with pytest.raises(Refusal) as refused:
        one.run()
    one.end(refused.value)
    assert str(journal) in str(refused.value)
    assert world.state.error == str(refused.value)
    assert world.state.failing_since is not None


# ---- directories of the client ---------------------------------------------------------------------------------------


def test_the_clients_directory_is_bounded(world: World) -> None:
    world.line.train(30)
    world.client_files, world.pace = True, MirrorPace(poll_s=10.0, directory_bytes=1500)  # a row takes 100
    mine = world.line.paths.wandb_directory / "mine"
    mine.mkdir(parents=True)
    (mine / "notes").write_text("a person's")
    world.mirror(3000, *[lambda: world.line.train(2)] * 30)
    world.assert_copied()
    assert world.service.calls.count("open") > 4
    # The last session's stays until the next start; the others went as their rows were found.
    assert len(list(world.line.paths.wandb_directory.glob("run-*"))) == 1
    assert [entry.clean for entry in world.state.directories] == [True]
    world.mirror(0)
    assert len(list(world.line.paths.wandb_directory.glob("run-*"))) == 1
    assert (mine / "notes").read_text() == "a person's"


def test_a_session_that_was_ended_for_its_size_is_clean_once_its_rows_are_found(world: World) -> None:
    world.line.train(3)
    world.client_files, world.pace = True, MirrorPace(poll_s=10.0, directory_bytes=1500)
    seen: list[tuple[bool, bool]] = []

    def see() -> None:
        if len(world.state.directories) == 2:
            seen.append((world.state.directories[0].clean, world.state.verified_through == 32))

    late = [lambda: None, lambda: setattr(world.service, "lag_s", 400.0), lambda: world.line.train(30)]
    world.mirror(600, *late, *[see] * 60)
    assert (False, False) in seen
    assert (True, False) not in seen
    world.assert_copied()


def test_a_directory_stays_until_its_rows_are_found_and_its_process_is_gone(world: World) -> None:
    world.client_files = True
    world.line.train(3)
    world.service.lag_s = 400.0
    world.mirror(50)
    (entry,) = world.state.directories
    assert (entry.clean, entry.pid) == (False, os.getpid())
    value = json.loads(world.line.paths.wandb_run.read_text())
    value["directories"][0]["pid"] = os.getppid()  # of a process that lives
    value["directories"] += [
        {"path": path, "pid": os.getpid(), "clean": True} for path in ("run.json", "wandb/../../trunk", "/tmp", "wandb")
    ]
    world.line.paths.wandb_run.write_text(json.dumps(value))
    world.mirror(1000)
    world.assert_copied()
    assert (world.line.paths.root / entry.path).is_dir()
    assert world.line.paths.run_json.exists()
    assert any("run.json could not be removed" in text for text in world.told)
    value = json.loads(world.line.paths.wandb_run.read_text())
    assert value["directories"][0]["clean"] is True
    value["directories"][0]["pid"] = 2**22 + 1  # of one that is gone
    world.line.paths.wandb_run.write_text(json.dumps(value))
    world.mirror(0)
    assert not (world.line.paths.root / entry.path).exists()


# ---- comparing -------------------------------------------------------------------------------------------------------


def test_rows_are_matched_by_their_update() -> None:
    mine = [{"update": update, "a": update} for update in range(6)]
    theirs = [{"update": update, "a": value} for update, value in [(0, 0), (2, 2), (2, 9), (3, 8), (5, 5), (7, 7)]]
    assert list(compared(iter(mine), iter(theirs))) == [
        (0, []), (1, None), (2, ["(there 2 times)", "a"]), (3, ["a"]), (4, None), (5, []),
    ]  # fmt: skip
    with pytest.raises(ServiceAway, match="gives back update 0 after update 2"):
        list(compared(iter(mine), itertools.cycle(mine[:3])))


@pytest.mark.parametrize(
    ("mine", "theirs", "names"),
    [
        ({"a": 1, "b": 0.5}, {"a": 1.0, "b": 0.5, "_step": 3}, []),
        ({"a": math.nan, "b": math.inf}, {"a": math.nan, "b": math.inf}, []),
        ({"a": math.inf}, {"a": -math.inf}, ["a"]),
        ({"a": math.nan}, {"a": 0.0}, ["a"]),
        ({"a": 0.1}, {"a": 0.1 + 2**-56}, ["a"]),
        ({"a": 1}, {}, ["a"]),
        ({}, {"a": 1, "b": None}, ["a"]),
        ({"a": 1}, {"a": "1"}, ["a"]),
        ({"a": 1}, {"a": True}, ["a"]),
    ],
)
def test_readings_that_differ(mine: dict[str, float], theirs: dict[str, Any], names: list[str]) -> None:
    assert differing(mine, theirs) == names
