"""A supervisor as a process of its own: `python foreground.py RUN TRAINER PREPARER [RELAUNCH-S [MIRROR]]`.

The modes are those of fake_children.py, "real" for the real child, or "faulty" for the real trainer with the faults
that are planned for it. It keeps QUICK's pace, but for the seconds before a trainer that failed is launched again.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from nstrain.base.errors import NstrainError
from nstrain.gpu.readings import gpu_of
from nstrain.supervise.pace import Pace
from nstrain.supervise.supervisor import MIRROR_COMMAND, PREPARER_COMMAND, TRAINER_COMMAND, Supervisor

FAKE = str(Path(__file__).with_name("fake_children.py"))

QUICK = Pace(
    tick_s=0.02,
    relaunch_s=(0.05,),
    hunger_s=0.3,
    fed_s=1.5,
    preparer_retry_s=0.3,
    preparer_backoff_s=(0.05,),
    preparer_grace_s=2.0,
    mirror_look_s=0.1,
    mirror_backoff_s=(0.05, 0.3),
    mirror_grace_s=20.0,
    dump_s=0.3,
    term_grace_s=1.0,
    kill_wait_s=1.0,
    gpu_poll_s=0.1,
    lease_poll_s=0.05,
    notice_limit_s=5.0,
    log_look_s=0.1,
)


def trainer_command(mode: str) -> tuple[str, ...]:
    """What starts a trainer of that mode."""
    if mode == "faulty":
        return (sys.executable, str(Path(__file__).with_name("faulty_trainer.py")))
    return TRAINER_COMMAND if mode == "real" else (sys.executable, FAKE, "trainer", mode)


def preparer_command(mode: str) -> tuple[str, ...]:
    """What starts a preparer of that mode, which may be faults of the real one (faulty_preparer.py)."""
    if mode.startswith(("full while ", "no room while ", "dies ")):
        return (sys.executable, str(Path(__file__).with_name("faulty_preparer.py")), mode)
    return PREPARER_COMMAND if mode == "real" else (sys.executable, FAKE, "preparer", mode)


def mirror_command(mode: str) -> tuple[str, ...]:
    """What starts a mirror of that mode."""
    return MIRROR_COMMAND if mode == "real" else (sys.executable, FAKE, "mirror", mode)


def main() -> int:
    """Supervise, print what happens, exit as `nstrain run` would."""
    run, trainer, preparer, *more = sys.argv[1:]
    relaunch_s, mirror = (*more, *("", "works")[len(more) :])
    gpu = gpu_of
    pace = dataclasses.replace(QUICK, relaunch_s=(float(relaunch_s),)) if relaunch_s else QUICK
    if trainer == "faulty":
        from faulty_trainer import card_of

        gpu = card_of(Path(run))

    def tell(text: str) -> None:
        print(text, flush=True)

    try:
        commands = trainer_command(trainer), preparer_command(preparer)
        supervisor = Supervisor(Path(run), tell, *commands, pace, gpu, mirror_command=mirror_command(mirror))
        return int(supervisor.run().exit_code)
    except NstrainError as error:
        print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
