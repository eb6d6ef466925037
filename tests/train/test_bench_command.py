"""`nstrain bench`: the command on a made-up card - its lease, and who is in its way - and what it refuses."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import Result
from fake_card import UUID, FakeCard, put_in_place
from typer.testing import CliRunner

from nstrain import bench as bench_module
from nstrain.base.errors import GpuTaken, Refusal
from nstrain.cli.main import app
from nstrain.gpu.ceilings import Ceilings
from nstrain.gpu.lease import gpu_lease
from nstrain.train.device import refuse_unfit_allocator
from nstrain.train.memory_errors import OutOfMemory

TINY = ("bench", "--model", "tiny-32k", "--seq-len", "32", "--accum", "1", "--updates", "1")


@pytest.fixture(autouse=True)
def no_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not set up as a trainer's: other tests need it as it is."""
    monkeypatch.setattr(bench_module, "enter_deterministic_mode", lambda threads: None)


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """A made-up card that host.json's reader tells of and torch is said to use."""
    card = put_in_place(tmp_path, monkeypatch)
    monkeypatch.setattr(bench_module, "this_gpu", lambda: UUID.removeprefix("GPU-"))
    return card


@pytest.fixture
def looks(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the measuring saw of the lease. It runs on the CPU, under the names of what it would do on the card."""
    seen: list[str] = []
    real = bench_module.build

    def on_cpu(settings: Any, vocabulary: int, device: str, seed: int) -> Any:
        seen.append(f"{device}, {'leased' if gpu_lease(UUID).held_elsewhere() else 'free'}")
        return real(settings, vocabulary, "cpu", seed)

    monkeypatch.setattr(bench_module, "build", on_cpu)
    monkeypatch.setattr("nstrain.gpu.ceilings.measure_ceilings", lambda: Ceilings(4.25, 750.0))
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "made up")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1 << 30)
    return seen


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*TINY, *arguments])


# --- the card ------------------------------------------------------------------------------------------------


def test_the_command_takes_the_card_once_and_gives_it_back(looks: list[str]) -> None:
    ran = typed("--eager", "--json")
    assert ran.exit_code == 0, repr(ran.exception)
    assert looks == ["cuda, leased"]
    assert not gpu_lease(UUID).held_elsewhere()
    found = json.loads(ran.stdout)
    assert (found["device"], found["copy_tb_s"], found["bf16_tflop_s"]) == ("made up", 4.25, 750.0)
    assert found["share"] == pytest.approx(found["model_tflop_s"] / 750)


def test_both_ceilings_are_shown(looks: list[str]) -> None:
    shown = typed("--eager").stdout
    assert "of 750 TFLOP/s" in shown
    assert "4.25 TB/s" in shown


def test_a_card_that_somebody_uses_is_left_alone(card: FakeCard, looks: list[str]) -> None:
    with gpu_lease(UUID).acquire("the test"):
        ran = typed("--eager")
    assert isinstance(ran.exception, GpuTaken)
    assert f"the GPU {UUID} is held by process {os.getpid()}" in str(ran.exception)
    card.put(os.getppid())
    ran = typed("--eager")
    assert isinstance(ran.exception, GpuTaken)
    assert f"process {os.getppid()} " in str(ran.exception)
    assert looks == []


def test_another_card_than_the_leased_one_is_refused(looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "this_gpu", lambda: "another")
    ran = typed("--eager")
    assert isinstance(ran.exception, Refusal)
    assert f"torch uses GPU another, but by CUDA_VISIBLE_DEVICES the lease of {UUID} was taken" in str(ran.exception)
    assert looks == []


# --- a machine without one -----------------------------------------------------------------------------------


def test_a_machine_without_a_card_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = typed()
    assert isinstance(ran.exception, Refusal)
    assert "torch finds no CUDA device here; --device cpu times" in str(ran.exception)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ("max_split_size_mb:512", "max_split_size_mb"),
        ("roundup_power2_divisions:[256:1,512:2], max_split_size_mb:128", "max_split_size_mb"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync"),
        ("garbage_collection_threshold:0.8,expandable_segments:true", "expandable_segments:true"),
    ],
)
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_allocator_that_an_arena_cannot_live_with_is_refused(
    variable: str, found: str, named: str, card: FakeCard, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, found)
    ran = typed()
    assert isinstance(ran.exception, Refusal)
    assert f"{variable} is {found!r}: with {named} a trainer cannot hold" in str(ran.exception)
    assert looks == []
    refuse_unfit_allocator({variable: "expandable_segments:False,backend:native,garbage_collection_threshold:0.8"})
    refuse_unfit_allocator({})


def test_a_profile_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "build", None)  # before anything is built
    ran = typed("--device", "cpu", "--profile")
    assert isinstance(ran.exception, Refusal)
    assert "on a CPU there are none" in str(ran.exception)


def test_a_plan_that_does_not_fit_is_told_what_to_do(looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nSee documentation")

    monkeypatch.setattr(bench_module, "train_update", fail)
    found = typed("--eager")
    assert isinstance(found.exception, OutOfMemory)
    assert str(found.exception) == (
        "tiny-32k with micro-batches of 1 x 32 tokens, recompute none, did not find the memory that it needs: CUDA out "
        "of memory. Tried to allocate 20 GiB. Use fewer --rows, or recompute more (--ac dendritic, --ac all)"
    )


def test_on_a_cpu(tmp_path: Path) -> None:
    ran = typed("--device", "cpu", "--json")
    assert ran.exit_code == 0, repr(ran.exception)
    found = json.loads(ran.stdout)
    assert (found["device"], found["tokens_per_update"], found["profile"]) == ("CPU", 32, None)
    assert len(found["losses"]) == 3


def clock_of(*updates_s: float) -> SimpleNamespace:
    """What stands for the module `time`: of each two readings the second is that much later."""
    readings = iter([reading for update_s in updates_s for reading in (0.0, update_s)])
    return SimpleNamespace(perf_counter=lambda: next(readings))


def test_its_numbers_are_those_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two updates that count for nothing: 192 tokens in 0.5 s, by the median of the other three."""
    monkeypatch.setattr(bench_module, "time", clock_of(80.0, 90.0, 0.5, 7.0, 0.25))
    found = json.loads(typed("--device", "cpu", "--rows", "2", "--accum", "3", "--updates", "3", "--json").stdout)
    assert (found["tokens_per_update"], found["update_s"], found["tokens_per_s"]) == (192, 0.5, 384.0)
    assert found["parameters"] == 3_907_356
    assert found["six_n_tflop_s"] == pytest.approx(6 * 3_907_356 * 384 / 1e12, rel=1e-12)
    # tiny-32k: DDH, 256 wide, in rows of 32 tokens; multiply-adds of a token forward.
    head = 8192 * 256
    dendritic = 256 * (512 + 512 + 2 * 64 + 8) + 512 * 256 + (32 * 64 + 32 * 512 + 2 * 512 * 64)
    addresses = 256 * (64 + 64) + (256 + 64) * (256 + 256 + 32)
    pool = (32 + 1) / 2 * 4 * (2 * 64 + 32)
    hippocampal = addresses + 256 * (256 + 4 * 4 + 256) + 256 * 256 + 3 * 256 * 704 + pool
    flops = 3 * 2 * (head + 2 * dendritic + hippocampal)
    assert found["model_tflop_s"] == pytest.approx(flops * 384 / 1e12, rel=1e-12)


def test_slow_rates_are_shown_to_three_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "time", clock_of(80.0, 90.0, 0.5))
    shown = typed("--device", "cpu").stdout
    assert re.search(r"6 N TFLOP/s\W+0\.00150\s", shown), "6 x 3,907,356 parameters x 64 tokens a second, in 1e12"
