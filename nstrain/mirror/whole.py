"""`nstrain mirror`: what is missing is sent, and then every row of the service's copy is held against the journal.

The mirror that runs beside a line compares a row once, soon after it was sent. This compares all of them, from update 0
on, and so also finds what a service has lost or changed since.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nstrain.base.errors import Refusal
from nstrain.base.units import human_seconds
from nstrain.line.paths import LinePaths
from nstrain.mirror.contract import ServiceAway
from nstrain.mirror.copying import Copier
from nstrain.mirror.session import Hole, Session, Stock
from nstrain.mirror.tail import OtherGeneration

Progress = Callable[[str, int, int], None]
"""Gets what is done (sending, comparing), and how many updates of how many are."""


@dataclasses.dataclass(frozen=True)
class Whole:
    """The service's copy of a line's journal, row by row the same but for what this says."""

    run_id: str
    url: str | None
    generation: int
    updates: int
    """Rows of the journal."""
    sent: int
    """Of them the service did not have before."""
    different: int
    """Of them the service has otherwise."""
    differences: tuple[tuple[int, tuple[str, ...]], ...]
    """The first of these: update, and the readings that differ."""
    beyond: int
    """Updates that the service has after the journal's last: it is an older copy, or lost its newest rows."""

    @property
    def same(self) -> bool:
        """Whether the service has what the journal has, and nothing else."""
        return not (self.different or self.beyond)


def send_and_compare(copier: Copier, paths: LinePaths, progress: Progress = lambda *_: None) -> Whole:
    """Send what is missing and compare everything. The caller holds the line's mirror lock.

    A service that fails is tried again as long as it gets on, and a run with a hole is replaced as the mirror does it.
    Raises `ServiceAway` and `ServiceRefuses`; `Refusal` if there is no journal or it is damaged; `DiskFull`.
    """
    pushed = -1
    floors: dict[str, int] = {}
    while True:
        if copier.fit() is None:
            raise Refusal(f"{paths.journal}: no such journal; it is made when the line is first run")
        try:
            found = _once(copier, floors, progress)
            if found is not None:
                return found
        except OtherGeneration:
            continue  # for which a new run is begun
        except Hole as hole:
            trouble = copier.replace_hole(hole)
            if trouble is not None:
                raise trouble from None
        except ServiceAway:
            got = copier.file.state.pushed_through
            if got is None or got <= pushed:
                raise
            pushed = got


def _once(copier: Copier, floors: dict[str, int], progress: Progress) -> Whole | None:
    """One session; None if another must go on. `floors`: by run what the service lacked from when first seen."""
    with copier.session() as session:
        run_id, last = copier.file.state.run_id, session.last_at_open
        floor = floors[run_id] = min(session.sent_through + 1, floors.get(run_id, session.sent_through + 1))

        def to_end(more: bool) -> bool:
            progress("sending", min(session.sent_through + 1, last + 1), last + 1)
            return not more or session.sent_through >= last

        if not copier.keep(session, to_end):
            return None
        if not copier.settle(session, copier.clock.now() + copier.pace.lag_s):
            raise ServiceAway(
                f"run {run_id}: the service does not show all of the updates up to {session.sent_through} "
                f"{human_seconds(copier.pace.lag_s)} after they were sent"
            )
        stock = _stock(copier, session, progress)
        session.close(copier.pace.close_s)
        state = copier.file.state
        return Whole(
            run_id=run_id,
            url=state.url,
            generation=state.generation,
            updates=stock.updates,
            sent=max(0, stock.updates - floor),
            different=stock.differences,
            differences=stock.first,
            beyond=max(0, session.sent_through + 1 - stock.updates),
        )


def _stock(copier: Copier, session: Session, progress: Progress) -> Stock:
    """Everything compared. Raises `Hole` for a row that is missing again and again: they had all been there."""
    clock, pace = copier.clock, copier.pace
    until = clock.now() + pace.lag_s
    while True:
        stock = session.take_stock(lambda done, of: progress("comparing", done, of))
        if stock.missing is None:
            return stock
        if clock.now() >= until:
            raise Hole(stock.missing)
        clock.sleep(pace.settle_s)
