"""Telling a line's alarms: each to run.log as it comes, what is new also as a notice (host.json's `notify`).

Neurons that are dead stay dead: their alarm is a notice when a validation first shows it, not at every one that
follows. A loss that jumps again within the window of the last jump that was told is part of the same event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nstrain.line.notices import Notifier, notice
from nstrain.line.paths import LinePaths
from nstrain.record.alarms import WINDOW_UPDATES, firing_alarms, in_short, loss_alarms, subject_of
from nstrain.settings.host import load_host
from nstrain.settings.run import RunSettings

FINISH_S = 10.0
"""How long the end of a trainer waits for the program that was given a notice."""


class Alarming:
    """The alarms of one trainer. Owns the programs that it gives notices to."""

    def __init__(self, paths: LinePaths, settings: RunSettings) -> None:
        self._paths, self._settings = paths, settings
        self._notifier = Notifier(load_host().notify, lambda text: print(text, flush=True))
        self._firing: set[str] = set()
        """What the last validation's alarms were about."""
        self._told_jump_at: int | None = None

    def alarms(self, update: int, row: Mapping[str, float], others: Sequence[str] = ()) -> list[str]:
        """A row's alarms, with `others` that its readings do not show; what is new of them is given as a notice."""
        jumps, firing = loss_alarms(row, self._settings.guards.loss_jump), firing_alarms(row)
        new = [*others, *(alarm for alarm in firing if subject_of(alarm) not in self._firing)]
        if any(name.startswith("val_") for name in row):
            self._firing = {subject_of(alarm) for alarm in firing}
        if jumps and (self._told_jump_at is None or update - self._told_jump_at > WINDOW_UPDATES):
            self._told_jump_at = update
            new += jumps
        if new:
            known = {"update": update, "tokens": int(row["tokens"])}
            text = "\n".join(in_short(new))
            self._notifier.send(notice("alarm", self._settings.id, self._paths.root, text, **known))
        self._notifier.look()
        return [*others, *jumps, *firing]

    def close(self) -> None:
        """Wait, bounded, for programs that still run."""
        self._notifier.finish(FINISH_S)
