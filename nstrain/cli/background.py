"""What commands that go on in the background share: the refusal of a login that would end them, and how they began."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer


def begin(name: str, service: Sequence[str], command: Sequence[str], output: Path) -> int:
    """Start `command` in the background and return its process; leaves with its exit code if it refused.

    `name` and `service` are the unit and the command of a system service that would do the same, for a login that does
    not let anything outlive it; the command's output is appended to the file `output`.
    """
    from nstrain.base.detach import start_in_background
    from nstrain.supervise.login import refuse_mortal_login

    if (unsure := refuse_mortal_login(name, service)) is not None:
        print(f"nstrain: {unsure}; if it does, this will not outlive the login", file=sys.stderr)
    begun = start_in_background(command, output)
    if begun.exit_code is not None:
        print(begun.words, file=sys.stderr)
        raise typer.Exit(begun.exit_code)
    return begun.pid
