"""Time as the mirror has it, and how long it takes for things; tests have days of it in a second."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class MirrorPace:
    """Everything about time and size that is not a setting of the line; seconds, unless a name says otherwise."""

    poll_s: float = 2.0
    """Between two looks at the journal."""
    verify_s: float = 600.0
    """Between two comparisons of what was sent with what the service has."""
    settle_s: float = 30.0
    """The same while a row is missing, or the service was away."""
    lag_s: float = 180.0
    """A row that was sent and is missing for so long was lost."""
    lost_s: float = 1800.0
    """One that the service counts, but does not show, may be late for so long."""
    away_s: float = 5.0
    """The wait after a first failure of the service; it doubles with each in a row,"""
    away_limit_s: float = 600.0
    """up to this."""
    refused_s: float = 600.0
    """Between two tries while the service refuses."""
    replacement_s: float = 3600.0
    """At least so long between two runs that are begun because of a hole."""
    told_after_s: float = 7200.0
    """A failure that lasts so long is told once more."""
    close_s: float = 600.0
    """A session may take so long to have everything taken,"""
    abandon_s: float = 10.0
    """and one that is given up so long."""
    ending_s: float = 50.0
    """From the request to end to the end (the supervisor waits for 60)."""
    directory_bytes: int = 256 << 20
    """A session whose client keeps more bytes than this is ended, and another begun."""


class MirrorClock:
    """This machine's time."""

    SLICE_S = 0.25
    """A wait looks so often whether it is to end."""

    def __init__(self, to_end: Callable[[], bool] = lambda: False) -> None:
        """`to_end` says whether the mirror was asked to end."""
        self._to_end = to_end

    def now(self) -> float:
        """Seconds, from any origin, that nobody sets."""
        return time.monotonic()

    def unix(self) -> float:
        """Unix seconds, which files tell."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def wait(self, seconds: float) -> bool:
        """Let time pass until the mirror is to end, if it is; whether it is."""
        until = self.now() + seconds
        while not self._to_end():
            left = until - self.now()
            if left <= 0:
                return False
            time.sleep(min(self.SLICE_S, left))
        return True
