"""The mirror's loop: one run on the service is kept equal to the lineage of the journal's newest generation.

The loop never ends by itself. A service that is away is tried again with growing waits, one that refuses now and then,
for as long as it takes; meanwhile nothing is kept but what is in the journal anyway. A rollback begins a new run, which
is filled from the journal from update 0 on; so does a hole in the service's copy, at most one an hour. The run before
is marked on the service as superseded, with what took its place and why. A journal that is damaged ends the mirror with
the journal's own words.

Every step leaves wandb_run.json and the service such that a mirror that is killed there goes on from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import secrets
from collections.abc import Callable, Iterator, Sequence

from nstrain.base.commands import typed
from nstrain.base.errors import DiskFull, NstrainError
from nstrain.base.units import human_seconds
from nstrain.line.paths import LinePaths
from nstrain.mirror.clock import MirrorClock, MirrorPace
from nstrain.mirror.contract import RunIdentity, ServiceAway, ServiceRefuses, Tracker
from nstrain.mirror.directories import with_clean, with_session, without_clean
from nstrain.mirror.session import Hole, Session
from nstrain.mirror.state import MirrorState, StateFile, SupersededRun
from nstrain.mirror.tail import OtherGeneration, last_update, newest_generation
from nstrain.settings.run import TrackerSettings

TROUBLE = (ServiceAway, ServiceRefuses, DiskFull)
"""What passes by itself, or is mended while the mirror waits."""

TOLD_DIFFERENCES = 10
"""Rows that differ are told of one by one up to so many, by one mirror."""

_HOLE = "a hole at update "


class Copier:
    """The copy of one line's journal. Its maker holds the line's mirror lock."""

    def __init__(
        self,
        paths: LinePaths,
        settings: TrackerSettings,
        tracker: Tracker,
        identity: Callable[[str, int], RunIdentity],
        tell: Callable[[str], None],
        clock: MirrorClock,
        pace: MirrorPace | None = None,
    ) -> None:
        """`identity` describes the run of an id and a generation; `tell` gets lines for people.

        Raises `Refusal` if wandb_run.json is damaged.
        """
        self._paths, self._settings, self._tracker, self._identity = paths, settings, tracker, identity
        self._tell, self.clock, self.pace = tell, clock, pace or MirrorPace()
        self.file = StateFile(paths, clock.unix)
        self._failures = 0
        """In a row."""
        self._verified_before = _number(self.file.state.verified_through) if self.file.begun else -1
        """What was verified when it last failed, or was found to do well."""
        self._told_of_refusal = self._told_after_long = self._told_of_mark = False
        self._told_differences = 0

    # ---- for ever ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Copy until the clock's waits say that it is to end, and what there is then.

        Raises what the journal refuses with; what the service does wrong is waited for.
        """
        while True:
            try:
                if self.fit() is None:
                    if self.clock.wait(self.pace.poll_s):
                        break
                elif self._one_session():
                    break
            except OtherGeneration:
                continue  # for which a new run is begun
            except Hole as hole:
                try:
                    trouble: NstrainError | None = self.replace_hole(hole)
                except DiskFull as error:
                    trouble = error
                if trouble is not None and self._wait_out(trouble):
                    break
            except TROUBLE as error:
                if self._wait_out(error):
                    break
        self._say_what_is_left()

    def end(self, error: BaseException | None = None) -> None:
        """Leave the file as that of a mirror that has ended, of an error if there is one."""
        if not self.file.begun:
            return
        if error is not None:
            said = str(error) if isinstance(error, NstrainError) else f"{type(error).__name__}: {error}"
            since = self.file.state.failing_since or self.clock.unix()
            self.file.note(failing_since=since, error=said)
        self.file.note(pid=None)
        self.file.beat(at_once=True)

    def _one_session(self) -> bool:
        """Keep one session for as long as it may go on; whether the mirror is to end."""
        with self.session() as session:
            if not self.keep(session, lambda more: self.clock.wait(0.0 if more else self.pace.poll_s)):
                return False
            now, limit_s = self.clock.now(), self.pace.ending_s
            while session.send_batch() and self.clock.now() < now + 0.4 * limit_s:
                pass
            self.settle(session, now + 0.7 * limit_s, cut_off=now + 0.7 * limit_s)
            session.close(max(1.0, now + limit_s - self.clock.now()))
            return True

    def _say_what_is_left(self) -> None:
        if not self.file.begun or not self._paths.journal.exists():
            return
        with contextlib.suppress(OtherGeneration):
            first = _number(self.file.state.verified_through) + 1
            last = last_update(self._paths.journal, self.file.state.generation)
            if last >= first:
                self._tell(
                    f"updates {first} to {last} have not been found on the service yet; the next mirror, or "
                    f"`{typed('nstrain', 'mirror', self._paths.root)}`, sends what is missing"
                )

    # ---- the run -----------------------------------------------------------------------------------------------------

    def fit(self) -> int | None:
        """Have a run for what run.json and the journal say; returns its generation, None if there is no journal yet.

        Raises `DiskFull` if that could not be kept, and `Refusal` for a damaged journal.
        """
        generation = newest_generation(self._paths.journal)
        if generation is None:
            return None
        place = {name: getattr(self._settings, name) for name in ("service", "base_url", "entity", "project")}
        if not self.file.begun:
            self._begin(MirrorState(**place, run_id=_new_id(), generation=generation))
            return generation
        state = self.file.state
        if any(getattr(state, name) != value for name, value in place.items()):
            self._tell(f"run.json names another place than run {state.run_id} is in; a new run begins there")
            new = MirrorState(**place, run_id=_new_id(), generation=generation, directories=state.directories)
            self._begin(new)
        elif state.generation != generation:
            self._replace(generation, f"generation {generation} of the line takes the place of {state.generation}")
        return generation

    def replace_hole(self, hole: Hole) -> ServiceAway | None:
        """Begin another run in the place of one with a hole, or say why not: the last such replacement is too recent.

        Raises `DiskFull` if that could not be kept.
        """
        earlier = [run.at for run in self.file.state.superseded if run.why.startswith(_HOLE)]
        if earlier and 0 <= self.clock.unix() - earlier[-1] < self.pace.replacement_s:
            return ServiceAway(
                f"run {self.file.state.run_id} has {hole}, which cannot be filled; the run before had one too, so the "
                f"next is begun no sooner than {human_seconds(self.pace.replacement_s)} after this one"
            )
        self._replace(self.file.state.generation, f"{_HOLE}{hole.update}")
        return None

    def _replace(self, generation: int, why: str) -> None:
        state = self.file.state
        old = SupersededRun(state.run_id, state.generation, why, self.clock.unix(), marked=False)
        self._tell(f"{why}: run {state.run_id} stays as it is, a new one is filled from the journal")
        new = dataclasses.replace(
            state,
            run_id=_new_id(),
            generation=generation,
            url=None,
            known=False,
            pushed_through=None,
            verified_through=None,
            differences=0,
            superseded=(*state.superseded, old),
        )
        self._begin(new)

    def _begin(self, state: MirrorState) -> None:
        self.file.begin(state)
        self._verified_before = -1

    # ---- a session ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        """The run, opened, and compared as far as it is there; what an error leaves open is given up.

        A block that goes well closes the session, whose directory is then clean if all that it was given was found.

        Raises `ServiceAway`, `ServiceRefuses`, `Hole`, and `DiskFull` if the file could not be kept.
        """
        state = self.file.state
        self.file.keep(pid=os.getpid(), directories=without_clean(self._paths, state.directories, self._tell))
        try:
            remote = self._tracker.open(self._identity(state.run_id, state.generation), state.known)
        except ServiceRefuses as error:
            if not state.known:
                raise
            again = typed("rm", self._paths.wandb_run)
            raise ServiceRefuses(
                f"{error}; if run {state.run_id} was deleted there, `{again}` begins another"
            ) from error
        session = Session(self._paths, remote, self.file, self._on_difference, self.clock, self.pace)
        try:
            if not state.known:
                self._tell(
                    f"run {state.run_id} begins, of generation {state.generation}: {remote.url or '(no address)'}"
                )
            directories = with_session(self._paths, self.file.state.directories, remote.client_directory)
            self.file.keep(known=True, url=remote.url, directories=directories)
            session.begin()
            self.after_comparison(session)
            yield session
            if session.complete:
                directories = with_clean(self._paths, self.file.state.directories, only=session.client_directory)
                self.file.note(directories=directories)
        finally:
            session.give_up()

    def keep(self, session: Session, to_end: Callable[[bool], bool]) -> bool:
        """Send and compare until `to_end` says so, which is told whether there were rows to send, and may wait.

        False: the client kept too much, so that the session was closed and another must go on, which compares.
        """
        while True:
            more = session.send_batch()
            if session.compare_if_due():
                self.after_comparison(session)
            if to_end(more):
                return True
            if session.client_bytes() > self.pace.directory_bytes:
                session.close(self.pace.close_s)
                return False

    def settle(self, session: Session, until: float, cut_off: float = math.inf) -> bool:
        """Wait until all that was sent is found (`Session.settle`), and draw what follows; whether it was."""
        found = session.settle(until, cut_off)
        if found:
            self.after_comparison(session)
        return found

    def after_comparison(self, session: Session) -> None:
        """Draw what follows from a comparison: failures are over, directories may go, runs can be marked."""
        verified = session.verified_through
        caught_up = session.complete and session.sent_through >= session.last_at_open
        if caught_up or verified > self._verified_before:
            self._recovered(verified)
        if caught_up:
            directories = with_clean(self._paths, self.file.state.directories, but=session.client_directory)
            self.file.note(directories=without_clean(self._paths, directories, self._tell))
        self._mark_superseded()

    def _mark_superseded(self) -> None:
        runs = self.file.state.superseded
        by = self.file.state.run_id  # it is there, which one in between may never have been
        for number, run in enumerate(runs):
            if run.marked:
                continue
            try:
                self._tracker.supersede(run.run_id, by, run.why)
            except ServiceAway:
                return  # the next comparison tries again
            except ServiceRefuses as error:
                if not self._told_of_mark:
                    self._tell(f"run {run.run_id} cannot be marked as superseded: {error}")
                self._told_of_mark = True
                return
            runs = (*runs[:number], dataclasses.replace(run, marked=True), *runs[number + 1 :])
            self.file.note(superseded=runs)
            self.file.beat(at_once=True)

    def _on_difference(self, update: int, names: Sequence[str]) -> None:
        self._told_differences += 1
        if self._told_differences <= TOLD_DIFFERENCES:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            self._tell(
                f"update {update} differs on the service: {', '.join(names[:3])}{more}; the journal's row is right"
            )
        elif self._told_differences == TOLD_DIFFERENCES + 1:
            self._tell(f"more updates differ on the service; {self._paths.wandb_run.name} counts them")

    # ---- trouble -----------------------------------------------------------------------------------------------------

    def _wait_out(self, error: NstrainError) -> bool:
        """Note what is wrong and wait until it is to be tried again; whether the mirror is to end."""
        self._failures += 1
        refused = isinstance(error, ServiceRefuses)
        now = self.clock.unix()
        since = now
        if self.file.begun:
            since = self.file.state.failing_since or now
            self.file.note(failing_since=since, error=str(error))
            self.file.beat(at_once=True)
            self._verified_before = max(self._verified_before, _number(self.file.state.verified_through))
        if self._failures == 1 or (refused and not self._told_of_refusal):
            self._tell(f"{error}; it is tried again, training does not wait for it")
        elif now - since >= self.pace.told_after_s and not self._told_after_long:
            self._tell(f"nothing has arrived for {human_seconds(now - since)}: {error}; it is tried again for ever")
            self._told_after_long = True
        self._told_of_refusal |= refused
        doubled_s = self.pace.away_s * 2.0 ** min(self._failures - 1, 32)
        pause_s = self.pace.refused_s if refused else min(self.pace.away_limit_s, doubled_s)
        return self._pause(pause_s * random.uniform(0.75, 1.0))  # mirrors of many lines do not come at once

    def _pause(self, seconds: float) -> bool:
        until = self.clock.now() + seconds
        while (left := until - self.clock.now()) > 0:
            if self.clock.wait(min(left, StateFile.BEAT_S)):
                return True
            self.file.beat()
        return False

    def _recovered(self, verified: int) -> None:
        since = self.file.state.failing_since
        if since is not None:
            self._tell(f"the copy goes on, through update {verified}, after {human_seconds(self.clock.unix() - since)}")
            self.file.note(failing_since=None, error=None)
        self._failures, self._verified_before = 0, verified
        self._told_of_refusal = self._told_after_long = False


def _new_id() -> str:
    return secrets.token_hex(8)


def _number(update: int | None) -> int:
    return -1 if update is None else update
