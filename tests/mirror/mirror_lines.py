"""A line with a journal and a tracker, without a data line or a trainer: what the mirror's tests copy."""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "settings"))

from fake_tracker import FakeClock, FakeService, FakeTracker
from run_json import changed, settings

from nstrain.line.paths import LinePaths
from nstrain.mirror.clock import MirrorPace
from nstrain.mirror.copying import Copier
from nstrain.mirror.opening import make_copier
from nstrain.record.journal import Journal
from nstrain.record.journal_reader import Row
from nstrain.settings.run import save_run

TRACKER = {"service": "wandb", "project": "neurons", "entity": None, "base_url": None}


@contextlib.contextmanager
def fast_directory() -> Iterator[Path]:
    """A directory where a durable write costs nothing: months of signs of life are written here."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if place.is_dir() else None) as directory:
        yield Path(directory).resolve()


def readings(update: int, version: int = 0) -> dict[str, float]:
    """An update's readings: every kind of number, and more names where it validated."""
    found: dict[str, float] = {"tokens": update * 512, "train/loss": 1 / (update + 3) + version, "skipped": 0}
    if update % 4 == 0:
        found |= {"val/mix": math.nan, "val/worst": math.inf, "val/rest": -0.0, "val/some": 5e-324 * update}
    return found


class Line:
    """A line's directory, with its journal's writer."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.paths = LinePaths(root)
        save_run(self.paths.run_json, settings(changed("tracker", to=TRACKER)))

    def train(self, updates: int, version: int = 0) -> None:
        """Record so many more updates."""
        with Journal.open(self.paths.journal, 2) as journal:
            last = journal.last_update()
            first = 0 if last is None else last + 1
            for update in range(first, first + updates):
                journal.commit(update, readings(update, version))

    def roll_back(self, to: int) -> None:
        """Open the next generation after an update."""
        with Journal.open(self.paths.journal, 2) as journal:
            journal.begin_generation(to + 1)

    def rows(self) -> dict[int, Row]:
        """The lineage."""
        with Journal.open_for_reading(self.paths.journal) as journal:
            return {int(row["update"]): row for row in journal.rows()}


def copier(
    line: Line,
    service: FakeService,
    clock: FakeClock,
    pace: MirrorPace | None = None,
    tell: Callable[[str], None] = lambda text: None,
    client_files: bool = False,
) -> Copier:
    """A mirror's loop, as a process that has just started makes it."""
    return make_copier(line.paths, tell, clock, pace, lambda _: FakeTracker(service, client_files))
