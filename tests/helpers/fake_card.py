"""A made-up GPU: a reader that prints what a file says is on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


def put_in_place(directory: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """A made-up card that host.json's reader tells of and torch is said to have; leases lie in `directory`."""
    card, host = FakeCard(directory / "card"), directory / "host.json"
    host.write_text(json.dumps({"gpu_reader": card.source.reader}))
    monkeypatch.setenv("NSTRAIN_HOST", str(host))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("nstrain.gpu.lease.LEASE_ROOTS", (directory,))
    monkeypatch.setattr("nstrain.gpu.borrowed.LEASE_WAIT_S", 0.0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return card
