"""A program for host.json's `notify` that keeps every notice it is given."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def set_notify(directory: Path, program: str | None = None) -> Path:
    """Name a program in the test's host.json (conftest.py); by default one that appends to the file returned."""
    sink = directory / "notices"
    script = directory / "notify.sh"
    script.write_text(program or f"#!/bin/sh\ncat >> {sink}\n")
    script.chmod(0o755)
    host = Path(os.environ["NSTRAIN_HOST"])
    host.write_text(json.dumps(json.loads(host.read_text()) | {"notify": str(script)}))
    return sink


def notices(sink: Path) -> list[dict[str, Any]]:
    """The notices given so far."""
    text = sink.read_text().strip() if sink.exists() else ""
    found = []
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found
