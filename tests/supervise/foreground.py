"""A supervisor as a process of its own: `python foreground.py RUN TRAINER-MODE PREPARER-MODE`.

The modes are those of fake_children.py, or "real" for the real child.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nstrain.base.errors import NstrainError
from nstrain.supervise.supervisor import PREPARER_COMMAND, TRAINER_COMMAND, Supervisor

FAKE = str(Path(__file__).with_name("fake_children.py"))


def trainer_command(mode: str) -> tuple[str, ...]:
    """What starts a trainer of that mode."""
    return TRAINER_COMMAND if mode == "real" else (sys.executable, FAKE, "trainer", mode)


def preparer_command(mode: str) -> tuple[str, ...]:
    """What starts a preparer of that mode."""
    return PREPARER_COMMAND if mode == "real" else (sys.executable, FAKE, "preparer", mode)


def main() -> int:
    """Supervise, print what happens, exit as `nstrain run` would."""
    run, trainer, preparer = sys.argv[1:]

    def tell(text: str) -> None:
        print(text, flush=True)

    try:
        supervisor = Supervisor(Path(run), tell, trainer_command(trainer), preparer_command(preparer))
        return int(supervisor.run().exit_code)
    except NstrainError as error:
        print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
