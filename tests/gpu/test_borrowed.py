"""A GPU that a command borrows: leased before it is touched, and only if nobody is there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from fake_card import UUID, FakeCard

from nstrain.base.disk import GLANCE_S
from nstrain.base.errors import GpuTaken, Refusal
from nstrain.gpu.borrowed import borrowed_gpu
from nstrain.gpu.lease import gpu_lease, refuse_other_gpu
from nstrain.gpu.readings import gpu_on


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeCard(tmp_path / "card")


def test_it_is_leased_until_the_block_ends(card: FakeCard) -> None:
    lease = gpu_lease(UUID, card.source.leases)
    with borrowed_gpu(card.source) as gpu:
        assert gpu is not None
        assert gpu.uuid == UUID
        assert lease.held_elsewhere()
        with (
            pytest.raises(GpuTaken, match=f"the GPU {UUID} is held by process {os.getpid()}"),
            borrowed_gpu(card.source, wait_s=0.0),
        ):
            pass
    assert not lease.held_elsewhere()


def test_who_is_on_it_is_waited_for_and_then_told(card: FakeCard) -> None:
    card.put(os.getppid())
    with (
        pytest.raises(GpuTaken, match=rf"process {os.getppid()} \(.*\) on {UUID}: wait until it has gone"),
        borrowed_gpu(card.source, wait_s=0.1),
    ):
        pass
    lease = gpu_lease(UUID, card.source.leases)
    assert not lease.held_elsewhere()
    lease.acquire("it")
    leaves = [threading.Timer(GLANCE_S + 0.1, lease.release), threading.Timer(GLANCE_S + 0.2, card.put)]
    for timer in leaves:
        timer.start()
    with borrowed_gpu(card.source, wait_s=20.0) as gpu:
        assert gpu is not None
        assert gpu.processes == ()
    for timer in leaves:
        timer.join()


def test_on_a_cpu_there_is_nothing_to_borrow() -> None:
    assert gpu_on("cpu") is None
    with borrowed_gpu(None) as gpu:
        assert gpu is None


def test_another_gpu_than_the_leased_one_is_refused() -> None:
    refuse_other_gpu(UUID, UUID.removeprefix("GPU-"))
    with pytest.raises(Refusal, match="torch uses GPU other, but .* CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        refuse_other_gpu(UUID, "other")
