"""The journal's mirror under a supervisor: kept at work, told of, and never in a line's way."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from foreground import QUICK, mirror_command, preparer_command, trainer_command
from notice_sink import notices, set_notify
from small_lines import make_small_line
from supervise_helpers import PATIENCE_S, Heard, SupervisorProcess, gone, set_guards, starts, supervise, wait_until

from nstrain.base.disk import FileLock
from nstrain.base.errors import ExitCode
from nstrain.base.process import identify
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_supervisor, request_stop
from nstrain.mirror.state import read_state
from nstrain.ops.status import status
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION, TrackerSettings, load_run, save_run
from nstrain.supervise.children import OTHERS_PREFIXES, Child, DeathPipe
from nstrain.supervise.mirroring import MirrorKeeper
from nstrain.supervise.supervisor import Supervisor

Start = Callable[..., SupervisorProcess]


def show(paths: LinePaths) -> LinePaths:
    """Give a line a tracker, and a journal."""
    tracker = TrackerSettings(service="wandb", project="spikes", base_url="http://127.0.0.1:9")
    save_run(paths.run_json, load_run(paths.run_json).model_copy(update={"tracker": tracker}))
    Journal.open(paths.journal, METRICS_VERSION).close()
    return paths


@pytest.fixture
def shown(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> LinePaths:
    """A line with a tracker that can be used."""
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    return show(paths)


# ---- beside a line ---------------------------------------------------------------------------------------------------


def test_it_may_send_the_last_rows_before_the_line_has_ended(shown: LinePaths) -> None:
    ending, events = supervise(shown, "done", mirror="slow")
    assert (ending.outcome, ending.exit_code) == ("done", ExitCode.DONE)
    assert (shown.root / "mirrored").read_text() == "the tracker to take the last rows"
    assert not any("mirror" in event for event in events)
    state = read_supervisor(shown)
    assert state is not None
    assert (state.mirror_pid, state.mirror_failures, state.waiting_for) == (None, 0, None)
    assert len(starts(shown.root, "mirror")) == 1


def test_one_that_fails_changes_nothing_for_the_line(shown: LinePaths) -> None:
    events: list[str] = []

    def tell(text: str) -> None:
        events.append(text)
        if sum("trainer started" in event for event in events) == 2 and any("mirror failed" in one for one in events):
            request_stop(shown)

    commands = trainer_command("crashes,works"), preparer_command("idle")
    supervisor = Supervisor(shown.root, tell, *commands, QUICK, mirror_command=mirror_command("refuses"))
    assert supervisor.run().outcome == "stopped"
    state = read_supervisor(shown)
    assert state is not None
    assert (state.failures_total, state.launches) == (1, 2)
    assert state.mirror_failures >= 1
    assert state.mirror_failure == "it ended with exit code 2 (project spikes: is refuses)"
    assert sum("the journal's mirror failed" in event for event in events) == 1, "the same is told once"


def test_its_words_are_not_taken_for_the_trainers(tmp_path: Path) -> None:
    pipe, log = DeathPipe(), tmp_path / "run.log"
    said = "failed: the GPU is gone\nmirror: failed: project spikes\npreparer: failed: source prose"
    trainer = Child("trainer", ["sh", "-c", f"printf '%s\n' '{said}'"], pipe, log, tmp_path)
    trainer.wait(10.0)
    assert trainer.last_words(lambda line: not line.startswith(OTHERS_PREFIXES)) == "failed: the GPU is gone"
    pipe.close()


def test_a_further_signal_ends_the_wait_for_it(shown: LinePaths, start: Start) -> None:
    running = start("works", "idle", "stubborn")
    running.wait_for_trainer()
    wait_until(lambda: read_state(shown) is not None)
    running.process.terminate()
    wait_until(lambda: running.state().waiting_for == "the tracker to take the last rows")
    look = status(shown.root)
    assert (look.state, look.waiting_for) == ("waiting", "the tracker to take the last rows")
    began = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    code, output = running.wait()
    assert time.monotonic() - began < QUICK.mirror_grace_s / 2
    assert code == ExitCode.STOPPED
    assert "was still sending when a signal came: SIGKILL" in output
    assert running.state().reason == "stopped by SIGTERM"


def test_a_service_that_is_away_for_long_is_notified_once_and_the_mirror_dies_with_its_supervisor(
    shown: LinePaths, start: Start, tmp_path: Path
) -> None:
    sink = set_notify(tmp_path)
    running = start("works", "idle", "away")
    running.wait_for_trainer()
    wait_until(lambda: notices(sink))
    time.sleep(0.5)
    look = status(shown.root)
    assert look.tracker is not None
    assert look.state == "running", "it is not the line that waits"
    assert (look.tracker.error, look.tracker.pid) == ("the service is away", running.state().mirror_pid)
    mirror = identify(starts(shown.root, "mirror")[0])
    running.process.kill()
    running.process.wait()
    wait_until(lambda: gone(mirror))
    (told,) = notices(sink)
    assert told["event"] == "mirror_failing"
    assert "for 1d00h nothing has been found to arrive" in told["text"]
    assert "the service is away" in told["text"]


# ---- its keeper, at a clock of the test's ----------------------------------------------------------------------------


class Kept:
    """A keeper with a clock that only the test moves."""

    def __init__(self, paths: LinePaths, command: Sequence[str], **pace: Any) -> None:
        self.now, self.heard, self.paths = 1e6, Heard(), paths
        self.pipe = DeathPipe()
        self.keeper = MirrorKeeper(
            paths,
            load_run(paths.run_json),
            command,
            self.pipe,
            dataclasses.replace(QUICK, mirror_look_s=5.0, mirror_backoff_s=(2.0, 60.0, 600.0), **pace),
            self.heard,
            lambda: self.now,
            lambda: self.now + 1e9,
        )

    def watch(self, after_s: float = 0.0) -> bool:
        """Let time pass, and look; whether a mirror runs."""
        self.now += after_s
        self.keeper.watch()
        return self.keeper.running()

    def started(self, times: int) -> None:
        """Wait until the mirror that was just started for the so manieth time has said something."""
        wait_until(lambda: len(self.starts()) == times)
        pid = self.starts()[-1]
        wait_until(lambda: (state := read_state(self.paths)) is not None and state.pid == pid)

    def starts(self) -> list[int]:
        return starts(self.paths.root, "mirror")

    def fails(self) -> None:
        """Wait until the mirror has failed."""
        wait_until(lambda: not self.watch())

    def says(self, **fields: Any) -> None:
        """Have wandb_run.json say something new of its mirror; only of one that says no more itself."""
        value = json.loads(self.paths.wandb_run.read_text())
        self.paths.wandb_run.write_text(json.dumps(value | {"updated_at": value["updated_at"] + 1.0} | fields))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    return show(make_small_line(tmp_path_factory.mktemp("template")))


@pytest.fixture
def bare(template: LinePaths, tmp_path: Path) -> LinePaths:
    """A line with a tracker and a journal, and nothing that could be trained."""
    shutil.copytree(template.root, tmp_path / "bare")
    return LinePaths(tmp_path / "bare")


@pytest.fixture
def keep(bare: LinePaths) -> Iterator[Callable[..., Kept]]:
    kept: list[Kept] = []

    def make(mirror: str, **pace: Any) -> Kept:
        kept.append(Kept(bare, mirror_command(mirror), **pace))
        return kept[-1]

    yield make
    for one in kept:
        one.keeper.end(hurried=lambda: True)
        one.pipe.close()


def test_it_begins_with_a_tracker_in_run_json(bare: LinePaths) -> None:
    save_run(bare.run_json, load_run(bare.run_json).model_copy(update={"tracker": None}))
    one = Kept(bare, mirror_command("works"))
    assert not any(one.watch(100.0) for _ in range(3))
    one.keeper.end()
    assert not one.heard.fields
    one.pipe.close()


def test_one_that_cannot_be_started(bare: LinePaths) -> None:
    one = Kept(bare, ["/no/such/program"])
    assert not any(one.watch(1000.0) for _ in range(3))
    (told,) = one.heard.told
    assert "/no/such/program" in told
    assert one.heard.fields["mirror_failures"] == 3
    one.pipe.close()


def test_it_begins_with_the_journal(keep: Callable[..., Kept]) -> None:
    one = keep("works")
    one.paths.journal.rename(one.paths.journal.with_suffix(".away"))
    assert not one.watch()
    one.paths.journal.with_suffix(".away").rename(one.paths.journal)
    assert not one.watch(4.9), "it looks now and then"
    assert one.watch(0.2)


def test_another_process_copies(keep: Callable[..., Kept]) -> None:
    one = keep("works")
    lock = FileLock(one.paths.mirror_lock).acquire("the test's lock")
    assert not any(one.watch(6.0) for _ in range(3))
    assert one.heard.told == [f"process {os.getpid()} copies the journal already; relying on it"]
    lock.release()
    assert one.watch(6.0)


def test_waits_grow_until_one_lives_for_longer_than_they_are(keep: Callable[..., Kept]) -> None:
    one = keep("crashes,crashes,crashes,crashes,quiet,crashes", mirror_notice_s=1000.0)
    for number, wait_s in enumerate((2.0, 60.0, 600.0, 600.0), start=1):
        assert one.watch()
        one.fails()
        assert one.heard.fields["mirror_failures"] == number
        assert not one.watch(wait_s - 0.1)
        one.now += 0.1
    assert [told.partition(":")[0] for told in one.heard.told] == ["the journal's mirror failed"], "told once"
    assert one.heard.events == ["mirror_failing"], "22 minutes after the first failure"
    assert one.watch()
    one.started(5)
    one.watch(5.0)
    one.watch(650.0)
    assert one.heard.fields["mirror_failures"] == 4, "it was started, and may have hung since"
    one.says()
    one.watch(5.0)
    assert not one.heard.fields["mirror_failures"]
    os.kill(one.starts()[-1], signal.SIGKILL)
    one.fails()
    assert "SIGKILL" in str(one.heard.fields["mirror_failure"])
    assert not one.watch(1.9)
    assert one.watch(0.2)
    assert one.heard.events == ["mirror_failing"], "a new row of failures, of a moment"


@pytest.mark.parametrize(("watchdog_s", "least_s"), [(100.0, 20.0), (20.0, 100.0)])
def test_one_that_is_silent_is_killed_and_started_again(
    keep: Callable[..., Kept], bare: LinePaths, watchdog_s: float, least_s: float
) -> None:
    set_guards(bare, watchdog_s=watchdog_s)
    one = keep("quiet", mirror_silence_s=least_s)
    one.watch()
    one.started(1)
    for _ in range(30):
        one.says()
        assert one.watch(5.0)
    one.watch(86_400.0)  # the machine was asleep
    assert one.heard.told == []
    looks = 0
    while not one.heard.told and looks < 100:
        one.watch(5.0)
        looks += 1
    assert looks == 19, "the sleep counts for two looks"
    assert one.heard.told == ["the journal's mirror has done nothing for 1m40s: SIGKILL"]
    one.fails()
    assert one.watch(2.1)
    one.started(2)


def test_each_time_that_a_service_is_away_for_long_is_notified(keep: Callable[..., Kept]) -> None:
    one = keep("quiet", mirror_notice_s=7200.0)
    one.watch()
    one.started(1)
    for _ in range(2):
        one.says(failing_since=one.now + 1e9, error="the service is away")
        before = len(one.heard.events)
        one.watch(7190.0)
        one.watch(9.0)
        assert len(one.heard.events) == before
        one.watch(6.0)
        one.watch(10_000.0)
        assert len(one.heard.events) == before + 1
        one.says(failing_since=None, error=None)
        one.watch(5.0)
    assert one.heard.told == [], "the mirror tells that itself"


def test_what_another_mirror_left_says_nothing(keep: Callable[..., Kept]) -> None:
    """A line that stopped a week ago, while the service was away: the new mirror has not tried yet."""
    one = keep("quiet")
    one.watch()
    one.started(1)
    one.says(failing_since=1e9, error="the service is away", pid=os.getpid())
    one.watch(10.0)
    assert one.heard.events == []
    one.paths.wandb_run.write_text("{")
    assert one.watch(10.0), "a damaged file is for the mirror to refuse"


def test_one_that_was_stopped_by_a_signal_goes_on_to_end(keep: Callable[..., Kept]) -> None:
    one = keep("slow")
    one.watch()
    one.started(1)
    os.kill(one.starts()[0], signal.SIGSTOP)
    give_up = time.monotonic() + PATIENCE_S
    one.keeper.end(lambda: time.monotonic() > give_up)
    assert (one.paths.root / "mirrored").exists()
    assert one.heard.told == []


def test_one_that_does_not_end_is_killed(keep: Callable[..., Kept]) -> None:
    one = keep("stubborn", mirror_grace_s=60.0)
    one.watch()
    one.started(1)

    def time_passes() -> bool:
        one.now += 10.0
        return False

    one.keeper.end(time_passes)
    (told,) = one.heard.told
    assert told.startswith("the journal's mirror was still sending when it took longer than 1m00s: SIGKILL")
    assert f"`nstrain mirror {one.paths.root}` sends the rest" in told
    assert not FileLock(one.paths.mirror_lock).held_elsewhere()
    assert one.heard.fields == {"mirror_pid": None, "waiting_for": None, "waiting_since": None}
