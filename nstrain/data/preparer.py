"""The preparer: a process that keeps a data line's cycles ready ahead of those who train on them.

It owns everything in a data line but line.json, val/ and consumers/. It may be killed at any instant: what it left
half-made is discarded at its next start and made again, to the same bytes. Run as a child it holds the read end of a
pipe and ends when the pipe closes, that is, when its parent is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nstrain.base.detach import say_ready
from nstrain.base.disk import FileLock, atomic_write_json, read_json
from nstrain.base.errors import DiskFull, Exhausted, ExitCode, NstrainError, Refusal
from nstrain.base.logs import FollowedLog, write_whole_lines
from nstrain.data.consumers import consumer_path, read_consumers
from nstrain.data.cycles import delete_consumed, discard_partial_cycles, prepare_cycle
from nstrain.data.encode import Encoder
from nstrain.data.extend import another_schedule_is_offered
from nstrain.data.line import DataLine
from nstrain.data.manifest import last_manifest, refuse_edited_pasts
from nstrain.data.opener_pool import OpenerPool, default_workers
from nstrain.data.readers import UnusableFile
from nstrain.data.readers.errors import FileRefusal
from nstrain.data.room import CheckpointRoom
from nstrain.gpu.readings import LINE_VARIABLE
from nstrain.line.orphaned import tell_of_the_supervisors_death, trainer_lives
from nstrain.line.paths import LinePaths

if TYPE_CHECKING:
    from nstrain.data.hub.downloads import DownloadProgress

LOCK_NAME = "preparer.lock"
STATUS_NAME = "preparer.json"
POLL_S = 0.25
DISK_RETRY_S = 10.0
SHOW_EVERY_S = 0.5
"""preparer.json shows a cycle's progress no more often than this."""
ORPHAN_WAIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class PreparerStatus:
    """preparer.json: what the preparer does now, for people and for the supervisor."""

    pid: int
    stage: str
    """preparing | downloading (what the cycle being prepared needs) | waiting_consumer (enough is ready ahead) |
    waiting_disk | done | stopped | failed"""
    cycle: int
    """The cycle it prepares or will prepare next."""
    progress: float
    """Share of that cycle that is done."""
    since: float
    """Unix time at which the stage began (of this cycle); of waiting_disk `disk_full_since`."""
    error: str | None
    """Of waiting_disk and failed; while downloading, what is being waited for."""
    download: dict[str, Any] | None = None
    """While downloading: how far it is (`DownloadProgress` without its trouble)."""
    disk_full_since: float | None = None
    """Unix time at which it first had no room, for the cycle that it has not finished since: one wait, though it tries
    again and again; None if it had room."""
    disk_full_tries: int = 0
    """How often it has found no room since then."""
    encoded_tokens: int = 0
    """Of preparing and downloading: tokens of the files that were opened for the cycle so far. Nearly all of a cycle's
    time goes into them, before anything of it is written; so this is the sign of life."""

    @property
    def download_progress(self) -> DownloadProgress | None:
        """How far the download is; None if there is none now."""
        if self.download is None:
            return None
        from nstrain.data.hub.downloads import DownloadProgress

        return DownloadProgress(**self.download, trouble=self.error)


class Preparer:
    """Prepares a line's cycles until the schedule is done or `stop()` says so."""

    def __init__(
        self,
        work: Path,
        ahead_cycles: int,
        until_cycle: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        on_status: Callable[[PreparerStatus], None] = lambda status: None,
        workers: int | None = None,
    ) -> None:
        """`ahead_cycles` stay ready beyond the cycle of each consumer (without one: beyond the first).

        With `until_cycle` it prepares the cycles up to that one without regard to consumers, and then ends. `workers`
        processes open files (None: as many as there are cores, at most eight; 0: none beside this one); their
        number changes no byte.
        """
        self.line = DataLine.open(work)
        self.ahead_cycles, self.until_cycle = ahead_cycles, until_cycle
        self._stop, self._on_status = stop, on_status
        self._workers = default_workers() if workers is None else workers
        self._room = CheckpointRoom(self.line)
        self._recorded = -1
        self._shown_at = self._fetching_at = 0.0
        self._disk_full_since: float | None = None
        self._disk_full_tries = 0
        self._encoded_tokens: Callable[[], int] = lambda: 0
        self._lost: dict[int, FileRefusal] = {}
        """Cycles that were deleted and cannot be made again, as it found when it tried, and why."""
        self._status = PreparerStatus(os.getpid(), "", 0, 0.0, time.time(), None)  # none of the stages: shown never

    def run(self) -> ExitCode:
        """Prepare until there is nothing left to do. The caller holds the lock. Errors are recorded, then raised."""
        try:
            self.line.calibration()
            refuse_edited_pasts(self.line)
            discard_partial_cycles(self.line)
            encoder = self.line.encoder()
            with OpenerPool(encoder, self._workers) as pool:
                self._encoded_tokens = lambda: pool.encoded_tokens
                while True:
                    try:
                        code = self._step(encoder, pool)
                    except DiskFull as error:
                        self._wait_for_disk(error, self._status.cycle)
                        continue
                    if code is not None:
                        return code
        except _StoppedError:
            self._show("stopped", self._status.cycle)
            return ExitCode.STOPPED
        except Exception as error:
            what = str(error) if isinstance(error, NstrainError) else f"{type(error).__name__}: {error}"
            self._show("failed", self._status.cycle, self._status.progress, what)
            raise

    def _step(self, encoder: Encoder, pool: OpenerPool) -> ExitCode | None:
        """Delete what is consumed, then prepare one cycle or wait a moment; an exit code if there is no more to do."""
        delete_consumed(self.line)
        self._record_prepared()
        cycle, due = self._next_cycle()
        if self._stop():
            self._show("stopped", cycle or self._status.cycle)
            return ExitCode.STOPPED
        if not due:
            self._refuse_lost()
        if cycle is None:
            self._show("done", self.until_cycle or self.line.cycle_count or 0, 1.0)
            return ExitCode.DONE
        if not due:
            self._show("waiting_consumer", cycle)
            time.sleep(POLL_S)
            return None
        try:
            self._room.refuse_to_begin(cycle)
        except DiskFull as error:
            self._wait_for_disk(error, cycle)
            return None
        if (self._status.stage, self._status.cycle) != ("waiting_disk", cycle):  # else once it gets on
            self._show("preparing", cycle)
        pool.encoded_tokens = 0
        try:
            with another_schedule_is_offered(self.line, cycle):
                prepare_cycle(
                    self.line, cycle, encoder, lambda share: self._progress(cycle, share), pool, self._downloading
                )
        except FileRefusal as error:
            if not self.line.manifest_path(cycle).exists():
                raise
            self._lost[cycle] = error  # of no concern to who is past it: the others' cycles come first
        self._disk_full_since, self._disk_full_tries = None, 0
        return None

    def _next_cycle(self) -> tuple[int | None, bool]:
        """The first cycle to be made now, and True; else the first that will be, if there is one, and False.

        These are cycles of the schedule that are neither on disk nor behind every consumer, nor lost.
        """
        last = self.line.cycle_count if self.until_cycle is None else self.until_cycle
        at = [consumer.cycle for consumer in read_consumers(self.line.work)] or [1]
        needed_from, furthest = min(at), max(at) + self.ahead_cycles
        later: int | None = None
        cycle = 1
        while (last is None or cycle <= last) and (later is None or cycle <= furthest):
            consumed = cycle < needed_from and self.line.manifest_path(cycle).exists()
            if not consumed and cycle not in self._lost and not self.line.is_ready(cycle):
                if self._is_due(cycle, at):
                    return cycle, True
                later = later or cycle
            cycle += 1
        return later, False

    def _is_due(self, cycle: int, at: list[int]) -> bool:
        """Whether a cycle is that of a consumer or so many ahead of it, or one that such a cycle follows from.

        Where consumers are far from each other, what lay between them was deleted, and is made again in its turn.
        """
        if self.until_cycle is not None:
            return True
        if not self.line.manifest_path(cycle).exists():
            return cycle <= max(at) + self.ahead_cycles
        return any(first <= cycle <= first + self.ahead_cycles for first in at)

    def _refuse_lost(self) -> None:
        """Raise `Refusal` for a deleted cycle that a consumer is still to train, if a file of it cannot be had."""
        consumers = read_consumers(self.line.work)
        for cycle, error in sorted(self._lost.items()):
            if self.until_cycle is not None or not consumers:
                raise error
            if wanting := [found for found in consumers if found.cycle <= cycle]:
                entries = ", ".join(str(consumer_path(self.line.work, found.id)) for found in wanting)
                raise Refusal(
                    f"cycle {cycle}, which is still to be trained by {', '.join(found.run for found in wanting)}, was "
                    f"deleted and cannot be made again: {error}. Lines that are past it go on. If the file cannot be "
                    f"had any more, nobody can train that cycle: remove those lines, and {entries}"
                ) from error

    def _progress(self, cycle: int, share: float) -> None:
        now = time.monotonic()  # files are opened while others are fetched: then it is the fetching that is shown
        if now >= self._shown_at + SHOW_EVERY_S and now >= self._fetching_at + 2 * SHOW_EVERY_S:
            self._show("preparing", cycle, share)
        self._room.refuse_to_go_on(cycle)
        if self._stop():
            raise _StoppedError

    def _downloading(self, progress: DownloadProgress) -> None:
        self._fetching_at = time.monotonic()
        trouble_is_new = progress.trouble is not None and self._status.error is None
        if trouble_is_new or time.monotonic() >= self._shown_at + SHOW_EVERY_S:
            figures = dataclasses.asdict(progress)
            del figures["trouble"]
            share = self._status.progress if self._status.stage in ("preparing", "downloading") else 0.0
            self._show("downloading", self._status.cycle, share, progress.trouble, figures)
        self._room.refuse_to_go_on(self._status.cycle)
        if self._stop():
            raise _StoppedError

    def _wait_for_disk(self, error: DiskFull, cycle: int) -> None:
        self._disk_full_since = self._disk_full_since or time.time()
        self._disk_full_tries += 1  # a sign of life
        self._show("waiting_disk", cycle, 0.0, str(error))
        deadline = time.monotonic() + DISK_RETRY_S
        while time.monotonic() < deadline and not self._stop():
            time.sleep(POLL_S)

    def _record_prepared(self) -> None:
        prepared = last_manifest(self.line)
        if prepared != self._recorded:
            path = self.line.work / "state.json"
            atomic_write_json(path, {**read_json(path), "prepared_cycles": prepared})
            self._recorded = prepared

    def _show(
        self,
        stage: str,
        cycle: int,
        progress: float = 0.0,
        error: str | None = None,
        download: dict[str, Any] | None = None,
    ) -> None:
        if stage not in ("preparing", "downloading", "waiting_disk"):
            self._disk_full_since, self._disk_full_tries = None, 0
        full_since, tries = self._disk_full_since, self._disk_full_tries
        same = (stage, cycle) == (self._status.stage, self._status.cycle)
        since = full_since if stage == "waiting_disk" else self._status.since if same else None
        encoded = self._encoded_tokens() if stage in ("preparing", "downloading") else 0
        status = PreparerStatus(
            os.getpid(), stage, cycle, progress, since or time.time(), error, download, full_since, tries, encoded
        )
        if status != self._status:
            self._status, self._shown_at = status, time.monotonic()
            with contextlib.suppress(DiskFull):  # what it does must not depend on telling it
                atomic_write_json(self.line.work / STATUS_NAME, dataclasses.asdict(status), durable=False)
            self._on_status(status)


class _StoppedError(Exception):
    """The preparer was told to stop in the middle of a cycle."""


def preparer_lock(work: Path) -> FileLock:
    """The lock of a data line's one preparer."""
    return FileLock(work / LOCK_NAME)


def run_preparer(
    work: Path,
    ahead_cycles: int = 1,
    until_cycle: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_status: Callable[[PreparerStatus], None] = lambda status: None,
    wait_s: float = 0.0,
    workers: int | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> ExitCode:
    """Run a preparer under the line's lock; `on_ready` is called once it has that.

    Raises `Refusal` if another one runs and does not end in `wait_s`.
    """
    DataLine.open(work)  # what is none gets no lock
    lock = preparer_lock(work)

    def tell(pid: int | None) -> None:
        print(f"waiting up to {wait_s:.0f} s for the preparer of {work} (process {pid}) to end", file=sys.stderr)

    try:
        lock.acquire(f"the preparer of {work}", wait_s, tell if wait_s else None)
    except NstrainError as error:
        raise Refusal(str(error)) from None
    with lock:
        on_ready()  # only now: line.json may have changed while another process had the lock
        return Preparer(work, ahead_cycles, until_cycle, stop, on_status, workers).run()


def cannot_pass(error: NstrainError) -> bool:
    """Whether what ended a preparer stays so until a person does something: a source that is used up, a file of which
    no text can be had. Anything else may be mended by itself."""
    return isinstance(error, Exhausted) or (isinstance(error, UnusableFile) and not error.may_pass)


def read_status(work: Path) -> PreparerStatus | None:
    """preparer.json, or None if there is none that can be read."""
    try:
        return PreparerStatus(**read_json(work / STATUS_NAME))
    except (NstrainError, TypeError):
        return None


def main() -> int:
    """`python -m nstrain.data.preparer WORK --ahead N ...`: the supervisor's child, or one in the background."""
    parser = argparse.ArgumentParser(prog="nstrain.data.preparer")
    parser.add_argument("work", type=Path)
    parser.add_argument("--ahead", type=int, default=1)
    parser.add_argument("--parent-fd", type=int, default=None, help="read end of a pipe that closes with the parent")
    parser.add_argument("--ready-fd", type=int, default=None, help="write end of a pipe that is told when it has begun")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--until", type=int, default=None)
    arguments = parser.parse_args()
    write_whole_lines()
    FollowedLog.of_output().follow(rotates=arguments.ready_fd is not None)  # else it is run.log, the supervisor's
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: told.append(n))

    def parent_gone() -> bool:
        fd = arguments.parent_fd
        return fd is not None and bool(select.select([fd], [], [], 0)[0])

    def stop() -> bool:
        return bool(told) or parent_gone()

    said: list[str] = []

    def show(status: PreparerStatus) -> None:
        line = f"preparer: {status.stage} cycle {status.cycle} {status.error or ''}".rstrip()
        if status.stage in ("preparing", "downloading") and status.error is None and status.progress not in (0.0, 1.0):
            return
        if said[-1:] != [line]:
            said[:] = [line]
            print(line, flush=True)

    try:
        return int(
            run_preparer(
                arguments.work,
                arguments.ahead,
                arguments.until,
                stop,
                show,
                ORPHAN_WAIT_S if arguments.ready_fd is None else 0.0,
                arguments.workers,
                lambda: say_ready(arguments.ready_fd),
            )
        )
    except NstrainError as error:
        print(f"preparer: {error}", file=sys.stderr, flush=True)
        return int(ExitCode.NEEDS_OPERATOR if cannot_pass(error) else error.exit_code)
    finally:
        line = os.environ.get(LINE_VARIABLE)
        if line is not None and parent_gone() and not trainer_lives(LinePaths(Path(line))):
            tell_of_the_supervisors_death(LinePaths(Path(line)), "no trainer ran; its preparer ends")


if __name__ == "__main__":
    sys.exit(main())
