"""Where everything of a training line is.

run.json                 settings                      locks/supervisor.lock, locks/trainer.lock
checkpoints/u00001200/   one checkpoint an update      supervisor.json   who supervises, and how it ended
checkpoints/latest       the name of the one to go on from        heartbeat   what the trainer does now
set-aside/               checkpoints that a rollback took out      STOP        a request to stop
journal.db               the record                    run.log           printed rows and events
tune/                    trials, kernel table and log of `nstrain tune`
wandb_run.json           the journal's copy on a tracking service: where it is, how far it is     locks/mirror.lock
wandb/                   the service's client keeps its files there
branches.json            the branches that were made from this line
supervisor.out           what a supervisor in the background printed: errors of its start
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from nstrain.base.disk import PARTIAL_SUFFIX

_CHECKPOINT_NAME = re.compile(r"u([0-9]{8,})")
_NUMBERED = re.compile(r"\.[0-9]+$")

REPLACED_SUFFIX = ".replaced"
"""Ends the name of a checkpoint that is being replaced by a new one of the same update (see checkpoint.py)."""


def checkpoint_name(update: int) -> str:
    """The directory's name of the checkpoint after an update: `u00001200`."""
    assert update >= 0, f"an update has a number from 0, found {update}"
    return f"u{update:08d}"


def parse_checkpoint_name(name: str) -> int | None:
    """The update of a checkpoint's name, or None if it is not exactly the name of one."""
    found = _CHECKPOINT_NAME.fullmatch(name)
    if found is None or checkpoint_name(int(found[1])) != name:
        return None
    return int(found[1])


def parse_set_aside_name(name: str) -> int | None:
    """The update of a checkpoint that a rollback has set aside, by its directory's name: `u00001200`, or the second of
    that update, `u00001200.2`. None for a name of a person's own: that directory stays for ever."""
    return parse_checkpoint_name(_NUMBERED.sub("", name.removesuffix(PARTIAL_SUFFIX)))


@dataclasses.dataclass(frozen=True)
class LinePaths:
    """The files of the line in the directory `root`, by what they are."""

    root: Path

    @property
    def run_json(self) -> Path:
        """The line's settings."""
        return self.root / "run.json"

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints."""
        return self.root / "checkpoints"

    @property
    def latest(self) -> Path:
        """A file that holds the name of the checkpoint to go on from."""
        return self.checkpoints / "latest"

    @property
    def set_aside(self) -> Path:
        """Checkpoints that a rollback took out of the line."""
        return self.root / "set-aside"

    @property
    def journal(self) -> Path:
        """The journal (nstrain.record.journal)."""
        return self.root / "journal.db"

    @property
    def run_log(self) -> Path:
        """The printed rows and events, for people."""
        return self.root / "run.log"

    @property
    def supervisor_json(self) -> Path:
        """Who supervises the line, its children, and how it ended; written by the supervisor."""
        return self.root / "supervisor.json"

    @property
    def supervisor_out(self) -> Path:
        """What a supervisor in the background printed."""
        return self.root / "supervisor.out"

    @property
    def heartbeat(self) -> Path:
        """What the trainer is doing; written by the trainer."""
        return self.root / "heartbeat"

    @property
    def stop(self) -> Path:
        """The request to stop, while it exists."""
        return self.root / "STOP"

    @property
    def tune(self) -> Path:
        """What `nstrain tune` measured (nstrain.tune.records)."""
        return self.root / "tune"

    @property
    def branches(self) -> Path:
        """The branches made from this line (nstrain.line.branches)."""
        return self.root / "branches.json"

    @property
    def branches_lock(self) -> Path:
        """Held by whoever adds to them."""
        return self.root / "locks" / "branches.lock"

    @property
    def wandb_run(self) -> Path:
        """The journal's copy on a tracking service; written by the mirror (nstrain.mirror.state)."""
        return self.root / "wandb_run.json"

    @property
    def mirror_lock(self) -> Path:
        """Held by the line's mirror for its life."""
        return self.root / "locks" / "mirror.lock"

    @property
    def wandb_directory(self) -> Path:
        """Where the tracking service's client keeps its files."""
        return self.root / "wandb"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the line's supervisor for its life."""
        return self.root / "locks" / "supervisor.lock"

    @property
    def trainer_lock(self) -> Path:
        """Held by the line's trainer for its life; whoever changes checkpoints holds it."""
        return self.root / "locks" / "trainer.lock"

    def checkpoint(self, update: int) -> Path:
        """The directory of the checkpoint after an update, whether it exists or not."""
        return self.checkpoints / checkpoint_name(update)

    def checkpoint_updates(self) -> list[int]:
        """The updates that have a checkpoint directory under its own name, in order of their number."""
        if not self.checkpoints.is_dir():
            return []
        updates = (parse_checkpoint_name(entry.name) for entry in self.checkpoints.iterdir() if entry.is_dir())
        return sorted(update for update in updates if update is not None)
