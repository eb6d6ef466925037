"""A process of its own with a WandbTracker in it, which does what it is told on its standard input.

A test may kill it. What W&B's library leaves behind in a process - threads, hooks, an environment - is no other test's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

Row = dict[str, float]


class Away(Exception):
    """The tracker raised `ServiceAway`."""


class Refuses(Exception):
    """The tracker raised `ServiceRefuses`."""


class Driver:
    """The process, as a test sees it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, what: str, **arguments: Any) -> Any:
        """Have a function of the driver called. Raises what it raised: `Away`, `Refuses`, or else `RuntimeError`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            kinds = {"ServiceAway": Away, "ServiceRefuses": Refuses}
            raise kinds.get(answer["kind"], RuntimeError)(answer["error"])
        return answer["result"]

    def service_processes(self) -> list[psutil.Process]:
        """Its wandb-core, if one runs."""
        return [child for child in psutil.Process(self._process.pid).children() if child.name() == "wandb-core"]

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait(10)

    def leave(self, limit_s: float) -> int:
        """Have it end by an exception that nobody catches, within so long. Returns its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(limit_s)


# ---- in the process --------------------------------------------------------------------------------------------------


class _Functions:
    def __init__(self) -> None:
        from nstrain.mirror.wandb_tracker import WandbTracker
        from nstrain.settings.run import TrackerSettings

        self.tracker = WandbTracker(TrackerSettings(service="wandb", project="brains"))
        self.run: Any = None

    def open(self, run_id: str, directory: str, known: bool) -> dict[str, Any]:
        from nstrain.mirror.contract import RunIdentity

        config = {"seed": 7, "nstrain": {"line": "line-1", "generation": 1}}
        identity = RunIdentity(run_id, f"name of {run_id}", "line-1", config, Path(directory))
        self.run = self.tracker.open(identity, known)
        return {"floor": self.run.floor, "url": self.run.url, "directory": str(self.run.client_directory)}

    def send(self, rows: list[Row], pause_s: float = 0.0) -> None:
        for row in rows:
            self.run.send(row)
            time.sleep(pause_s)

    def read(self, first: int, last: int) -> list[Row]:
        return list(self.run.read(first, last))

    def close(self, limit_s: float = 20.0) -> None:
        self.run.close(limit_s)

    def supersede(self, run_id: str, by: str, why: str) -> None:
        self.tracker.supersede(run_id, by, why)

    def patience(self, **limits: float) -> None:
        """Set limits of the tracker's module; `poll_s`: how often the library asks whether it is to stop."""
        import nstrain.mirror.wandb_tracker as module

        if "poll_s" in limits:
            from wandb.sdk.lib.run_stopping import RunStopChecker

            assert RunStopChecker.__init__.__kwdefaults__ == {"poll_interval": 15}
            RunStopChecker.__init__.__kwdefaults__["poll_interval"] = limits.pop("poll_s")
        for name, value in limits.items():
            assert hasattr(module, name)
            setattr(module, name, value)

    def left_behind(self) -> dict[str, Any]:
        """What a session could leave behind in the process."""
        return {
            "environment": sorted(name for name in os.environ if name.startswith("WANDB_")),
            "hooks": [sys.exit.__name__, sys.excepthook.__name__],
            "threads": sorted(t.name for t in threading.enumerate() if t.name not in ("MainThread", "NetStatThr")),
            "files": psutil.Process().num_fds(),
        }


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not be taken for an answer
    functions = _Functions()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(functions, request["what"])(**request["arguments"])}
        except Exception as error:
            text = str(error) if type(error).__name__.startswith("Service") else traceback.format_exc()
            answer = {"error": text, "kind": type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)
    raise RuntimeError("the test has told it to leave")


if __name__ == "__main__":
    _main()
