"""A tracking service in memory, as real ones fail: it loses rows, shows them late, is away, refuses, and is left in the
middle of any call by a client that was killed.

It also is the judge: a row that a client must not send - below the floor, a second time, in a session that is over - is
an `AssertionError`, and stays one in `FakeService.wrongs`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nstrain.mirror.clock import MirrorClock
from nstrain.mirror.contract import RunIdentity, ServiceAway, ServiceRefuses
from nstrain.record.journal_reader import Row


class Killed(BaseException):
    """The mirror's process was killed here."""


class FakeClock(MirrorClock):
    """Time that passes only by waiting, and the events of that time."""

    def __init__(self, on_wait: Callable[[], bool] = lambda: False, start: float = 1.8e9) -> None:
        """`on_wait` is called at each wait that takes time, and says whether the mirror is to end."""
        super().__init__()
        self.time = start
        self.waits: list[float] = []
        self._on_wait = on_wait

    def now(self) -> float:
        return self.time

    def unix(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def wait(self, seconds: float) -> bool:
        if seconds <= 0:
            return False
        if self._on_wait():
            return True
        self.waits.append(seconds)
        self.time += seconds
        return False


@dataclasses.dataclass
class FakeRun:
    """A run as the service has it."""

    generation: int
    config: dict[str, Any]
    rows: dict[int, Row] = dataclasses.field(default_factory=dict)
    shown_from: dict[int, float] = dataclasses.field(default_factory=dict)
    """When a row can be read back, by its update."""
    top: int = -1
    """The service takes rows above this."""
    sent: list[int] = dataclasses.field(default_factory=list)
    """Every update that was handed over, in order."""
    tags: list[str] = dataclasses.field(default_factory=list)
    superseded: tuple[str, str] | None = None


class FakeService:
    """The service, which outlives the clients that are killed."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.runs: dict[str, FakeRun] = {}
        self.wrongs: list[str] = []
        self.away_until = self.refuses_until = 0.0
        self.away_for: set[str] = set()
        """Calls that fail as of a service that is away, for ever: open, send, read, close, supersede."""
        self.lag_s = 0.0
        self.drops = 0
        """So many of the next rows get lost between client and service."""
        self.kill_in: int | None = None
        """Kill the client at the so many-th instant from now on; each call has two, before and after what it does."""
        self.calls: list[str] = []

    def check(self, sane: bool, what: str) -> None:
        if not sane:
            self.wrongs.append(what)
            raise AssertionError(what)

    def instant(self) -> None:
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                raise Killed  # and again at whatever it still tries to do

    def call(self, name: str) -> None:
        self.calls.append(name)
        self.instant()
        if self.clock.time < self.refuses_until and name in ("open", "supersede"):
            raise ServiceRefuses("https://tracker: the key is not valid")
        if self.clock.time < self.away_until or name in self.away_for:
            raise ServiceAway(f"https://tracker: {name}: no answer")

    def taken(self, run_id: str, what: dict[str, Any]) -> None:
        """A run with its config, or a row, was taken: for a service that outlives this process too."""

    # ---- what a service does to rows ---------------------------------------------------------------------------------

    def lose_newest(self, run_id: str, count: int) -> None:
        """As when it was put back from a copy: it knows less, and takes those rows again."""
        run = self.runs[run_id]
        for update in sorted(run.rows)[len(run.rows) - min(count, len(run.rows)) :]:
            del run.rows[update]
        run.top = max(run.rows, default=-1)

    def lose(self, run_id: str, update: int) -> None:
        """One row is gone for good."""
        del self.runs[run_id].rows[update]

    def alter(self, run_id: str, update: int, **readings: float) -> None:
        self.runs[run_id].rows[update].update(readings)


class FakeTracker:
    """The client of one process."""

    def __init__(self, service: FakeService, client_files: bool = False) -> None:
        self.service, self._client_files = service, client_files
        self.open_run: FakeRemote | None = None

    def open(self, identity: RunIdentity, known: bool) -> FakeRemote:
        service = self.service
        service.check(self.open_run is None, f"{identity.run_id} is opened while another run is open")
        service.call("open")
        run = service.runs.get(identity.run_id)
        if known and run is None:
            raise ServiceRefuses(f"https://tracker: there is no run {identity.run_id}")
        if run is None:
            config = copy.deepcopy(dict(identity.config))
            run = service.runs[identity.run_id] = FakeRun(config["nstrain"]["generation"], config)
            service.taken(identity.run_id, config)
        service.check(known or run.top == -1, f"{identity.run_id} was not to be known, but has rows")
        service.check(run.superseded is None, f"{identity.run_id} is superseded, and opened again")
        service.instant()
        directory = None
        if self._client_files:
            directory = identity.directory / f"run-{len(service.calls)}"
            directory.mkdir(parents=True)
        self.open_run = FakeRemote(self, identity.run_id, run, directory)
        return self.open_run

    def supersede(self, run_id: str, by: str, why: str) -> None:
        service = self.service
        service.call("supersede")
        service.check(by in service.runs, f"{run_id} is superseded by {by}, which is not there")
        if run_id in service.runs:
            run = service.runs[run_id]
            run.tags, run.superseded = ["superseded"], (by, why)
        service.instant()


class FakeRemote:
    """A session."""

    def __init__(self, tracker: FakeTracker, run_id: str, run: FakeRun, directory: Path | None) -> None:
        self._tracker, self._service, self.run_id, self._run = tracker, tracker.service, run_id, run
        self.url: str | None = f"https://tracker/{run_id}"
        self.floor = run.top + 1
        self.client_directory = directory
        self._next = self.floor
        self._closed = False

    def send(self, row: Row) -> None:
        service, run, update = self._service, self._run, int(row["update"])
        service.call("send")
        service.check(not self._closed, f"update {update} is sent in a session that is over")
        service.check(update >= self._next, f"update {update} is sent, below {self._next}")
        service.check(update not in run.rows, f"update {update} is sent though it is there")
        self._next = update + 1
        run.sent.append(update)
        if self.client_directory is not None:
            with (self.client_directory / "rows").open("ab") as file:
                file.write(bytes(100))
        if service.drops:
            service.drops -= 1
        elif update > run.top:
            run.rows[update], run.top = dict(row), update
            service.taken(self.run_id, dict(row))
            run.shown_from[update] = service.clock.time + service.lag_s
        service.instant()

    def read(self, first: int, last: int) -> Iterator[Row]:
        self._service.check(not self._closed, "reading in a session that is over")
        self._service.call("read")
        for update in sorted(self._run.rows):
            if first <= update <= last and self._run.shown_from[update] <= self._service.clock.time:
                self._service.instant()
                yield {**self._run.rows[update], "_step": update, "_runtime": 1.5}

    def close(self, limit_s: float) -> None:
        self._closed, self._tracker.open_run = True, None
        self._service.call("close")
