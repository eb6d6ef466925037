"""host.json: what is true of this machine and not of a line.

Every command reads it first of all; its `env` is set before torch or triton can be imported; children
inherit both. The file is `$NSTRAIN_HOST`, or ~/.nstrain/host.json; without one the defaults hold.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import pydantic

from nstrain.base.errors import Refusal
from nstrain.settings.host_file import HOST_FILE_VARIABLE, host_file
from nstrain.settings.model import Settings, load

MODEL_PACKAGE = "neuronspark"
"""The model package's name, unless host.json names a package of another name."""

_entered_package = MODEL_PACKAGE
"""The model package's name in this process."""


def _absolute(path: str) -> str:
    """A path with its ~ expanded. Raises ValueError if it depends on where a command is run."""
    expanded = os.path.expanduser(path)
    if not os.path.isabs(expanded):
        raise ValueError("expected a path that begins with / or ~")
    return expanded


HostPath = Annotated[str, pydantic.AfterValidator(_absolute)]
"""A path that means the same wherever a command is run."""


class HostSettings(Settings):
    """Settings of the host; every field is optional."""

    neuronspark: HostPath | None = None
    """The model package to train: a package's own directory, whatever its name, or a directory that holds a package
    `neuronspark` (default: the one that comes with nstrain)."""
    env: dict[str, str] = pydantic.Field(default_factory=dict)
    """Environment variables set for every command and its children, before torch is imported."""
    work_root: HostPath | None = None
    """Directory of the lines that commands are given by a bare name."""
    tokenizer: HostPath | None = None
    """The tokenizer.json that `data init` uses when none is named."""
    calibration_from: HostPath | None = None
    """state.json of a data line whose calibration `data init` takes over for the sources that both have."""
    notify: str | None = None
    """A program that is given one event as JSON on its standard input (docs/reference/notices.md)."""
    gpu_reader: tuple[str, ...] | None = None
    """The command that prints what is on this machine's GPUs as JSON (default: nstrain's own, by NVML; see
    nstrain/gpu/reader.py for the form)."""


def load_host() -> HostSettings:
    """The host's settings. Raises `Refusal` if a file that `$NSTRAIN_HOST` names is missing, or if one is wrong."""
    path = host_file()
    if not path.exists():
        if os.environ.get(HOST_FILE_VARIABLE):
            raise Refusal(f"{path}: named by ${HOST_FILE_VARIABLE}, but there is no such file")
        return HostSettings()
    host = load(HostSettings, path)
    if host.neuronspark is not None and not (_package_directory(host.neuronspark) / "__init__.py").is_file():
        raise Refusal(
            f"{path}: field 'neuronspark': expected a directory that holds the package neuronspark/, or a package's "
            f"own directory, found {host.neuronspark!r}"
        )
    return host


def _package_directory(named: str) -> Path:
    """The directory of the model package that host.json names, by itself or by what holds it."""
    path = Path(named).resolve()
    return path / MODEL_PACKAGE if (path / MODEL_PACKAGE).is_dir() else path


def model_package() -> str:
    """The name that the model package is imported by in this process, as `enter_host` left it."""
    return _entered_package


def enter_host() -> HostSettings:
    """Load host.json and put it into force in this process and, through the environment, in its children.

    Must run before torch is imported, which is why it refuses to run after.
    """
    host = load_host()
    if host.env or host.neuronspark:
        assert "torch" not in sys.modules, "host.json must be read before torch is imported"
    os.environ.update(host.env)
    if host.neuronspark is not None:
        package = _package_directory(host.neuronspark)
        if str(package.parent) not in sys.path:
            sys.path.insert(0, str(package.parent))
        global _entered_package
        _entered_package = package.name
    return host
