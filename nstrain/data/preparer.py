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

from nstrain.base.disk import FileLock, atomic_write_json, read_json
from nstrain.base.errors import DiskFull, ExitCode, NstrainError, Refusal
from nstrain.data.consumers import read_consumers
from nstrain.data.cycles import delete_consumed, discard_partial_cycles, prepare_cycle
from nstrain.data.encode import Encoder
from nstrain.data.line import DataLine
from nstrain.data.manifest import load_manifest, refuse_edited_past

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
    """preparing | waiting_consumer (enough is ready ahead) | waiting_disk | done | stopped | failed"""
    cycle: int
    """The cycle it prepares or will prepare next."""
    progress: float
    """Share of that cycle that is done."""
    since: float
    """Unix time at which the stage began (of this cycle)."""
    error: str | None


class Preparer:
    """Prepares a line's cycles until the schedule is done or `stop()` says so."""

    def __init__(
        self,
        work: Path,
        ahead_cycles: int,
        until_cycle: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        on_status: Callable[[PreparerStatus], None] = lambda status: None,
    ) -> None:
        """`ahead_cycles` stay ready beyond the cycle of the furthest consumer (without one: beyond the first).

        With `until_cycle` it prepares the cycles up to that one without regard to consumers, and then ends.
        """
        self.line = DataLine.open(work)
        self.ahead_cycles, self.until_cycle = ahead_cycles, until_cycle
        self._stop, self._on_status = stop, on_status
        self._recorded = -1
        self._shown_at = 0.0
        self._status = PreparerStatus(os.getpid(), "", 0, 0.0, time.time(), None)  # none of the stages: shown never

    def run(self) -> ExitCode:
        """Prepare until there is nothing left to do. The caller holds the lock. Errors are recorded, then raised."""
        try:
            self._refuse_edited_past()
            discard_partial_cycles(self.line)
            encoder = self.line.encoder()
            while True:
                try:
                    code = self._step(encoder)
                except DiskFull as error:
                    self._wait_for_disk(error)
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

    def _step(self, encoder: Encoder) -> ExitCode | None:
        """Delete what is consumed, then prepare one cycle or wait a moment; an exit code if there is no more to do."""
        delete_consumed(self.line)
        self._record_prepared()
        cycle = self._next_cycle()
        if self._stop():
            self._show("stopped", cycle or self._status.cycle)
            return ExitCode.STOPPED
        if cycle is None:
            self._show("done", self.line.cycle_count or self.until_cycle or 0, 1.0)
            return ExitCode.DONE
        if self.until_cycle is None and cycle > self._wanted_through():
            self._show("waiting_consumer", cycle)
            time.sleep(POLL_S)
            return None
        self._show("preparing", cycle)
        prepare_cycle(self.line, cycle, encoder, lambda share: self._progress(cycle, share))
        return None

    def _refuse_edited_past(self) -> None:
        for cycle in range(1, self._prepared() + 1):
            refuse_edited_past(self.line, load_manifest(self.line.manifest_path(cycle)))

    def _next_cycle(self) -> int | None:
        """The first cycle of the schedule that is neither on disk nor behind every consumer; None if there is none."""
        last = self.line.cycle_count if self.until_cycle is None else self.until_cycle
        needed_from = min((consumer.cycle for consumer in read_consumers(self.line.work)), default=1)
        cycle = 1
        while last is None or cycle <= last:
            consumed = cycle < needed_from and self.line.manifest_path(cycle).exists()
            if not consumed and not self.line.is_ready(cycle):
                return cycle
            cycle += 1
        return None

    def _prepared(self) -> int:
        """The last cycle that has a manifest; 0 if none has."""
        names = (path.name for path in (self.line.work / "manifests").glob("*.json"))
        return max((int(name[:-5]) for name in names if name[:-5].isdecimal()), default=0)

    def _wanted_through(self) -> int:
        return max((consumer.cycle for consumer in read_consumers(self.line.work)), default=1) + self.ahead_cycles

    def _progress(self, cycle: int, share: float) -> None:
        if time.monotonic() >= self._shown_at + SHOW_EVERY_S:
            self._show("preparing", cycle, share)
        if self._stop():
            raise _StoppedError

    def _wait_for_disk(self, error: DiskFull) -> None:
        self._show("waiting_disk", self._status.cycle, 0.0, str(error))
        deadline = time.monotonic() + DISK_RETRY_S
        while time.monotonic() < deadline and not self._stop():
            time.sleep(POLL_S)

    def _record_prepared(self) -> None:
        prepared = self._prepared()
        if prepared != self._recorded:
            atomic_write_json(self.line.work / "state.json", {"format": 1, "prepared_cycles": prepared})
            self._recorded = prepared

    def _show(self, stage: str, cycle: int, progress: float = 0.0, error: str | None = None) -> None:
        same = (stage, cycle) == (self._status.stage, self._status.cycle)
        since = self._status.since if same else time.time()
        status = PreparerStatus(os.getpid(), stage, cycle, progress, since, error)
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
) -> ExitCode:
    """Run a preparer under the line's lock. Raises `Refusal` if another one runs and does not end in `wait_s`."""
    preparer = Preparer(work, ahead_cycles, until_cycle, stop, on_status)
    lock = preparer_lock(work)

    def tell(pid: int | None) -> None:
        print(f"waiting up to {wait_s:.0f} s for the preparer of {work} (process {pid}) to end", file=sys.stderr)

    try:
        lock.acquire(f"the preparer of {work}", wait_s, tell if wait_s else None)
    except NstrainError as error:
        raise Refusal(str(error)) from None
    with lock:
        return preparer.run()


def read_status(work: Path) -> PreparerStatus | None:
    """preparer.json, or None if there is none that can be read."""
    try:
        return PreparerStatus(**read_json(work / STATUS_NAME))
    except (NstrainError, TypeError):
        return None


def main() -> int:
    """`python -m nstrain.data.preparer WORK --ahead N --parent-fd FD`: the supervisor's child."""
    parser = argparse.ArgumentParser(prog="nstrain.data.preparer")
    parser.add_argument("work", type=Path)
    parser.add_argument("--ahead", type=int, default=1)
    parser.add_argument("--parent-fd", type=int, default=None)
    arguments = parser.parse_args()
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: told.append(n))

    def stop() -> bool:
        fd = arguments.parent_fd
        return bool(told) or (fd is not None and bool(select.select([fd], [], [], 0)[0]))

    def show(status: PreparerStatus) -> None:
        if status.stage != "preparing" or status.progress in (0.0, 1.0):
            print(f"preparer: {status.stage} cycle {status.cycle} {status.error or ''}".rstrip(), flush=True)

    try:
        return int(run_preparer(arguments.work, arguments.ahead, None, stop, show, ORPHAN_WAIT_S))
    except NstrainError as error:
        print(f"preparer: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
