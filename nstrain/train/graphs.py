"""The engine that replays CUDA graphs: the host launches one graph a micro-batch and two an update.

The pieces of `EagerEngine` are captured as they stand - micro-batch (one graph for every shape and recomputation
mode), norms, AdamW with the model's refresh - so with the same kernels they give the same bits. All that varies from
update to update is in device scalars and the input buffers, which are filled before a replay: a larger batch, another
rate or a smaller last update need no new capture.

Before a capture the pieces run once eagerly on the capture's stream (kernels compile, libraries allocate their
workspaces), the norms and AdamW on a gradient with a NaN in it: a skipped update stores nothing. Warm-up and capture
take their memory from one pool, which holds nothing that lives longer than a replay; what lives longer was made before
(parameters, moments, inputs, sums). Graphs never run at the same time, so they share the pool.

Autograd runs on the calling thread while a graph is made: its own threads would allocate elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nstrain.base.errors import NstrainError
from nstrain.settings.run import LengthSettings, OptimizerSettings
from nstrain.train.engine import EagerEngine, TokenRows, UpdateReadings
from nstrain.train.model import IGNORED_TOKEN, TrainableModel


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What one micro-batch graph was captured for."""

    rows: int
    columns: int
    recompute: str


class GraphEngine(EagerEngine):
    """`EagerEngine`, captured. Needs a CUDA device."""

    def __init__(self, model: TrainableModel, settings: OptimizerSettings) -> None:
        super().__init__(model, settings)
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.MemPool()
        self._pool_id: Any = self._pool.id
        self._micro_graphs: dict[_Shape, torch.cuda.CUDAGraph] = {}
        self._update_graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self._recompute = "none"
        with torch.cuda.stream(self._stream):
            # The products' workspace of this stream must not come to lie in the pool, which is given back.
            torch.mm(*(torch.zeros(64, 64, device=self.flat.device, dtype=torch.bfloat16) for _ in range(2)))
        self._stream.wait_stream(torch.cuda.current_stream())

    def set_length(self, length: LengthSettings) -> None:
        """Get ready for rows of one length; its graph is captured with the first micro-batch of a shape."""
        super().set_length(length)
        self._recompute = length.recompute

    def accumulate(self, rows: TokenRows, loss_scale: float) -> None:
        """Forward and backward of one micro-batch: a replay of its shape's graph."""
        shape = _Shape(self._micro_rows, rows.shape[1], self._recompute)
        with torch.cuda.stream(self._stream):
            if shape not in self._micro_graphs:
                self._capture(shape)
            self._take_in(rows)
            self._loss_scale.fill_(loss_scale)
            self._micro_graphs[shape].replay()

    def finish(self, learning_rate: float, weight_decay: float) -> UpdateReadings:
        """Norm, clipped AdamW or the skip, refresh and the cleared gradient: replays of two graphs."""
        assert self._update_graphs is not None, "an update has at least one micro-batch"
        with torch.cuda.stream(self._stream):
            self._begin_finish(learning_rate, weight_decay)
            for graph in self._update_graphs:
                graph.replay()
            return self._read()

    # --- making the graphs -----------------------------------------------------------------------------------------

    def _capture(self, shape: _Shape) -> None:
        """Warm a shape up and capture it; what the update has accumulated so far is kept."""
        began = time.perf_counter()
        held = self._gradients_so_far()
        tokens = self._take_in_padding(shape)
        with self._memory():
            self._micro_batch(tokens)
        if not self._micro_graphs:  # the warm-up made the terms' sums in the pool, and they are to outlive it
            self._terms = {name: self._scalar(0.0, torch.float64) for name in self._terms}
        self._micro_graphs[shape] = self._captured(lambda: self._micro_batch(tokens))
        if self._update_graphs is None:
            self._warm_up_update()
            self._update_graphs = self._captured(self._measure), self._captured(self._apply)
        self._restore_gradients(held)
        print(
            f"captured {shape.rows} x {shape.columns - 1:,} tokens, recompute {shape.recompute}, in "
            f"{time.perf_counter() - began:.1f} s; {torch.cuda.memory_reserved() / 2**30:.1f} GiB reserved",
            flush=True,
        )

    def _take_in_padding(self, shape: _Shape) -> Tensor:
        place = (shape.rows, shape.columns)
        if place not in self._inputs:
            self._inputs[place] = torch.empty(place, dtype=torch.int64, device=self.flat.device)
        return self._inputs[place].fill_(IGNORED_TOKEN)

    def _warm_up_update(self) -> None:
        """Norms and AdamW once, as a skip: a NaN in the gradient keeps every byte of weights and moments."""
        self._begin_finish(0.0, 0.0)
        self.flat.groups[0].main_grad[:1].fill_(math.nan)
        with self._memory():
            self._measure()
            self._apply()
        if not (self._clip and self._clip.skip.item()):
            raise NstrainError("the warm-up of the optimizer's kernels was not skipped: its gradient norm was finite")

    def _gradients_so_far(self) -> list[Tensor] | None:
        """Copies of the sums of micro-batches already accumulated in this update, if there are any."""
        sums = [group.main_grad for group in self.flat.groups] + [self._loss, *self._terms.values()]
        if not any(bool(total.any()) for total in sums):
            return None
        return [total.clone() for total in sums]

    def _restore_gradients(self, held: list[Tensor] | None) -> None:
        sums = [group.main_grad for group in self.flat.groups] + [self._loss, *self._terms.values()]
        for index, total in enumerate(sums):
            if held is not None and index < len(held):
                total.copy_(held[index])
            else:
                total.zero_()

    @contextlib.contextmanager
    def _memory(self) -> Iterator[None]:
        """Eager work whose memory comes from the pool, on this thread alone."""
        with torch.autograd.set_multithreading_enabled(False), torch.cuda.use_mem_pool(self._pool):
            yield

    def _captured(self, piece: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            torch.autograd.set_multithreading_enabled(False),
            # A background writer's work in another thread must not break the capture.
            torch.cuda.graph(graph, pool=self._pool_id, stream=self._stream, capture_error_mode="thread_local"),
        ):
            piece()
        return graph
