"""The learning rate of run.json, for tests that need one."""

from __future__ import annotations

from typing import Any


def rate_pieces(peak: float, warmup_tokens: int = 0, decay: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """A warm-up to `peak`, then constant, then linearly to 0 between the two positions of `decay`."""
    pieces: list[dict[str, Any]] = []
    if warmup_tokens:
        pieces.append({"from": 0, "to": warmup_tokens, "shape": "linear", "start": 0.0, "end": peak})
    if decay is None or decay[0] > warmup_tokens:
        pieces.append({"from": warmup_tokens, "shape": "constant", "start": peak})
    if decay is not None:
        pieces.append({"from": decay[0], "to": decay[1], "shape": "linear", "start": peak, "end": 0.0})
    return pieces
