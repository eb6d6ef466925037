"""`nstrain bench`: how fast a model trains here, on random tokens, as a line would train it.

An update is what a line's is: `accum` micro-batches of `rows` rows, the norms, AdamW, by the same engine. Rates are of
the updates after the first two, each timed by the host from its first micro-batch to its readings, which wait for the
device. On a GPU the ceilings are measured in the same run, before the memory is taken.

With a profile one more update runs under CUPTI: time by operator and by kernel, and the idle share - the part of the
update's span in which no kernel ran (train/profile.py).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from nstrain.base.errors import Refusal
from nstrain.gpu.lease import refuse_other_gpu, this_gpu
from nstrain.gpu.readings import Gpu
from nstrain.settings.model import validate
from nstrain.settings.run import LengthSettings, ModelSettings, OptimizerSettings
from nstrain.train.determinism import enter_deterministic_mode
from nstrain.train.device import refuse_unfit_allocator
from nstrain.train.engine import EagerEngine, TokenRows, train_update
from nstrain.train.memory_errors import memory_told
from nstrain.train.model import build, kernel_operators, model_cost
from nstrain.train.profile import TRAINER_KERNELS, Profile, summarize
from nstrain.train.versions import versions

WARM_UP_UPDATES = 2
EMA_MOVE = 1e-4
"""How far an update moves the weights' average, if there is one."""
Recompute = Literal["none", "dendritic", "all"]


@dataclasses.dataclass(frozen=True)
class BenchPlan:
    """What is to be timed."""

    model: str
    """A preset's name."""
    row_tokens: int
    rows: int
    """Rows of a micro-batch."""
    accum: int
    """Micro-batches of an update."""
    recompute: Recompute
    updates: int = 5
    """Updates that are timed, after the warm-up."""
    device: str = "cuda"
    threads: int = 1
    hold_bytes: int | None = None
    """What the arena holds beforehand on a GPU; null: all that is free but a slack."""
    eager: bool = False
    """Run operator by operator on a GPU as well."""
    ema: bool = False
    """Keep a moving average of the weights."""


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """What was measured."""

    plan: BenchPlan
    device: str
    versions: dict[str, Any]
    """What decides what is computed, as a checkpoint keeps it."""
    parameters: int
    tokens_per_update: int
    update_s: float
    """Median of the timed updates."""
    tokens_per_s: float
    model_tflop_s: float
    """Model FLOPs (`model show`), recomputation not counted, in 1e12 a second."""
    six_n_tflop_s: float
    """6 x parameters x tokens a second, in 1e12 a second: what is often quoted."""
    peak_gib: float | None
    """Most memory in use at once, weights and optimizer included; null on a CPU."""
    copy_tb_s: float | None
    bf16_tflop_s: float | None
    """The card's ceilings, measured in this run; null on a CPU."""
    losses: list[float]
    """Of all updates: they must fall, or at least be finite."""
    profile: Profile | None

    @property
    def share(self) -> float | None:
        """Model FLOPs over the card's measured product rate."""
        return None if self.bf16_tflop_s is None else self.model_tflop_s / self.bf16_tflop_s


def refuse_unfit(plan: BenchPlan, profile: bool) -> None:
    """Raise `Refusal` for a device that is not there or cannot be held, and a profile on a CPU. Occupies no GPU."""
    if profile and plan.device != "cuda":
        raise Refusal("--profile times the kernels of a GPU; on a CPU there are none: leave it out")
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise Refusal("torch finds no CUDA device here; --device cpu times the eager engine")
    if plan.device == "cuda" and not plan.eager:
        refuse_unfit_allocator()


def bench(
    plan: BenchPlan,
    profile: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    gpu: Gpu | None = None,
) -> BenchResult:
    """Time a plan. On a GPU `gpu` is the one that the caller has borrowed (gpu/borrowed.py), before torch touches it.

    Raises `Refusal` for what `refuse_unfit` does, a model that does not exist or read such rows, and another GPU, and
    `OutOfMemory` for a plan that does not fit.
    """
    refuse_unfit(plan, profile)
    what = f"{plan.model} with micro-batches of {plan.rows} x {plan.row_tokens:,} tokens, recompute {plan.recompute},"
    with memory_told(what, "Use fewer --rows, or recompute more (--ac dendritic, --ac all)"):
        return _measured(plan, profile, tell, gpu)


def _measured(plan: BenchPlan, profile: bool, tell: Callable[[str], None], gpu: Gpu | None) -> BenchResult:
    enter_deterministic_mode(plan.threads)
    if plan.device == "cuda":
        assert gpu is not None, "whoever benches on a GPU borrows it first"
        refuse_other_gpu(gpu.uuid, this_gpu())
    cost = model_cost(plan.model, plan.row_tokens)
    if plan.row_tokens > cost.row_tokens:
        raise Refusal(f"{plan.model} reads rows of {cost.row_tokens:,} tokens at most, not {plan.row_tokens:,}")
    ceilings = None
    if plan.device == "cuda":
        from nstrain.gpu.ceilings import measure_ceilings

        tell("measuring the card's ceilings")
        ceilings = measure_ceilings()
        torch.cuda.empty_cache()
    tell(f"building {plan.model}: {cost.parameters:,} parameters")
    vocabulary = int(cost.config["vocab_size"])
    engine = _engine(plan, cost.config, vocabulary, tell)
    if plan.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for number in range(WARM_UP_UPDATES + plan.updates):
        rows = _rows(plan, vocabulary, number)
        began = time.perf_counter()
        losses.append(_update(engine, plan, rows))
        seconds.append(time.perf_counter() - began)
        tell(f"update {number + 1}: {seconds[-1]:.2f} s, loss {losses[-1]:.3f}")
    tokens = plan.accum * plan.rows * plan.row_tokens
    update_s = statistics.median(seconds[WARM_UP_UPDATES:])
    return BenchResult(
        plan=plan,
        device=torch.cuda.get_device_name() if plan.device == "cuda" else "CPU",
        versions=versions(plan.device),
        parameters=cost.parameters,
        tokens_per_update=tokens,
        update_s=update_s,
        tokens_per_s=tokens / update_s,
        model_tflop_s=cost.flops_per_token * tokens / update_s / 1e12,
        six_n_tflop_s=6 * cost.parameters * tokens / update_s / 1e12,
        peak_gib=_peak_gib() if plan.device == "cuda" else None,
        copy_tb_s=ceilings.copy_tb_s if ceilings else None,
        bf16_tflop_s=ceilings.bf16_tflop_s if ceilings else None,
        losses=losses,
        profile=_profiled(engine, plan, vocabulary) if profile else None,
    )


def _engine(plan: BenchPlan, config: dict[str, Any], vocabulary: int, tell: Callable[[str], None]) -> EagerEngine:
    model = build(ModelSettings(preset=plan.model, config=config), vocabulary, plan.device, seed=0)
    optimizer = validate(OptimizerSettings, {"clip_norm": 1.0}, "optimizer")
    if plan.device == "cuda" and not plan.eager:
        from nstrain.train.graphs import GraphEngine

        graphs = GraphEngine(model, optimizer, plan.hold_bytes, plan.ema, tell)
        graphs.open_arena()  # before the peak is reset: an arena is held by allocating it, which would count
        engine: EagerEngine = graphs
    else:
        engine = EagerEngine(model, optimizer, with_ema=plan.ema)
    engine.set_length(LengthSettings(micro_rows=plan.rows, recompute=plan.recompute))
    return engine


def _update(engine: EagerEngine, plan: BenchPlan, rows: TokenRows) -> float:
    """One update; its loss."""
    return train_update(engine, rows, plan.rows, 1e-4, 0.1, EMA_MOVE if plan.ema else None).loss


def _rows(plan: BenchPlan, vocabulary: int, number: int) -> TokenRows:
    shape = (plan.accum * plan.rows, plan.row_tokens + 1)
    return np.random.default_rng(number).integers(0, vocabulary, shape, dtype=np.int64)


def _peak_gib() -> float:
    """Most memory in use. A graph's intermediates are counted when it is captured, which is the first update."""
    return torch.cuda.max_memory_allocated() / 2**30


def _profiled(engine: EagerEngine, plan: BenchPlan, vocabulary: int) -> Profile:
    """One more update under the profiler."""
    from torch.profiler import ProfilerActivity, profile

    rows = _rows(plan, vocabulary, 0)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        _update(engine, plan, rows)
        torch.cuda.synchronize()
    events = [event for event in profiled.events() if event.device_type.name == "CUDA"]
    intervals = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    return summarize(intervals, {**kernel_operators(), **TRAINER_KERNELS})
