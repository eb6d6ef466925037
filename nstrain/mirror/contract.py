"""What the mirror asks of a tracking service: to take rows in order, to give them back, and to say where it stands.

A run on a service is a copy of one lineage of a line's journal: its row of update u stands at step u. The service's own
client is not trusted with that. What it was given may never arrive, and nothing says so; so the mirror reads back what
the service has, and compares. Everything here may take as long as a network does: nothing of it is called by a trainer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from nstrain.base.errors import NeedsOperator, NstrainError
from nstrain.record.journal_reader import Row


class ServiceAway(NstrainError):
    """The service cannot be reached, or has failed, and may be back: to be tried again later, from where it stands."""


class ServiceRefuses(NeedsOperator):
    """The service does not take this run from this user: a person must mend the key, the project or the package."""


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """One run on a service."""

    run_id: str
    """Made by us before the service hears of it, so that a start that was cut off finds its run again."""
    name: str
    """What people see."""
    group: str
    """The line's id: what its runs, one a generation, have in common."""
    config: Mapping[str, Any]
    """run.json as it is now, and under `nstrain` where the run comes from: line, generation, parent."""
    directory: Path
    """Where the client may keep its files; nobody else's."""


class RemoteRun(Protocol):
    """A run that is open for writing. One a process."""

    url: str | None
    """Where people see it."""
    floor: int
    """The first update that the service takes now: what is missing below can never be added to this run."""
    client_directory: Path | None
    """Where this session's client keeps its files; None if it keeps none."""

    def send(self, row: Row) -> None:
        """Hand over the row of an update not below `floor`; updates must grow. Returns once the client has it.

        Raises `ServiceAway` if the client cannot go on: open the run again and send from its floor.
        """

    def read(self, first: int, last: int) -> Iterator[Row]:
        """What the service has of the updates first ... last, in their order, without what it added itself; each row
        has its `update`. Rows that it does not have, or not yet, are left out. Raises `ServiceAway`.
        """

    def close(self, limit_s: float) -> None:
        """Have everything taken and end this session; the run can be opened again. Raises `ServiceAway` if that is not
        done in time; the session is over in any case.
        """


class Tracker(Protocol):
    """A service, for one line."""

    def open(self, identity: RunIdentity, known: bool) -> RemoteRun:
        """Open a run: `known` if the service has taken it before, when it must still be there.

        Raises `ServiceAway`, and `ServiceRefuses` for what trying again does not mend (no key, no such project, a run
        that was deleted there).
        """

    def supersede(self, run_id: str, by: str, why: str) -> None:
        """Mark a run as replaced by another, with a tag and in its config. Nothing if it is not there any more.

        Raises `ServiceAway`, `ServiceRefuses`.
        """
