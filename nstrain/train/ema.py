"""The moving average of the weights, and the use of it in their place.

    e <- w                   with the first update that moves it
    e <- e + move (w - e)    with every later one; move = the update's tokens / horizon_tokens

w are the fp32 masters after the update; an update that is skipped moves nothing. After a decay of the learning rate
weights stand about where this average stands now (Zhang et al., arXiv 2410.21676, use it in place of a decay), so that
validating with it reads what a decay would give.

To compute with the average, a parameter that is a rounded copy of its master is rounded from the average, and from its
master again afterwards. Where the parameter *is* the master, the contents of the two buffers change places and change
back, a chunk at a time. Either way every bit is as it was, and no copy of the weights is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nstrain.train.flat import FlatGroup, FlatParameters

CHUNK = 1 << 20
"""Elements that are moved or exchanged at a time: 4 MiB of memory beside the buffers."""


def move_ema(group: FlatGroup, move: Tensor, skip: Tensor) -> None:
    """Move a group's average towards its masters, operator by operator (a GPU's kernel does it within AdamW's pass).

    `move` and `skip` are 0-d tensors: nothing is stored where `move` is 0 or `skip` is 1, and a move of 1 is a copy.
    """
    assert group.ema is not None
    share = move.item()
    if share == 0.0 or skip.item() == 1.0:
        return
    if share == 1.0:
        group.ema.copy_(group.master)
        return
    way = torch.empty(min(CHUNK, group.ema.numel()), dtype=torch.float32, device=group.ema.device)
    for ema, master in zip(group.ema.split(CHUNK), group.master.split(CHUNK), strict=True):
        to_go = torch.sub(master, ema, out=way[: ema.numel()])
        ema.add_(to_go.mul_(share))


def show_ema(flat: FlatParameters) -> None:
    """Put the average in the parameters' place. `show_weights` must follow before anything else uses the buffers."""
    for group in flat.groups:
        assert group.ema is not None
        if group.compute is group.master:
            _exchange(group.master, group.ema)
        else:
            group.compute.copy_(group.ema)


def show_weights(flat: FlatParameters) -> None:
    """Undo `show_ema`, to the bit."""
    for group in flat.groups:
        assert group.ema is not None
        if group.compute is group.master:
            _exchange(group.master, group.ema)
        else:
            group.refresh_compute()


def _exchange(a: Tensor, b: Tensor) -> None:
    held = torch.empty(min(CHUNK, a.numel()), dtype=a.dtype, device=a.device)
    for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True):
        kept = held[: x.numel()].copy_(x)
        x.copy_(y)
        y.copy_(kept)
