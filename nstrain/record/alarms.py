"""What of a row of readings a person should look at: neurons that are dead or seize, and a loss that jumps.

Alarms are sentences formed from a row alone, so that the trainer, `status` and whoever reads an export find the same
ones. For the loss the row carries `train/loss_jump`: how far the loss lies above those before it, in deviations,

    (loss - median) / max(LEAST_DEVIATION, 1.4826 * the median distance from the median)

over the losses of the WINDOW_UPDATES updates before, skipped ones left out (1.4826 median distances are a standard
deviation of normal noise, and no single update moves them). It is a function of rows of the journal: a trainer that
goes on from a checkpoint forms it again from them.
"""

from __future__ import annotations

import collections
import math
import re
import statistics
from collections.abc import Iterable, Mapping

from nstrain.record.journal_reader import JournalReader

DEAD_FIRING = 0.02
SEIZING_FIRING = {"excitatory": 0.8, "signed": 0.95}
"""Above this a neuron's release says next to nothing about its potential."""
NEURONS = {
    "dendritic/firing": "signed",
    "hippocampal/gate_firing": "excitatory",
    "hippocampal/ffn_in_firing": "signed",
    "hippocampal/ffn_gate_firing": "excitatory",
    "hippocampal/ffn_up_firing": "signed",
}
"""The kind of neuron behind every firing rate."""

WINDOW_UPDATES = 100
LEAST_LOSSES = 25
"""Losses in the window from which on a jump can be told."""
NORMAL_DEVIATIONS = 1.4826
"""A standard deviation of normal noise, in median distances from its median."""
LEAST_DEVIATION = 0.02
"""In nats: losses that hardly vary do not make a jump of a small step."""
SHOWN_ALARMS = 5
"""As many are written out; the others are counted."""


class LossWatch:
    """The losses of the updates just before the next one."""

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        """`rows` are those of the updates before, in order."""
        self._losses = collections.deque(map(_loss_of, rows), maxlen=WINDOW_UPDATES)

    @classmethod
    def at(cls, journal: JournalReader, update: int) -> LossWatch:
        """The watch of a line that stands after `update`."""
        rows = journal.rows(from_update=max(1, update - WINDOW_UPDATES + 1))
        return cls(row for row in rows if row["update"] <= update)

    def read(self, row: Mapping[str, float]) -> dict[str, float]:
        """An update's `train/loss_jump`, if there are losses enough before it; the watch goes on past it."""
        jump = self._jump(row["train/loss"])
        self._losses.append(_loss_of(row))
        return {} if jump is None else {"train/loss_jump": jump}

    def _jump(self, loss: float) -> float | None:
        losses = [loss for loss in self._losses if loss is not None]
        if len(losses) < LEAST_LOSSES:
            return None
        median = statistics.median(losses)
        distance = statistics.median(abs(loss - median) for loss in losses)
        return (loss - median) / max(LEAST_DEVIATION, NORMAL_DEVIATIONS * distance)


def _loss_of(row: Mapping[str, float]) -> float | None:
    """A row's training loss; None if its update was skipped or its loss is not finite."""
    loss = row.get("train/loss", math.nan)
    return None if row.get("skipped") or not math.isfinite(loss) else loss


def loss_alarms(row: Mapping[str, float], limit: float) -> list[str]:
    """Whether the loss of an update that was applied jumped."""
    jump = row.get("train/loss_jump")
    if jump is None or row.get("skipped") or jump <= limit:
        return []
    return [f"train/loss jumped to {row['train/loss']:.4f}: {jump:.1f} deviations above the updates before it"]


def firing_alarms(row: Mapping[str, float]) -> list[str]:
    """Neurons of a validation that hardly ever, or nearly always, release."""
    alarms = []
    for name, value in row.items():
        found = re.fullmatch(r"val_\d+/(\w+)/(?:\w+/)?(\w*firing)(?:_seg\d+)?", name)
        neuron = NEURONS.get(f"{found[1]}/{found[2]}") if found else None
        if neuron is None:
            continue
        if not value >= DEAD_FIRING:
            alarms.append(f"{name} is {value:.4f}: these neurons are nearly dead (below {DEAD_FIRING})")
        elif value > SEIZING_FIRING[neuron]:
            alarms.append(f"{name} is {value:.4f}: these {neuron} neurons seize (above {SEIZING_FIRING[neuron]})")
    return alarms


def subject_of(alarm: str) -> str:
    """The reading that an alarm is about."""
    return alarm.partition(" ")[0]


def in_short(alarms: list[str]) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(alarms) - SHOWN_ALARMS
    return [*alarms[:SHOWN_ALARMS], *([f"and {more} more"] if more > 0 else [])]
