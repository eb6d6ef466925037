"""What an arena takes of a card, on a made-up allocator."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from nstrain.gpu import arena as arena_module
from nstrain.gpu.arena import GIB, LARGE_GRAIN_BYTES, Arena, ArenaTooSmall


class MadeUpCard:
    """So much is free, in blocks of a largest size."""

    def __init__(self, free: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.largest = free, largest
        self.blocks: list[int] = []
        nothing = {name: lambda *_: None for name in ("synchronize", "empty_cache", "caching_allocator_delete")}
        contexts = {name: lambda _: contextlib.nullcontext() for name in ("stream", "use_mem_pool")}
        values = {"MemPool": lambda: self, "mem_get_info": lambda: (self.free, 2 * free)}
        for name, value in {**nothing, **contexts, **values, "caching_allocator_alloc": self.allocate}.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)
        monkeypatch.setattr(arena_module, "arena_stream", lambda: None)

    def snapshot(self) -> list[dict[str, Any]]:
        return []

    def allocate(self, size: int, stream: Any) -> int:
        if size > min(self.free, self.largest):
            raise torch.OutOfMemoryError
        self.blocks.append(size)
        self.free -= size
        return len(self.blocks)


@pytest.mark.parametrize("largest", [200 * GIB, 30 * GIB])
def test_all_but_the_slack_is_held_and_a_share_of_it_for_small_tensors(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = MadeUpCard(105 * GIB, largest, monkeypatch)
    arena = Arena()
    assert 4 * GIB <= card.free < 4 * GIB + arena_module.SMALLEST_BLOCK_BYTES
    assert arena.held_bytes == sum(card.blocks) == 105 * GIB - card.free
    small = [block for block in card.blocks if block <= 1 << 20]
    assert sum(small) == 101 * GIB // 64 // LARGE_GRAIN_BYTES * LARGE_GRAIN_BYTES
    assert set(small) == {1 << 20}, "the allocator serves tensors up to 1 MiB from segments of 2 MiB, two in each"


def test_a_card_without_room_beside_the_slack_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as an arena that fewer rows would fit."""
    MadeUpCard(3 * GIB, GIB, monkeypatch)
    with pytest.raises(ArenaTooSmall, match=r"^3.0 GiB .* 4.0 GiB are left .* a smaller model or a GPU with more"):
        Arena()
    assert Arena(hold_bytes=GIB).held_bytes == GIB
    assert Arena(hold_bytes=0).held_bytes == 0
