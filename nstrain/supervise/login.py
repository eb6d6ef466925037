"""Whether a process started here outlives the login: what systemd-logind does when a session ends.

A session of its own (setsid, a daemon) does not leave the login's control group, and logind ends groups:

    cgroup of this process                  ends with the login when
    session-N.scope                         KillUserProcesses is on for this user, or StopIdleSessionSec is set
    user@UID.service (systemd-run --user)   the user has no linger: the manager ends with the last session
    anything else                           never: a system service, a container, init, a machine without systemd

(logind.conf(5), loginctl(1); facts checked against systemd 252's session_stop.) Where it would be ended, a start is
refused with the command of a system service that does so. Facts are read from /proc, /var/lib/systemd/linger and the
bus, each bounded; what the bus does not tell is assumed to be as distributions ship it, and said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nstrain.base.errors import Refusal

BUS_LIMIT_S = 5.0
NEVER_USEC = 2**64 - 1
"""How the bus writes a time that never comes."""

KEPT_VARIABLES = re.compile(
    r"PATH|HOME|LANG|VIRTUAL_ENV|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON.*|NSTRAIN_HOST|HF_.*|.*_PROXY|.*_proxy"
    r"|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|NOTIFY_.*|WANDB_.*|NEURONSPARK_.*|CUDA_.*|NVIDIA_.*|CUBLAS_.*|TRITON_.*|TORCH.*|PYTORCH_.*"
    r"|ATEN_.*|OMP_.*|MKL_.*"
)
"""Variables of the environment that a service needs to do what the command would have done here: what it finds, whom it
tells (examples/notify, a tracker), and which numbers come out."""

BusReader = Callable[[str], "str | None"]
"""A property of logind's manager as busctl prints it, `b false` or `as 1 "root"`; None if it cannot be had."""


@dataclasses.dataclass(frozen=True)
class Login:
    """Where this process stands."""

    systemd: bool
    """Whether systemd manages this machine (or container)."""
    cgroup: str
    """The control group that systemd sees it in."""
    user: str
    """Whose login it is (not root's, after sudo)."""
    linger: bool
    """Whether the user's manager stays without a session."""


def this_login() -> Login:
    """Where the calling process stands."""
    cgroup = cgroup_of(Path("/proc/self/cgroup").read_text())
    owner = re.search(r"/user-(\d+)\.slice", cgroup)
    uid = os.getuid() if owner is None else int(owner[1])
    user = str(uid)
    with contextlib.suppress(KeyError):  # a user that only the kernel knows
        user = pwd.getpwuid(uid).pw_name
    linger = Path("/var/lib/systemd/linger", user).exists()
    return Login(Path("/run/systemd/system").is_dir(), cgroup, user, linger)


def cgroup_of(text: str) -> str:
    """systemd's group among the lines of /proc/PID/cgroup: of its own hierarchy, or of the unified one."""
    groups = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups[controllers] = path
    return groups.get("name=systemd", groups.get("", "/"))


def read_bus(name: str) -> str | None:
    """A property of logind's manager, from the system bus; None if there is no answer in time."""
    place = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
    try:
        asked = subprocess.run(
            ["busctl", "--system", "get-property", *place, name],
            capture_output=True,
            text=True,
            timeout=BUS_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


@dataclasses.dataclass(frozen=True)
class Outlives:
    """Whether a process started here outlives the login."""

    ends: str | None
    """What would end it; None if nothing would."""
    unsure: str | None = None
    """What could not be found out, if it matters."""


def outlives(login: Login, read: BusReader = read_bus) -> Outlives:
    """What would end a process of this login, by the table above."""
    if not login.systemd:
        return Outlives(None)
    parts = login.cgroup.split("/")
    if any(re.fullmatch(r"user@\d+\.service", part) for part in parts):
        if login.linger:
            return Outlives(None)
        return Outlives(f"the manager of user {login.user} ends with the last login, since linger is off")
    if not any(re.fullmatch(r"session-c?\d+\.scope", part) for part in parts):
        return Outlives(None)
    idle = _words(read("StopIdleSessionUSec"))  # none before systemd 252, where there is no such thing
    if idle and idle[0].isdecimal() and int(idle[0]) not in (0, NEVER_USEC):
        return Outlives(f"logind stops sessions that are idle for {int(idle[0]) // 10**6} s (StopIdleSessionSec)")
    kills = _words(read("KillUserProcesses"))
    if not kills:
        return Outlives(None, "whether logind ends a login's processes (KillUserProcesses) could not be read")
    only, excluded = _words(read("KillOnlyUsers"))[1:], _words(read("KillExcludeUsers"))[1:]
    if kills == ["true"] and login.user not in excluded and (not only or login.user in only):
        return Outlives("logind ends all processes of a login with it (KillUserProcesses)")
    return Outlives(None)


def _words(answer: str | None) -> list[str]:
    """The value of a property without its type; a list begins with its length."""
    return [] if answer is None else shlex.split(answer)[1:]


def refuse_mortal_login(
    name: str,
    command: Sequence[str],
    login: Login | None = None,
    read: BusReader = read_bus,
    environment: Mapping[str, str] = os.environ,
) -> str | None:
    """Raise `Refusal`, with the command to use, if a process started here would end with the login.

    `name` is the unit's, `command` what it is to run. Returns what could not be found out, for people, or None.
    """
    found = outlives(login or this_login(), read)
    if found.ends is None:
        return found.unsure
    raise Refusal(
        f"what is started here would not outlive the login: {found.ends}. Start it as a system service:\n\n"
        f"    {service_command(name, command, environment)}\n\n"
        "or keep it in this terminal with --foreground"
        + ("; or let the user's manager stay: loginctl enable-linger" if "linger" in found.ends else "")
    )


def service_command(name: str, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The systemd-run command that runs `command` as a system service, as this user, here and in this environment.

    The values of variables are left for the shell to fill in: some are secret. `--collect` lets the same command be
    typed again: a line that was stopped ends with 3, and systemd keeps the name of a unit that has not ended with 0.
    """
    kept = [variable for variable in sorted(environment) if KEPT_VARIABLES.fullmatch(variable)]
    words = [
        *("sudo", "systemd-run", "--collect", f"--unit={name}", f"--uid={os.getuid()}", f"--gid={os.getgid()}"),
        *("-p", "KillMode=mixed", "-p", "TimeoutStopSec=1h", "-p", f"WorkingDirectory={os.getcwd()}"),
    ]
    quoted = [shlex.quote(word) for word in words]
    quoted += [f'-E {variable}="${variable}"' for variable in kept]
    return " ".join([*quoted, *map(shlex.quote, command)])
