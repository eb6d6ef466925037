"""Readings of GPUs: bounded, unknown is not free, and whose process is whose."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_card import UUID, FakeCard

from nstrain.base.errors import GpuTaken, Refusal
from nstrain.gpu.held import HeldGpu
from nstrain.gpu.lease import gpu_lease
from nstrain.gpu.readings import (
    LINE_VARIABLE,
    Gpu,
    ReadingProcess,
    Unreadable,
    describe,
    is_ours,
    read_gpus,
    visible_gpu,
)
from nstrain.supervise.pace import Pace
from nstrain.supervise.waits import GpuGate

LINE = Path("/lines/one")


@pytest.fixture
def card(tmp_path: Path) -> FakeCard:
    return FakeCard(tmp_path / "card")


@pytest.fixture
def foreign() -> Iterator[int]:
    """A process that belongs to nobody's line."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def own_child() -> Iterator[int]:
    """A process that was started for the line."""
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, LINE_VARIABLE: str(LINE)})
    yield process.pid
    process.kill()
    process.wait()


def held(card: FakeCard, own_bytes: int = 0) -> HeldGpu:
    return HeldGpu.take(LINE, card.source, 5, lambda: own_bytes)


def seen(gpu: HeldGpu, update: int) -> str | None:
    """What the look that is due at an update finds."""
    gpu.taken_by(update)
    deadline = time.monotonic() + 10
    while gpu._reading is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        gpu.taken_by(update)
    return gpu.others


# ---- the reader ------------------------------------------------------------------------------------------------------


def test_a_reading(card: FakeCard) -> None:
    card.put(7, 8)
    (gpu,) = read_gpus(card.source.reader)
    assert (gpu.uuid, [process.pid for process in gpu.processes]) == (UUID, [7, 8])


def test_a_reader_that_hangs_is_left_behind(card: FakeCard) -> None:
    card.reads("sleep 600")
    began = time.monotonic()
    with pytest.raises(Unreadable, match="no answer in 0 s"):
        read_gpus(card.source.reader, 0.3)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("echo no driver >&2; exit 1", Unreadable, "exit code 1: no driver"),
        ("echo install it >&2; exit 2", Refusal, "install it"),
        ("echo '{}'", Unreadable, "something else"),
        ("echo nonsense", Unreadable, "nonsense"),
        ("kill -9 $$", Unreadable, "exit code -9"),
    ],
)
def test_a_reader_that_fails(card: FakeCard, script: str, error: type[Exception], words: str) -> None:
    card.reads(script)
    with pytest.raises(error, match=words):
        read_gpus(card.source.reader)


def test_a_reader_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="cannot be started"):
        read_gpus([str(tmp_path / "nothing")])


def test_a_reading_does_not_wait(card: FakeCard) -> None:
    card.reads("sleep 600")
    began = time.monotonic()
    reading = ReadingProcess(card.source.reader)
    assert reading.poll() is None
    assert time.monotonic() - began < 1
    reading.close()


def test_our_own_reader_answers_or_says_what_is_missing() -> None:
    ran = subprocess.run([sys.executable, "-m", "nstrain.gpu.reader"], capture_output=True, text=True, timeout=60)
    assert ran.returncode in (0, 1, 2)
    if ran.returncode == 0:
        assert json.loads(ran.stdout)["format"] == 1
    else:
        assert ran.stderr.strip()
        assert "Traceback" not in ran.stderr


def test_our_own_reader_of_a_made_up_library(tmp_path: Path) -> None:
    """Every field of the form comes from the library's calls; what a driver does not have is passed over."""
    (tmp_path / "pynvml.py").write_text(FAKE_LIBRARY)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    ran = subprocess.run(
        [sys.executable, "-m", "nstrain.gpu.reader"], capture_output=True, text=True, env=environment, cwd="/"
    )
    assert ran.returncode == 0, ran.stderr
    plain, lost, split, part, unified, refused, desk, login = json.loads(ran.stdout)["gpus"]
    assert plain == {
        "uuid": "GPU-0",
        "name": "card",
        "used_bytes": 900,
        "reserved_bytes": 500,
        "total_bytes": 1000,
        "memory_tells": True,
        "processes": [{"pid": 5, "used_bytes": None}, {"pid": 6, "used_bytes": 10}],
    }
    assert lost == {"uuid": "", "unreadable": "GPU is lost"}, "it hides the others, or its place"
    assert (split["uuid"], part["uuid"]) == ("GPU-split", "MIG-split-0")
    assert (split["processes"], len(part["processes"])) == ([], 2), "only root may ask for all of a split card's"
    assert (unified["total_bytes"], unified["memory_tells"], len(unified["processes"])) == (0, False, 2)
    assert not desk["memory_tells"], "a desktop's windows would be taken for a process that is not listed"
    assert (desk["processes"], login["processes"], login["memory_tells"]) == ([], [], True)
    assert refused == {"uuid": "GPU-refused", "unreadable": "Insufficient Permissions"}


FAKE_LIBRARY = """
from types import SimpleNamespace as N
class NVMLError(Exception): pass
class NVMLError_LibraryNotFound(NVMLError): pass
class NVMLError_NotSupported(NVMLError): pass
class NVMLError_FunctionNotFound(NVMLError): pass
nvmlMemory_v2, NVML_DEVICE_MIG_ENABLE = 2, 1
CARDS = ["0", None, "split", "unified", "refused", "desk", "login"]
def nvmlInit(): pass
def nvmlDeviceGetCount(): return len(CARDS)
def nvmlDeviceGetHandleByIndex(index):
    if CARDS[index] is None: raise NVMLError("GPU is lost")
    return CARDS[index]
def nvmlDeviceGetUUID(handle): return ("MIG-" if "-" in handle else "GPU-") + handle
def nvmlDeviceGetName(handle): return "card"
def nvmlDeviceGetMemoryInfo(handle, version=1):
    if handle == "unified": raise NVMLError_NotSupported()
    return N(used=900, reserved=500, total=1000)
def nvmlDeviceGetNumaNodeId(handle): raise NVMLError_NotSupported()
def nvmlDeviceGetComputeRunningProcesses(handle):
    if handle in ("split", "refused"): raise NVMLError("Insufficient Permissions")
    if handle in ("desk", "login"): return []
    return [N(pid=6, usedGpuMemory=10), N(pid=5, usedGpuMemory=None)]
def nvmlDeviceGetGraphicsRunningProcesses(handle):
    if handle == "0": raise NVMLError_NotSupported()
    return [N(pid=7, usedGpuMemory=4 << 20), *([N(pid=8, usedGpuMemory=900 << 20)] if handle == "desk" else [])]
def nvmlDeviceGetMPSComputeRunningProcesses(handle): raise NVMLError_FunctionNotFound()
def nvmlDeviceGetMigMode(handle): return (int(handle == "split"), 0)
def nvmlDeviceGetMaxMigDeviceCount(handle): return 2
def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    if index: raise NVMLError_NotSupported()
    return handle + "-0"
"""


# ---- which GPU -------------------------------------------------------------------------------------------------------


def gpu_named(uuid: str) -> Gpu:
    return Gpu(uuid, "", 0, 0, 1, True, ())


CARDS = [gpu_named("GPU-aaaa"), gpu_named("GPU-bbbb"), gpu_named("MIG-cccc"), gpu_named("MIG-dddd")]


@pytest.mark.parametrize(
    ("variable", "uuid"),
    [
        (None, "GPU-aaaa"),
        ("0", "GPU-aaaa"),
        ("1", "MIG-cccc"),
        ("0,1", "GPU-aaaa"),
        ("GPU-aa", "GPU-aaaa"),
        ("MIG-dddd", "MIG-dddd"),
    ],
)
def test_the_gpu_that_a_process_is_given(variable: str | None, uuid: str) -> None:
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpu(CARDS, environment).uuid == uuid


@pytest.mark.parametrize("variable", ["2", "", "-1", "GPU-x", "GPU-"])
def test_no_gpu(variable: str) -> None:
    with pytest.raises(Refusal, match="this machine's GPUs are GPU-aaaa"):
        visible_gpu(CARDS, {"CUDA_VISIBLE_DEVICES": variable})


LOST = Gpu("", "", 0, 0, 0, False, (), "GPU is lost")


@pytest.mark.parametrize("variable", ["0", "GPU-gone"])
def test_a_gpu_that_cannot_be_read_hides_no_other_and_is_not_free(variable: str) -> None:
    with pytest.raises(Unreadable, match="cannot be read: GPU is lost"):
        visible_gpu([LOST, *CARDS], {"CUDA_VISIBLE_DEVICES": variable})
    for other, uuid in (("1", "GPU-aaaa"), ("2", "MIG-cccc"), ("GPU-bb", "GPU-bbbb")):
        assert visible_gpu([LOST, *CARDS], {"CUDA_VISIBLE_DEVICES": other}).uuid == uuid


# ---- whose process ---------------------------------------------------------------------------------------------------


def test_ours_and_others(foreign: int, own_child: int) -> None:
    assert is_ours(os.getpid(), LINE)
    assert is_ours(own_child, LINE)
    assert not is_ours(own_child, Path("/lines/on"))
    assert not is_ours(foreign, LINE)
    assert not is_ours(2**22 + 1, LINE), "a number of another machine's or container's"


def test_words(foreign: int) -> None:
    value: Any = read_gpus(["sh", "-c", _printed(foreign)])[0]
    words = describe(value, value.processes)
    assert words == f"process {foreign} (sleep, 2.0 GiB) on GPU-x"


def _printed(pid: int) -> str:
    gpu = {"uuid": "GPU-x", "name": "", "used_bytes": 0, "reserved_bytes": 0, "total_bytes": 0, "memory_tells": True}
    said = json.dumps({"format": 1, "gpus": [gpu | {"processes": [{"pid": pid, "used_bytes": 2 << 30}]}]})
    return f"echo '{said}'"


# ---- a trainer's -----------------------------------------------------------------------------------------------------


def test_take_and_look(card: FakeCard, foreign: int, own_child: int) -> None:
    gpu = held(card)
    card.put(os.getpid(), own_child)
    assert seen(gpu, 1) is None
    card.put(os.getpid(), own_child, foreign)
    assert gpu.taken_by(5) is None, "not due before update 6"
    assert gpu._reading is None
    assert f"process {foreign} (sleep)" in (seen(gpu, 6) or "")
    card.put(os.getpid())
    assert seen(gpu, 11) is None, "they have left"


def test_a_lease_or_a_process_in_the_way(card: FakeCard, foreign: int) -> None:
    lease = gpu_lease(UUID, card.source.leases).acquire("it")
    with pytest.raises(GpuTaken, match=f"held by process {os.getpid()}"):
        held(card)
    lease.release()
    card.put(foreign)
    with pytest.raises(GpuTaken, match=f"process {foreign}"):
        held(card)
    card.put()
    held(card)
    with pytest.raises(GpuTaken):
        held(card)


def test_a_card_that_is_lost_is_waited_for_and_does_not_end_training(
    card: FakeCard, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu = held(card)
    lost = json.dumps({"format": 1, "gpus": [{"uuid": UUID, "unreadable": "GPU is lost"}]})
    card.reads(f"echo '{lost}'")
    assert seen(gpu, 1) is None
    assert f"training goes on: {UUID}: GPU is lost" in capfd.readouterr().out
    gpu._lease.release()
    with pytest.raises(GpuTaken, match=f"nobody can tell .* {UUID} cannot be read: GPU is lost"):
        held(card)
    gate = GpuGate(LINE, card.source, Pace(gpu_poll_s=0.0), 1)
    while gate.taken is None:
        assert not gate.free()
    assert "cannot be read: GPU is lost" in gate.taken


def test_a_look_at_the_lease_is_no_holder(card: FakeCard) -> None:
    """A line that waits looks every second whether the lease is held, which takes it for an instant."""
    lease = gpu_lease(UUID, card.source.leases)
    looks = os.open(lease.path, os.O_RDONLY)
    fcntl.flock(looks, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, [looks]).start()
    assert seen(held(card), 1) is None


def test_unknown_is_not_free(card: FakeCard) -> None:
    card.reads("exit 1")
    with pytest.raises(GpuTaken, match="nobody can tell"):
        held(card)
    card.reads("echo install it >&2; exit 2")
    with pytest.raises(Refusal, match="install it"):
        held(card)


def test_a_look_that_fails_is_told_once_and_passed_over(card: FakeCard, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = held(card)
    card.reads("echo broken >&2; exit 1")
    assert seen(gpu, 1) is None
    assert seen(gpu, 6) is None
    assert capsys.readouterr().out.count("broken") == 1
    card.reads()
    assert seen(gpu, 11) is None
    assert "can be read again" in capsys.readouterr().out


def test_a_number_of_the_host_that_is_ours(card: FakeCard, foreign: int) -> None:
    """In a container this process may be listed under a number that means nothing here."""
    gpu = held(card, own_bytes=1 << 30)
    card.put(2**22 + 5)
    assert seen(gpu, 1) is None
    card.put(2**22 + 5, 2**22 + 6)
    assert str(2**22 + 6) in (seen(gpu, 6) or "")


def test_a_stranger_at_the_first_look_is_not_taken_for_us(card: FakeCard, foreign: int) -> None:
    gpu = held(card, own_bytes=1 << 30)
    card.put(os.getpid(), foreign)
    assert seen(gpu, 1) is not None


def test_memory_tells_where_no_process_is_listed(card: FakeCard) -> None:
    gpu = held(card, own_bytes=1 << 30)
    card.put(used_bytes=3 << 30)
    assert seen(gpu, 1) is None, "ours, as of now"
    card.put(used_bytes=(3 << 30) + (100 << 20))
    assert seen(gpu, 6) is None, "a library that was loaded"
    card.put(used_bytes=5 << 30)
    assert "took 2.0 GiB" in (seen(gpu, 11) or "")
    card.put(used_bytes=5 << 30, memory_tells=False)
    assert seen(gpu, 16) is None


def test_torch_must_use_the_leased_one(card: FakeCard) -> None:
    gpu = held(card)
    gpu.confirm(UUID.removeprefix("GPU-"))
    with pytest.raises(Refusal, match="CUDA_DEVICE_ORDER"):
        gpu.confirm("GPU-99999999-2222-3333-4444-555555555555")
