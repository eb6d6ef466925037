"""One update: forward and backward over its micro-batches, the norm, AdamW or the skip.

`Engine` is what the loop knows; `EagerEngine` runs it operator by operator, on a CPU or a GPU. Shapes: B rows of a
micro-batch, L target tokens of a row.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nstrain.settings.run import LengthSettings, OptimizerSettings
from nstrain.train.adamw import Clip, adamw_update, advance_step, clip_by_norm
from nstrain.train.ema import show_ema, show_weights
from nstrain.train.flat import FlatParameters
from nstrain.train.model import DECAYED_GROUPS, IGNORED_TOKEN, ProbedModel, TrainableModel, parameter_places
from nstrain.train.norms import GradientNorms, gradient_norms
from nstrain.train.optimizer_summaries import OptimizerSummaries, optimizer_summaries

TokenRows = npt.NDArray[np.int64]
"""Rows of token ids, [rows, L + 1]: inputs are [:, :-1], targets [:, 1:]."""

ProbeReadings = dict[str, dict[str, npt.NDArray[np.float64]]]
"""What a probe gives, by part and reading: [rows, members]. Empty for a model that has no probe."""


@dataclasses.dataclass
class OptimizerCounts:
    """What the optimizer counts; a checkpoint holds it."""

    step: int = 0
    """Updates that were applied: the t of AdamW's bias correction."""
    consecutive_skips: int = 0
    """Updates skipped since the last one that was applied."""
    total_skips: int = 0
    """Updates skipped in the line's life."""


@dataclasses.dataclass(frozen=True)
class UpdateReadings:
    """What one update measured."""

    loss: float
    """Mean loss a target token, in nats."""
    terms: dict[str, float]
    """The loss's terms by name, means a target token as well."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    group_norms: dict[str, float]
    """The same by optimizer group."""
    part_norms: dict[str, float]
    """The same by part of the model."""
    skipped: bool
    """Whether the norm was not finite and nothing was applied."""


class Engine(Protocol):
    """The body that trains. Between two updates it holds no gradient and no other state than what `flat` holds."""

    model: TrainableModel
    flat: FlatParameters
    counts: OptimizerCounts
    before_apply: Callable[[], None]
    """Called when masters, moments or their average are about to be written; on a GPU with the stream that will write
    them as the current one, so that it can be made to wait for an event (a copy of them that is still under way)."""
    is_whole: bool
    """Whether `flat` holds the state after the last update that came to its end; not while one is being applied, nor
    after one that failed there."""

    def set_length(self, length: LengthSettings) -> None:
        """Get ready for rows of one length."""

    def accumulate(self, rows: TokenRows, loss_scale: float) -> None:
        """Forward and backward of one micro-batch of real rows, at most `micro_rows`; gradients add up."""

    def finish(self, learning_rate: float, weight_decay: float, ema: float | None = None) -> UpdateReadings:
        """Apply the accumulated gradient, or skip it if its norm is not finite, and clear it.

        `ema` is how far the weights' moving average moves (schedule.ema_step); None leaves it alone. Its first move,
        however far, is a copy.
        """

    def token_losses(self, rows: TokenRows) -> npt.NDArray[np.float32]:
        """Cross-entropy of each target in nats, [rows, L]; rows of any length, all at once.

        Like all readings of the state this touches nothing of it.
        """

    def probe(self, rows: TokenRows, eos_id: int, train_length: int, attention: bool = True) -> ProbeReadings:
        """What the model's probe says of rows; `attention=False` leaves out what costs most."""

    def optimizer_summaries(self, learning_rate: float) -> OptimizerSummaries:
        """Sizes of weights, moments and AdamW's next step at a rate, by group and part."""

    def ema_weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside, all readings are of the moving average; after it every bit is as it was. Only once that has begun."""

    def restored(self, counts: OptimizerCounts) -> None:
        """Take up weights and moments that were loaded into `flat`."""


class EagerEngine:
    """The engine that runs every operator as it comes.

    What an update computes is in three pieces - micro-batch, norms, AdamW - that read and write buffers of the engine
    and nothing else, so that another engine may run the same pieces in another way (see `graphs.py`).
    """

    def __init__(self, model: TrainableModel, settings: OptimizerSettings, with_ema: bool = False) -> None:
        """`with_ema` makes room for a moving average of the weights."""
        self.model = model
        self.settings = settings
        self.flat = FlatParameters(parameter_places(model), with_ema)
        self.counts = OptimizerCounts()
        self.before_apply: Callable[[], None] = lambda: None
        self.is_whole = True
        self._micro_rows = 0
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._loss_scale, self._rate, self._step, self._move = (self._scalar(0.0) for _ in range(4))
        self._decay, self._loss = (self._scalar(0.0, torch.float64) for _ in range(2))
        self._terms: dict[str, Tensor] = {}
        self._norms: GradientNorms | None = None
        self._clip: Clip | None = None
        model.refresh()

    def _scalar(self, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=self.flat.device)

    def set_length(self, length: LengthSettings) -> None:
        """Get ready for rows of one length: micro-batches of `micro_rows` rows, and what is recomputed."""
        self._micro_rows = length.micro_rows
        self.model.recompute(length.recompute)

    def _inputs_of(self, shape: tuple[int, int]) -> Tensor:
        """The device's buffer of token ids of a shape, which stays where it is."""
        if shape not in self._inputs:
            self._inputs[shape] = torch.empty(shape, dtype=torch.int64, device=self.flat.device)
        return self._inputs[shape]

    def _fill(self, inputs: Tensor, rows: TokenRows) -> None:
        """Put rows into a buffer of [micro_rows, L + 1]; rows that are missing carry no loss."""
        assert 0 < len(rows) <= len(inputs), f"{len(rows)} rows for a micro-batch of {len(inputs)}"
        padded = torch.full(inputs.shape, IGNORED_TOKEN, dtype=torch.int64, pin_memory=inputs.is_cuda)
        padded[: len(rows)] = torch.from_numpy(rows)
        inputs.copy_(padded, non_blocking=True)

    def _take_in(self, rows: TokenRows) -> Tensor:
        """Rows on the device as [micro_rows, L + 1]."""
        inputs = self._inputs_of((self._micro_rows, rows.shape[1]))
        self._fill(inputs, rows)
        return inputs

    # --- the three pieces ------------------------------------------------------------------------------------------

    def _micro_batch(self, tokens: Tensor) -> None:
        loss, terms = self.model.loss(tokens, self._loss_scale)
        loss.backward()
        self._loss += loss.detach()
        for name, term in terms.items():
            if name not in self._terms:
                self._terms[name] = self._scalar(0.0, torch.float64)
            self._terms[name] += term.detach().double() * self._loss_scale

    @torch.no_grad()
    def _measure(self) -> None:
        self._norms = gradient_norms(self.flat)
        self._clip = clip_by_norm(self._norms.total, self.settings.clip_norm)

    @torch.no_grad()
    def _apply(self) -> None:
        assert self._clip is not None
        advance_step(self._step, self._clip)
        for group in self.flat.groups:
            decay = self._decay if group.name in DECAYED_GROUPS else None
            adamw_update(group, self.settings, self._clip, self._step, self._rate, decay, self._move)
        self.model.refresh()

    # --- an update -------------------------------------------------------------------------------------------------

    def accumulate(self, rows: TokenRows, loss_scale: float) -> None:
        """Forward and backward of one micro-batch. `loss_scale` is 1 / (target tokens of the whole update)."""
        self._loss_scale.fill_(loss_scale)
        self._micro_batch(self._take_in(rows))

    def finish(self, learning_rate: float, weight_decay: float, ema: float | None = None) -> UpdateReadings:
        """Norm, clipped AdamW or the skip, refresh; then the gradient is cleared, whatever was in it."""
        self._begin_finish(learning_rate, weight_decay, ema)
        self._measure()
        self.before_apply()
        self.is_whole = False
        self._apply()
        return self._read(ema)

    def _begin_finish(self, learning_rate: float, weight_decay: float, ema: float | None) -> None:
        assert ema is None or (self.flat.has_ema and 0 < ema <= 1), f"a move of {ema} of the moving average"
        self._rate.fill_(learning_rate)
        self._decay.fill_(weight_decay)
        self._step.fill_(self.counts.step)
        self._move.fill_(0.0 if ema is None else ema if self.flat.ema_begun else 1.0)

    def _read(self, ema: float | None) -> UpdateReadings:
        """Bring the update's readings to the host, in one copy, and start anew."""
        norms, clip = self._norms, self._clip
        assert norms is not None
        assert clip is not None
        read = {
            "loss": {"": self._loss},
            "norm": {"": norms.total},
            "skip": {"": clip.skip.double()},
            "terms": dict(sorted(self._terms.items())),
            "groups": norms.groups,
            "parts": norms.parts,
        }
        values = iter(to_host(torch.stack([value for kind in read.values() for value in kind.values()])))
        found = {kind: {name: next(values) for name in of_kind} for kind, of_kind in read.items()}
        readings = UpdateReadings(
            loss=found["loss"][""],
            terms={name.removesuffix("_sum"): term for name, term in found["terms"].items()},
            grad_norm=found["norm"][""],
            group_norms=found["groups"],
            part_norms=found["parts"],
            skipped=bool(found["skip"][""]),
        )
        for total in (self._loss, *self._terms.values()):
            total.zero_()
        self.counts = after_update(self.counts, readings.skipped)
        self.flat.ema_begun = self.flat.ema_begun or (ema is not None and not readings.skipped)
        self.is_whole = True
        return readings

    # --- readings of the state -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Where everything that only reads the state runs; none of its tensors may outlive it."""
        with torch.no_grad():
            yield

    def token_losses(self, rows: TokenRows) -> npt.NDArray[np.float32]:
        """Cross-entropy of each target in nats, [rows, L]."""
        with self._reading("validation"):
            return self.model.token_losses(self._on_device(rows)).cpu().numpy()

    def probe(self, rows: TokenRows, eos_id: int, train_length: int, attention: bool = True) -> ProbeReadings:
        """What the model's probe says of rows, in host memory."""
        if not isinstance(self.model, ProbedModel):
            return {}
        with self._reading("a probe"):
            found = self.model.probe(self._on_device(rows), eos_id, train_length, attention=attention)
            return {part: {name: v.cpu().numpy() for name, v in of.items()} for part, of in found.items()}

    def _on_device(self, rows: TokenRows) -> Tensor:
        return torch.from_numpy(rows).to(self.flat.device)

    def optimizer_summaries(self, learning_rate: float) -> OptimizerSummaries:
        """Sizes of weights, moments and AdamW's next step at a rate, by group and part."""
        with self._reading("the optimizer's summary"):
            return optimizer_summaries(self.flat, self.settings, self.counts.step, learning_rate)

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """The moving average in the weights' place, for readings; see ema.py."""
        assert self.flat.ema_begun, "the moving average has not begun"
        try:
            with self._reading("the moving average"):
                self.before_apply()
                show_ema(self.flat)
                self.model.refresh()
            yield
        finally:
            with self._reading("the moving average"):
                show_weights(self.flat)
                self.model.refresh()

    def restored(self, counts: OptimizerCounts) -> None:
        """Take up weights and moments that were loaded into `flat`."""
        self.counts = dataclasses.replace(counts)
        self.model.refresh()


def to_host(readings: Tensor) -> list[float]:
    """An update's readings; the only place where an update waits for its device."""
    values: list[float] = readings.tolist()
    return values


def after_update(counts: OptimizerCounts, skipped: bool) -> OptimizerCounts:
    """The counts after one more update."""
    if skipped:
        return OptimizerCounts(counts.step, counts.consecutive_skips + 1, counts.total_skips + 1)
    return OptimizerCounts(counts.step + 1, 0, counts.total_skips)


def micro_batches(rows: TokenRows, micro_rows: int) -> Iterator[TokenRows]:
    """Rows cut into micro-batches, in order; the last one may be shorter."""
    for first in range(0, len(rows), micro_rows):
        yield rows[first : first + micro_rows]


def train_update(
    engine: Engine,
    rows: TokenRows,
    micro_rows: int,
    learning_rate: float,
    weight_decay: float,
    ema: float | None = None,
) -> UpdateReadings:
    """One whole update on its rows; the loss is the mean over all its target tokens."""
    loss_scale = 1.0 / (rows.shape[0] * (rows.shape[1] - 1))
    for batch in micro_batches(rows, micro_rows):
        engine.accumulate(batch, loss_scale)
    return engine.finish(learning_rate, weight_decay, ema)
