"""What the optimizer's state says, by group and by part: sizes of weights, momentum, gradients and the next step.

Over the real elements of a group or part, with AdamW's moments m and v after t applied updates:

    param_norm     ||w||                                                  the fp32 masters
    m_norm         ||m||
    grad_rms       sqrt(mean(v) / (1 - beta2^t))                          of clipped gradients, as AdamW averages
    update_norm    || rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) ||
    update_ratio   update_norm / param_norm                               0 for weights that are all 0

update_norm is the step that AdamW would take at this rate with the moments as they are; weight decay is not in it.
Before the first applied update (t = 0) all but param_norm are 0.

One pass over the three buffers. Sums are formed in fp64 over nodes of NODE elements, then over each part's nodes, in
one order always, as those of the gradient norms are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from nstrain.settings.run import OptimizerSettings
from nstrain.train.adamw import by_kernels
from nstrain.train.flat import FlatGroup, FlatParameters
from nstrain.train.norms import NODE, stretch_table, tree_sum

CHUNK = 64 * NODE
"""Elements of a pass's chunk on a CPU, which decides the speed and not the sums: its fp64 copies stay in a cache."""

SUMS = ("weight", "momentum", "square", "step")
"""What is summed of each element: w^2, m^2, v, and the square of AdamW's step at rate 1."""


@dataclasses.dataclass(frozen=True)
class OptimizerSummary:
    """Of one group or part; the module has the formulas."""

    param_norm: float
    m_norm: float
    grad_rms: float
    update_norm: float
    update_ratio: float


@dataclasses.dataclass(frozen=True)
class OptimizerSummaries:
    """Of the whole model."""

    groups: dict[str, OptimizerSummary]
    """By optimizer group."""
    parts: dict[str, OptimizerSummary]
    """By part: layer00 ..., embedding, norm."""


def optimizer_summaries(
    flat: FlatParameters, settings: OptimizerSettings, step: int, learning_rate: float
) -> OptimizerSummaries:
    """The summaries after `step` applied updates, with the next step's size at `learning_rate`; reads the device."""
    cells = [(group.name, part) for group in flat.groups for part in group.parts]
    sums = _cell_sums(flat, settings, step).tolist()
    elements = _cell_elements(flat)

    def summary(owned: Iterable[int]) -> OptimizerSummary:
        chosen = list(owned)
        weight, momentum, square, moved = (math.fsum(of_kind[cell] for cell in chosen) for of_kind in sums)
        count = sum(elements[cell] for cell in chosen)
        param_norm, update_norm = math.sqrt(weight), learning_rate * math.sqrt(moved)
        return OptimizerSummary(
            param_norm=param_norm,
            m_norm=math.sqrt(momentum),
            grad_rms=math.sqrt(square / count / (1 - settings.beta2**step)) if step else 0.0,
            update_norm=update_norm,
            update_ratio=update_norm / param_norm if param_norm else 0.0,
        )

    return OptimizerSummaries(
        groups={g.name: summary(i for i, cell in enumerate(cells) if cell[0] == g.name) for g in flat.groups},
        parts={part: summary(i for i, cell in enumerate(cells) if cell[1] == part) for part in flat.part_names},
    )


def _cell_elements(flat: FlatParameters) -> list[int]:
    """Real elements of every group's share of every part."""
    return [
        sum(cut.elements for cut in group.slices if cut.part == part) for group in flat.groups for part in group.parts
    ]


def _cell_sums(flat: FlatParameters, settings: OptimizerSettings, step: int) -> Tensor:
    """SUMS over every group's share of every part, [SUMS, cells] in fp64 on the host."""
    if by_kernels(flat.device):
        return _cell_sums_by_kernels(flat, settings, step)
    cells: list[Tensor] = []
    for group in flat.groups:
        nodes = _node_sums(group, settings, step)
        cells += [
            torch.stack([tree_sum(sums[first // NODE : last // NODE]) for sums in nodes])
            for first, last in group.parts.values()
        ]
    return torch.stack(cells, dim=1).cpu()


def _node_sums(group: FlatGroup, settings: OptimizerSettings, step: int) -> Tensor:
    """SUMS of each NODE elements of a group, [SUMS, nodes] in fp64."""
    correction1, correction2 = _corrections(settings, step)
    sums = torch.empty(len(SUMS), group.master.numel() // NODE, dtype=torch.float64)
    for first in range(0, group.master.numel(), CHUNK):
        of = slice(first, first + CHUNK)
        w, m, v = (buffer[of].double() for buffer in (group.master, group.exp_avg, group.exp_avg_sq))
        moved = m / correction1 / ((v / correction2).sqrt_() + settings.eps)
        for kind, values in enumerate((w.square_(), m.square_(), v, moved.square_())):
            sums[kind, first // NODE : first // NODE + values.numel() // NODE] = values.view(-1, NODE).sum(1)
    return sums


def _corrections(settings: OptimizerSettings, step: int) -> tuple[float, float]:
    """AdamW's bias corrections; 1 before the first applied update, when the moments are 0."""
    return (1 - settings.beta1**step, 1 - settings.beta2**step) if step else (1.0, 1.0)


def _cell_sums_by_kernels(flat: FlatParameters, settings: OptimizerSettings, step: int) -> Tensor:
    from nstrain.train.optimizer_kernels import state_sums, stretch_sums

    table = stretch_table(flat)
    sizes = [group.master.numel() // NODE for group in flat.groups]
    nodes = torch.empty(len(SUMS), sum(sizes), dtype=torch.float64, device=flat.device)
    for group, of_group in zip(flat.groups, nodes.split(sizes, dim=1), strict=True):
        buffers = group.master, group.exp_avg, group.exp_avg_sq
        state_sums(*buffers, NODE, *_corrections(settings, step), settings.eps, out=of_group)
    return torch.stack([stretch_sums(of_kind, table.firsts, table.lasts) for of_kind in nodes]).cpu()
