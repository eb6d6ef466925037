"""The lease of a GPU: one holder on a host, whoever it is, and none after its death."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nstrain.base.errors import NstrainError
from nstrain.gpu import lease as lease_module
from nstrain.gpu.lease import gpu_lease, lease_directory

UUID = "GPU-5fd3a4c2-0000-1111-2222-333344445555"
HOLDER = """
import sys, time
from pathlib import Path
from nstrain.gpu.lease import gpu_lease
with gpu_lease(sys.argv[1], Path(sys.argv[2])).acquire("it"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_holder_and_none_after_its_death(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, UUID, str(tmp_path / "leases")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    mine = gpu_lease(UUID, tmp_path / "leases")
    with pytest.raises(NstrainError, match=f"the GPU is held by process {holder.pid}"):
        mine.acquire("the GPU")
    other_card = gpu_lease("MIG-1", tmp_path / "leases")
    assert other_card.try_acquire()
    other_card.release()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert mine.try_acquire()
    mine.release()
    assert mine.path.exists(), "a lease that is removed could be held twice"


def test_every_user_may_take_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        lease = gpu_lease(UUID, tmp_path / "leases")
    finally:
        os.umask(before)
    assert stat.S_IMODE(lease.path.stat().st_mode) == 0o666
    assert stat.S_IMODE(lease.path.parent.stat().st_mode) == 0o777


def test_the_directory_is_one_that_all_can_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, ours = tmp_path / "mine", tmp_path / "ours"
    mine.mkdir(mode=0o755)
    ours.mkdir()
    ours.chmod(0o777)
    monkeypatch.setattr(lease_module, "LEASE_ROOTS", (tmp_path / "missing", mine, ours))
    assert lease_directory().parent == ours


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(NstrainError, match="UUID"):
        gpu_lease("../x", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(NstrainError, match="cannot be opened"):
        gpu_lease(UUID, tmp_path / "file" / "leases")
