"""A training line's entry among the consumers of its data line: what keeps the cycles that it still needs on disk.

`new` makes the entry and the trainer moves it after each committed checkpoint. A missing one (new.py says how that can
be) is written again before a preparer is started. An entry belongs to one directory: a copy of a line that kept the id
would move its original's entry, and cycles that the original still needs would be deleted.
"""

from __future__ import annotations

from pathlib import Path

from nstrain.base.errors import Refusal
from nstrain.data.consumers import Consumer, consumer_path, read_consumer, write_consumer
from nstrain.line.checkpoint import newest_good, read_state
from nstrain.line.paths import LinePaths
from nstrain.settings.run import RunSettings, load_run


def enter_consumer(paths: LinePaths, settings: RunSettings) -> bool:
    """Write the line's entry if it is missing; whether it was.

    It says the position that the line would go on from: its newest good checkpoint, or the start.
    """
    work = Path(settings.data.work)
    if consumer_path(work, settings.id).exists():
        return False
    newest = newest_good(paths, warn=lambda message: None)
    cycle, row, tokens = 1, 0, 0
    if newest is not None:
        state = read_state(newest)
        cycle, row, tokens = state["position"]["cycle"], state["position"]["row"], state["tokens"]
    write_consumer(work, settings.id, cycle, row, tokens, paths.root)
    return True


def refuse_shared_entry(paths: LinePaths, settings: RunSettings) -> Consumer | None:
    """The line's entry, if there is one. Raises `Refusal` if it is that of another directory with a line of this id.

    A line that was moved is told from one that was copied by whether the directory in the entry still holds it.
    """
    path = consumer_path(Path(settings.data.work), settings.id)
    if not path.exists():
        return None
    entry = read_consumer(path)
    other = LinePaths(Path(entry.run))
    elsewhere = other.root.resolve() != paths.root.resolve() and other.run_json.exists()
    if elsewhere and load_run(other.run_json).id == settings.id:
        raise Refusal(
            f"{paths.root} and {other.root} are one line in two directories (id {settings.id!r}), and {path} can "
            "follow only one of them; remove the copy, or make a new line"
        )
    return entry
