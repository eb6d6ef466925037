"""What memory may still be taken, from files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from nstrain.base.host_memory import available_host_bytes

KIB, GIB = 1 << 10, 1 << 30


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """proc and cgroup below it; 64 GiB are available."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    meminfo = f"MemTotal: {128 * GIB // KIB} kB\nMemFree: 1 kB\nMemAvailable:   {64 * GIB // KIB} kB\n"
    (tmp_path / "proc" / "meminfo").write_text(meminfo)
    return tmp_path


def group(place: Path, limit: object, taken: int, **stat: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{limit}\n")
    (place / "memory.current").write_text(f"{taken}\n")
    (place / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


def available(system: Path) -> int:
    return available_host_bytes(system / "proc", system / "cgroup")


def test_the_machine_this_runs_on_has_some() -> None:
    assert 0 < available_host_bytes() < 1 << 60


def test_without_control_groups_the_kernels_estimate(system: Path) -> None:
    assert available(system) == 64 * GIB
    (system / "proc" / "self" / "cgroup").write_text("0::/user/session\n")
    assert available(system) == 64 * GIB, "the group's files are not there"


def test_the_narrowest_limit_on_the_way_up_counts(system: Path) -> None:
    (system / "proc" / "self" / "cgroup").write_text("0::/pod/box\n")
    group(system / "cgroup" / "pod" / "box", "max", 5 * GIB)
    assert available(system) == 64 * GIB
    group(system / "cgroup" / "pod", 20 * GIB, 8 * GIB)
    assert available(system) == 12 * GIB
    group(system / "cgroup" / "pod" / "box", 6 * GIB, 5 * GIB)
    assert available(system) == 1 * GIB


def test_pages_of_files_can_be_given_back(system: Path) -> None:
    (system / "proc" / "self" / "cgroup").write_text("0::/box\n")
    group(system / "cgroup" / "box", 20 * GIB, 19 * GIB, anon=4 * GIB, active_file=5 * GIB, inactive_file=10 * GIB)
    assert available(system) == 16 * GIB


def test_a_group_over_its_limit_leaves_nothing(system: Path) -> None:
    (system / "proc" / "self" / "cgroup").write_text("0::/box\n")
    group(system / "cgroup" / "box", GIB, 2 * GIB)
    assert available(system) == 0


def test_in_a_container_the_root_is_its_own_group(system: Path) -> None:
    (system / "proc" / "self" / "cgroup").write_text("0::/machine/of/the/host\n")
    group(system / "cgroup", 10 * GIB, 3 * GIB)
    assert available(system) == 7 * GIB


def test_version_one(system: Path) -> None:
    (system / "proc" / "self" / "cgroup").write_text("4:cpu,cpuacct:/box\n9:memory:/box\n0::/\n")
    place = system / "cgroup" / "memory" / "box"
    place.mkdir(parents=True)
    (place / "memory.limit_in_bytes").write_text(f"{30 * GIB}\n")
    (place / "memory.usage_in_bytes").write_text(f"{10 * GIB}\n")
    assert available(system) == 20 * GIB
