"""Where host.json is. Apart from host.py, so that a command on a host without one reads no settings library."""

from __future__ import annotations

import os
from pathlib import Path

HOST_FILE_VARIABLE = "NSTRAIN_HOST"


def host_file() -> Path:
    """The host's settings file, whether it exists or not: `$NSTRAIN_HOST`, or ~/.nstrain/host.json."""
    named = os.environ.get(HOST_FILE_VARIABLE)
    return Path(named) if named else Path.home() / ".nstrain" / "host.json"


def host_is_set() -> bool:
    """Whether there is, or should be, a host.json."""
    return HOST_FILE_VARIABLE in os.environ or host_file().exists()
