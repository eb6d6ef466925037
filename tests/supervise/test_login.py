"""What systemd-logind would end, by a made-up bus: each row of the table in login.py."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from nstrain.base.errors import Refusal
from nstrain.supervise.login import (
    NEVER_USEC,
    Login,
    cgroup_of,
    outlives,
    read_bus,
    refuse_mortal_login,
    service_command,
    this_login,
)

SESSION = "/user.slice/user-1000.slice/session-3.scope"
MANAGER = "/user.slice/user-1000.slice/user@1000.service/app.slice/run-r1.scope"
DISTRIBUTION = {
    "KillUserProcesses": "b false",
    "KillOnlyUsers": "as 0",
    "KillExcludeUsers": 'as 1 "root"',
    "StopIdleSessionUSec": f"t {NEVER_USEC}",
}
UPSTREAM = DISTRIBUTION | {"KillUserProcesses": "b true"}


def ends(cgroup: str, bus: dict[str, str], user: str = "ada", linger: bool = False, systemd: bool = True) -> str | None:
    """What would end a process there."""
    return outlives(Login(systemd, cgroup, user, linger), bus.get).ends


@pytest.mark.parametrize(
    ("cgroup", "bus", "why"),
    [
        (SESSION, DISTRIBUTION, None),
        (SESSION, UPSTREAM, "KillUserProcesses"),
        (SESSION, UPSTREAM | {"KillOnlyUsers": 'as 2 "eve" "bob"'}, None),
        (SESSION, UPSTREAM | {"KillOnlyUsers": 'as 2 "eve" "ada"'}, "KillUserProcesses"),
        (SESSION, UPSTREAM | {"KillExcludeUsers": 'as 2 "root" "ada"'}, None),
        (SESSION, DISTRIBUTION | {"StopIdleSessionUSec": "t 900000000"}, "idle for 900 s"),
        (SESSION, {name: value for name, value in UPSTREAM.items() if name[0] == "K"}, "KillUserProcesses"),
        (SESSION, {name: value for name, value in DISTRIBUTION.items() if name[0] == "K"}, None),
        ("/user.slice/user-1000.slice/session-c12.scope", UPSTREAM, "KillUserProcesses"),
        (MANAGER, DISTRIBUTION, "linger is off"),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", DISTRIBUTION, "linger is off"),
        ("/system.slice/nstrain-trunk.service", UPSTREAM, None),
        ("/system.slice/docker-0123456789ab.scope", UPSTREAM, None),
        ("/machine.slice/libpod-0123.scope", UPSTREAM, None),
        ("/init.scope", UPSTREAM, None),
        ("/", UPSTREAM, None),
        ("/../../session-like.scope/x", UPSTREAM, None),
    ],
)
def test_the_table(cgroup: str, bus: dict[str, str], why: str | None) -> None:
    found = ends(cgroup, bus)
    assert (found is None) == (why is None), found
    assert why is None or why in (found or "")


def test_linger_keeps_the_manager() -> None:
    assert ends(MANAGER, DISTRIBUTION, linger=True) is None


def test_linger_does_not_keep_a_session() -> None:
    assert ends(SESSION, UPSTREAM, linger=True) is not None


def test_a_machine_or_container_without_systemd() -> None:
    assert ends(SESSION, UPSTREAM, systemd=False) is None


def test_root_is_excluded_by_default() -> None:
    assert ends("/user.slice/user-0.slice/session-3.scope", UPSTREAM, user="root") is None


def test_a_bus_that_does_not_answer_is_told() -> None:
    found = outlives(Login(True, SESSION, "ada", False), lambda name: None)
    assert found.ends is None
    assert "KillUserProcesses" in (found.unsure or "")
    assert outlives(Login(True, "/system.slice/a.service", "ada", False), lambda name: None).unsure is None


@pytest.mark.parametrize(
    ("text", "group"),
    [
        (f"0::{SESSION}\n", SESSION),
        (f"12:cpuset:/\n1:name=systemd:{SESSION}\n0::/\n", SESSION),
        (f"1:name=systemd:{SESSION}\n", SESSION),
        ("0::/\n", "/"),
        ("9:name=systemd:/\n4:memory:/a:b\n0::/\n", "/"),
    ],
)
def test_the_group_among_the_lines_of_proc(text: str, group: str) -> None:
    assert cgroup_of(text) == group


def test_this_process_and_this_bus() -> None:
    """Whatever this machine is, the facts can be read."""
    login = this_login()
    assert login.cgroup.startswith("/")
    assert login.user
    outlives(login)


def test_a_bus_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "busctl").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "busctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("nstrain.supervise.login.BUS_LIMIT_S", 0.3)
    assert read_bus("KillUserProcesses") is None


def test_what_busctl_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "busctl").write_text('#!/bin/sh\necho "b $*"\n')
    (tmp_path / "busctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = read_bus("KillUserProcesses")
    assert asked is not None
    assert asked.endswith("/org/freedesktop/login1 org.freedesktop.login1.Manager KillUserProcesses")


def test_the_refusal_gives_the_command() -> None:
    with pytest.raises(Refusal, match="KillUserProcesses") as caught:
        refuse_mortal_login(
            "nstrain-a b", ["python", "run", "/lines/a b"], Login(True, SESSION, "ada", False), UPSTREAM.get
        )
    lines = str(caught.value).splitlines()
    (command,) = [line.strip() for line in lines if "systemd-run" in line]
    words = shlex.split(command)
    # Without --collect the name stays taken by a unit that did not end with 0, as after every `nstrain stop`.
    assert words[:4] == ["sudo", "systemd-run", "--collect", "--unit=nstrain-a b"]
    assert words[-3:] == ["python", "run", "/lines/a b"]
    assert "--foreground" in lines[-1]
    with pytest.raises(Refusal, match="enable-linger"):
        refuse_mortal_login("x", ["true"], Login(True, MANAGER, "ada", False), DISTRIBUTION.get)


def test_the_command_carries_the_environment_without_showing_it() -> None:
    environment = {
        "HF_TOKEN": "secret",
        "PATH": "/bin with space",
        "NSTRAIN_HOST": "/h.json",
        "LS_COLORS": "x",
        "HOME": "/",
        "NOTIFY_WEBHOOK": "w",
        "WANDB_API_KEY": "also secret",
        # What decides which numbers come out.
        "NEURONSPARK_KERNELS": "reference",
        "PYTORCH_ALLOC_CONF": "a:1",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "COMPATIBLE",
    }
    command = service_command("unit", ["true"], environment)
    assert "secret" not in command
    assert "LS_COLORS" not in command
    # The shell fills the values in: what systemd-run would be given, by a shell that has them.
    shown = command.replace("sudo systemd-run", "printf '%s\\n'")
    ran = subprocess.run(["/bin/sh", "-c", shown], env=environment, capture_output=True, text=True, check=True)
    given = ran.stdout.splitlines()
    assert {f"{name}={value}" for name, value in environment.items() if name != "LS_COLORS"} <= set(given)
    assert given[-1] == "true"
