"""Gradient norms - of the whole model, of every group and of every part - from one pass over the gradients.

Sums are formed in fp64 in an order of our own: a tree of nodes of NODE elements. So the result is the same on any
number of threads, and the same bits in every run. A NaN or an infinity anywhere reaches every sum above it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nstrain.train.adamw import by_kernels
from nstrain.train.flat import ALIGNMENT, FlatGroup, FlatParameters

NODE = ALIGNMENT
"""Elements summed at once; no node of the lowest level holds two parameters."""

CHUNK = {"cpu": 256 * NODE, "cuda": 32768 * NODE}
"""Elements squared at a time in fp64, which decides the speed and not the sums: on a CPU 2 MiB, which stay in a core's
cache (2.6 ms for 8M gradients on two threads), on a GPU enough to fill it."""


def tree_sum(values: Tensor) -> Tensor:
    """The sum of a vector as a 0-d tensor, in an order that depends on its length alone."""
    while values.numel() > NODE:
        gap = -values.numel() % NODE
        values = torch.nn.functional.pad(values, (0, gap)).view(-1, NODE).sum(1)
    return values.sum()


def _sums_of_squares(buffer: Tensor) -> Tensor:
    """Sum of squares of each NODE elements of an fp32 buffer, in fp64."""
    sums = torch.empty(buffer.numel() // NODE, dtype=torch.float64, device=buffer.device)
    step = min(CHUNK[buffer.device.type], buffer.numel())
    squares = torch.empty(step, dtype=torch.float64, device=buffer.device)
    for first in range(0, buffer.numel(), step):
        chunk = buffer[first : first + step]
        nodes = squares[: chunk.numel()].copy_(chunk).square_().view(-1, NODE)
        torch.sum(nodes, 1, out=sums[first // NODE : first // NODE + nodes.shape[0]])
    return sums


@dataclasses.dataclass(frozen=True)
class GradientNorms:
    """Euclidean norms of the accumulated gradient, in fp64 on the device."""

    total: Tensor
    """The global norm, 0-d."""
    groups: dict[str, Tensor]
    """By optimizer group."""
    parts: dict[str, Tensor]
    """By part of the model."""


def gradient_norms(flat: FlatParameters) -> GradientNorms:
    """The norms of everything in the main gradients. Nothing is brought to the host."""
    if by_kernels(flat.device):
        return _norms_by_kernels(flat)
    cells = {group.name: _part_sums(group) for group in flat.groups}
    total = torch.stack([cell for parts in cells.values() for cell in parts.values()])
    by_part = {
        name: torch.stack([parts[name] for parts in cells.values() if name in parts]) for name in flat.part_names
    }
    return GradientNorms(
        total=total.sum().sqrt(),
        groups={name: torch.stack(list(parts.values())).sum().sqrt() for name, parts in cells.items()},
        parts={name: sums.sum().sqrt() for name, sums in by_part.items()},
    )


def _part_sums(group: FlatGroup) -> dict[str, Tensor]:
    sums = _sums_of_squares(group.main_grad)
    return {part: tree_sum(sums[first // NODE : last // NODE]) for part, (first, last) in group.parts.items()}


# --- on a GPU -------------------------------------------------------------------------------------------------


class StretchTable:
    """Where every group's share of every part lies among the nodes of all groups, and who owns it; on the device."""

    def __init__(self, flat: FlatParameters) -> None:
        firsts, lasts, owners, offset = [], [], [], 0
        for group in flat.groups:
            for part, (first, last) in group.parts.items():
                firsts.append(offset + first // NODE)
                lasts.append(offset + last // NODE)
                owners.append((group.name, part))
            offset += group.main_grad.numel() // NODE
        self.groups = [group.name for group in flat.groups]
        self.parts = list(flat.part_names)
        self.firsts, self.lasts = (torch.tensor(places, device=flat.device) for places in (firsts, lasts))
        # A choice and not a product: 0 * NaN would carry one part's NaN into all.
        self.of_group = torch.tensor([[o[0] == name for o in owners] for name in self.groups], device=flat.device)
        self.of_part = torch.tensor([[o[1] == name for o in owners] for name in self.parts], device=flat.device)


def stretch_table(flat: FlatParameters) -> StretchTable:
    """The table of a model's buffers, made once; before any capture, since copies from the host cannot be captured."""
    flat.stretches = flat.stretches or StretchTable(flat)
    return flat.stretches


def _norms_by_kernels(flat: FlatParameters) -> GradientNorms:
    from nstrain.train.optimizer_kernels import node_sums, stretch_sums

    table = stretch_table(flat)
    nodes = torch.cat([node_sums(group.main_grad, NODE) for group in flat.groups])
    cells = stretch_sums(nodes, table.firsts, table.lasts)
    groups, parts = (torch.where(owned, cells, 0.0).sum(1).sqrt() for owned in (table.of_group, table.of_part))
    return GradientNorms(
        total=cells.sum().sqrt(),
        groups=dict(zip(table.groups, groups.unbind(), strict=True)),
        parts=dict(zip(table.parts, parts.unbind(), strict=True)),
    )
