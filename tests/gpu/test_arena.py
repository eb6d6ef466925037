"""The arena on a card: it holds, serves captures and eager work, gives all back, twenty times."""

from __future__ import annotations

import pytest
import torch
from own_process import in_its_own_process

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from nstrain.gpu.arena import GIB, Arena, ArenaNotEmpty


def work(x: torch.Tensor) -> torch.Tensor:
    y = (x @ x).relu()
    return (y @ x).sum()


def captured(arena: Arena, x: torch.Tensor, out: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=arena.pool_id, stream=arena.stream, capture_error_mode="thread_local"):
        out.copy_(work(x))
    return graph


def hold_all_but_the_slack_and_give_it_back() -> None:
    free = torch.cuda.mem_get_info()[0]
    arena = Arena()
    left = torch.cuda.mem_get_info()[0]
    assert 3.5 * GIB < left < 4.5 * GIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(left + GIB, dtype=torch.uint8, device="cuda")
    assert arena.close() > free - left - GIB
    assert torch.cuda.mem_get_info()[0] > free - GIB // 2


@pytest.mark.card_alone
def test_it_holds_all_but_the_slack_and_gives_it_back() -> None:
    in_its_own_process(hold_all_but_the_slack_and_give_it_back)


def live_twenty_times() -> None:
    x, out = torch.randn(4096, 4096, device="cuda"), torch.zeros((), device="cuda")
    seen, free = set(), []
    for _ in range(20):
        arena = Arena(hold_bytes=20 * GIB)
        with arena.memory():
            work(x)
        graph = captured(arena, x, out)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        seen.add(out.item())
        assert arena.grown_segments() == 0
        graph.reset()
        del graph
        arena.close()
        free.append(torch.cuda.mem_get_info()[0])
    assert len(seen) == 1
    assert free[1] - free[-1] < 64 << 20


@pytest.mark.card_alone  # what others take beside it would be taken for a leak
def test_twenty_lives_leak_nothing_and_every_capture_gives_the_same_bits() -> None:
    in_its_own_process(live_twenty_times)


def test_shapes_of_any_size_and_order_are_served_without_growing() -> None:
    arena = Arena(hold_bytes=16 * GIB)
    with arena.memory():
        for elements in (1 << 30, 1 << 10, 3 << 28, 1 << 20, 1 << 31):
            torch.empty(elements, dtype=torch.float32, device="cuda")
            torch.empty(100, device="cuda")
    assert arena.grown_segments() == 0
    assert arena.active_bytes() == 0
    arena.close()


def test_a_living_tensor_keeps_it_from_being_closed() -> None:
    arena = Arena(hold_bytes=GIB)
    with arena.memory():
        kept = torch.ones(1000, device="cuda")
    with pytest.raises(ArenaNotEmpty, match="bytes of the arena are still in use"):
        arena.close()
    del kept
    arena.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_library_s_workspaces_do_not_keep_it_from_being_closed(dtype: torch.dtype) -> None:
    """Each kind of product may have a workspace of its own, made in the arena if it first happens there."""
    torch._C._cuda_clearCublasWorkspaces()
    a, bias, total = (torch.ones(shape, device="cuda", dtype=dtype) for shape in ((64, 64), (64,), (64, 64)))
    arena = Arena(hold_bytes=GIB)
    with arena.memory():
        torch.addmm(bias, a, a)
        torch.addmm(total, a, a)
        torch.bmm(a[None], a[None])
        if dtype == torch.bfloat16:
            torch.mm(a, a, out_dtype=torch.float32)
            torch.bmm(a[None], a[None], out_dtype=torch.float32)
            torch.addmm(total.float(), a, a, out_dtype=torch.float32)
    arena.close()
