"""A made-up GPU: a reader that prints what a file says is on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nstrain.base.disk import atomic_write
from nstrain.gpu.readings import GpuSource

UUID = "GPU-11111111-2222-3333-4444-555555555555"
RESERVED_BYTES = 500 << 20


class FakeCard:
    """What is on the card is what was put on it last."""

    def __init__(self, directory: Path) -> None:
        """An empty card; its files lie in `directory`, which is made."""
        directory.mkdir(parents=True, exist_ok=True)
        self._said = directory / "gpus.json"
        self._reader = directory / "reader"
        self.source = GpuSource((str(self._reader),), directory / "leases")
        self.put()
        self.reads()

    def put(self, *pids: int, used_bytes: int = RESERVED_BYTES, **gpu: Any) -> None:
        """From now on these processes are on the card."""
        value = {
            "uuid": UUID,
            "name": "made up",
            "used_bytes": used_bytes,
            "reserved_bytes": RESERVED_BYTES,
            "total_bytes": 100 << 30,
            "memory_tells": True,
            "processes": [{"pid": pid, "used_bytes": None} for pid in pids],
        }
        atomic_write(self._said, json.dumps({"format": 1, "gpus": [value | gpu]}), durable=False)

    def reads(self, script: str | None = None) -> None:
        """From now on the reader does what a script of the shell says; by default it tells what is on the card."""
        text = f"#!/bin/sh\n{script or f'exec cat {self._said}'}\n"
        new = self._reader.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o755)
        new.rename(self._reader)
