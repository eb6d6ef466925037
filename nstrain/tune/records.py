"""What `nstrain tune` keeps in RUN/tune: its trials, so that none is run twice, and the kernels they ran with.

trials.json    {"format": 1, "basis", "trials", "chosen"}: replaced as a whole after every trial
kernels.json   the kernels' launch configurations, for the line to begin with (nstrain/train/tuned_kernels.py)
trials.log     what the trials' processes printed

`basis` is everything that a trial's numbers depend on but its shape: the model and the other settings that are
computed with, the machine, libraries and code. Trials of another basis are not used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from nstrain.base.disk import atomic_write_json, read_json
from nstrain.base.errors import Refusal
from nstrain.line.paths import LinePaths
from nstrain.train.tuned_kernels import KERNELS_FORMAT, kernels_file
from nstrain.tune.memory import fits

TUNE_FORMAT: Literal[1] = 1

Mode = Literal["none", "dendritic", "all"]
MODES: tuple[Mode, ...] = ("none", "dendritic", "all")
"""Modes of recomputation, from the one that keeps most in memory."""


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """How rows are pushed through the device."""

    row_tokens: int
    """Target tokens of a row."""
    micro_rows: int
    """Rows of a micro-batch."""
    recompute: Mode
    """Layers whose activations are computed again."""

    def __str__(self) -> str:
        return f"{self.micro_rows} x {self.row_tokens:,} tokens, recompute {self.recompute}"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a trial measured."""

    micro_batch_s: float
    """Forward and backward of a micro-batch: median over updates of the mean in one."""
    finish_s: float
    """An update's end - norms, AdamW - in the median."""
    updates: int
    """Updates that were timed."""
    persistent_bytes: int
    """Weights, gradients, moments."""
    transient_bytes: int
    """Most that was in use beside them at once."""
    room_bytes: int
    """What there was for that: on a GPU what the arena held, on a CPU the available memory."""

    @property
    def fits(self) -> bool:
        """Whether its memory leaves the margin free."""
        return fits(self.transient_bytes, self.room_bytes)


Outcome = Literal["running", "measured", "failed", "pruned"]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One shape that was tried, or ruled out."""

    shape: Shape
    outcome: Outcome
    reason: str | None = None
    """Why it failed or was ruled out; of one that runs, what it does."""
    out_of_memory: bool = False
    """Whether it failed for want of memory."""
    estimated_bytes: int | None = None
    """Transient memory as it was estimated beforehand; null for a first trial."""
    measured: Measurement | None = None
    tokens_per_s: float | None = None
    """Trained tokens a second over the schedule's updates of this length, padding deducted."""
    padding: float | None = None
    """Share of the computed rows that is padding."""
    reused: bool = False
    """Whether it was measured by an earlier call."""

    @property
    def usable(self) -> bool:
        """Whether a line may train with it."""
        return self.measured is not None and self.measured.fits

    def to_json(self) -> dict[str, Any]:
        """As trials.json has it."""
        fields = dataclasses.asdict(self)
        del fields["reused"]
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Trial:
        """From trials.json, without what depends on the schedule. Raises `KeyError` or `TypeError`."""
        measured = fields["measured"]
        return cls(
            shape=Shape(**fields["shape"]),
            outcome=fields["outcome"],
            reason=fields["reason"],
            out_of_memory=fields["out_of_memory"],
            estimated_bytes=fields["estimated_bytes"],
            measured=None if measured is None else Measurement(**measured),
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """The shape chosen for a row length, with what speaks for it."""

    micro_rows: int
    recompute: Mode
    tokens_per_s: float
    """As of its trial."""
    padding: float
    """As of its trial."""


class TuneFiles:
    """RUN/tune of one line."""

    def __init__(self, paths: LinePaths) -> None:
        self._directory, self.kernels = paths.tune, kernels_file(paths)

    @property
    def trials(self) -> Path:
        """The trials."""
        return self._directory / "trials.json"

    @property
    def log(self) -> Path:
        """The output of the trials' processes."""
        return self._directory / "trials.log"

    def make(self) -> None:
        """Make the directory. Raises `Refusal` if that cannot be done."""
        try:
            self._directory.mkdir(exist_ok=True)
        except OSError as error:
            raise Refusal(f"{self._directory} cannot be made ({error})") from error

    def read_trials(self, basis: Mapping[str, Any]) -> tuple[dict[Shape, Trial], list[str]]:
        """Measured trials of this basis, and in words what differs if there are only those of another one.

        Raises `Refusal` for a file that is not trials.json of this format.
        """
        if not self.trials.exists():
            return {}, []
        stored = read_json(self.trials)
        try:
            if stored["format"] != TUNE_FORMAT:
                raise ValueError(f"format {stored['format']}, expected {TUNE_FORMAT}")
            trials = [Trial.from_json(fields) for fields in stored["trials"]]
            differences = _differences(stored["basis"], basis)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refusal(f"{self.trials}: is not what `nstrain tune` writes ({error!r}); remove it") from None
        if differences:
            return {}, differences
        return {trial.shape: dataclasses.replace(trial, reused=True) for trial in trials if trial.measured}, []

    def write_trials(
        self, basis: Mapping[str, Any], trials: Iterable[Trial], chosen: Mapping[int, Choice] | None
    ) -> None:
        """Replace trials.json. Raises `DiskFull`."""
        picked = None if chosen is None else {str(length): dataclasses.asdict(c) for length, c in chosen.items()}
        stored = {"format": TUNE_FORMAT, "basis": basis, "chosen": picked}
        atomic_write_json(self.trials, stored | {"trials": [trial.to_json() for trial in trials]})

    def add_kernels(self, basis: Mapping[str, Any], kernels: Mapping[str, Any]) -> None:
        """Add to kernels.json what a trial ran with; a table of another basis is replaced. Raises `DiskFull`."""
        known: dict[str, Any] = {}
        if self.kernels.exists():
            stored = read_json(self.kernels)
            if isinstance(stored, dict) and stored.get("basis") == basis and isinstance(stored.get("kernels"), dict):
                known = stored["kernels"]
        table = dict(sorted({**known, **kernels}.items()))
        atomic_write_json(self.kernels, {"format": KERNELS_FORMAT, "basis": basis, "kernels": table})


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], place: str = "") -> list[str]:
    """What differs between two bases, in words."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name), new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            found += _differences(was, now, f"{place}{name}.")
        elif was != now:
            found.append(f"{place}{name} was {was!r}, is {now!r}")
    return found
