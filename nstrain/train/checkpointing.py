"""From a training line to a checkpoint and back: what state.json says, and what a resume refuses.

The position in a checkpoint is the next row to train. In the middle of a cycle it comes with the hash of the cycle's
manifest and the digest of its row order, and a line is not continued under others. At a cycle's start nothing of that
cycle was trained yet (it may not even be prepared): there the finished cycle's are kept under `previous`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from nstrain.base.disk import sha256_file
from nstrain.base.errors import Refusal
from nstrain.data.line import DataLine
from nstrain.data.manifest import make_again
from nstrain.line.checkpoint import Checkpoint
from nstrain.line.state_json import FORMAT
from nstrain.line.tensor_file import Tensors
from nstrain.settings.changes import Changes, settle_changes
from nstrain.settings.model import dump
from nstrain.settings.run import HELD_OUT, RunSettings
from nstrain.train.engine import Engine, OptimizerCounts
from nstrain.train.flat import TENSOR_KINDS, TensorKind
from nstrain.train.model import kernel_table, use_kernels
from nstrain.train.plan import Position
from nstrain.train.versions import GATING, software, versions

KEPT_REASONS = frozenset({"start", "cycle_end", "length_change", "end"})
"""Reasons whose checkpoints stay: points that a branch or a later stage can begin from."""


@dataclasses.dataclass(frozen=True)
class CycleOrder:
    """What the rows of a cycle were, so that a resume under another order is noticed."""

    cycle: int
    row_tokens: int
    manifest_sha256: str
    order_digest: str


@dataclasses.dataclass(frozen=True)
class LineState:
    """Where a line stands between two updates, apart from its tensors."""

    position: Position
    tokens: int
    """The position in tokens."""
    generation: int
    order: CycleOrder | None
    """Of the last update's cycle; None before the first update."""
    changes: Changes = dataclasses.field(default_factory=Changes)
    """The changes of fixed settings that the line has been through."""
    held_out: str | None = None
    """The hash of the held-out index that the line's readings are of; None in checkpoints of before it was kept."""

    def position_json(self, settings: RunSettings) -> dict[str, Any]:
        """The position as state.json has it."""
        here = {"cycle": self.position.cycle, "row": self.position.row}
        if self.position.row > 0:
            assert self.order is not None
            assert self.order.cycle == self.position.cycle
            return here | dataclasses.asdict(self.order)
        return here | {
            "row_tokens": settings.row_tokens_at(self.position.cycle),
            "manifest_sha256": None,
            "order_digest": None,
            "previous": None if self.order is None else dataclasses.asdict(self.order),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> LineState:
        """From a state.json."""
        position = state["position"]
        order = position["previous"] if position["row"] == 0 else position
        fields = [field.name for field in dataclasses.fields(CycleOrder)]
        return cls(
            position=Position(state["update"], position["cycle"], position["row"]),
            tokens=state["tokens"],
            generation=state["generation"],
            order=None if order is None else CycleOrder(**{name: order[name] for name in fields}),
            changes=Changes.from_state(state),
            held_out=state.get(HELD_OUT),
        )


def make_checkpoint(
    engine: Engine, settings: RunSettings, line: LineState, reason: str, tensors: Mapping[str, Tensors]
) -> Checkpoint:
    """A checkpoint of the present state; `tensors` are the engine's, by kind (host_copy.py)."""
    state = {
        "format": FORMAT,
        "update": line.position.update,
        "tokens": line.tokens,
        "generation": line.generation,
        "position": line.position_json(settings),
        "optimizer": dataclasses.asdict(engine.counts),
        "reason": reason,
        "kept": reason in KEPT_REASONS,
        "settings": dump(settings),
        "changes": line.changes.to_json(),
        HELD_OUT: line.held_out,
        "versions": versions(engine.flat.device.type),
        "threads": torch.get_num_threads(),
        "kernels": kernel_table(),
        "id": settings.id,
    }
    return Checkpoint(state, tensors)


def restore(engine: Engine, checkpoint: Checkpoint, where: str, average_from_tokens: int | None = None) -> None:
    """Put a checkpoint's tensors and counters into the engine. Raises `Refusal` before anything is changed.

    The kernels go on with the launch configurations that the line was trained with. An average of the weights is left
    out if the line does not keep one any more, or begins it after this checkpoint (`average_from_tokens`: `ema` of
    run.json, changed on purpose); it then begins anew, as one does that it did not keep before.
    """
    kinds: tuple[TensorKind, ...] = TENSOR_KINDS
    begins_later = average_from_tokens is not None and checkpoint.state["tokens"] < average_from_tokens
    if engine.flat.has_ema and "ema" in checkpoint.tensors and not begins_later:
        kinds = (*kinds, "ema")
    for kind in kinds:
        engine.flat.refuse_other_shapes(kind, checkpoint.tensors[kind], where)
    use_kernels(checkpoint.state.get("kernels", {}), where)
    for kind in kinds:
        engine.flat.load(kind, checkpoint.tensors[kind], where)
    engine.restored(OptimizerCounts(**checkpoint.state["optimizer"]))


def refuse_other_line(
    state: Mapping[str, Any], settings: RunSettings, where: str, held_out: str | None = None
) -> Changes:
    """Refuse to continue a checkpoint with settings, threads or an order other than those it was trained with, or with
    another held-out text (`held_out` is its index's hash; None: not looked at).

    Returns the changes of settings that the line has been through, those that it makes here on purpose included.
    """
    changes = settle_changes(state, settings, where, held_out)
    changed_here = {change.field for change in changes.applied if change.update == state["update"]}
    problems = []
    if state["threads"] != settings.threads and "threads" not in changed_here:
        problems.append(f"it was trained with {state['threads']} threads, now {settings.threads}")
    for name, version in GATING.items():
        if state["versions"].get(name) != version:
            problems.append(f"it has {name} {state['versions'].get(name)}, this nstrain has {version}")
    position = state["position"]
    if position["row_tokens"] != settings.row_tokens_at(position["cycle"]) and position["row"] > 0:
        problems.append(
            f"it stands inside cycle {position['cycle']} with rows of {position['row_tokens']:,} tokens, run.json now "
            f"says {settings.row_tokens_at(position['cycle']):,} there"
        )
    if problems:
        raise Refusal(
            f"{where}: the line cannot go on from here: {'; '.join(problems)}. Put the old value back, or go on with "
            "the nstrain that wrote it."
        )
    return changes


def changed_libraries(state: Mapping[str, Any], device: str | None = None) -> list[str]:
    """Versions that differ from the checkpoint's and may change bits, for the log.

    The machine's are looked at with a `device` only ("cpu" or "cuda"): asking for a card makes CUDA ready. A checkpoint
    from before a version was recorded says nothing of it.
    """
    before, now = state["versions"], software() if device is None else versions(device)
    return [
        f"{name} was {before[name]}, is now {version}"
        for name, version in now.items()
        if name in before and before[name] != version
    ]


def refuse_other_order(line: LineState, found: CycleOrder, where: str) -> None:
    """Refuse to go on in the middle of a cycle whose rows are no longer those that were trained."""
    if line.position.row == 0 or line.order is None:
        return
    for field in dataclasses.fields(CycleOrder):
        expected, now = getattr(line.order, field.name), getattr(found, field.name)
        if expected != now:
            raise Refusal(
                f"{where}: {field.name} of cycle {found.cycle} was {expected} in the checkpoint and is now {now}: the "
                "rows would not be those that the line has been trained on. Put the data line back as it was; a line "
                "is never continued in another order."
            )


def refuse_other_manifest(line: LineState, data: DataLine) -> None:
    """Refuse a data line whose manifest of the cycle just finished is not the one that was trained."""
    if line.position.row > 0 or line.order is None:
        return  # In the middle of a cycle refuse_other_order sees more.
    path = data.manifest_path(line.order.cycle)
    found = sha256_file(path) if path.exists() else "missing"
    if found != line.order.manifest_sha256:
        remedy = "put the data line back as it was" if path.exists() else make_again(data, line.order.cycle)
        raise Refusal(
            f"{path}: expected sha256 {line.order.manifest_sha256}, as the checkpoint after update "
            f"{line.position.update} has it, found {found}; {remedy}"
        )
