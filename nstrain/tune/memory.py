"""How much memory a shape will take, before it is tried; corrected by each shape that was.

    needed = persistent + transient(mode, L, r)

persistent, of P parameters:  P x (4 master + 4 gradient + 4 + 4 AdamW's moments + e + c),
    e = 4 with a moving average of the weights and 0 without; c = 2 on a GPU, where parameters compute in bf16 beside
    their fp32 masters, and 0 on a CPU, where they are them.
    What is left of the device after it - on a GPU less the arena's slack - is the room, as the trials measure it.

transient, of micro-batches of r rows of L tokens under one mode of recomputation: what is alive at once beside that -
activations, gradients of activations, workspaces:  fixed + r x L x a, a bytes a token. Nothing is known of it before
the first trial, which is therefore the smallest. From then on

    two trials or more of (mode, L):   the line through the two largest;
    one trial, (r1, t1):               t1 + GROWING_SHARE x t1 x (r - r1) / r1, since part of t1 may be fixed;
    none, but one of another length with n tokens, t1:   as from one trial, with tokens in place of rows.

A shape is pruned if its estimate and the margin are more than the room.
"""

from __future__ import annotations

import dataclasses

FP32_STATES_BYTES = 16
"""A parameter: fp32 master, main gradient and two moments."""

EMA_BYTES = 4
"""A parameter: its moving average, if the line has one."""

COMPUTE_BYTES = {"cuda": 2, "cpu": 0}
"""A parameter: its copy in the dtype it computes in, where that is not the master itself."""

GROWING_SHARE = 0.5
"""At least this share of a first trial's transient memory is taken to grow with the rows."""

MARGIN_SHARE = 0.02
"""Share of the room that stays free, for fragmentation that a short trial does not see."""


def persistent_bytes(parameters: int, device: str, ema: bool) -> int:
    """Weights, gradients, moments and, with `ema`, the weights' average of a model, in bytes."""
    return parameters * (FP32_STATES_BYTES + (EMA_BYTES if ema else 0) + COMPUTE_BYTES[device])


def fits(transient_bytes: int, room_bytes: int) -> bool:
    """Whether so much transient memory fits the room with the margin."""
    return transient_bytes + margin_bytes(room_bytes) <= room_bytes


def margin_bytes(room_bytes: int) -> int:
    """What must stay free of a room."""
    return int(MARGIN_SHARE * room_bytes)


@dataclasses.dataclass
class MemoryModel:
    """What the trials of a device have shown so far."""

    room_bytes: int | None = None
    """Room for transient memory; None before the first trial. The largest found: each trial is judged by its own."""
    _seen: dict[tuple[str, int], dict[int, int]] = dataclasses.field(default_factory=dict)
    """Transient bytes by (mode, row length) and rows."""

    def saw(self, mode: str, row_tokens: int, micro_rows: int, transient_bytes: int, room_bytes: int) -> None:
        """Take in a trial."""
        self.room_bytes = room_bytes if self.room_bytes is None else max(self.room_bytes, room_bytes)
        self._seen.setdefault((mode, row_tokens), {})[micro_rows] = transient_bytes

    def estimate(self, mode: str, row_tokens: int, micro_rows: int) -> int | None:
        """Transient bytes of a shape; None if no trial tells anything of its mode."""
        seen = sorted(self._seen.get((mode, row_tokens), {}).items())
        if len(seen) >= 2:
            (r1, t1), (r2, t2) = seen[-2:]
            return max(0, round(t2 + (t2 - t1) * (micro_rows - r2) / (r2 - r1)))
        if seen:
            return _grown(seen[0][1], micro_rows / seen[0][0])
        tokens = micro_rows * row_tokens
        others = [
            (abs(tokens - length * rows), length * rows, transient)
            for (other, length), trials in sorted(self._seen.items())
            if other == mode
            for rows, transient in sorted(trials.items())
        ]
        if not others:
            return None
        _, nearest_tokens, transient = min(others)
        return _grown(transient, tokens / nearest_tokens)

    def rules_out(self, mode: str, row_tokens: int, micro_rows: int) -> int | None:
        """The estimate of a shape that will not fit; None for one that is worth a trial."""
        estimate = self.estimate(mode, row_tokens, micro_rows)
        if estimate is None or self.room_bytes is None or fits(estimate, self.room_bytes):
            return None
        return estimate


def _grown(transient_bytes: int, times: float) -> int:
    """From one trial to a shape `times` as large."""
    return round(transient_bytes * (1 + GROWING_SHARE * (times - 1)))
