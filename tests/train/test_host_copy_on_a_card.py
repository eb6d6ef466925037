"""The pinned copy of a GPU's tensors: the state of its moment, whatever the GPU does next."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, random_rows

from nstrain.base.errors import NstrainError
from nstrain.gpu.arena import arena_stream
from nstrain.line.tensor_file import file_blocks
from nstrain.settings.run import LengthSettings
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.graphs import GraphEngine
from nstrain.train.host_copy import HostCopy, LazyCopy, PinnedCopy, open_host_copy

pytestmark = pytest.mark.gpu

HELD = 2 << 30


@pytest.fixture(params=["graphs", "eager"])
def engine(request: pytest.FixtureRequest) -> Any:
    model = TinyModel(seed=1, vocab_size=4096, width=256).cuda()
    if request.param == "eager":
        made: EagerEngine = EagerEngine(model, optimizer_settings(), with_ema=True)
    else:
        made = GraphEngine(model, optimizer_settings(), HELD, with_ema=True)
    made.set_length(LengthSettings(micro_rows=2))
    train(made, ema=1.0)
    return made


def train(engine: EagerEngine, ema: float | None = 0.5) -> None:
    rows = random_rows(4, 64, vocab_size=4096, seed=engine.counts.step)
    train_update(engine, rows, 2, 1e-3, 0.1, ema)


def bytes_of(tensors: Any) -> dict[tuple[str, str], bytes]:
    torch.cuda.synchronize()
    return {(kind, name): array.tobytes() for kind, arrays in tensors.items() for name, array in arrays.items()}


def state(engine: EagerEngine) -> dict[tuple[str, str], bytes]:
    return bytes_of({kind: engine.flat.export(kind) for kind in engine.flat.kinds})


def test_the_copy_is_the_state_at_its_moment_though_updates_follow_at_once(engine: EagerEngine) -> None:
    copy = PinnedCopy(engine)
    assert copy.in_background
    assert copy.slow is None
    for delay in (0, 500_000_000, 0):
        before = state(engine)
        assert len(engine.flat.kinds) == 4
        with torch.cuda.stream(copy._stream), pytest.MonkeyPatch.context() as patch:
            torch.cuda._sleep(delay + 1)  # the copy comes late; the next update must not overtake it
            patch.setattr(torch.cuda, "synchronize", lambda: None)
            taken = copy.take()
        train(engine)
        taken.ready()
        train(engine)
        assert bytes_of(taken.by_kind) == before
        assert state(engine) != before
    copy.close()


def test_the_copy_does_not_hold_up_the_forward_and_backward_passes(engine: EagerEngine) -> None:
    copy = PinnedCopy(engine)
    torch.cuda.synchronize()
    before = state(engine)
    with torch.cuda.stream(copy._stream):
        torch.cuda._sleep(4_000_000_000)  # two seconds or so
    # As `take`, but for its synchronize, which would wait for the sleep.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        taken = copy.take()
    engine.accumulate(random_rows(2, 64, vocab_size=4096), 1 / 128)
    passed = torch.cuda.Event()
    with torch.cuda.stream(arena_stream() if isinstance(engine, GraphEngine) else torch.cuda.current_stream()):
        passed.record()
    passed.synchronize()
    assert not copy._copied.query(), "the passes have ended while the copy was still to come"
    engine.finish(1e-3, 0.1)
    taken.ready()
    assert bytes_of(taken.by_kind) == before
    copy.close()


def test_memory_is_pinned_page_by_page_and_given_back(engine: EagerEngine) -> None:
    elements = sum(group.master.numel() for group in engine.flat.groups)
    for _ in range(3):
        copy = PinnedCopy(engine)
        assert sum(buffer.numel() for buffer in copy._buffers.values()) == 4 * elements
        assert all(buffer.is_pinned() for buffer in copy._buffers.values())
        buffers = list(copy._buffers.values())
        copy.close()
        assert not any(buffer.is_pinned() for buffer in buffers)


def test_a_driver_that_does_not_pin_is_named_and_leaves_the_device_in_order(
    engine: EagerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pages a second time: what the driver refuses."""
    pages = mmap.mmap(-1, 4 * max(group.master.numel() for group in engine.flat.groups))
    monkeypatch.setattr(mmap, "mmap", lambda *_: pages)
    with pytest.raises(NstrainError, match="the driver does not pin"):
        PinnedCopy(engine)
    slow = open_host_copy(engine)
    assert type(slow) is HostCopy
    assert "the driver does not pin" in (slow.slow or "")
    train(engine)  # no error of the failed call comes out later


def test_tensors_read_one_by_one_are_the_same(engine: EagerEngine) -> None:
    lazy, pinned = LazyCopy(engine, "no room").take(), PinnedCopy(engine)
    taken = pinned.take()
    taken.ready()
    for kind in engine.flat.kinds:
        assert b"".join(map(bytes, file_blocks(lazy.by_kind[kind]))) == b"".join(
            map(bytes, file_blocks(taken.by_kind[kind]))
        )
    pinned.close()
