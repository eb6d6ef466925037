"""One session with the service: rows of one generation's lineage into its run, and read back.

What was handed to the client is not taken to have arrived. The rows after `verified_through` are read back now and
then and compared. The newest of them may be shown late; so a row counts as lost only when it is still missing
`lag_s` after a comparison that missed it. Missing at the end, it is sent again: the run is opened anew, which tells
from where the service takes rows. Missing below rows that are there, it is a hole, which no service lets anyone fill;
so is one that the service counted when the run was opened, once it has not shown it for `lost_s`.

A row that the service has otherwise than the journal is counted, told and left: nothing there can be rewritten. Where
the service has more than the journal (a crash took the newest rows, or the journal is a copy put back), nothing is sent
until the journal has come as far again, and what it then holds is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

from nstrain.base.disk import bytes_below
from nstrain.line.paths import LinePaths
from nstrain.mirror.clock import MirrorClock, MirrorPace
from nstrain.mirror.comparing import compared
from nstrain.mirror.contract import RemoteRun, ServiceAway, ServiceRefuses
from nstrain.mirror.state import StateFile
from nstrain.mirror.tail import last_update, look, stream


class Hole(Exception):
    """The service lacks a row below others that it has: this run can never be whole."""

    def __init__(self, update: int) -> None:
        super().__init__(f"a hole at update {update}")
        self.update = update


FIRST_DIFFERENCES = 10
"""Rows that differ are named up to so many."""


@dataclasses.dataclass(frozen=True)
class _Doubt:
    """Rows that were missing at a comparison."""

    through: int
    """The last update that had been sent by then."""
    since: float


@dataclasses.dataclass(frozen=True)
class Stock:
    """What a comparison of everything found."""

    updates: int
    """Rows of the journal, from update 0 on, that the service should have."""
    differences: int
    """Of them it has otherwise."""
    first: tuple[tuple[int, tuple[str, ...]], ...]
    """The first of these: update, and the readings that differ."""
    missing: int | None
    """The first that it does not have."""


class Session:
    """An open run, kept equal to the journal."""

    def __init__(
        self,
        paths: LinePaths,
        remote: RemoteRun,
        file: StateFile,
        on_difference: Callable[[int, Sequence[str]], None],
        clock: MirrorClock,
        pace: MirrorPace,
    ) -> None:
        """`file` tells of the run that `remote` is; `on_difference` gets an update and names of its readings."""
        self._journal, self._generation = paths.journal, file.state.generation
        self._remote, self._file, self._pace, self._clock = remote, file, pace, clock
        self._on_difference = on_difference
        self.client_directory = remote.client_directory
        """Where this session's client keeps its files, if it keeps any."""
        self._floor, self.sent_through = remote.floor, remote.floor - 1
        """The service has the updates up to this one, or they were handed to its client; -1: none."""
        self.last_at_open = -1
        """The journal's last update when the session began."""
        self.complete = False
        """Whether all that was sent has been found."""
        self._doubt: _Doubt | None = None
        self._next_comparison = clock.now()
        self._closed = False

    def begin(self) -> None:
        """Take stock of what the service has. Raises what `compare` does."""
        verified = min(self.verified_through, self.sent_through)  # what it has lost since is sent and compared again
        self._file.note(pushed_through=_some(self.sent_through), verified_through=_some(verified))
        self.last_at_open = last_update(self._journal, self._generation)
        self.compare()

    @property
    def verified_through(self) -> int:
        """The updates up to this one were found and compared; -1: none."""
        found = self._file.state.verified_through
        return -1 if found is None else found

    def client_bytes(self) -> int:
        """Bytes that the client's files take now."""
        return 0 if self.client_directory is None else bytes_below(self.client_directory)

    def close(self, limit_s: float) -> None:
        """Have all taken that was sent. Raises `ServiceAway` if that takes longer; the session is over then too."""
        self._closed = True
        self._remote.close(limit_s)

    def give_up(self) -> None:
        """End a session that was not closed, soon: what is lost by that is sent again."""
        if not self._closed:
            with contextlib.suppress(ServiceAway, ServiceRefuses):
                self.close(self._pace.abandon_s)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send_batch(self) -> bool:
        """Send the journal's next rows, as many as one look takes; whether there were any.

        Raises `OtherGeneration`, `ServiceAway`, and `Refusal` for a damaged journal.
        """
        found = look(self._journal, self._generation, self.sent_through + 1)
        if found.last_update < self.verified_through:
            # Older than what was compared: what it comes to hold from here on must be compared again.
            self._file.note(verified_through=_some(found.last_update))
        for row in found.rows:
            self._remote.send(row)
            self._file.beat()
        if found.rows:
            self.sent_through, self.complete = int(found.rows[-1]["update"]), False
            self._file.note(pushed_through=self.sent_through)
        self._file.beat()
        return bool(found.rows)

    # ---- comparing ---------------------------------------------------------------------------------------------------

    def compare_if_due(self) -> bool:
        """Compare what was sent since the last time, if it is time; whether it was."""
        if self._clock.now() < self._next_comparison:
            return False
        self.compare()
        return True

    def compare(self) -> None:
        """Read back what was sent and not yet compared. Raises `Hole`, or `ServiceAway`, once a row counts as lost."""
        hole = self._compare()
        now, missing = self._clock.now(), self.verified_through + 1
        pause_s = self._pace.settle_s
        if self._doubt is None:
            if self.complete:
                pause_s = self._pace.verify_s if self._file.state.failing_since is None else pause_s
            else:
                self._doubt = _Doubt(self.sent_through, now)
        elif self.verified_through >= min(self._doubt.through, last_update(self._journal, self._generation)):
            self._doubt, pause_s = None, self._pace.verify_s
        elif now - self._doubt.since >= (self._pace.lag_s if hole or missing >= self._floor else self._pace.lost_s):
            if hole or missing < self._floor:
                raise Hole(missing)
            raise ServiceAway(
                f"updates {missing} to {self._doubt.through} were sent, but after {self._pace.lag_s:.0f} s the service "
                "does not show them"
            )
        self._next_comparison = now + pause_s

    def settle(self, until: float, cut_off: float = math.inf) -> bool:
        """Compare until all that was sent is found, or the clock says `until`; whether it was found.

        No comparison begins after that; one that has begun is broken off when the clock says `cut_off`.
        """
        while True:
            with contextlib.suppress(ServiceAway):
                self._compare(cut_off)
            if self.complete or self._clock.now() >= until:
                return self.complete
            self._clock.sleep(min(self._pace.poll_s, max(0.0, until - self._clock.now())))

    def take_stock(self, progress: Callable[[int, int], None]) -> Stock:
        """Compare everything; `progress` is told of how many updates how many are done."""
        last = min(self.sent_through, last_update(self._journal, self._generation))
        differences, missing = 0, None
        first: list[tuple[int, tuple[str, ...]]] = []
        theirs = self._remote.read(0, last) if last >= 0 else iter(())
        for update, names in compared(stream(self._journal, self._generation, 0, last), theirs):
            if names is None:
                missing = update if missing is None else missing
            elif names:
                differences += 1
                if len(first) < FIRST_DIFFERENCES:
                    first.append((update, tuple(names)))
            progress(update + 1, last + 1)
            self._file.beat()
        self._file.note(differences=differences)
        return Stock(last + 1, differences, tuple(first), missing)

    def _compare(self, cut_off: float = math.inf) -> bool:
        """One comparison, from the first update that was not found yet; whether one is missing below one that is there.

        What is equal or different up to the first missing row is noted, so that no difference is counted twice.
        """
        first, last = self.verified_through + 1, min(self.sent_through, last_update(self._journal, self._generation))
        self.complete = False
        missing = hole = False
        mine = stream(self._journal, self._generation, first, last)
        theirs = self._remote.read(first, last) if first <= last else iter(())
        for update, names in compared(mine, theirs):
            if self._clock.now() >= cut_off:
                return hole
            if names is None:
                missing = True
            elif missing:
                hole = True
            else:
                changes = {"verified_through": update}
                if names:
                    changes["differences"] = self._file.state.differences + 1
                    self._on_difference(update, names)
                self._file.note(**changes)
            self._file.beat()
        self.complete = not missing
        return hole


def _some(update: int) -> int | None:
    """As the file has it: None for -1."""
    return None if update < 0 else update
