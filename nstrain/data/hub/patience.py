"""How long anything of the network may take, and how long to wait before it is tried again."""

from __future__ import annotations

import dataclasses
import email.utils
import os
import random
import re
import time
from collections.abc import Mapping

from nstrain.data.hub.errors import HubRefusal

LONGEST_WAIT_S = 3600.0
"""A server that asks for a longer wait is asked again after this."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """Timeouts and waits. The defaults are for a real hub; tests are less patient."""

    connect_s: float = 20.0
    """To look up a name, connect, shake hands and get the first line of an answer, all together."""
    read_s: float = 30.0
    """Without a byte of a file (HF_HUB_DOWNLOAD_TIMEOUT, if it is set)."""
    stall_s: float = 120.0
    """A file that has come on by less than `stall_bytes` in this time is stalled, though bytes trickle."""
    stall_bytes: int = 1 << 20
    page_s: float = 120.0
    """For a page of a listing."""
    first_wait_s: float = 1.0
    """Before the second try; doubled with each, and jittered."""
    longest_wait_s: float = 120.0
    wrong_fetches: int = 4
    """Times that a file with wrong bytes is fetched from one place."""
    parallel_files: int = 4
    """Files that are fetched at once."""
    ahead_files: int = 12
    """Files that are fetched and not yet used, those being fetched included."""
    ahead_bytes: int = 16 << 30
    """Their bytes (a larger file is fetched alone)."""
    reserve_bytes: int = 1 << 30
    """Disk that a download leaves free."""

    def wait_s(self, tries: int, asked_s: float | None = None) -> float:
        """Seconds to wait after so many failed tries (from 1) in a row; never less than the server asked for."""
        if asked_s is not None:
            return min(asked_s, LONGEST_WAIT_S) + random.uniform(0.0, 1.0) * self.first_wait_s
        full = min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(tries - 1, 30))
        return full * random.uniform(0.5, 1.0)


PATIENCE = Patience()
"""What every download and listing of this process goes by."""


def patience() -> Patience:
    """The patience in force, with the hub's own variable for the read timeout. Raises `HubRefusal` if that is none."""
    asked = os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", "").strip()
    if not asked:
        return PATIENCE
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{0,6})?", asked) or not float(asked) > 0:
        raise HubRefusal(f"HF_HUB_DOWNLOAD_TIMEOUT: expected seconds, like 30, found {asked!r}; correct or unset it")
    return dataclasses.replace(PATIENCE, read_s=float(asked))


_RATE_LIMIT = re.compile(r"r\s*=\s*(\d{1,9})\s*;\s*t\s*=\s*(\d{1,9})")


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer asks to wait: RateLimit (`"api";r=0;t=55`, a second more), else Retry-After."""
    limit = _RATE_LIMIT.search(headers.get("RateLimit") or headers.get("ratelimit") or "")
    if limit is not None and int(limit[1]) == 0:
        return int(limit[2]) + 1.0
    after = (headers.get("Retry-After") or headers.get("retry-after") or "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", after):
        return float(after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(after).timestamp() - time.time())
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
