"""The engine that replays CUDA graphs: the host launches one graph a micro-batch and two an update.

The pieces of `EagerEngine` are captured as they stand - micro-batch (one graph for every shape and recomputation
mode), norms, AdamW with the model's refresh - so with the same kernels they give the same bits. All that varies from
update to update is in device scalars and the input buffers, which are filled before a replay: a larger batch, another
rate or a smaller last update need no new capture.

Before a capture the pieces run once eagerly on the capture's stream (kernels compile, libraries allocate their
workspaces), the norms and AdamW on a gradient with a NaN in it: a skipped update stores nothing. Warm-up, capture and
validation take their memory from the arena (nstrain/gpu/arena.py), where nothing lives longer than a replay; what lives
longer was made before (parameters, moments, inputs, sums). Graphs never run at the same time, so they share it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nstrain.base.errors import NstrainError
from nstrain.gpu.arena import Arena, ArenaTooSmall, arena_stream
from nstrain.settings.run import LengthSettings, OptimizerSettings
from nstrain.train.engine import EagerEngine, OptimizerCounts, TokenRows, UpdateReadings
from nstrain.train.model import IGNORED_TOKEN, TrainableModel
from nstrain.train.norms import stretch_table


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What one micro-batch graph was captured for."""

    rows: int
    columns: int
    recompute: str


def _print(line: str) -> None:
    print(line, flush=True)


class GraphEngine(EagerEngine):
    """`EagerEngine`, captured. Needs a CUDA device."""

    def __init__(
        self,
        model: TrainableModel,
        settings: OptimizerSettings,
        hold_bytes: int | None = None,
        with_ema: bool = False,
        tell: Callable[[str], None] = _print,
    ) -> None:
        """`hold_bytes` is what the arena holds beforehand: by default all that is free but a slack.

        `tell` is given a sentence when memory is held and when a shape has been captured.
        """
        with torch.cuda.stream(arena_stream()):
            # Autograd runs what it does for a parameter on the stream that was current when its hook was registered.
            super().__init__(model, settings, with_ema)
            # Made here and not when the norms are first taken: in the arena an earlier graph would write over it.
            stretch_table(self.flat)
        self._arena: Arena | None = None
        self._hold_bytes = hold_bytes
        self._tell = tell
        self._micro_graphs: dict[_Shape, torch.cuda.CUDAGraph] = {}
        self._update_graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self._recompute = "none"

    def set_length(self, length: LengthSettings) -> None:
        """Get ready for rows of one length; its graph is captured with the first micro-batch of a shape."""
        super().set_length(length)
        self._recompute = length.recompute

    def accumulate(self, rows: TokenRows, loss_scale: float) -> None:
        """Forward and backward of one micro-batch: a replay of its shape's graph."""
        shape = _Shape(self._micro_rows, rows.shape[1], self._recompute)
        with torch.cuda.stream(self._opened_arena().stream):
            if shape not in self._micro_graphs:
                self._capture(shape)
            self._take_in(rows)
            self._loss_scale.fill_(loss_scale)
            self._micro_graphs[shape].replay()

    def finish(self, learning_rate: float, weight_decay: float, ema: float | None = None) -> UpdateReadings:
        """Norm, clipped AdamW or the skip, refresh and the cleared gradient: replays of two graphs."""
        assert self._update_graphs is not None, "an update has at least one micro-batch"
        norms, apply = self._update_graphs
        with torch.cuda.stream(self._opened_arena().stream):
            self._begin_finish(learning_rate, weight_decay, ema)
            norms.replay()
            self.before_apply()
            self.is_whole = False
            apply.replay()
            return self._read(ema)

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """In the arena's memory, on its stream."""
        with self._opened_arena().memory(), torch.no_grad():
            yield
        self._refuse_growth(what)

    def restored(self, counts: OptimizerCounts) -> None:
        """Take up weights and moments that were loaded into `flat`, on another stream than the graphs'."""
        super().restored(counts)
        torch.cuda.synchronize()

    def open_arena(self) -> int:
        """Take the arena's memory now, and not with the first micro-batch; the bytes it holds."""
        return self._opened_arena().held_bytes

    def close_arena(self) -> int:
        """Give the arena's memory back, graphs and all; the bytes returned. The next micro-batch makes it anew."""
        if self._arena is None:
            return 0
        torch.cuda.synchronize()
        for graph in (*self._micro_graphs.values(), *(self._update_graphs or ())):
            graph.reset()
        self._micro_graphs.clear()
        self._update_graphs = self._norms = self._clip = None
        arena, self._arena = self._arena, None
        return arena.close()

    def _opened_arena(self) -> Arena:
        if self._arena is None:
            self._arena = Arena(self._hold_bytes)
            self._tell(f"holding {self._arena.held_bytes / 2**30:.1f} GiB of the GPU")
        return self._arena

    def _refuse_growth(self, what: str) -> None:
        """Raise if the arena had to take more than it held: then it is too small for what this line does."""
        if self._hold_bytes != 0 and self._opened_arena().grown_segments():
            grown = self._opened_arena().grown_segments()
            raise ArenaTooSmall(
                f"{what} took {grown} more segments from the driver than the arena held: other processes may take that "
                "memory the next time; use fewer micro_rows (nstrain tune)"
            )

    # --- making the graphs -----------------------------------------------------------------------------------------

    def _capture(self, shape: _Shape) -> None:
        """Warm a shape up and capture it; what the update has accumulated so far is kept."""
        began = time.perf_counter()
        held = self._gradients_so_far()
        tokens = self._inputs_of((shape.rows, shape.columns)).fill_(IGNORED_TOKEN)
        with self._opened_arena().memory():
            self._micro_batch(tokens)
        if not self._micro_graphs:  # the warm-up made the terms' sums in the pool, and they are to outlive it
            self._terms = {name: self._scalar(0.0, torch.float64) for name in self._terms}
        self._micro_graphs[shape] = self._captured(lambda: self._micro_batch(tokens))
        if self._update_graphs is None:
            self._warm_up_update()
            self._update_graphs = self._captured(self._measure), self._captured(self._apply)
        self._restore_gradients(held)
        self._refuse_growth("a capture")
        self._tell(
            f"captured {shape.rows} x {shape.columns - 1:,} tokens, recompute {shape.recompute}, in "
            f"{time.perf_counter() - began:.1f} s; {torch.cuda.memory_reserved() / 2**30:.1f} GiB reserved"
        )

    def _warm_up_update(self) -> None:
        """Norms and AdamW once, as a skip: a NaN in the gradient keeps every byte of weights and moments."""
        self._begin_finish(0.0, 0.0, None)
        self.flat.groups[0].main_grad[:1].fill_(math.nan)
        with self._opened_arena().memory():
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

    def _captured(self, piece: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        arena, graph = self._opened_arena(), torch.cuda.CUDAGraph()
        with (
            torch.autograd.set_multithreading_enabled(False),
            # A background writer's work in another thread must not break the capture.
            torch.cuda.graph(graph, pool=arena.pool_id, stream=arena.stream, capture_error_mode="thread_local"),
        ):
            piece()
        return graph
