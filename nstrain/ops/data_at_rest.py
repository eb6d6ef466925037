"""A data line at which nobody is at work: neither its preparer nor a line that trains on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from nstrain.base.errors import NstrainError, Refusal
from nstrain.data.consumers import read_consumers
from nstrain.data.line import DataLine
from nstrain.data.preparer import preparer_lock
from nstrain.line.paths import LinePaths
from nstrain.ops.rollback import at_rest


@contextlib.contextmanager
def data_at_rest(work: Path, what: str) -> Iterator[None]:
    """Hold the locks of a data line's preparer and of the lines that train on it, as far as they are where they were.

    Raises `Refusal` naming whoever is at work: it cannot be `what` then.
    """
    DataLine.open(work)  # what is none gets no lock
    with contextlib.ExitStack() as held:
        for run in dict.fromkeys(consumer.run for consumer in read_consumers(work)):
            paths = LinePaths(Path(run))
            if paths.run_json.exists():
                held.enter_context(at_rest(paths, what))
        try:
            held.enter_context(preparer_lock(work).acquire(f"the preparer of {work}"))
        except NstrainError as error:
            raise Refusal(f"{work} cannot be {what} ({error})") from None
        yield
