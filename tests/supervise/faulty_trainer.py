"""The real trainer with a fault: `python faulty_trainer.py RUN --parent-fd N`.

RUN.faults.json is a list; the n-th launch takes the n-th fault, `{"after": updates since the launch, "do": what}`, and
those beyond its end none. `after: -1` is before anything of the trainer runs. RUN.card is a made-up card (FaultCard).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from fake_card import FakeCard

from nstrain.base import killpoints
from nstrain.base.disk import atomic_write_json
from nstrain.data.preparer import read_status
from nstrain.gpu.readings import GpuSource, gpu_of
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import Heartbeat, Stage, read_heartbeat, request_stop
from nstrain.settings.run import RunSettings, load_run
from nstrain.train.__main__ import main
from nstrain.train.stopping import StopRequests

RUN = Path(sys.argv[1])
PACE_S = 0.01
"""An update takes at least this long, so that what happens outside finds the line before its end."""

BUSY_LOOKS = 2
"""A foreign process stays on the card until so many have looked: by the clock a slow machine would not see it."""


class FaultCard(FakeCard):
    """A card on which process 1 appears for a while."""

    def __init__(self, run: Path) -> None:
        super().__init__(run.with_name(f"{run.name}.card"))
        busy, free = self._said.with_name("busy.json"), self._said.with_name("free.json")
        if not busy.exists():
            self.put(1)
            self._said.rename(busy)
            self.put()
            self._said.rename(free)
        self._looks = self._said.with_name("looks")
        left = f"left=$(cat {self._looks} 2>/dev/null || echo 0)"
        self.reads(
            f'{left}; [ "$left" -gt 0 ] && echo $((left - 1)) > {self._looks} && exec cat {busy}; exec cat {free}'
        )

    def appear(self) -> None:
        """Have the process there from now on, for BUSY_LOOKS."""
        self._looks.write_text(str(BUSY_LOOKS))


def card_of(run: Path) -> Callable[[RunSettings], GpuSource | None]:
    """The made-up card of a line, if it has one; else the machine's, of a line that trains there."""
    if not run.with_name(f"{run.name}.card").exists():
        return gpu_of
    source = FaultCard(run).source
    return lambda settings: source


def crash() -> None:
    raise RuntimeError("a bug in the trainer")


def hang() -> None:
    while True:
        time.sleep(0.05)


def hang_deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang()


def full_disk() -> None:
    """As on a disk that has no room for a checkpoint; it has again in the next process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, resource.RLIM_INFINITY))


def failing_writer() -> None:
    """From now on whoever begins to write a checkpoint meets an error that is none of the disk's room."""
    from nstrain.line import checkpoint

    def fail(point: str) -> None:
        raise NotADirectoryError(f"at {point}")

    checkpoint.kill_point = fail


def spoil() -> None:
    """From now on every gradient holds a NaN."""
    from nstrain.train.engine import EagerEngine

    finish: Any = EagerEngine.finish

    def spoiled(self: EagerEngine, *arguments: Any) -> Any:
        self.flat.groups[0].main_grad[:1].fill_(math.nan)
        return finish(self, *arguments)

    EagerEngine.finish = spoiled  # type: ignore[method-assign]


def slow(stage: str) -> None:
    """From now on the trainer stays in a stage after it has shown it, until somebody has asked what he wants to."""
    from nstrain.train import loop, opening

    asked, until = RUN.with_name(f"{RUN.name}.asked"), time.monotonic() + 60

    for module in (loop, opening):
        write = module.write_heartbeat

        def slowly(paths: LinePaths, beat: Heartbeat, write: Any = write) -> None:
            write(paths, beat)
            while beat.stage == stage and not asked.exists() and time.monotonic() < until:
                time.sleep(0.02)

        module.write_heartbeat = slowly


def in_micro_batch(number: int, do: Callable[[], object]) -> None:
    """Have it happen in the n-th micro-batch that this process goes through operator by operator.

    On a GPU the first is the warm-up of a capture and the second the capture; the others are replays. When it happens
    is written beside the line, with the stage that the heartbeat shows then and whether a stream is being captured.
    """
    import torch

    from nstrain.train.engine import EagerEngine

    micro_batch: Any = EagerEngine._micro_batch
    seen = 0

    def disturbed(self: EagerEngine, tokens: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            beat = read_heartbeat(LinePaths(RUN))
            capturing = tokens.is_cuda and torch.cuda.is_current_stream_capturing()
            note = {"time": time.time(), "stage": None if beat is None else beat.stage, "capturing": capturing}
            atomic_write_json(RUN.with_name(f"{RUN.name}.disturbed.json"), note)
            do()
        micro_batch(self, tokens)

    EagerEngine._micro_batch = disturbed  # type: ignore[method-assign]


def terminate_supervisor() -> None:
    """SIGTERM to the supervisor, and time for it to pass that on."""
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1.0)


def kill_preparer() -> None:
    """Whether there is one."""
    status = read_status(Path(load_run(RUN / "run.json").data.work))
    if status is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(status.pid, signal.SIGKILL)


FAULTS: dict[str, Callable[[], object]] = {
    "crash": crash,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sigterm to supervisor": terminate_supervisor,
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hang,
    "hang deaf": hang_deaf,
    "kill supervisor": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "full disk": full_disk,
    "failing writer": failing_writer,
    "nan": spoil,
    "others": lambda: FaultCard(RUN).appear(),
    "stop": lambda: request_stop(LinePaths(RUN)),
    "kill both": lambda: (kill_preparer(), os.kill(os.getpid(), signal.SIGKILL)),
    "others and crash": lambda: (FaultCard(RUN).appear(), crash()),
    **{f"slow {stage}": (lambda stage=stage: slow(stage)) for stage in get_args(Stage)},
    **{f"{how} in micro-batch {n}": (lambda how=how, n=n: in_micro_batch(n, FAULTS[how]))
       for how in ("sigterm to supervisor", "stop") for n in (1, 2)},
    **{f"kill in {area} {n}": (lambda where=f"{area}:{n}": killpoints.arm(where))
       for area in ("checkpoint", "journal", "train") for n in range(1, 30)},
}  # fmt: skip


def arm() -> None:
    """Have this launch's fault happen."""
    counter, plan = RUN.with_name(f"{RUN.name}.launches"), RUN.with_name(f"{RUN.name}.faults.json")
    launch = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(launch + 1))
    faults = json.loads(plan.read_text()) if plan.exists() else []
    fault = faults[launch] if launch < len(faults) else {"after": math.inf, "do": "crash"}
    if fault["after"] < 0:
        FAULTS[fault["do"]]()
    updates = 0
    reason_at = StopRequests.reason_at  # asked once before each update

    def asked(self: StopRequests, cycle: int) -> str | None:
        nonlocal updates
        if updates == fault["after"]:
            FAULTS[fault["do"]]()
        updates += 1
        time.sleep(PACE_S)
        return reason_at(self, cycle)

    StopRequests.reason_at = asked  # type: ignore[method-assign]


if __name__ == "__main__":
    arm()
    sys.exit(main(card_of(RUN)))
